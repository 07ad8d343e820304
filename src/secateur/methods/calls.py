"""Sizes and distances of the calls of a block, and copies of what was read in them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from .._arguments import copied, replaced, tensors_of
from ..edit import run
from ..moments import Seen
from ..tape import Call


def size_of(call: Call) -> int:
    """The number of values in the arguments of a call."""
    return sum(tensor.numel() for tensor in tensors_of(call))


def distance(call: Call, dense: Call) -> float:
    """The relative distance between the tensors of a call in the pruned model and in the dense one."""
    away = size = 0.0
    for one, other in zip(tensors_of(call), tensors_of(dense), strict=False):
        if one is not other and one.is_floating_point() and one.shape == other.shape:
            away += float((one.float() - other.float()).square().sum())
            size += float(other.float().square().sum())
    return (away / size) ** 0.5 if size > 0 else 0.0


def detached(seen: Seen, streams: Mapping[str, Tensor]) -> Seen:
    """A read with copies of its tensors, to which the block, or its run in the pruned model, may write."""
    args, kwargs, x, streams = copied((seen.args, dict(seen.kwargs), seen.x, dict(streams)), {})
    return seen._replace(args=args, kwargs=kwargs, x=x, streams=streams)


def first_samples(module: nn.Module, call: Call) -> Call:
    """The call with the first two rows of each tensor that has as many rows as the first one; the call itself if that fails."""
    tensors = tensors_of(call)
    rows = [i for i, tensor in enumerate(tensors) if tensor.shape[:1] == tensors[0].shape[:1] and tensor.ndim]
    first = replaced(call, {i: tensors[i][:2] for i in rows}, [0])
    try:
        run(module, *copied(first, {}))
    except Exception:  # it takes batches of other sizes
        return call
    return first
