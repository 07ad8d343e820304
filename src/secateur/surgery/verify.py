"""Whether a cut is exact: the small model against the masked one, in float64, on copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..axes import Group, atoms, keep_mask
from ..edit import Cuts, check_fits, copied, run, tensors_inside
from ..trace import Trace, main_outputs, trace
from .exact import units_along
from .masked import make, names_of, silence_

_STILL = 1e-12


@dataclass(frozen=True)
class Verified:
    """Relative differences between small and masked: `max_error` of the small model as it is now, and per group.

    The masked model is the original with the weights that make the removed units set to zero and their biases kept.
    `groups`: each group cut alone (with those that its count is tied to), made anew. `recut`: all of them, made anew: what the
    cut itself costs, without what the small model was given or has learnt since (a refit, training). Folded constants are
    rounded to the model's dtype, so a float32 model can show 1e-8 here; in a float64 one it is 1e-16.
    `moved`: whether masking changed the output at all; where it did not, equality says nothing.
    """

    max_error: float
    groups: dict[str, float] = field(default_factory=dict)
    recut: float | None = None
    moved: bool = True
    dtype: str = "float64"
    note: str = ""

    def __str__(self) -> str:
        worst = max(self.groups.items(), key=lambda item: item[1], default=("no group", 0.0))
        text = f"max_error {self.max_error:.2e} in {self.dtype}"
        if self.recut is not None:
            text += f" (cut made anew: {self.recut:.2e}; worst alone: {worst[0]}, {worst[1]:.2e})"
        if not self.moved:
            text += "; the masked output is that of the dense model, so this says nothing: try other inputs"
        return f"{text}; {self.note}" if self.note else text


def verify(
    original: nn.Module, small: nn.Module, cuts: Cuts, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, each: bool = True
) -> Verified:
    """Compare the small model with the masked one; `each`: also the cut made anew, of all and of every group by itself."""
    check_fits(original, cuts)
    device = next((p.device.type for p in original.parameters()), "cpu")
    try:
        with torch.autocast(device, enabled=False):  # one around all this would round
            return _compare(original, small, cuts, args, kwargs, each, torch.float64)
    except Exception as error:
        found = _compare(original, small, cuts, args, kwargs, each, None)
        dtype = str(next(original.parameters()).dtype).removeprefix("torch.")
        note = f"not in float64, where the model fails ({type(error).__name__}: {error})"
        return Verified(found.max_error, found.groups, found.recut, found.moved, dtype, note)


def _compare(
    original: nn.Module,
    small: nn.Module,
    cuts: Cuts,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    each: bool,
    dtype: torch.dtype | None,
) -> Verified:
    traced = trace(original, args, kwargs)
    keep = kept_units(traced, cuts)
    wide_args, wide_kwargs = as_dtype(dtype, (args, dict(kwargs)))

    def answer(model: nn.Module, masked: Mapping[Any, Tensor] | None = None) -> Any:
        made = copied(model)
        made = made if dtype is None else widened(made, dtype)
        return run(made if masked is None else silence_(made, traced, masked), wide_args, wide_kwargs)

    silent, dense = answer(original, keep), answer(original)
    if dtype is not None and any(bool(t.isnan().any()) for t in tensors_of(dense)):
        raise ArithmeticError("its answer is not a number there")
    moved = difference(silent, dense) > _STILL
    recut = difference(answer(make(original, traced, keep, args, kwargs).small), silent) if each else None
    groups: dict[str, float] = {}
    names = names_of(traced)
    for together in tied(traced, keep) if each else ():
        alone = {g.atom: keep[g.atom] for g in together}
        error = difference(answer(make(original, traced, alone, args, kwargs).small), answer(original, alone))
        groups |= {names[g]: error for g in together}
    return Verified(difference(answer(small), silent), groups, recut, moved)


def widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself in another precision; complex numbers stay complex."""
    return model._apply(lambda t: _cast(t, dtype))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype if tensor.is_floating_point() else tensor.dtype)


def as_dtype(dtype: torch.dtype | None, values: Any) -> Any:
    return tree_map(lambda v: _cast(v, dtype) if isinstance(v, Tensor) and dtype else v, values)


def kept_units(traced: Trace, cuts: Cuts) -> dict[Any, Tensor]:
    """The units that cuts keep, in the atoms of a trace of the same model."""
    keep: dict[Any, Tensor] = {}
    for group in traced.groups:
        for m in group.members:
            kept = cuts.tensors.get(m.tensor, {}).get(m.dim)
            for along in units_along(traced.dims[m.tensor][m.dim], group.atom) if kept is not None else ():
                units = along[torch.tensor(kept)]
                mask = torch.zeros(group.size, dtype=torch.bool)
                mask[units[units >= 0]] = True
                if not bool(mask.all()):
                    keep[group.atom] = mask
    for name, axes in traced.dims.items():
        for d, e in enumerate(axes):
            indices = cuts.tensors.get(name, {}).get(d, list(range(e.size)))
            touched = any(a in keep for a in atoms(e)) or len(indices) < e.size
            if touched and keep_mask(e, keep).nonzero()[:, 0].tolist() != indices:
                raise ValueError(f"{name!r} is wired differently in this trace; the cuts were made for another model")
    return keep


def tied(traced: Trace, keep: Iterable[Any]) -> list[list[Group]]:
    """Cut groups, those whose counts constraints tie together in one list."""
    head = {atom: atom for atom in keep}

    def find(atom: Any) -> Any:
        while head[atom] is not atom:
            atom = head[atom]
        return atom

    for constraint in traced.constraints:
        tied = [v for v in constraint.variables if v in head]
        for other in tied[1:]:
            head[find(other)] = find(tied[0])
    found: dict[Any, list[Group]] = {}
    for group in traced.groups:
        if group.atom in head:
            found.setdefault(find(group.atom), []).append(group)
    return list(found.values())


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that a model answers with: what had to keep its shape."""
    return tensors_inside(main_outputs(result))


def difference(result: Any, expected: Any) -> float:
    """The largest difference between two answers over the largest value of the second; infinite where either is not finite."""
    return max(_differences(tensors_of(result), tensors_of(expected)), default=0.0)


def _differences(found: Iterable[Tensor], expected: Iterable[Tensor]) -> Iterable[float]:
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:  # where values decide on shapes
            yield float("inf")
            continue
        a, b = ((t.cdouble() if t.is_complex() else t.double()) for t in (a, b))
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()):
            yield float("inf")
        elif bool(finite.any()):
            a, b = a[finite], b[finite]
            yield float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
