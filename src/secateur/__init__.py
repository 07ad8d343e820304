"""Secateur: pruning for PyTorch. Pruning scores elements, combines them into units, ranks the units in pools, keeps as many as
the budget allows, and stores the result as masks outside the model.

Every name is imported on first use, so `import secateur` is quick and imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._imports import after_import
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import methods
    from .activations import Gates as Gates
    from .activations import gate_
    from .budgets import by_loss, erk, owl, uniform
    from .criteria import (
        Criterion,
        criterion,
        fisher,
        grad,
        grad_square,
        input_norm,
        lamp,
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
    from .criteria import linear_grad as linear_grad
    from .distill import distill_
    from .execute import bench, compress_, decompress_
    from .folders import prune_folder
    from .integrations.adapters import merge_lora_
    from .integrations.onnx import to_onnx
    from .io import dense_state_dict, load, save
    from .masks import Masks
    from .patterns import Pattern
    from .plans import Plan, plan
    from .progress import set_progress
    from .pruner import Pruner
    from .pruning import prune_
    from .recipes import Recipe
    from .reorder import reorder_
    from .reports import report
    from .rotation import rotate_ as rotate_
    from .schedules import Schedule, cosine, cubic, exponential, join, linear, one_shot
    from .summaries import summary
    from .surgery import activation_variance, bn_scale, fpgm, reap, reconstruction, shrink, shrink_
    from .surgery import obs as obs
    from .targeting import targets
    from .tuning import search, sensitivity

__all__ = [
    "Criterion",
    "Masks",
    "Pattern",
    "Plan",
    "Pruner",
    "Recipe",
    "Schedule",
    "activation_variance",
    "bench",
    "bn_scale",
    "by_loss",
    "compress_",
    "cosine",
    "criterion",
    "cubic",
    "decompress_",
    "dense_state_dict",
    "distill_",
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
    "load",
    "magnitude",
    "merge_lora_",
    "methods",
    "movement",
    "one_shot",
    "owl",
    "plan",
    "prune_",
    "prune_folder",
    "random",
    "reap",
    "reconstruction",
    "reorder_",
    "report",
    "ria",
    "save",
    "search",
    "sensitivity",
    "set_progress",
    "shrink",
    "shrink_",
    "snip",
    "summary",
    "synflow",
    "targets",
    "taylor",
    "to_onnx",
    "uniform",
    "wanda",
    "weight",
]

# The module that each name comes from.
_HOMES = {
    "activations": "gate_",
    "budgets": "by_loss erk owl uniform",
    "criteria": "Criterion criterion fisher grad grad_square input_norm lamp magnitude movement random ria snip "
    "synflow taylor wanda weight",
    "distill": "distill_",
    "execute": "bench compress_ decompress_",
    "folders": "prune_folder",
    "integrations.adapters": "merge_lora_",
    "integrations.onnx": "to_onnx",
    "io": "dense_state_dict load save",
    "masks": "Masks",
    "patterns": "Pattern",
    "plans": "Plan plan",
    "progress": "set_progress",
    "pruner": "Pruner",
    "pruning": "prune_",
    "recipes": "Recipe",
    "reorder": "reorder_",
    "reports": "report",
    "schedules": "Schedule cosine cubic exponential join linear one_shot",
    "summaries": "summary",
    "surgery": "activation_variance bn_scale fpgm reap reconstruction shrink shrink_",
    "targeting": "targets",
    "tuning": "search sensitivity",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
# public, and not in __all__
_UNLISTED = {"Gates": "activations", "linear_grad": "criteria", "obs": "surgery", "rotate_": "rotation"}
_MODULES = ("layers", "methods", "ops")  # public modules
_MOVED = {"input_first": "secateur.layers.input_first"}
_METHODS = ("admm", "drop_and_grow", "flow", "own", "rank", "sparsegpt", "topk")

# torch.export.load looks for the operators of compressed layers without naming this package.
after_import("torch", lambda: import_module(".torch_ops", __name__))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if home := _HOME.get(name) or _UNLISTED.get(name):
        globals()[name] = getattr(import_module(f".{home}", __name__), name)
        return globals()[name]
    hint = f". It is now {_MOVED[name]}." if name in _MOVED else ""
    hint = f". It is {__name__}.methods.{name}." if name in _METHODS else hint
    known = [*__all__, *_UNLISTED]
    if f"{name}_" in known:
        hint = f". {name}_ changes the model in place." + (" plan only computes what it would do." if name == "prune" else "")
    elif not hint and not name.startswith("_"):
        from ._tree import nearest

        hint = f".{nearest(name, known)}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
