"""Reads: the inputs that weights are multiplied with while a model runs.

A weight is read when its layer is called, or when the model passes it to `torch.nn.functional.linear` itself.
`nn.MultiheadAttention` does that with all of its weights, and some vision models with a layer that they never call.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._layers import passes_its_weights
from .targeting import Target

Called = Callable[[Target, str, nn.Module, tuple[Any, ...], dict[str, Any]], None]
Passed = Callable[[Target, slice, Tensor], None]
Returned = Callable[[Target, slice, Tensor], Tensor]


@contextlib.contextmanager
def listen(
    targets: Sequence[Target], called: Called, passed: Passed, returned: Returned | None = None, *, before: bool = False
) -> Iterator[None]:
    """Reports the reads of these targets, inside the context.

    `called(target, attribute, layer, args, kwargs)` reports a call of the target's layer, and `passed(target, groups, x)` an
    input x that is multiplied with groups of the target's rows outside of such a call. They are called after the product, or
    before it if `before` is True. `returned(target, groups, output)` reports the product itself and returns the tensor that
    the model goes on with. Torch's fused attention kernels hide all of them (`edit.no_mha_fastpath`).
    """
    running: Counter[str] = Counter()  # calls of the layers of each target that have begun and not ended
    with contextlib.ExitStack() as stack:
        for target in targets:
            for owner, attribute in target.slot.owners:
                if not passes_its_weights(owner):
                    stack.enter_context(_layer_calls(target, owner, attribute, called, returned, running, before))
        stack.enter_context(_linear_calls(targets, passed, returned, running, before))
        yield


@contextlib.contextmanager
def _layer_calls(
    target: Target,
    owner: nn.Module,
    attribute: str,
    called: Called,
    returned: Returned | None,
    running: Counter[str],
    before: bool,
) -> Iterator[None]:
    def begin(*_: Any) -> None:
        running[target.name] += 1

    def end(*_: Any) -> None:
        running[target.name] -= 1

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> None:
        called(target, attribute, module, args, kwargs)

    def pass_on(module: nn.Module, args: Any, output: Any) -> Tensor | None:
        return returned(target, slice(None), output) if returned and isinstance(output, Tensor) else None

    handles = [
        owner.register_forward_pre_hook(begin),
        owner.register_forward_pre_hook(see, with_kwargs=True)
        if before
        else owner.register_forward_hook(see, with_kwargs=True),
        owner.register_forward_hook(pass_on),
        owner.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _linear_calls(
    targets: Sequence[Target], passed: Passed, returned: Returned | None, running: Counter[str], before: bool
) -> Iterator[None]:
    """Replaces `F.linear`, inside the context, by a function that also reports.

    A `TorchFunctionMode` would not see the calls that `F.multi_head_attention_forward` makes.
    """
    by_memory: dict[int, list[tuple[Target, Tensor]]] = {}
    for target in targets:
        if len(target.layout.shape) == 2 or target.layout.stacked:
            whole = target.weight
            by_memory.setdefault(whole.untyped_storage().data_ptr(), []).append((target, whole))
    original = F.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: list[tuple[Target, slice]] = []
        if type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided and weight.numel():
            for target, whole in by_memory.get(weight.untyped_storage().data_ptr(), ()):
                groups = _groups(target, whole, weight)
                if groups is not None and not running[target.name]:
                    found.append((target, groups))
        if before:
            report(found, input)
        output = original(input, weight, bias)
        if not before:
            report(found, input.detach())
        for target, groups in found:
            output = returned(target, groups, output) if returned else output
        return output

    def report(found: list[tuple[Target, slice]], x: Tensor) -> None:
        for target, groups in found:
            passed(target, groups, x)

    F.linear = linear
    try:
        yield
    finally:
        F.linear = original


def _groups(target: Target, whole: Tensor, part: Tensor) -> slice | None:
    """The groups of a target's rows that `part` is a view of; None if it is not made of whole rows of the target."""
    if target.layout.stacked and whole.layout == torch.strided:
        number, rest = divmod(int(part.storage_offset() - whole.storage_offset()), max(whole.stride(0), 1))
        fits = part.shape == whole.shape[1:] and part.stride() == whole.stride()[1:] and not rest
        return slice(number, number + 1) if fits and 0 <= number < whole.shape[0] else None
    if whole.layout != torch.strided or part.stride() != whole.stride() or part.shape[1:] != whole.shape[1:]:
        return None
    first, rest = divmod(int(part.storage_offset() - whole.storage_offset()), max(whole.stride(0), 1))
    last = first + part.shape[0]
    if rest or first < 0 or last > whole.shape[0]:
        return None
    height = target.layout.rows // target.layout.groups
    if first % height or last % height:
        raise ValueError(
            f"rows {first} to {last} of {target.name!r} are multiplied with inputs of their own, so it has no common inputs; "
            "exclude it, or use a criterion or method without data"
        )
    return slice(first // height, last // height)
