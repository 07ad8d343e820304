"""A vision model end to end: train, shrink, fine-tune, prune while fine-tuning, compress, and ship.

Runs in seconds on scikit-learn's digits. For CIFAR-10: `python examples/vision.py --data cifar10.npz`, a file with the arrays
x_train, y_train, x_test and y_test; images are (number, height, width, channels) in uint8.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import secateur as sc

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # images and labels to train on, images and labels to test on


def load(path: str | None) -> Data:
    if path is None:
        digits = load_digits()
        images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[:1400], order[1400:]
        return images[train], labels[train], images[test], labels[test]
    with np.load(path) as arrays:
        images = [torch.tensor(arrays[key]).permute(0, 3, 1, 2) / 255 for key in ("x_train", "x_test")]
        labels = [torch.tensor(arrays[key]).long() for key in ("y_train", "y_test")]
    return images[0], labels[0], images[1], labels[1]


def build(channels: int = 1) -> nn.Module:
    """A small residual network for images of any size."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.two, self.last = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.last(self.two(self.norm(self.one(x)).relu()))).relu()

    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(channels, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
    return nn.Sequential(stem, Block(48), nn.MaxPool2d(2), Block(48), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def train(model: nn.Module, data: Data, epochs: int, lr: float, pruner: sc.Pruner | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if pruner is not None:
        pruner.attach(optimizer)
    shuffle = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(data[1]), generator=shuffle).split(64):
            optimizer.zero_grad()
            cross_entropy(model(data[0][part]), data[1][part]).backward()
            optimizer.step()
    model.eval()


def accuracy(model: nn.Module, data: Data) -> float:
    with torch.inference_mode():
        right = [(model(x).argmax(1) == y).float().sum() for x, y in zip(data[2].split(256), data[3].split(256), strict=True)]
    return float(sum(right)) / len(data[3])


def main(path: str | None = None, epochs: int = 5, folder: str = "out/vision") -> dict[str, tuple[float, int]]:
    """Returns the accuracy and the bytes on disk of each stage."""
    data, found = load(path), {}
    one, channels = data[2][:1], data[0].shape[1]

    def note(stage: str, model: nn.Module) -> None:
        place = Path(folder) / stage
        sc.save(model, place, packed=True)
        found[stage] = accuracy(model, data), sum(file.stat().st_size for file in place.iterdir())
        print(f"{stage:<11}  {found[stage][0]:.1%} right  {found[stage][1] / 1000:>6.0f} kB on disk")

    dense = build(channels)
    train(dense, data, epochs, lr=3e-3)
    note("dense", dense)

    # Half of the FLOPs: whole channels go, and the layers that read them are fitted again to training images.
    small, cut = sc.shrink(dense, one, sc.reconstruction, flops=0.5, data=[data[0][:256]], refit=True)
    train(small, data, epochs, lr=1e-3)
    note("shrunk", small)

    # 70 % zeros, in steps while it trains on.
    steps = epochs * -(-len(data[1]) // 64)
    pruner = sc.Pruner(small, sc.magnitude, sparsity=sc.cubic(0.7, end=steps * 2 // 3, every=5), scope="global")
    train(small, data, epochs, lr=1e-3, pruner=pruner)
    pruner.finish()
    note("pruned", small)

    # Sparse formats where they measure faster, here, on one image.
    packed = sc.compress_(small, one)
    note("compressed", small)

    print(f"\n{cut}\n\n{packed}\n\n{sc.bench({'dense': dense, 'compressed': small}, one, seconds=0.5)}")
    again = sc.load(Path(folder) / "compressed", into=lambda: build(channels)).eval()
    with torch.inference_mode():
        assert torch.equal(again(one), small(one))
    return found


@click.command(help=__doc__)
@click.option("--data", "path", type=click.Path(exists=True), help="CIFAR-10 as an .npz file. Default: digits.")
@click.option("--epochs", default=5, show_default=True)
@click.option("--folder", default="out/vision", show_default=True)
def command(path: str | None, epochs: int, folder: str) -> None:
    main(path, epochs, folder)


if __name__ == "__main__":
    command()
