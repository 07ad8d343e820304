"""`search`: the smallest model whose metric stays within a drop, by bisection over the numbers of a recipe."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from time import perf_counter
from typing import Any, NoReturn

from torch import nn

from .._hints import hints
from .._tree import packed_layers
from ..display import Shown, Table, format_seconds
from ..edit import copied
from ..execute import decompress_
from ..progress import Progress
from ..recipes import Recipe
from ..stats import Loss
from ..summaries import summary
from .measuring import Evaluate, Journal, check_evaluate, fingerprint, loss_of, measured, measured_before

# The numbers that a search may vary, from hardly any pruning to the most: sparsities rise, fractions that remain fall.
RANGES = {
    "prune": {"sparsity": (0.0, 0.98)},
    "gate": {"sparsity": (0.0, 0.95)},
    "shrink": dict.fromkeys(("channels", "params", "flops", "latency", "depth"), (1.0, 0.05)),
}
_DEFAULT = [{"prune": {"sparsity": 0.5, "scope": "global", "floor": 0.01}}]


@dataclass(frozen=True)
class Tried:
    """One attempt: the numbers of the recipe, the metric and its drop, and the size of the model.

    `why`: the reason if the recipe could not be run with these numbers.
    """

    numbers: dict[str, float]
    drop: float
    within: bool
    seconds: float
    value: float = math.nan
    parameters: int = 0
    zeros: int = 0
    why: str = ""

    @property
    def left(self) -> int:
        """The weights that are not zero."""
        return self.parameters - self.zeros


@dataclass(frozen=True, repr=False)
class SearchResult(Shown):
    """What `search` found: the model, the recipe that makes it, the results of its stages, and everything that was tried.

    `print` shows a table. `dense`: the metric before; `value`: that of the model found. `parameters`: of the model given.
    """

    model: nn.Module
    recipe: Recipe
    results: list[Any]
    dense: float
    drop: float
    tried: list[Tried]
    parameters: int
    better: str = "higher"

    @property
    def best(self) -> Tried:
        """The attempt that made the model."""
        return max((one for one in self.tried if one.within), key=_strength)

    @property
    def value(self) -> float:
        """The metric of the model found."""
        return self.best.value

    def sweep(self) -> dict[str, Any]:
        """Metric against sparsity of everything tried, for `sweep=` of `sc.report`. Removed weights count as zeros."""
        most = max(self.parameters, *(one.parameters for one in self.tried))
        ran = [one for one in sorted(self.tried, key=_strength) if not one.why]
        points = [{"sparsity": 1 - one.left / most, "value": one.value} for one in ran]
        label = ", ".join(self.best.numbers)
        return {"lines": [{"label": label, "points": points}], "dense": self.dense, "chosen": 1 - self.best.left / most}

    def metrics(self) -> dict[str, float]:
        """The model found, as a flat dictionary of numbers."""
        best = self.best
        sizes = {"parameters": best.parameters, "left": best.left, "tried": len(self.tried)}
        return {"value": best.value, "dense": self.dense, "drop": best.drop, **sizes, **best.numbers}

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, as plain values that JSON can hold."""
        return {**self.metrics(), "recipe": self.recipe.to_dict(), "tried": [asdict(one) for one in self.tried]}

    def _table(self) -> Table:
        names = list(self.best.numbers)
        best = self.best
        rows = [
            (
                *(f"{one.numbers[name]:.4g}" for name in names),
                *(f"{one.value:.6g}", f"{one.drop:+.4g}", f"{one.left:,}", format_seconds(one.seconds)),
                "chosen" if one is best else "" if one.within else "cannot be run" if one.why else "too much",
            )
            for one in sorted(self.tried, key=_strength)
        ]
        return Table(
            (*names, "metric", "drop", "weights left", "time", ""),
            rows,
            right=range(len(names) + 4),
            title=f"{len(self.tried)} tried, drop of at most {self.drop:g} from {self.dense:.6g} ({self.better} is better)",
        )


def _strength(one: Tried) -> float:
    """How strongly an attempt prunes: sparsities count up, fractions that remain count down."""
    return sum(value if name.endswith("sparsity") else -value for name, value in one.numbers.items())


