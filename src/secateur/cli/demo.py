"""`secateur demo`: trains a small network on made-up pictures, makes it smaller in three ways, and compares them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import execute, io, reports
from ..display import Table, format_seconds
from ..progress import Progress
from ..pruner import Pruner
from ..schedules import cubic
from ..surgery import shrink
from .models import check_writable
from .running import Answer

CLASSES, SIDE, BATCH, STEPS = 10, 12, 64, 200


def run(output: str | None) -> Answer:
    """Trains, prunes, shrinks and compresses. Everything in the table is measured in this run."""
    if output is not None:
        check_writable(Path(output))
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = _models()
    finally:
        torch.set_num_threads(threads)
    images, labels = _pictures(2000, seed=2)
    timings = execute.bench(models, images[:BATCH], threads=1, seconds=0.5)
    rows = []
    for name, model in models.items():
        rows.append(
            {"model": name, "accuracy": _accuracy(model, images, labels), "bytes": _bytes(model), "seconds": timings[name].best}
        )
    if output is not None:
        _keep(models, Path(output), images, labels)
    first = rows[0]
    table = Table(
        ("model", "accuracy", "file", "smaller", "time of 64 images", "faster"),
        [
            (
                *(row["model"], f"{row['accuracy']:.1%}", f"{row['bytes'] / 1e3:,.0f} kB"),
                *(f"{first['bytes'] / row['bytes']:.1f}x", format_seconds(row["seconds"])),
                f"{first['seconds'] / row['seconds']:.2f}x",
            )
            for row in rows
        ],
        right=range(1, 6),
        title=f"A network for {CLASSES} classes of made-up pictures, on one thread, torch {torch.__version__}",
        notes=[f"written to {output}: report.html and the folder model" if output else "next: secateur demo -o demo"],
    )
    return Answer(str(table), {"rows": rows, **({"output": output} if output else {})})


def _keep(models: dict[str, nn.Module], folder: Path, images: Tensor, labels: Tensor) -> None:
    """Writes the last model and the report of how it was made."""
    io.save(models["95 % zeros, compressed"], folder / "model")
    reports.report(
        path=folder / "report.html",
        stages={name: model for name, model in models.items() if name != "half of the units"},
        example_inputs=images[:BATCH],
        evaluate=lambda model: _accuracy(model, images, labels),
        samples=len(labels),
        name="the network of secateur demo",
        note="It was trained while it was pruned.",
        seconds=0.3,
    )


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def _models() -> dict[str, nn.Module]:
    with Progress("demo", 4) as progress:
        progress("training the dense network")
        dense = _train(_network(), STEPS)
        progress("removing half of the units, training on")
        small = _train(shrink(dense, _pictures(BATCH, 3)[0], channels=0.5)[0], STEPS // 2)
        progress("setting 95 % of the weights to zero, training on")
        sparse = copy.deepcopy(dense)
        pruner = Pruner(sparse, sparsity=cubic(0.95, end=STEPS // 2, every=5), scope="global", floor=0.01)
        _train(sparse, STEPS, pruner.attach)
        pruner.finish()
        progress("choosing sparse formats")
        packed = copy.deepcopy(sparse)
        execute.compress_(packed, _pictures(BATCH, 3)[0], threads=1)
    return {"dense": dense, "half of the units": small, "95 % zeros": sparse, "95 % zeros, compressed": packed}


def _network() -> nn.Module:
    width = 1024
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def _pictures(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy and shifted versions of one random pattern for each class, and their classes."""
    patterns = torch.randn(CLASSES, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    shifts = torch.randint(3, (number,), generator=generator)
    images = torch.stack([patterns[label].roll(int(shift), 1) for label, shift in zip(labels, shifts)])
    return images + 1.5 * torch.randn(images.shape, generator=generator), labels


def _train(model: nn.Module, steps: int, attach: Callable[[Any], Any] | None = None) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if attach is not None:
        attach(optimizer)
    images, labels = _pictures(4096, seed=1)
    order = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(steps):
        part = torch.randint(len(labels), (BATCH,), generator=order)
        optimizer.zero_grad()
        cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    return model.eval()


def _bytes(model: nn.Module) -> int:
    with tempfile.TemporaryDirectory() as folder:
        io.save(model, folder, packed=True)
        return sum(file.stat().st_size for file in Path(folder).iterdir())
