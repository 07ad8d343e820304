"""Secateur: pruning for PyTorch. Score elements, fold them into units, let units compete in pools, keep what the budget
allows, and store the result as masks outside the model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import (
    methods,
    torch_ops,  # noqa: F401 - registers torch.ops.secateur, which exported programs call
)
from ._tree import nearest
from ._version import __version__ as __version__
from .activations import Gates, gate_
from .budgets import erk, owl, uniform
from .criteria import (
    Criterion,
    criterion,
    fisher,
    grad,
    grad_square,
    input_norm,
    lamp,
    linear_grad,
    magnitude,
    movement,
    random,
    ria,
    snip,
    synflow,
    taylor,
    wanda,
    weight,
)
from .masks import Masks
from .patterns import Pattern
from .plans import Plan, plan
from .pruner import Pruner
from .pruning import prune_
from .schedules import Schedule, cosine, cubic, exponential, join, linear, one_shot
from .targeting import targets

if TYPE_CHECKING:
    from .execute import bench, compress_, decompress_
    from .io import dense_state_dict, load, save
    from .summaries import summary
    from .surgery import activation_variance, bn_scale, fpgm, reconstruction, shrink, shrink_

__all__ = [
    "Criterion",
    "Gates",
    "Masks",
    "Pattern",
    "Plan",
    "Pruner",
    "Schedule",
    "activation_variance",
    "bench",
    "bn_scale",
    "compress_",
    "cosine",
    "criterion",
    "cubic",
    "decompress_",
    "dense_state_dict",
    "erk",
    "exponential",
    "fisher",
    "fpgm",
    "gate_",
    "grad",
    "grad_square",
    "input_norm",
    "join",
    "lamp",
    "linear",
    "linear_grad",
    "load",
    "magnitude",
    "methods",
    "movement",
    "one_shot",
    "owl",
    "plan",
    "prune_",
    "random",
    "reconstruction",
    "ria",
    "save",
    "shrink",
    "shrink_",
    "snip",
    "summary",
    "synflow",
    "targets",
    "taylor",
    "uniform",
    "wanda",
    "weight",
]

# These are imported on first use, because most programs that prune need none of them.
_LATER = {
    **dict.fromkeys(("shrink", "shrink_", "activation_variance", "bn_scale", "fpgm", "reconstruction"), "surgery"),
    **dict.fromkeys(("save", "load", "dense_state_dict"), "io"),
    **dict.fromkeys(("compress_", "decompress_", "bench"), "execute"),
    "summary": "summaries",
}
_MOVED = {"input_first": "secateur.layers.input_first"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
        return globals()[name]
    hint = f". It is now {_MOVED[name]}." if name in _MOVED else ""
    if f"{name}_" in __all__:
        hint = f". {name}_ changes the model in place." + (" plan only computes what it would do." if name == "prune" else "")
    elif not hint and not name.startswith("_"):
        hint = f".{nearest(name, __all__)}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