@hints
def search(
    model: nn.Module,
    evaluate: Evaluate,
    recipe: Recipe | str | os.PathLike[str] | Sequence[Mapping[str, Any]] | None = None,
    *,
    drop: float = 0.01,
    vary: Mapping[str, tuple[float, float]] | Iterable[str] | str | None = None,
    tolerance: float = 0.01,
    data: Iterable[Any] | None = None,
    example_inputs: Any = None,
    loss: Loss | None = None,
    better: str | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> SearchResult:
    """Finds the smallest model whose metric is at most `drop` worse than that of the model given, which is unchanged.

    `evaluate(model)` returns the metric, one number, and `drop` is in its unit. `recipe`: a `Recipe`, its file or name, or its
    stages as plain data; by default the smallest weights of the whole model are pruned. `vary` names the numbers to search for:
    "prune.sparsity" or "shrink.flops"; by default every sparsity and target in the recipe. With a mapping of names to
    (mildest, strongest) the search stays within these. Several numbers move together, in proportion.

    The strongest setting is tried first, then the middle of the range that is left, until it is smaller than `tolerance` of
    the whole: about eight attempts. This assumes that more pruning does not improve the metric. `data`,
    `example_inputs` and `loss` go to `Recipe.run`. `better`: "higher" for accuracy (the default), "lower" for perplexity or a
    loss. `journal`: a file to which every attempt is written; a search that was stopped continues from it.

    Raises ValueError if even the mildest attempt drops too much, if `drop` is as large as the metric itself, or if `better` is
    left out and the strongest setting raises the metric.
    """
    check_evaluate(evaluate, better)
    _check_drop(drop)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance!r} must be a fraction of the range, above 0 and below 1")
    base = _recipe(recipe)
    ranges = _ranges(base, vary)
    batches = list(data) if data is not None and iter(data) is data else data
    settings = {"recipe": base.to_dict(), "vary": ranges, "better": better or "higher"}
    kept = Journal(journal, {"call": "search", "model": fingerprint(model), "settings": settings})
    dense = kept.get("dense", lambda: {"value": measured_before(evaluate, model)})["value"]
    _check_drop(drop, dense, better)
    tried: list[Tried] = []
    best: tuple[float, nn.Module | None, list[Any]] | None = None

    def run(strength: float) -> tuple[nn.Module, list[Any]]:
        made = _at(base, ranges, strength).run_(copied(model), data=batches, example_inputs=example_inputs, loss=loss)
        return made.model, made.results

    def attempt(strength: float) -> bool:
        nonlocal best
        made: tuple[nn.Module | None, list[Any]] = (None, [])

        def measure() -> dict[str, Any]:
            nonlocal made
            begin = perf_counter()
            try:
                new, _ = made = run(strength)
            except ValueError as error:  # a target that the model cannot meet is too strong
                return {"why": str(error), "seconds": perf_counter() - begin}
            return {"value": measured(evaluate, new), "seconds": perf_counter() - begin, **_size(new)}

        found = kept.get(f"{strength!r}", measure)
        if better is None:
            _check_direction(found.get("value", math.nan), dense, tried)
        away = loss_of(found.get("value", math.nan), dense, better or "higher")
        fields = {name: value for name, value in found.items() if name != "key"}
        tried.append(Tried(_numbers(ranges, strength), drop=away, within=away <= drop, **fields))
        if away <= drop and (best is None or strength > best[0]):
            best = (strength, *made)
        return away <= drop

    _bisect(attempt, tolerance, ", ".join(ranges))
    if best is None:
        _raise_nothing_found(min(tried, key=_strength), dense, drop, better)
    strength, found, results = best
    if found is None:  # it was measured in an earlier run
        found, results = run(strength)
    return SearchResult(
        found, _at(base, ranges, strength), results, dense, drop, tried, _size(model)["parameters"], better or "higher"
    )


def _check_drop(drop: Any, dense: float | None = None, better: str | None = None) -> None:
    """Raises unless `drop` is a number that the metric of the dense model can drop by."""
    if not isinstance(drop, Real) or isinstance(drop, bool) or not float(drop) >= 0:
        raise ValueError(f"drop={drop!r} must be a number, 0 or more: how much worse the metric may be, in its own unit")
    if dense is None or better == "lower" or not 0 < dense <= float(drop):
        return
    share = f"; for {float(drop):g} points of a metric from 0 to 1 pass drop={float(drop) / 100:g}" if 0 < dense <= 1 else ""
    raise ValueError(
        f"drop={drop!r} lets the metric fall from {dense:.6g} to 0 and below, so any model would do{share}. If lower is better "
        "(perplexity, a loss), pass better='lower'"
    )


