"""`Ran`: what a recipe did to a model, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..display import Shown, Table, format_seconds
from .schema import KINDS


@dataclass(frozen=True, repr=False)
class Ran(Shown):
    """What `Recipe.run` returns: the new model, and the result of each stage (`Plan`, `Shrunk`, `Gates`, `Compression`).

    `print` shows a table of the stages, and `print(ran.results[0])` the layers of one. `model, results = recipe.run(model)`
    unpacks it. `stages` are the kinds of the stages, and `seconds` the time that each of them took.
    """

    _folded = "layers"

    model: nn.Module
    results: list[Any]
    stages: tuple[str, ...]
    seconds: tuple[float, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.results))

    def metrics(self) -> dict[str, Any]:
        """The totals of all stages, as a flat dictionary: "prune/sparsity", or "stages[1].prune/sparsity" where two prune."""
        paths = [f"stages[{i}].{kind}" if self.stages.count(kind) > 1 else kind for i, kind in enumerate(self.stages)]
        found = {
            f"{path}/{key}": value
            for path, result in zip(paths, self.results, strict=True)
            for key, value in result.metrics().items()
            if "/" not in key
        }
        return {"stages": len(self.stages), "seconds": sum(self.seconds), **found}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, as plain values that JSON can hold."""
        stages = zip(self.stages, self.seconds, self.results, strict=True)
        return {"stages": [{"stage": kind, "seconds": took, "result": result.to_dict()} for kind, took, result in stages]}

    def _table(self) -> Table:
        stages = zip(self.stages, self.seconds, self.results, strict=True)
        rows = [(kind, KINDS[kind].describe(result.metrics()), format_seconds(took)) for kind, took, result in stages]
        return Table(("stage", "result", "time"), rows, right=(2,), notes=["results[0] shows the layers of the first stage"])
