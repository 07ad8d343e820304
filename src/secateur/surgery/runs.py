"""Runs a cut model before it is returned: on the example inputs and on twice the batch, in eval and in training mode.

Also tells whether the constants that were folded into it are those of one batch size alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import Group, atoms
from ..edit import Inputs, copied
from ..trace import GIVEN, Step, Trace, trace
from .cut import Keep
from .masked import CutModel, make, mask_
from .sizes import outline

Shapes = list[tuple[int, ...]]
_DRAWS = 4  # weights changed at random, which show whether values decide on a size


def check_runs(traced: Trace, small: nn.Module, inputs: Inputs, flops: int, keep: Keep) -> int:
    """Raises unless the small model runs wherever the original does, and returns tensors of the same shapes.

    Returns its FLOPs on the example inputs; `flops` is what they should be.
    """
    doubled = _doubled(traced, inputs)
    shapes = traced.record.output_shapes
    twice = None if doubled is None else _try(small, doubled)
    if not isinstance(twice, Exception) and twice is not None and twice[0] == [(2 * s[0], *s[1:]) if s else s for s in shapes]:
        counted = flops  # where twice the batch runs as it should, one batch does too
    else:
        counted = _check_once(traced, small, inputs, keep)
    if doubled is not None and isinstance(twice, Exception) and not isinstance(_try(traced.model, doubled), Exception):
        raise DoesNotRun("on twice the batch", small, doubled, twice)
    _check_training(traced.model, small, [inputs] if doubled is None else [inputs, doubled])
    return counted


def depends_on_batch(traced: Trace, made: CutModel, keep: Keep, inputs: Inputs, *, bias: bool = True) -> dict[Group, str]:
    """The groups whose folded constants are right for this batch size alone, with the reason.

    Only where the code of the model uses a number that is the batch size: it is traced on twice the batch then, and cut again.
    Which group a constant comes from is not known, so that all of them count.
    """
    number = _batch_size(inputs)
    if not made.folded or number is None or not any(_may_hold(step, number) for step in traced.steps):
        return {}
    cut = [g for g in traced.groups if g.atom in keep and not bool(keep[g.atom].all())]
    twice = _doubled(traced, inputs)
    try:
        same = twice is not None and _cut_alike(traced, trace(traced.model, *twice), made, keep, bias)
    except Exception:  # it does not run there, or runs otherwise
        same = False
    why = f"the model computes with the batch size ({number}), and constants of removed units may depend on it"
    return {} if same else dict.fromkeys(cut, why)


def _batch_size(inputs: Inputs) -> int | None:
    sizes = {v.shape[0] for v in (*inputs[0], *inputs[1].values()) if isinstance(v, Tensor) and v.dim()}
    return max(sizes, default=None)


def _may_hold(step: Step, number: int) -> bool:
    """True if a step may compute with the batch size: it makes a tensor of that size, or has that number as an argument."""
    numbers = {v for v in (*step.args, *step.kwargs.values()) if isinstance(v, int | float) and not isinstance(v, bool)}
    sizes = {n for v in step.args if isinstance(v, tuple) for n in v if isinstance(n, int)}
    if not step.inputs:
        return number in numbers | sizes
    return number in numbers and step.operator.values == "elementwise"


def _cut_alike(one: Trace, other: Trace, made: CutModel, keep: Keep, bias: bool) -> bool:
    """Whether the same cut of two traces of a model gives the same weights."""
    if [g.members for g in one.groups] != [g.members for g in other.groups]:
        return False
    kept = {b.atom: keep[a.atom] for a, b in zip(one.groups, other.groups, strict=True) if a.atom in keep}
    again, weights = (cut.small.state_dict() for cut in (make(one.model, other, kept, bias=bias), made))
    return weights.keys() == again.keys() and all(
        torch.allclose(weights[name], again[name], 1e-6, 1e-12, equal_nan=True) for name in weights
    )


def _check_training(model: nn.Module, small: nn.Module, batches: list[Inputs]) -> None:
    """Warns where the small model does not run in training mode, on the first batch on which the original does.

    The traced run is one in eval mode. A parameter that only training reads is not cut along.
    """
    for inputs in batches:
        result = _try(small, inputs, training=True)
        if not isinstance(result, Exception):
            return
        if not isinstance(_try(model, inputs, training=True), Exception):
            warnings.warn(
                f"the cut model runs in eval mode but not in training mode: {type(result).__name__}: {result}. To train it "
                "further, exclude the layer that fails.",
                stacklevel=2,
            )
            return


def _check_once(traced: Trace, small: nn.Module, inputs: Inputs, keep: Keep) -> int:
    shapes, result = traced.record.output_shapes, _try(small, inputs, count=True)
    if isinstance(result, Exception):
        raise DoesNotRun("on the example inputs", small, inputs, result)
    found, flops = result
    if shapes != found and not _alike(found, shapes, _with_other_values(traced, inputs, keep)):
        raise ValueError(
            f"the cut model returns shapes {found} instead of {shapes}; where values decide on shapes (predicted lengths, "
            "thresholds), exclude the layers that compute them. The model is unchanged."
        )
    return flops


class DoesNotRun(RuntimeError):
    """The cut model fails where the original runs. `what`: the layer and the error."""

    def __init__(self, where: str, small: nn.Module, inputs: Inputs, error: Exception) -> None:
        layer = _failing_layer(small, inputs)
        self.what = f"{layer or 'the model'} fails {where} ({type(error).__name__}: {error})"
        advice = f"exclude {layer}, or the layers before it" if layer else "exclude the layers whose sizes it computes with"
        super().__init__(f"in the cut model, {self.what}. The model is unchanged; {advice}")


def _failing_layer(model: nn.Module, inputs: Inputs) -> str:
    """The name of the innermost module that raises on these inputs; empty if that is the model itself."""
    inside: list[str] = []

    def leave(*_: object) -> None:
        inside.pop()

    hooks = [m.register_forward_pre_hook(lambda *_, name=name: inside.append(name)) for name, m in model.named_modules()]
    hooks += [m.register_forward_hook(leave) for m in model.modules()]
    try:
        return inside[-1] if isinstance(_try(model, inputs), Exception) and inside else ""
    finally:
        for hook in hooks:
            hook.remove()


def in_formulas(traced: Trace, keep: Keep) -> dict[Group, str]:
    """The cut groups whose size the code of the model computes with, other than in ways that a cut can follow."""
    found: dict[Group, str] = {}
    for use in traced.formula_uses:
        used = {atom for e in traced.axes_in(use.source) for atom in atoms(e)}
        why = f"its size enters a formula in {use.module or 'the model'} ({use.how})"
        found |= {g: why for g in traced.prunable if g.atom in used and g.atom in keep and not bool(keep[g.atom].all())}
    return found


def _try(model: nn.Module, inputs: Any, **how: bool) -> tuple[Shapes, int] | Exception:
    """What `outline` returns, or the error."""
    try:
        return outline(model, *inputs, **how)
    except Exception as error:
        return error


def _with_other_values(traced: Trace, inputs: Inputs, keep: Keep) -> list[Shapes]:
    """The shapes that the model returns in full size, when it is masked and with weights that are changed at random."""
    found = [_try(mask_(copied(traced.model), traced, keep), inputs)]
    for seed in range(_DRAWS):
        model, draw = copied(traced.model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.is_floating_point()):
                parameter.mul_(1 + torch.randn(parameter.shape, generator=draw).to(parameter))
        found.append(_try(model, inputs))
    return [result[0] for result in found if not isinstance(result, Exception)]


def _alike(found: Shapes, whole: Shapes, others: list[Shapes]) -> bool:
    """True if the shapes are equal except for sizes that depend on values: those that other values alone change too."""
    ranks = [len(shape) for shape in whole]
    if any([len(shape) for shape in shapes] != ranks for shapes in (found, *others)):
        return False
    same = [[{shapes[i][d] for shapes in (whole, *others)} for d in range(rank)] for i, rank in enumerate(ranks)]
    return all(found[i][d] == whole[i][d] or len(same[i][d]) > 1 for i, rank in enumerate(ranks) for d in range(rank))


def _doubled(traced: Trace, inputs: Inputs) -> Inputs | None:
    """The inputs with every tensor repeated along its first dim.

    None where the tensors disagree on the batch size, or where a weight has the size of the batch: some of torch's kernels
    write past the end of memory on inputs of another size.
    """
    args, kwargs = inputs
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    if not tensors or any(t.dim() == 0 or t.shape[0] != tensors[0].shape[0] for t in tensors):
        return None
    tied = {a.size for axes in traced.dims.values() for e in axes for a in atoms(e) if a.frozen == GIVEN}
    if tensors[0].shape[0] in tied:
        return None
    twice = [torch.cat([v, v]) if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
    return tuple(twice[: len(args)]), dict(zip(kwargs, twice[len(args) :]))
