"""Settings of one pruning: criterion, pattern, scope, budget and method. Checked when made, before any model is touched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar

from torch import Tensor

from ._dist import Comm
from ._text import percent_hint
from ._tree import bare_name, nearest_glob
from .budgets import Spread, as_spread, by_loss, cap, erk, hold, names_spread, owl, uniform
from .criteria import NAMED, Criterion, criterion, magnitude
from .methods import Amount, Method, as_method, check_needs, drop_and_grow, names_method
from .owners import measured
from .patterns import Pattern
from .schedules import AnySchedule, Number, as_schedule
from .scores import Scores
from .select import SCOPES
from .shards import pruned_shares, select_shared, whole_sizes


@dataclass(frozen=True)
class Settings:
    """Criterion, pattern, scope, budget and method, which fit each other."""

    kind: ClassVar[str] = "Recipe"  # states of pruners name it

    criterion: Criterion
    pattern: Pattern
    scope: str
    sparsity: Number | None
    count: int | None
    spread: Spread | Mapping[str, Number] | None
    method: Method
    floor: float = 0.0

    @staticmethod
    def of(
        by: Criterion | Callable[..., Tensor] | str,
        pattern: str | Pattern,
        scope: str | None,
        sparsity: Number | None,
        count: int | None,
        spread: Spread | Mapping[str, Number] | str | None,
        method: Method | str | None = None,
        floor: float = 0.0,
    ) -> Settings:
        """The settings that these arguments describe. Raises an error with advice if they contradict each other."""
        _check_place(by)
        shape = Pattern.parse(pattern)
        if scope is not None and scope not in SCOPES:
            raise ValueError(f"scope={scope!r} is not one of {', '.join(map(repr, SCOPES))}")
        if sparsity is not None:
            sparsity = _fraction("sparsity", sparsity)
        if count is not None and (not isinstance(count, Integral) or isinstance(count, bool) or count < 0):
            raise ValueError(
                f"count={count!r} must be a whole number of units to prune, 0 or more; for a fraction use sparsity="
            )
        if shape.keep:
            _fits_n_of_m(shape, scope, sparsity, count, spread)
        else:
            _one_budget(sparsity, count, spread)
        spread = _checked_spread(as_spread(spread), scope, count)
        if scope == "row" and shape.unit == "out":
            raise ValueError(
                'pattern "out" with scope="row": each row is one unit, with nothing to compete with; use scope="tensor"'
            )
        how = as_method(method)
        check_needs(how)
        by = criterion(by)
        if by != magnitude and not how.ranks and scope != "global" and not callable(spread):
            raise ValueError(
                f"{how} chooses weights by itself and would not use the criterion {by}; drop one of them, or let "
                'the criterion spread the budget over layers with scope="global" or spread='
            )
        own = spread is None and sparsity is not None and scope != "global" and not shape.keep
        shares = how.spread if own else spread
        made = Settings(by, shape, scope or "tensor", sparsity, count, shares, how, _checked_floor(floor))
        made._check_reach()
        how.check(made.pattern, made.scope, made.scheduled)
        return made

    def _check_reach(self) -> None:
        """Raises where the budget, at the end of its schedule, prunes more than `floor` leaves."""
        if self.pattern.keep and self.floor > self.pattern.keep[0] / self.pattern.keep[1]:
            raise ValueError(f"pattern {str(self.pattern)!r} keeps less than floor={self.floor:g} of each tensor; lower floor=")
        spread = self.spread if isinstance(self.spread, Mapping) else {}
        for number in (self.sparsity, *spread.values()):
            self._check_share(_at(number, number.end if isinstance(number, AnySchedule) else 0))

    def _check_share(self, share: float | None, of: str = "each tensor") -> None:
        if share is not None and share > 1 - self.floor + 1e-9:
            raise ValueError(
                f"sparsity {share:g} leaves {1 - share:.4g} of {of}, but floor={self.floor:g} keeps more; lower one of them"
            )

    @property
    def needs(self) -> frozenset[str]:
        """The evidence that criterion and method need."""
        return self.criterion.needs | self.method.needs

    @property
    def scheduled(self) -> list[AnySchedule]:
        """The schedules in the budget."""
        numbers = [self.sparsity, *(self.spread.values() if isinstance(self.spread, Mapping) else ())]
        return [number for number in numbers if isinstance(number, AnySchedule)]

    def at(self, step: int) -> float | None:
        """The sparsity at a step."""
        return _at(self.sparsity, step)

    def due(self, step: int) -> bool:
        """Whether new masks are due at this step: by the schedule, or at the start of a constant budget."""
        return any(number.due(step) for number in self.scheduled) or (step == 0 and not self.scheduled)

    def shares(
        self, scores: Mapping[str, Scores], step: int, pruned: Mapping[str, float] | None = None
    ) -> float | dict[str, float] | None:
        """The sparsity of each tensor, or one number for all. Elements that are already `pruned` stay pruned, and count."""
        sparsity = self.at(step)
        self._check_share(sparsity)
        if self.pattern.keep or self.count is not None or self.spread is None:
            return sparsity
        if isinstance(self.spread, Mapping):
            named = _by_name({glob: _at(share, step) for glob, share in self.spread.items()}, list(scores), sparsity)
            for name, share in named.items():
                self._check_share(share, repr(name))
            return named
        assert sparsity is not None
        shares = self.spread(scores, sparsity)
        if not isinstance(shares, Mapping) or shares.keys() != scores.keys():
            raise ValueError(f"spread= must give a mapping of every tensor's name to its sparsity; it gave {shares!r}")
        own = {name: _at(_fraction(f"the spread= of {name!r}", share), step) or 0.0 for name, share in shares.items()}
        sizes = {name: one.numel for name, one in scores.items()}
        if any(share > 1 - self.floor for share in own.values()):
            own = cap(own, sizes, 1 - self.floor)
        return own if pruned is None else hold(own, pruned, sizes, sparsity)

    def _shares_of_all(
        self, scores: Mapping[str, Scores], step: int, pruned: Mapping[str, float] | None, comm: Comm
    ) -> float | dict[str, float] | None:
        """`shares` over the tensors of all processes."""
        if comm.alone or not callable(self.spread):
            return self.shares(scores, step, pruned)
        measure = getattr(self.spread, "measure", None)
        if self.spread not in (uniform, erk) and measure is None:
            raise NotImplementedError(
                f"spread={getattr(self.spread, '__name__', self.spread)} looks at the scores of whole tensors, and several "
                "processes hold parts of them; use sc.uniform, sc.erk, sc.owl() or a mapping of name to sparsity"
            )
        found = measured(scores, measure, comm) if measure else dict.fromkeys(scores, 0.0)
        rows = [(name, one.layout, found[name], pruned[name] if pruned else 0.0) for name, one in whole_sizes(scores).items()]
        every = {(stage, row[0]): row[1:] for stage, part in enumerate(comm.gather_stages(rows)) for row in part}
        sizes = {f"{stage} {name}": Scores.of_size(row[0]) for (stage, name), row in every.items()}
        told: Any = self.spread
        spread = partial(told, measured=dict(zip(sizes, (row[1] for row in every.values()), strict=True)))
        gone = dict(zip(sizes, (row[2] for row in every.values()), strict=True)) if pruned else None
        shares = replace(self, spread=spread if measure else self.spread).shares(sizes, step, gone)
        assert isinstance(shares, dict)
        return {name: shares[f"{comm.stage} {name}"] for name in scores}

    def amounts(
        self, scores: Mapping[str, Scores], step: int, held: Mapping[str, Tensor] | None, comm: Comm
    ) -> dict[str, Amount]:
        """How much of each tensor is pruned at a step. `held` are masks of the elements that may be kept, as matrices."""
        pruned = None
        if held and callable(self.spread):
            pruned = pruned_shares(scores, held, comm)
        shares = self._shares_of_all(scores, step, pruned, comm)
        if self.scope == "global" or (not comm.alone and self.method.ranks and not self.method.revives):
            kept = select_shared(  # all tensors at once, so that the processes agree on them in the same rounds
                scores,
                self.pattern,
                scope=self.scope,
                sparsity=shares,
                count=self.count,
                previous=held,
                comm=comm,
                floor=self.floor,
            )
            return {name: Amount(ranked=mask, comm=comm) for name, mask in kept.items()}
        each = shares if isinstance(shares, Mapping) else dict.fromkeys(scores, shares)
        return {name: Amount(self.scope, each[name], self.count, comm=comm, floor=self.floor) for name in scores}

    def describe(self, step: int = 0) -> str:
        """The settings in one line, with the sparsity at a step."""
        by = str(self.criterion) if self.method.ranks else str(self.method)
        how = f", {self.method}" if self.method.ranks and self.method != as_method(None) else ""
        how = f", floor {self.floor:g}{how}" if self.floor else how
        if callable(self.spread) and self.spread is not uniform:
            how = f", spread {getattr(self.spread, '__name__', self.spread)}{how}"
        if self.pattern.keep:
            return f"{by}, {self.pattern}{how}"
        budget = f"count {self.count}" if self.count is not None else f"sparsity {self.at(step)}"
        budget = "sparsity by name" if self.sparsity is None and self.count is None else budget
        return f"{by}, {self.pattern}, {budget}, scope {self.scope}{how}"


def method_of(method: Method | str | None, grow: Any, swap: Any) -> Method | str | None:
    """The method for `grow=` and `swap=`, or the given method."""
    if grow is None and swap is not None:
        raise ValueError("swap= goes with grow=, the criterion that chooses which pruned weights return")
    if grow is None:
        return method
    if method is not None:
        raise ValueError("grow= is short for method=sc.methods.drop_and_grow(grow, swap); give one of the two")
    return drop_and_grow(grow, swap)


def check_ste(recipe: Settings, ste: bool, every: int) -> None:
    """Raises where `ste=` and `every=` of a `Pruner` contradict each other or the settings."""
    falling = [number for number in recipe.scheduled if number.falls]
    if falling and not (ste or recipe.method.revives):
        raise ValueError(f"{falling[0]} falls, but pruned weights stay pruned; use ste=True or grow= to let weights return")
    if ste and recipe.method.revives:
        raise ValueError("grow= and ste=True both let pruned weights return; choose one")
    if ste and recipe.method.rewrites:
        raise ValueError(f"{recipe.method} changes weights, but ste=True trains the dense weights; choose one")
    if not isinstance(every, int) or every < 1 or (every > 1 and (not ste or recipe.scheduled)):
        raise ValueError(
            f"every={every!r} must be 1 or more, the number of steps between new masks; it needs ste=True and no schedule"
        )


def _checked_spread(
    spread: Spread | Mapping[str, Number] | None, scope: str | None, count: int | None
) -> Spread | Mapping[str, Number] | None:
    """The spread, with functions of the step as schedules. Raises where it is none, or where something else decides."""
    if spread is None:
        return None
    if scope == "global" or count is not None:
        rival = 'scope="global"' if scope == "global" else "count="
        raise ValueError(f"spread= and {rival} both determine the sparsity of each tensor; drop one of them")
    for make in (owl, by_loss):
        if spread is make:
            raise TypeError(f"spread=sc.{make.__name__} is made by calling it: spread=sc.{make.__name__}()")
    if isinstance(spread, Mapping):
        return {name: _fraction(f"spread[{name!r}]", share) for name, share in spread.items()}
    if not callable(spread):
        raise TypeError(
            "spread= is sc.uniform, sc.erk, sc.owl(), sc.by_loss(), one of their names, or a mapping of name to sparsity, "
            f"not {spread!r}"
        )
    try:
        inspect.signature(spread).bind(None, None)
    except TypeError as error:
        raise TypeError(
            "spread= is called with two arguments, the scores of all tensors by name and the total sparsity, but "
            f"{getattr(spread, '__name__', spread)} does not accept them: {error}"
        ) from None
    except ValueError:  # some functions written in C have no signature
        pass
    return spread


def _check_place(by: object) -> None:
    """Raises if the criterion is a number, a pattern, a method or a spread, and names the right argument."""
    if isinstance(by, Real) and not isinstance(by, bool) and 0 <= float(by) <= 1:
        raise TypeError(f"criterion={by!r} is a number; to prune this fraction of the weights pass sparsity={by!r}")
    if isinstance(by, Method):
        raise TypeError(f"criterion={by} is a method; pass it as method=")
    if not isinstance(by, str) or by in NAMED:
        return
    kinds = {"method": names_method(by), "spread": names_spread(by), "pattern": _is_pattern(by)}
    for argument in (name for name, fits in kinds.items() if fits):
        raise ValueError(f"criterion={by!r} is a {argument} and scores no weights; pass {argument}={by!r}")


def _is_pattern(text: str) -> bool:
    try:
        return bool(Pattern.parse(text))
    except ValueError:
        return False


def _checked_floor(floor: object) -> float:
    if not isinstance(floor, Real) or isinstance(floor, bool) or not 0 <= float(floor) < 1:
        raise ValueError(f"floor={floor!r} must be a fraction from 0 to below 1: the least of each tensor that is kept")
    return float(floor)


def _at(number: Number | None, step: int) -> float | None:
    return number(step) if callable(number) else number


def _fraction(name: str, value: object) -> Number:
    if callable(value):
        return as_schedule(value, name)
    if not isinstance(value, Real) or isinstance(value, bool):
        hint = _number_hint(value) if name == "sparsity" else percent_hint(value)
        raise TypeError(f"{name}={value!r} must be a number from 0 to 1, or a schedule such as sc.cubic(0.9, end=1000){hint}")
    if not 0 <= float(value) <= 1:  # NaN is outside too
        raise ValueError(
            f"{name}={value!r} must be a fraction of the original from 0 to 1{percent_hint(value)}; for a number of units use "
            "count="
        )
    return float(value)


def _number_hint(value: object) -> str:
    """A hint for the error where `sparsity=` is not a number."""
    if isinstance(value, Mapping):
        return f"; for numbers by name pass spread={value!r}"
    if isinstance(value, str) and _is_pattern(value):
        return f"; pass pattern={value!r}"
    return percent_hint(value)


def _fits_n_of_m(pattern: Pattern, scope: str | None, sparsity: Number | None, count: int | None, spread: object) -> None:
    assert pattern.keep
    n, m = pattern.keep
    given = {"scope": scope, "count": count, "spread": spread}
    if conflicts := [f"{key}=" for key, value in given.items() if value is not None]:
        raise ValueError(
            f"pattern {str(pattern)!r} says how many of each {m} are kept, so {' and '.join(conflicts)} cannot be set too"
        )
    if sparsity is not None and (not isinstance(sparsity, Real) or abs(float(sparsity) - (1 - n / m)) > 1e-9):
        raise ValueError(
            f"pattern {str(pattern)!r} is {1 - n / m:g} sparse and sparsity={sparsity} was asked; drop sparsity=, "
            "or use another pattern"
        )


def _one_budget(sparsity: Number | None, count: int | None, spread: object) -> None:
    if sparsity is not None and count is not None:
        raise ValueError(f"sparsity={sparsity} and count={count} both say how much to prune; give one of them")
    if sparsity is None and count is None and not isinstance(spread, Mapping):
        raise ValueError(
            "say how much to prune: sparsity= (a fraction of the original), count= (units), or a pattern such as '2:4'"
        )


def _by_name(spread: Mapping[str, float | None], names: list[str], rest: float | None) -> dict[str, float]:
    """The sparsity of each target by a mapping of names or globs; targets that it does not name get `rest`."""
    for glob in spread:
        if not any(_names(name, glob) for name in names):
            raise ValueError(f"spread={{{glob!r}: ...}} matches no tensor that is pruned.{nearest_glob(glob, names)}")
    shares = {}
    for name in names:
        found = [share for glob, share in spread.items() if _names(name, glob)]
        if not found and rest is None:
            raise ValueError(f"spread= has no number for {name!r}; add it, exclude the tensor, or pass sparsity= for the rest")
        shares[name] = float((found[-1] if found else rest) or 0.0)
    return shares


def _names(name: str, glob: str) -> bool:
    """True if a glob matches a name, or the name without the parts that wrappers such as torch.compile add."""
    return fnmatchcase(name, glob) or fnmatchcase(bare_name(name), glob)
