"""Values for `method=` of `prune_`, `plan` and `Pruner`: they compute the masks of a layer, and new values of its weights.

`rank()` is the default. `topk()`, `sparsegpt()` and `admm()` also change the weights that stay, so that the outputs of a layer
change little; `own()` and `flow()` are the outputs that `topk` and `admm` aim at. `drop_and_grow(grow, swap)` is for training.
A method of your own is a subclass of `Method` with a `solve`, which gets a `LayerProblem` and an `Amount` and returns a
`Solution`.
"""

from __future__ import annotations

from typing import Any

from .._text import read_call
from .._tree import nearest
from ..criteria import NAMED as CRITERIA
from ..criteria import Criterion
from .admm import ByTheLoss, admm
from .allocate import greedy_sparsities, squares
from .changes import write_
from .contract import check_needs, solve_checked, what_to_know
from .curves import error_curves
from .dropgrow import drop_and_grow
from .gates import METHODS, Gate, Seen
from .measure import Measured, Probe, mean, ratio
from .ranking import rank
from .residence import OnDevice, as_mapping, from_mapping, on_cpu
from .seam import Amount, LayerProblem, Method, Solution
from .sparsegpt import sparsegpt
from .straight_through import SoftMasks, without_soft_masks
from .targets import flow, own
from .topk import topk
from .walk import STREAMED, solve_all

__all__ = [
    "Amount", "LayerProblem", "Method", "Solution",
    "admm", "drop_and_grow", "flow", "own", "rank", "sparsegpt", "topk",
    "as_method", "names_method", "check_needs", "solve_checked", "what_to_know",  # for plans and recipes
    "STREAMED", "error_curves", "solve_all", "write_",
    "OnDevice", "as_mapping", "from_mapping", "on_cpu",  # for folders
    "SoftMasks", "without_soft_masks",  # for pruning and io
    "METHODS", "Gate", "Seen", "Measured", "Probe", "greedy_sparsities", "mean", "ratio", "squares",  # for activations
]  # fmt: skip


def _flow(values: str | None = None, group: int | None = None, reorder: bool = True) -> Method:
    """`method="flow"`. The target of this name is an argument of `admm`."""
    return admm(steps=8, target=flow(0.5, 0.75), values=values, group=group, reorder=reorder)


_CALLS = {"rank": rank, "topk": topk, "sparsegpt": sparsegpt, "admm": admm, "loss": ByTheLoss, "flow": _flow}  # of a text


def as_method(given: Method | str | Any | None) -> Method:
    """The method that `method=` means: a value, its text ("sparsegpt", "sparsegpt(damp=0.05)"), or None for ranking once."""
    if isinstance(given, Method):
        return given
    if given is None:
        return rank()
    if isinstance(given, str) and given in _CALLS:
        return _CALLS[given]()
    if isinstance(given, str) and names_method(given):
        inside = {} if given.strip().startswith("flow") else {"own": own, "flow": flow}  # a target, where it is an argument
        return as_method(read_call(given, {**_CALLS, **inside}))
    shown = _uncalled(given) or repr(given)
    calls = ("rank()", "topk()", "sparsegpt()", "admm()", "drop_and_grow(grow, swap)")
    known = ", ".join(f"sc.methods.{call}" for call in calls)
    raise (ValueError if isinstance(given, str) else TypeError)(
        f"method={shown} is not a method; use {known}, 'flow' or 'loss'.{_method_hint(given)}"
    )


def names_method(text: str) -> bool:
    """Whether a text such as "flow" or "sparsegpt(damp=0.05)" names a method."""
    return text.partition("(")[0].strip() in _CALLS


def _method_hint(given: Any) -> str:
    if isinstance(given, Criterion) or (isinstance(given, str) and given in CRITERIA):
        return f" {given} is a criterion; pass it as criterion="
    if given is own or given is flow:
        return f" It is a target of sc.methods.admm; pass method='flow', or admm(target={_uncalled(given)}(...))"
    if name := _uncalled(given):
        return f" Call it: {name}()"
    return nearest(given, _CALLS) if isinstance(given, str) else ""


def _uncalled(given: Any) -> str:
    """The name of a function that makes a method, if one was given itself; else ""."""
    made = (rank, topk, sparsegpt, admm, drop_and_grow, own, flow)
    return next((f"sc.methods.{each.__name__}" for each in made if given is each), "")


def __getattr__(name: str) -> Any:
    if name in CRITERIA:
        raise AttributeError(f"{name!r} is a criterion and not a method: it is sc.{name}, for criterion=")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{nearest(name, __dir__())}")


def __dir__() -> list[str]:
    """The names for users; `__all__` also has what the other rooms of the package import."""
    return sorted(__all__[: __all__.index("as_method")])
