"""Drop and grow: swaps the least important kept units for the most promising pruned ones, at constant sparsity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..criteria import Criterion, criterion
from ..owners import scores_of
from ..patterns import Pattern
from ..schedules import AnySchedule, as_schedule
from ..shards import select_shared, units_of
from .seam import Amount, LayerProblem, Method, Solution


@dataclass(frozen=True)
class DropAndGrow(Method):
    """Dynamic sparse training as a method. `drop_and_grow(grow, swap)` makes one."""

    grow: Criterion
    swap: AnySchedule
    revives = True

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return self.grow.needs

    def due(self, step: int) -> bool:
        return self.swap.due(step)

    def check(self, pattern: Pattern, scope: str, scheduled: list[AnySchedule]) -> None:
        if pattern.keep or pattern.lose or scope != "tensor":
            raise ValueError('grow= swaps whole units within each tensor; it goes with scope="tensor", without n:m and "AxB-Z"')
        if scheduled:
            raise ValueError(f"grow= swaps weights at a constant sparsity, not with {scheduled[0]}; pass a number")

    def solve(self, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
        """Ranks once while nothing is pruned; from then on swaps, with as many units kept as before.

        The fraction `swap` of the kept units with the lowest scores goes, and as many of those outside with the highest scores
        by `grow` come in. A unit that was dropped in the same update may come straight back.
        """
        assert problem.scores is not None
        assert problem.evidence is not None
        comm = amount.comm
        total, alive = (0, 0) if previous is None else units_of(problem.scores, pattern, previous, comm)
        if previous is None or alive == total:
            return Solution(amount.keep(problem.name, problem.scores, pattern, previous))
        swapped = round(self.swap(problem.step) * alive)
        stay = Amount(count=total - alive + swapped, comm=comm).keep(problem.name, problem.scores, pattern, previous)
        # Of the units outside now, the best `swapped` come in: all others are pruned from that ranking.
        promise = {problem.name: scores_of(self.grow, problem.evidence)}
        outside = {problem.name: ~stay}
        (grown,) = select_shared(promise, pattern, count=total - swapped, previous=outside, comm=comm).values()
        return Solution(stay | grown)

    def __str__(self) -> str:
        return f"drop_and_grow({self.grow}, {self.swap})"


def drop_and_grow(grow: Criterion | Callable[..., Tensor] | str, swap: Callable[[int], float] | None) -> DropAndGrow:
    """Dynamic sparse training, for a `Pruner`: whenever the schedule `swap` is due, swaps that fraction of the kept weights.

    The kept weights with the lowest scores by the pruner's criterion are dropped, and as many pruned ones with the highest
    scores by `grow` come in, at zero. Growing by `abs(grad)` is RigL (Evci et al., 2020), growing by `random()` is SET
    (Mocanu et al., 2018).
    """
    if not callable(swap):
        raise ValueError(
            "grow= needs swap=, a schedule of the fraction of kept weights to swap, and when: for instance "
            "swap=sc.cosine(0.0, initial=0.3, end=10_000, every=100)"
        )
    return DropAndGrow(criterion(grow), as_schedule(swap, "swap"))
