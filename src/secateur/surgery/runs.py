"""Runs a cut model before it is returned: on the example inputs and on twice the batch, in eval and in training mode."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import atoms
from ..edit import Inputs, copied
from ..trace import GIVEN, Trace
from .cut import Keep
from .masked import mask_
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
    if isinstance(twice, Exception) and not isinstance(_try(traced.model, doubled), Exception):
        raise _failure("on twice the batch", twice)
    _check_training(traced.model, small, [inputs] if doubled is None else [inputs, doubled])
    return counted


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
    shapes, result = traced.record.output_shapes, _try(small, inputs)
    if isinstance(result, Exception):
        raise _failure("on the example inputs", result)
    found, flops = result
    if shapes != found and not _alike(found, shapes, _with_other_values(traced, inputs, keep)):
        raise ValueError(
            f"the cut model returns shapes {found} instead of {shapes}; where values decide on shapes (predicted lengths, "
            "thresholds), exclude the layers that compute them. The model is unchanged."
        )
    return flops


def _failure(where: str, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"the cut model does not run {where}: {type(error).__name__}: {error}. The model is unchanged; exclude the layer that "
        "fails"
    )


def _try(model: nn.Module, inputs: Any, training: bool = False) -> tuple[Shapes, int] | Exception:
    """The shapes that a model returns and its FLOPs, or the error."""
    try:
        return outline(model, *inputs, training=training)
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
