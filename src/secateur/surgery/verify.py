"""Checks whether a cut is exact: compares the small model with the masked one, in float64, on copies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import Atom, Group, atoms, keep_mask
from ..edit import Cuts, Inputs, check_fits, copied, is_cut
from ..progress import Progress, track
from ..trace import Trace, trace
from .caches import without_caches
from .compare import answer, difference, lost_finite, tensors_of
from .cut import Keep
from .depth import copied_without, skipping
from .exact import units_along
from .masked import make, mask_
from .names import names_of

_UNCHANGED = 1e-12


@dataclass(frozen=True)
class Verified:
    """Relative differences between the small model and the masked one: `max_error` for the small model as it is now.

    The masked model is the original with removed blocks skipped and with the weights that produce removed units set to zero;
    biases are kept where they can be folded into the layers that read the units. `moved`: whether masking changed the output
    at all; if not, equality proves nothing.

    `groups` and `recut` are measured by `verify(groups=True)`. `groups`: the error of each group when it is cut alone (with the
    groups that its count is tied to). `recut`: the error of the same cut made again, without later changes such as a refit or
    training. Folded constants are rounded to the dtype of the model: the error of an exact cut is about 1e-8 in a float32 model
    and 1e-16 in a float64 one. `rounding` is the machine epsilon of that dtype.
    """

    max_error: float
    groups: dict[str, float] = field(default_factory=dict)
    recut: float | None = None
    moved: bool = True
    dtype: str = "float64"
    note: str = ""
    rounding: float = 0.0

    @property
    def exact(self) -> bool:
        """True if the small model equals the masked one up to rounding: 16 times the machine epsilon of its weights."""
        return self.max_error <= 16 * self.rounding

    def __str__(self) -> str:
        verdict = "equals the masked one up to rounding" if self.exact else "differs from the masked one"
        text = (
            f"the small model {verdict}: max_error {self.max_error:.2e} of the largest output, in {self.dtype} (rounding of "
            f"the weights: {self.rounding:.1e})"
        )
        if self.recut is not None:
            worst = max(self.groups.items(), key=lambda item: item[1], default=("no group", 0.0))
            text += f" (the same cut made again: {self.recut:.2e}; worst group alone: {worst[0]}, {worst[1]:.2e})"
        if not self.moved:
            text += "; masking did not change the output, so this proves nothing: try other inputs"
        return f"{text}; {self.note}" if self.note else text

    __repr__ = __str__


def verify(original: nn.Module, small: nn.Module, cuts: Cuts, inputs: Inputs, *, groups: bool = False) -> Verified:
    """Compare the small model with the masked one, in four runs. `groups`: also cut each group alone, which takes longer."""
    check_fits(original, cuts)
    device = next((p.device.type for p in original.parameters()), "cpu")
    with without_caches(original, inputs), without_caches(small, inputs), Progress("verify"):
        try:
            with torch.autocast(device, enabled=False):  # autocast around this call would round
                found = _compare(original, small, cuts, inputs, groups, torch.float64)
                return replace(found, rounding=_rounding(original))
        except Exception as error:
            found = replace(_compare(original, small, cuts, inputs, groups, None), rounding=_rounding(original))
            dtype = str(next(original.parameters()).dtype).removeprefix("torch.")
            note = f"not in float64, where the model fails ({type(error).__name__}: {error})"
            return replace(found, dtype=dtype, note=f"{note}; {found.note}" if found.note else note)


def _rounding(model: nn.Module) -> float:
    return max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)


def _compare(
    original: nn.Module, small: nn.Module, cuts: Cuts, inputs: Inputs, groups: bool, dtype: torch.dtype | None
) -> Verified:
    dense = answer(original, inputs, dtype)
    if dtype is not None and any(bool(t.isnan().any()) for t in tensors_of(dense)):
        raise ArithmeticError("its output is NaN there")
    skipped, middle, by_group, error, note = dense, original, dict[str, float](), 0.0, ""
    if cuts.drop:
        middle = copied_without(original, cuts.drop)
        with skipping(original, cuts.drop):
            skipped = answer(original, inputs, dtype)
        error = difference(answer(middle, inputs, dtype), skipped)
        if lost_finite(tensors_of(skipped), tensors_of(dense)):  # two outputs that are NaN compare equal
            error, note = float("inf"), "without the blocks the output is not finite where it was"
        by_group = dict.fromkeys(cuts.drop, error)
    left = [a for a in cuts.attributes if not cuts.drop or not is_cut(middle, Cuts(attributes=[a]))]
    units = Cuts(cuts.tensors, cuts.shapes, left, cuts.added)
    if not (units.tensors or units.attributes or units.added):
        found = max(difference(answer(small, inputs, dtype), skipped), error)
        return Verified(found, by_group, error, difference(skipped, dense) > _UNCHANGED, note=note)
    traced = trace(middle, *inputs)
    keep = kept_units(traced, units)
    masked = answer(mask_(copied(middle), traced, keep), inputs, dtype)
    found, recut = max(difference(answer(small, inputs, dtype), masked), error), None
    if groups:
        recut = difference(answer(make(middle, traced, keep).small, inputs, dtype), masked)
        alone, failed = _each_alone(middle, traced, keep, inputs, dtype)
        by_group |= alone
        note = "; ".join(part for part in (note, failed) if part)
    return Verified(found, by_group, recut, difference(masked, dense) > _UNCHANGED, note=note)


def _each_alone(
    model: nn.Module, traced: Trace, keep: Keep, inputs: Inputs, dtype: torch.dtype | None
) -> tuple[dict[str, float], str]:
    """The error of each group when it is cut alone, and a note on groups for which there is no such cut."""
    names, found, failed = names_of(traced), dict[str, float](), list[str]()
    for together in track(tied(traced, keep), "verify", lambda groups: f"{names[groups[0]]} alone"):
        alone = {g.atom: keep[g.atom] for g in together}
        try:
            small = make(model, traced, alone).small
        except ValueError:
            failed += [names[g] for g in together]
            continue
        masked = answer(mask_(copied(model), traced, alone), inputs, dtype)
        found |= dict.fromkeys((names[g] for g in together), difference(answer(small, inputs, dtype), masked))
    return found, f"not cut alone, because sizes tie them to other groups: {', '.join(failed)}" if failed else ""


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
                raise ValueError(f"{name!r} is used differently in this trace; the cuts were made for another model")
    return keep


def tied(traced: Trace, keep: Iterable[Any]) -> list[list[Group]]:
    """The cut groups; those whose counts are tied by constraints, directly or through an attribute, in one list."""
    head: dict[Any, Any] = {variable: variable for c in traced.constraints for variable in c.variables}
    cut = set(keep)
    head |= {atom: atom for atom in cut}

    def find(variable: Any) -> Any:
        while head[variable] is not variable:
            variable = head[variable]
        return variable

    for constraint in traced.constraints:
        first, *others = [v for v in constraint.variables if v in cut or not isinstance(v, Atom)] or [None]
        for other in others:
            head[find(other)] = find(first)
    found: dict[Any, list[Group]] = {}
    for group in traced.groups:
        if group.atom in cut:
            found.setdefault(find(group.atom), []).append(group)
    return list(found.values())
