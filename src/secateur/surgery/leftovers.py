"""Copies of a model, with what torch forgets or refuses to copy: hooks of parameters, and tensors that earlier runs left.

Such tensors (recurrent states) are no part of the model, and a run writes them anew without a look at them. But another way
through the model may look at them, so they follow the sizes of what a run puts there.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..axes import keep_mask
from ..edit import states
from ..trace import Trace
from .cut import Keep


def follow_leftovers_(small: nn.Module, trace: Trace, keep: Keep) -> None:
    """Cut, in a cut model, what earlier runs left as what a run leaves now; gone where a run leaves nothing."""
    held = states(small)
    for (path, name), axes in trace.record.replaced.items():
        if (path, name) in held:
            left = held[path, name].detach()
            for d, e in enumerate(axes or ()):
                left = left.index_select(d, keep_mask(e, keep).nonzero()[:, 0].to(left.device))
            _set(small, path, name, None if axes is None else left)


def drop_leftovers_(model: nn.Module, small: nn.Module) -> None:
    """The same for the model itself, once it has the sizes of its small copy."""
    for path, name in states(model).keys() - states(small).keys():
        _set(model, path, name, None)


def _set(model: nn.Module, path: str, name: str, value: Tensor | None) -> None:
    vars(model.get_submodule(path))[name] = value
