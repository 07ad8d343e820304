"""Trains a small CNN on scikit-learn's digits, prunes it in several ways, and prints what is left of it.

Then a wider network: its file on disk and its milliseconds, before and after, and a report of the last variant as a web page.
Everything printed is measured in this run. To add a column, add a line to COLUMNS or SIZES; to add a row, a line to `recipes`
or `variants`.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import secateur as sc

SEED = 0
EPOCHS = 10  # of the dense model, and again of fine-tuning
BATCH = 64


@dataclass
class Digits:
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @staticmethod
    def load() -> Digits:
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(bunch.target)
        order = train_test_split(range(len(labels)), test_size=0.2, random_state=SEED, stratify=labels)
        return Digits(*((images[part], labels[part]) for part in order))

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.train
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for part in torch.randperm(len(labels), generator=generator).split(BATCH):
                yield images[part], labels[part]

    def steps(self, epochs: int) -> int:
        return epochs * -(-len(self.train[1]) // BATCH)


def build() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(model: nn.Module, digits: Digits, epochs: int, *, lr: float = 2e-3, pruner: sc.Pruner | None = None) -> None:
    """An everyday training loop. The pruner, if there is one, rides on the optimizer and is not seen again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    if pruner is not None:
        pruner.attach(optimizer)
    model.train()
    for images, labels in digits.batches(epochs, seed=SEED + 1):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.eval()


@dataclass
class Row:
    """One line of the table: a model, what was done to it, and how long that took."""

    name: str
    model: nn.Module
    plan: sc.Plan | None
    seconds: float
    digits: Digits

    def accuracy(self) -> str:
        images, labels = self.digits.test
        with torch.inference_mode():
            return f"{(self.model(images).argmax(1) == labels).float().mean():.1%}"

    def nonzero(self) -> str:
        """Counted in the model itself, not read from the plan."""
        return f"{sum(int(w.count_nonzero()) for w in matrices(self.model)):,}"

    def sparsity(self) -> str:
        weights = matrices(self.model)
        return f"{sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights):.1%}"


def matrices(model: nn.Module) -> list[Tensor]:
    """The weights of linear and convolution layers, which are what is pruned by default."""
    return [parameter.detach() for parameter in model.parameters() if parameter.ndim > 1]


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row.name,
    "accuracy": Row.accuracy,
    "non-zero weights": Row.nonzero,
    "sparsity": Row.sparsity,
    "made in": lambda row: f"{row.seconds:.2f} s" if row.plan else "",
}


