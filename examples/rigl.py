"""Training from scratch with few weights: 95 % are zero from the first step, fixed at random or moved by SET or RigL."""

from __future__ import annotations

from typing import Any

import click
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import secateur as sc


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))


def main(epochs: int = 15, sparsity: float = 0.95) -> dict[str, float]:
    """Returns the accuracy of each way to train."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    steps = epochs * -(-1400 // 64)
    swap = sc.cosine(0.0, initial=0.3, end=steps * 3 // 4, every=20)  # the fraction that is exchanged, less and less
    ways: dict[str, dict[str, Any] | None] = {
        "dense": None,
        "fixed at random": {"criterion": sc.random(0)},
        "SET": {"criterion": sc.magnitude, "method": sc.methods.drop_and_grow(sc.random(0), swap)},
        "RigL": {"criterion": sc.magnitude, "method": sc.methods.drop_and_grow(abs(sc.grad), swap)},
    }
    found = {}
    for name, arguments in ways.items():
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        pruner = None
        if arguments is not None:
            pruner = sc.Pruner(model, sparsity=sparsity, spread=sc.erk, **arguments).attach(optimizer)
        shuffle = torch.Generator().manual_seed(1)
        for _ in range(epochs):
            for part in torch.randperm(1400, generator=shuffle).split(64):
                optimizer.zero_grad()
                cross_entropy(model(images[part]), labels[part]).backward()
                optimizer.step()
        if pruner is not None:
            pruner.finish()
        with torch.inference_mode():
            found[name] = float((model(images[1400:]).argmax(1) == labels[1400:]).float().mean())
        left = sum(int(p.count_nonzero()) for p in model.parameters() if p.ndim > 1)
        print(f"{name:<15}  {left:>7,} weights  {found[name]:.1%} right")
    return found


@click.command(help=__doc__)
@click.option("--epochs", default=15, show_default=True)
@click.option("--sparsity", default=0.95, show_default=True)
def command(epochs: int, sparsity: float) -> None:
    main(epochs, sparsity)


if __name__ == "__main__":
    command()
