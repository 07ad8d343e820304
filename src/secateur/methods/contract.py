"""Checks that a method of one's own does what its attributes and its budget say."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .._tree import nearest
from ..criteria import EVIDENCE
from ..patterns import Pattern
from .seam import Amount, LayerProblem, Method, Solution
from .walk import STREAMED

_MANY = 0.1  # the fraction of zeros from which on a weight was pruned before


def check_needs(method: Method) -> None:
    """Raises ValueError for evidence that nobody collects."""
    known = sorted({*EVIDENCE, *STREAMED} - {"weight"})
    for name in sorted(method.needs - {"weight"}):
        if name not in known:
            raise ValueError(f"{method} needs {name!r}, and evidence is one of {', '.join(known)}.{nearest(name, known)}")


def solve_checked(method: Method, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
    """`method.solve`, with its answer checked. Methods of this package are tested, and counting would wait for a device."""
    solution = method.solve(problem, pattern, amount, previous)
    if type(method).__module__.partition(".")[0] == __name__.partition(".")[0] or not isinstance(solution, Solution):
        return solution
    if solution.weight is not None and not method.rewrites:
        raise ValueError(f"{method} returned new weights for {problem.name!r}; state rewrites = True in its class")
    if problem.scores is not None and amount.comm.alone and solution.mask.shape == problem.W.shape:
        _check_count(method, problem, pattern, amount, previous, solution.mask)
    return solution


def what_to_know(problem: LayerProblem, solution: object) -> Iterator[str]:
    """What a user may not expect of a solution, in sentences."""
    tokens, inputs = problem.tokens, problem.W.shape[-1]
    if tokens is not None and tokens < inputs:
        yield f"{tokens:,} tokens of data= for {inputs:,} inputs do not determine its weights; pass more"
    if isinstance(solution, Solution) and solution.weight is not None:
        zero = problem.W == 0
        if int(zero.sum()) > _MANY * zero.numel() and bool((zero & (solution.weight != 0)).any()):
            yield "it had zeros, and not all of them are left: methods that re-solve weights choose the zeros anew"


def _check_count(
    method: Method, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None, mask: Tensor
) -> None:
    assert problem.scores is not None
    if previous is not None and not method.revives and bool((mask & ~previous).any()):
        raise ValueError(
            f"{method} keeps weights of {problem.name!r} that were pruned before; state revives = True in its class"
        )
    wanted = amount.keep(problem.name, problem.scores, pattern, None if method.revives else previous)
    found, asked = int(mask.sum()), int(wanted.sum())
    if found != asked:
        raise ValueError(
            f"{method} keeps {found:,} of the {mask.numel():,} weights of {problem.name!r}, and the budget leaves {asked:,}; "
            "amount.keep(name, scores, pattern, previous) gives a mask that meets it"
        )
    if pattern.keep and pattern.elementwise:
        n, m = pattern.keep
        whole = mask[:, : mask.shape[1] // m * m].unflatten(1, (-1, m))
        if bool((whole.sum(2) > n).any()):
            raise ValueError(f"{method} keeps more than {n} of {m} neighbours in {problem.name!r}; the pattern is {pattern}")
