"""What was asked of `shrink`: its keywords, and the checks on them that come before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, TypedDict

import torch
from torch import nn

from .._tree import check_unpacked, nearest
from ..axes import Group
from ..criteria import criterion as as_criterion
from ..stats import Loss, check_evidence
from ..targeting import globs_of
from ..trace import Trace
from .budget import SCOPES
from .calibrate import UnitCriterion

TARGETS = ("channels", "params", "flops", "latency")


class Options(TypedDict, total=False):
    """The keywords of `shrink` and `shrink_`."""

    channels: float | None
    params: float | None
    flops: float | None
    latency: float | None
    depth: float | None
    multiple_of: int
    scope: str
    exclude: str | Iterable[str]
    floor: float | None
    data: Iterable[Any] | None
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    exact_only: bool
    reestimate: bool
    refit: bool


def target_of(options: Options) -> tuple[str, float]:
    asked = {key: value for key in TARGETS if (value := options.get(key)) is not None}
    if len(asked) != 1:
        said = ", ".join(f"{key}={value}" for key, value in asked.items()) or "none of them"
        raise ValueError(
            "say what remains with one of channels=, params=, flops=, latency= (0.5 is half), with depth=, or with depth= and "
            f"one of them; given: {said}"
        )
    ((what, value),) = asked.items()
    _check_fraction(what, value)
    return what, float(value)


def _check_fraction(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{what}={value!r} is the fraction that remains: a number above 0 and at most 1")


def check(options: Options) -> None:
    """Raises unless the keywords make sense, each by itself and together."""
    scope, multiple, floor = options.get("scope", "global"), options.get("multiple_of", 1), options.get("floor")
    if unknown := set(options) - set(Options.__annotations__):
        name = sorted(unknown)[0]
        raise TypeError(f"shrink_ has no argument {name!r}.{nearest(name, Options.__annotations__)}")
    if options.get("depth") is not None:
        _check_fraction("depth", options.get("depth"))
    if scope not in SCOPES:
        raise ValueError(f"scope={scope!r} must be one of {', '.join(map(repr, SCOPES))}.{nearest(str(scope), SCOPES)}")
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ValueError(f"multiple_of={multiple!r} must be a whole number from 1 on, such as 8")
    if floor is not None and (isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1):
        raise ValueError(f"floor={floor!r} is the fraction of its units that every group keeps: a number from 0 to 1")
    if (options.get("reestimate") or options.get("refit")) and options.get("data") is None:
        raise ValueError("reestimate= and refit= work on data, so pass data= (an iterable of batches)")
    if options.get("data") is not None:
        check_evidence(frozenset(), options.get("data"), options.get("loss"))
    optimizer = options.get("optimizer")
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TypeError(f"optimizer={optimizer!r} must be the torch.optim.Optimizer of this model, or left out")
    if options.get("refit") and options.get("depth") is not None and all(options.get(key) is None for key in TARGETS):
        raise ValueError(
            "refit=True fits the layers that lost inputs, and depth= alone takes whole blocks: no layer loses any. Ask for "
            f"one of {', '.join(f'{key}=' for key in TARGETS)} too, or for reestimate=True, or leave refit= out"
        )


def check_model(model: Any) -> None:
    """Raises for a model that could be traced, and not be cut."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shrink() wants a torch.nn.Module, got {type(model).__name__}")
    check_unpacked(model, "shrink cuts dense weights")
    if torch.get_default_device().type == "meta":
        raise ValueError("the default device is meta, where nothing has a value; call shrink under `with torch.device('cpu'):`")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {name!r}" if name else "the model"
            raise ValueError(f"{where} is compiled by torch.jit, so its code is fixed; cut it first and script what comes out")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name!r} belongs to a lazy module and has no shape yet; run the model once first")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name!r} was made in inference mode, where it stays; make the model outside of it, or cut it inside"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and holds no numbers: no unit can be told from another; load its weights first"
            )


def check_criterion(criterion: Any) -> None:
    if not isinstance(criterion, UnitCriterion):
        as_criterion(criterion)


def names_to_leave(exclude: Any) -> tuple[str, ...]:
    """`exclude` as globs."""
    if exclude is None:
        raise TypeError("exclude=None must be a name or glob such as 'encoder.*', or several of them; to cut all, leave it out")
    return globs_of("exclude", exclude)


def under(name: str, globs: Iterable[str]) -> bool:
    """Whether a glob means this name, or a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), glob) for glob in globs for n in range(len(parts)))


def excluded(traced: Trace, globs: str | Iterable[str]) -> dict[Group, str]:
    """The groups that excluded names carry: all of a name keeps its shape."""
    globs = names_to_leave(globs)
    modules = [name for name, _ in traced.model.named_modules() if name]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in (*traced.dims, *modules)):
            raise ValueError(f"exclude={glob!r} matches no tensor and no module.{nearest(glob, (*traced.dims, *modules))}")
    return {g: "excluded" for g in traced.prunable if any(under(m.tensor, globs) for m in g.members)}