def recipes(digits: Digits, epochs: int) -> dict[str, Callable[[nn.Module], sc.Plan | None]]:
    """Name of a row to what is done to a copy of the trained model."""
    steps = digits.steps(epochs)

    def fine_tuned(**recipe: Any) -> Callable[[nn.Module], sc.Plan]:
        def run(model: nn.Module) -> sc.Plan:
            pruner = sc.Pruner(model, sc.magnitude, **recipe)
            train(model, digits, epochs, pruner=pruner)
            pruner.verify()
            return pruner.finish()

        return run

    def gradual(final: float) -> Callable[[nn.Module], sc.Plan]:
        return fine_tuned(sparsity=sc.cubic(final, end=steps * 2 // 3, every=5), scope="global")

    def rigl(model: nn.Module) -> sc.Plan:
        model.load_state_dict(build().state_dict())  # back to the start: sparse from the first step
        swap = sc.cosine(0.0, initial=0.3, end=steps * 3 // 2, every=20)
        pruner = sc.Pruner(model, sc.magnitude, sparsity=0.9, spread=sc.erk, grow=abs(sc.grad), swap=swap)
        train(model, digits, 2 * epochs, pruner=pruner)
        pruner.verify()
        return pruner.finish()

    return {
        "dense": lambda model: None,
        "dense, trained as long": lambda model: train(model, digits, epochs),
        "one-shot 50 %": lambda model: sc.prune_(model, sc.magnitude, sparsity=0.5),
        "one-shot 80 %, global": lambda model: sc.prune_(model, sc.magnitude, sparsity=0.8, scope="global"),
        "one-shot 90 %, global": lambda model: sc.prune_(model, sc.magnitude, sparsity=0.9, scope="global"),
        "one-shot 2:4": lambda model: sc.prune_(model, sc.magnitude, pattern="2:4"),
        "2:4, fine-tuned": fine_tuned(pattern="2:4"),
        "gradual 90 %, global": gradual(0.9),
        "gradual 95 %, global": gradual(0.95),
        "RigL 90 %, from scratch": rigl,
    }


def table(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]] = COLUMNS) -> str:
    """The columns of all rows, the first to the left, the numbers to the right."""
    cells = [list(columns), *([column(row) for column in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def run(epochs: int) -> list[Row]:
    """Trains, prunes in every way, and gives the rows."""
    digits = Digits.load()
    trained = build()
    train(trained, digits, epochs)
    sizes = [len(part[1]) for part in (digits.train, digits.test)]
    print(
        f"A CNN on scikit-learn's digits: {sizes[0]:,} images to train on, {sizes[1]} to test on; seed {SEED}, "
        f"torch {torch.__version__}, one thread.\n"
        f"Trained for {epochs} epochs ({digits.steps(epochs)} steps). Fine-tuned and gradual rows train {epochs} more, "
        f"RigL {2 * epochs} from the start.\n"
    )
    rows = []
    for name, recipe in recipes(digits, epochs).items():
        model = copy.deepcopy(trained)
        started = time.perf_counter()
        plan = recipe(model)
        rows.append(Row(name, model.eval(), plan, time.perf_counter() - started, digits))
    return rows


# ---------------------------------------------------------------- smaller and faster


@dataclass
class Smaller(Row):
    """One line of the second table: a variant of the wide network, the bytes of its files, its time next to the dense one's."""

    bytes: int
    timing: Any
    dense: Smaller | None

    def times(self, value: Callable[[Smaller], float]) -> str:
        return f"{value(self.dense) / value(self):.1f}x" if self.dense else ""

    def verdict(self) -> str:
        faster = self.dense is None or self.dense.timing.best > 1.05 * self.timing.best
        return self.times(lambda row: row.timing.best) if faster else "not faster"


SIZES: dict[str, Callable[[Smaller], str]] = {
    "model": lambda row: row.name,
    "accuracy": Row.accuracy,
    "files": lambda row: f"{row.bytes / 1000:,.0f} kB",
    "smaller": lambda row: row.times(lambda each: each.bytes),
    "time": lambda row: f"{row.timing.best * 1e3:.2f} ms",
    "faster": Smaller.verdict,
}


def build_wide() -> nn.Module:
    """Wide enough for a product to take longer than the call of it."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


@dataclass
class Chain:
    """The wide network after each step of the last variant, and what each call returned."""

    stages: dict[str, nn.Module]
    results: list[Any]


def variants(digits: Digits, epochs: int) -> tuple[dict[str, nn.Module], Chain]:
    """Name of a row to a model, and the steps of the last one.

    All but the first are made from the trained one, and trained a little more.
    """
    dense, inputs, steps = build_wide(), digits.test[0][:BATCH], digits.steps(epochs)
    train(dense, digits, epochs)

    def pruned(model: nn.Module, **recipe: Any) -> tuple[nn.Module, sc.Plan]:
        model = copy.deepcopy(model)
        pruner = sc.Pruner(model, sc.magnitude, **recipe)
        train(model, digits, epochs, lr=1e-3, pruner=pruner)
        return model, pruner.finish()

    def compressed(model: nn.Module) -> tuple[nn.Module, Any]:
        model = copy.deepcopy(model)
        return model, sc.compress_(model, inputs)

    gradual = sc.cubic(0.95, end=steps * 2 // 3, every=5)
    sparse, _ = pruned(dense, sparsity=gradual, scope="global")
    two_of_four, _ = pruned(dense, pattern="2:4")
    narrow, cut = sc.shrink(dense, inputs, channels=0.25)
    train(narrow, digits, epochs, lr=1e-3)
    thin, plan = pruned(narrow, sparsity=0.8, scope="global")
    packed, compression = compressed(thin)
    models = {
        "dense": dense,
        "unstructured 95 %": sparse,
        "unstructured 95 %, compressed": compressed(sparse)[0],
        "2:4": two_of_four,
        "2:4, compressed": compressed(two_of_four)[0],
        "structured, a quarter of the units": narrow,
        "the same, pruned 80 %, compressed": packed,
    }
    stages = {"dense": dense, "shrunk": narrow, "pruned": thin, "compressed": packed}
    return models, Chain(stages, [cut, plan, compression])


def measure(models: dict[str, nn.Module], digits: Digits) -> list[Smaller]:
    """Save each, load it back, see that it answers the same, and time all of them in turns."""
    images, sizes = digits.test[0][:BATCH], {}
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            sc.save(model, folder, packed=name != "dense")
            sizes[name] = sum(file.stat().st_size for file in Path(folder).iterdir())
            if not torch.equal(sc.load(folder, into=build_wide).eval()(images), model.eval()(images)):
                raise AssertionError(f"{name}: the model that was loaded answers otherwise than the one that was saved")
    timed = sc.bench(models, images, seconds=0.5)
    rows: list[Smaller] = []
    for name, model in models.items():
        rows.append(Smaller(name, model, None, 0.0, digits, sizes[name], timed[name], rows[0] if rows else None))
    return rows


def write_report(chain: Chain, digits: Digits, epochs: int, path: Path) -> Path:
    """Writes the steps of the last variant as one web page, and returns its path."""
    images, labels = digits.test

    def evaluate(model: nn.Module) -> float:
        with torch.inference_mode():
            return float((model(images).argmax(1) == labels).float().mean())

    sc.report(
        *chain.results,
        path=path,
        stages=chain.stages,
        example_inputs=images[:BATCH],
        evaluate=evaluate,
        samples=len(labels),
        name="A network on digits",
        data="scikit-learn's digits",
        note=f"Trained for {epochs} epochs after each cut.",
        seconds=0.3,
    )
    return path.resolve()


def main(epochs: int = EPOCHS, report: str | Path = "out/demo/report.html") -> tuple[list[Row], list[Smaller], Path]:
    begin = time.perf_counter()
    torch.set_num_threads(1)  # the model is too small for more, and one thread gives the same numbers in every run
    rows = run(epochs)
    print(table(rows))
    shown = next(row for row in rows if row.name == "gradual 95 %, global")
    print(f"\n{shown.name}, layer by layer, and what was skipped and why:\n\n{shown.plan}")
    fewer = max(1, epochs // 2)
    models, chain = variants(shown.digits, fewer)
    smaller = measure(models, shown.digits)
    path = write_report(chain, shown.digits, fewer, Path(report))
    print(
        f"\nA wider network (64, 1024, 1024, 10) on the same digits. Files: what sc.save wrote, packed but for the dense one;\n"
        f"each was loaded back and answers the same. Time: the best for {BATCH} images, all models in turns.\n"
    )
    print(table(smaller, SIZES))
    print(f"\nThe last row as a report, step by step and layer by layer: {path}\n{time.perf_counter() - begin:.0f} s in all.")
    return rows, smaller, path


if __name__ == "__main__":
    main()
