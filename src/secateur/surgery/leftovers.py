"""Tensors that earlier runs left in a model, such as recurrent states.

The traced run writes them and does not read them. Another run may read them, so they are cut to the size of what a run writes.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..axes import keep_mask
from ..edit import states
from ..trace import Trace
from .cut import Keep


def follow_leftovers_(small: nn.Module, trace: Trace, keep: Keep) -> None:
    """Cut the tensors that earlier runs left in a cut model; remove those that the traced run removes."""
    held = states(small)
    for (path, name), axes in trace.record.replaced.items():
        if (path, name) in held:
            left = held[path, name].detach()
            for d, e in enumerate(axes or ()):
                left = left.index_select(d, keep_mask(e, keep).nonzero()[:, 0].to(left.device))
            _set(small, path, name, None if axes is None else left)


def drop_leftovers_(model: nn.Module, small: nn.Module) -> None:
    """Remove from the model, cut in place, what its small copy no longer holds."""
    for path, name in states(model).keys() - states(small).keys():
        _set(model, path, name, None)


def _set(model: nn.Module, path: str, name: str, value: Tensor | None) -> None:
    vars(model.get_submodule(path))[name] = value
