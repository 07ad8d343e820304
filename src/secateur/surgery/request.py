"""The request: the keywords of `shrink` as one frozen value, and the checks that come before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from .._text import percent_hint
from .._tree import check_unpacked, nearest
from ..criteria import Criterion, magnitude
from ..criteria import criterion as as_criterion
from ..stats import Loss, check_evidence
from ..targeting import globs_of
from .calibrate import UNIT_CRITERIA, Repair, UnitCriterion, list_batches, reap
from .search import SCOPES

TARGETS = ("channels", "params", "flops", "latency")
AnyCriterion = Criterion | UnitCriterion | Callable[..., Tensor] | str


class ShrinkOptions(TypedDict, total=False):
    """The keywords of `shrink`, for the type checker: `shrink_` passes them on."""

    channels: float | Mapping[str, float] | None
    params: float | None
    flops: float | None
    latency: float | None
    depth: float | None
    experts: float | None
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
    bias: bool


@dataclass(frozen=True, kw_only=True)
class ShrinkRequest:
    """What one call of `shrink` asks for. The defaults are those of the signature of `shrink`."""

    criterion: Any
    channels: float | Mapping[str, float] | None
    params: float | None
    flops: float | None
    latency: float | None
    depth: float | None
    experts: float | None
    multiple_of: int
    scope: str
    exclude: Any
    floor: float | None
    data: Any
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    exact_only: bool
    reestimate: bool
    refit: bool
    bias: bool

    @property
    def what(self) -> str:
        """The target: one of `TARGETS`, or "" where only `depth` or `experts` is given."""
        return next((key for key in TARGETS if getattr(self, key) is not None), "")

    @property
    def target(self) -> float:
        """The fraction that remains; 1 where there is none, or where there is one for each name."""
        value = getattr(self, self.what) if self.what else 1.0
        return 1.0 if isinstance(value, Mapping) else float(value)

    @property
    def ratios(self) -> Mapping[str, float]:
        """The ratios by name of `channels={glob: ratio}`; else empty."""
        return self.channels if isinstance(self.channels, Mapping) else {}

    @property
    def priced(self) -> bool:
        """Whether the criterion gives costs of the loss, which units of all kinds can be compared by."""
        return isinstance(self.criterion, UnitCriterion) and self.criterion.priced

    @property
    def repair(self) -> Repair:
        return "refit" if self.refit else "reestimate" if self.reestimate else "none"

    @property
    def unread(self) -> str:
        """A note if `data=` was passed and nothing reads it; else empty."""
        by = self.criterion
        needed = by.gather is not None if isinstance(by, UnitCriterion) else bool(by.needs)
        if self.data is None or needed or self.reestimate or self.refit or self.depth is not None or self.experts is not None:
            return ""
        return f"data=: nothing read it: {by} scores weights alone; 'wanda', 'reconstruction', refit=True and depth= use data"

    def recipe(self, measured: str = "") -> str:
        """The request in one line; `measured`: the latency that was reached."""
        asked = dict(self.ratios) if self.ratios else f"{self.target:g}"
        return f"{self.criterion}, {self.what}={asked}{measured}, scope={self.scope}, multiple_of={self.multiple_of}"


def check_request(request: ShrinkRequest) -> ShrinkRequest:
    """The request with `criterion`, `exclude` and `data` in their final form. Raises where the keywords make no sense."""
    if isinstance(by := request.criterion, float):
        raise TypeError(
            f"criterion={by!r} is a number; to keep this fraction pass params={by!r}, flops={by!r} or channels={by!r}"
        )
    _check_targets(request)
    if request.scope not in SCOPES:
        raise ValueError(
            f"scope={request.scope!r} must be one of {', '.join(map(repr, SCOPES))}.{nearest(str(request.scope), SCOPES)}"
        )
    if not isinstance(request.multiple_of, int) or isinstance(request.multiple_of, bool) or request.multiple_of < 1:
        raise ValueError(f"multiple_of={request.multiple_of!r} must be a whole number from 1 on, such as 8")
    if request.floor is not None and (not _is_number(request.floor) or not 0 <= request.floor <= 1):
        raise ValueError(f"floor={request.floor!r} must be a number from 0 to 1: the fraction of its units that a group keeps")
    optimizer = request.optimizer
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise TypeError(f"optimizer={optimizer!r} must be the torch.optim.Optimizer of this model, or left out")
    criterion = _criterion(request.criterion)
    if request.experts is not None and criterion not in (magnitude, reap):
        raise ValueError(f"experts= are scored by reap, and not by {criterion}; leave the criterion out, or ask for channels=")
    return replace(request, criterion=criterion, exclude=_exclude(request.exclude), data=_data(request))


def _check_targets(request: ShrinkRequest) -> None:
    asked = {key: value for key in TARGETS if (value := getattr(request, key)) is not None}
    if request.experts is not None:
        _check_experts(request, asked)
    elif len(asked) > 1 or (not asked and request.depth is None):
        given = ", ".join(f"{key}={value}" for key, value in asked.items()) or "none of them"
        raise ValueError(
            "shrink needs one of channels=, params=, flops=, latency= (the fraction that remains: 0.5 is half), depth=, or "
            f"depth= and one of the others; or experts= alone; given: {given}"
        )
    if isinstance(request.channels, Mapping):
        if not request.channels:
            raise ValueError("channels={} names no group; write channels={'layer1.*': 0.5}, or one number for all groups")
        asked = {f"channels[{name!r}]": ratio for name, ratio in request.channels.items()}
    parts = {key: value for key in ("depth", "experts") if (value := getattr(request, key)) is not None}
    for name, value in {**asked, **parts}.items():
        if not _is_number(value) or not 0 < value <= 1:
            raise ValueError(
                f"{name}={value!r} is the fraction that remains: a number above 0 and at most 1{percent_hint(value)}"
            )
    if request.refit and request.depth is not None and not request.what:
        raise ValueError(
            "refit=True fits the layers that lost inputs, and depth= alone removes whole blocks, so no layer loses any. Ask "
            f"for one of {', '.join(f'{key}=' for key in TARGETS)} too, or for reestimate=True, or leave refit= out"
        )


def _check_experts(request: ShrinkRequest, asked: Mapping[str, Any]) -> None:
    others = [*asked, *(["depth"] if request.depth is not None else [])]
    if others or request.refit or request.reestimate:
        more = [*others, *(key for key in ("refit", "reestimate") if getattr(request, key))]
        raise ValueError(
            f"experts= cannot be combined with {', '.join(f'{key}=' for key in more)}; remove experts first, and call shrink "
            "again for the rest"
        )
    if request.exact_only:
        raise ValueError(
            "exact_only=True leaves all experts: the router chooses among those that are left, which is never exact"
        )
    if request.data is None:
        raise ValueError("experts= removes experts by what they do on data, so pass data= (an iterable of batches)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _criterion(given: Any) -> Criterion | UnitCriterion:
    if isinstance(given, str) and given in UNIT_CRITERIA:
        return UNIT_CRITERIA[given]
    return given if isinstance(given, UnitCriterion) else as_criterion(given)


def _exclude(given: Any) -> tuple[str, ...]:
    if given is None:
        raise TypeError("exclude=None must be a name or glob such as 'encoder.*', or several; leave it out to exclude nothing")
    return globs_of("exclude", given)


def _data(request: ShrinkRequest) -> Iterable[Any] | None:
    """The batches. An iterator becomes a list, because several steps read the data."""
    data = request.data
    if data is None:
        if request.reestimate or request.refit:
            raise ValueError("reestimate= and refit= work on data, so pass data= (an iterable of batches)")
        return None
    check_evidence(frozenset(), data, request.loss)
    several = (
        request.depth is not None or request.experts is not None or request.reestimate or request.refit or iter(data) is data
    )
    return list_batches(data) if several else data


def check_model(model: Any) -> None:
    """Raises for a model that can be traced but not cut."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shrink() wants a torch.nn.Module, got {type(model).__name__}")
    check_unpacked(model, "shrink cuts dense weights")
    if torch.get_default_device().type == "meta":
        raise ValueError("the default device is meta, which holds no values; call shrink under `with torch.device('cpu'):`")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            inner = ", or pass model._orig_mod" if hasattr(model, "_orig_mod") else ""
            raise ValueError(f"{where} is compiled; shrink the model before torch.compile{inner}")
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is compiled by torch.jit, so its code is fixed; shrink it first and script what comes out"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_tensor(name, tensor)


def _check_tensor(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} belongs to a lazy module and has no shape yet; run the model once first")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name!r} was made in inference mode and cannot be changed outside of it; create the model outside of it, "
            "or call shrink inside"
        )
    if tensor.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device and holds no numbers, so units have no scores; load its weights first"
        )
