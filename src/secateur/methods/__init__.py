"""Methods: how the weights of a layer answer a budget, as values for `method=` of `prune_`, `plan` and `Pruner`.

`rank()` is the default. `sparsegpt()` changes the weights that stay, `drop_and_grow(grow, swap)` is for training. A method of
your own is a subclass of `Method` with a `solve`, which gets a `LayerProblem` and an `Amount` and returns a `Solution`.
"""

from __future__ import annotations

from typing import Any

from .._text import read_call
from .._tree import nearest
from .allocate import greedy_sparsities, squares
from .contract import check_needs, solve_checked
from .dropgrow import drop_and_grow
from .gates import METHODS, Gate, Seen
from .measure import Measured, Probe, mean, ratio
from .ranking import rank
from .seam import Amount, LayerProblem, Method, Solution
from .sparsegpt import sparsegpt
from .straight_through import SoftMasks, without_soft_masks
from .walk import STREAMED, solve_all, write_

__all__ = [
    "Amount", "LayerProblem", "Method", "Solution", "drop_and_grow", "rank", "sparsegpt",
    "as_method", "check_needs", "solve_checked", "STREAMED", "solve_all", "write_",  # for plans and recipes
    "SoftMasks", "without_soft_masks",  # for pruning and io
    "METHODS", "Gate", "Seen", "Measured", "Probe", "greedy_sparsities", "mean", "ratio", "squares",  # for activations
]  # fmt: skip

_NAMED = {"rank": rank, "sparsegpt": sparsegpt}
_CALLS = {"rank": rank, "sparsegpt": sparsegpt}  # what the text of a method with arguments may call


def as_method(given: Method | str | Any | None) -> Method:
    """The method that `method=` means: a value, its text ("sparsegpt", "sparsegpt(damp=0.05)"), or None for ranking once."""
    if isinstance(given, Method):
        return given
    if given is None:
        return rank()
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]()
    if isinstance(given, str) and given.partition("(")[0].strip() in _NAMED:
        return as_method(read_call(given, _CALLS))
    hint = nearest(given, _NAMED) if isinstance(given, str) else ""
    known = ", ".join(f"sc.methods.{name}" for name in ("rank()", "sparsegpt()", "drop_and_grow(grow, swap)"))
    raise (ValueError if isinstance(given, str) else TypeError)(f"method={given!r} is not a method; use {known}.{hint}")


def __dir__() -> list[str]:
    """The names for users; `__all__` also has what the other rooms of the package import."""
    return sorted(__all__[: __all__.index("as_method")])