def _check_direction(value: float, dense: float, tried: Sequence[Tried]) -> None:
    """Raises if the first attempt, which prunes most, raises a metric of which nobody said that higher is better."""
    if not tried and value > dense:
        raise ValueError(
            f"the strongest setting raises the metric from {dense:.6g} to {value:.6g}. If lower is better (perplexity, a loss) "
            "pass better='lower', and if higher is better pass better='higher'"
        )


def _raise_nothing_found(mildest: Tried, dense: float, drop: float, better: str | None) -> NoReturn:
    if mildest.why:
        raise ValueError(f"even {_shown(mildest.numbers)} cannot be run: {mildest.why}")
    turned = "; if lower is better (perplexity, a loss), pass better='lower'" if better is None else ""
    raise ValueError(
        f"even {_shown(mildest.numbers)} drops the metric by {mildest.drop:.4g}, from {dense:.6g} to {mildest.value:.6g}, and "
        f"drop={drop:g} was allowed; allow more, or search with another recipe{turned}"
    )


def _bisect(attempt: Any, tolerance: float, what: str) -> None:
    """Tries strengths between 0 (not tried: nothing is pruned) and 1 until the border is known to `tolerance`."""
    steps = 1 + sum(1 for n in range(64) if 0.5**n > tolerance)
    with Progress(f"search of {what}", steps) as progress:
        progress("the strongest setting")
        if attempt(1.0):
            return
        low, high = 0.0, 1.0
        while high - low > tolerance:
            middle = (low + high) / 2
            progress(f"strength {middle:.3g}")
            low, high = (middle, high) if attempt(middle) else (low, middle)


# --- the numbers --------------------------------------------------------------------------------------------------------


def _recipe(given: Any) -> Recipe:
    if given is None:
        return Recipe.of_stages(_DEFAULT)
    if isinstance(given, Recipe):
        return given
    return Recipe.load(given) if isinstance(given, str | os.PathLike) else Recipe.of_stages(given)


def _ranges(recipe: Recipe, vary: Any) -> dict[str, tuple[float, float]]:
    """The fields to vary, as paths, each with its mildest and its strongest value."""
    fields = {
        _path(recipe, place, name): span
        for place, stage in enumerate(recipe.stages)
        for name, span in RANGES.get(stage.kind, {}).items()
        if name in stage.arguments and isinstance(stage.arguments[name], int | float)
    }
    if vary is None:
        if not fields:
            raise ValueError("the recipe has no sparsity and no target that a search could vary; name a field in vary=")
        return fields
    names = [vary] if isinstance(vary, str) else list(vary)
    found = {}
    for name in names:
        place, field_name = recipe.place(name)
        kind = recipe.stages[place].kind
        span = vary[name] if isinstance(vary, Mapping) else RANGES.get(kind, {}).get(field_name)
        if span is not None and not (isinstance(span, tuple | list) and len(span) == 2):
            raise TypeError(f"vary={{{name!r}: {span!r}}} must give the range as (mildest, strongest)")
        if span is None:
            raise ValueError(f"vary={name!r}: say its range, as vary={{{name!r}: (mildest, strongest)}}")
        found[_path(recipe, place, field_name)] = (float(span[0]), float(span[1]))
    return found


def _path(recipe: Recipe, place: int, name: str) -> str:
    """The path of a field: "prune.sparsity", or "stages[1].prune.sparsity" where several stages prune."""
    kinds = [stage.kind for stage in recipe.stages]
    return f"{kinds[place]}.{name}" if kinds.count(kinds[place]) == 1 else f"stages[{place}].{kinds[place]}.{name}"


def _numbers(ranges: Mapping[str, tuple[float, float]], strength: float) -> dict[str, float]:
    return {path: mild + strength * (strong - mild) for path, (mild, strong) in ranges.items()}


def _at(recipe: Recipe, ranges: Mapping[str, tuple[float, float]], strength: float) -> Recipe:
    for path, value in _numbers(ranges, strength).items():
        recipe = recipe.replace(path, value)
    return recipe


def _shown(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{path}={value:.4g}" for path, value in numbers.items())


def _size(model: nn.Module) -> dict[str, int]:
    """Parameters, and the zeros in weights. Compressed layers count as the dense ones that they stand for."""
    dense = decompress_(copied(model)) if packed_layers(model) else model
    return {"parameters": sum(p.numel() for p in dense.parameters()), "zeros": int(summary(dense).metrics()["zeros"])}
