"""Activation sparsity: small inputs of layers become zero, and a compressed layer reads no weights for them."""

from __future__ import annotations

import copy

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import secateur as sc


def main(epochs: int = 5, width: int = 1024) -> dict[float, float]:
    """Returns the accuracy for each share of zeros in the inputs of the wide layers."""
    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for part in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
    model.eval()

    found = {}
    for sparsity in (0.0, 0.3, 0.5, 0.7):
        gates = sc.gate_(model, sparsity=sparsity, at=("2", "4"), data=[images[:256]])
        with torch.inference_mode():
            found[sparsity] = float((model(images[1400:]).argmax(1) == labels[1400:]).float().mean())
        measured = gates.measured(images[1400:])
        print(f"asked {sparsity:.0%}, zeros {measured.sparsity:.1%}, error {measured.error:.3f}, {found[sparsity]:.1%} right")
        gates.undo_()

    gated = copy.deepcopy(model)
    sc.gate_(gated, sparsity=0.5, at=("2", "4"), data=[images[:256]])
    print(f"\n{sc.compress_(gated, images[:1])}\n")
    print(sc.bench({"dense": model, "gated and compressed": gated}, images[:1], seconds=0.3))
    return found


@click.command(help=__doc__)
@click.option("--epochs", default=5, show_default=True)
@click.option("--width", default=1024, show_default=True)
def command(epochs: int, width: int) -> None:
    main(epochs, width)


if __name__ == "__main__":
    command()
