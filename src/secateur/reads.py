"""Reads: the inputs that weights are multiplied with while a model runs.

A weight is read when its layer is called, or when the model passes it to `torch.nn.functional.linear` or a convolution itself.
`nn.MultiheadAttention` does that with all of its weights, state space models with their convolution, and some vision models
with a layer that they never call.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

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

    `called(target, attribute, layer, args, kwargs)` reports a call of the target's layer, or of a convolution with its weight,
    for which `layer` is a copy with the stride and padding of that call. `passed(target, groups, x)` reports an input x that is
    multiplied with groups of the target's rows outside of such a call. They are called after the product, or before it if
    `before` is True. `returned(target, groups, output)` reports the product itself and returns the tensor that the model uses
    instead. Torch's fused attention kernels hide all of them (`edit.no_mha_fastpath`).
    """
    running: Counter[str] = Counter()  # calls of the layers of each target that have begun and not ended
    with contextlib.ExitStack() as stack:
        for target in targets:
            for owner, attribute in target.slot.owners:
                if not passes_its_weights(owner):
                    stack.enter_context(_layer_calls(target, owner, attribute, called, returned, running, before))
        stack.enter_context(_product_calls(targets, passed, returned, running, before))
        stack.enter_context(_convolution_calls(targets, called, returned, running, before))
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


_PRODUCTS = (
    (torch, "matmul"),
    (torch, "mm"),
    (torch, "bmm"),
    *((Tensor, name) for name in ("matmul", "__matmul__", "mm", "bmm")),
)


class _Part(NamedTuple):
    """Groups of a target's rows that are multiplied with an input."""

    target: Target
    groups: slice
    x: Tensor


class _Matrices:
    """Finds the targets that a tensor is a part of. Matrices are (outputs, inputs), or (experts, outputs, inputs)."""

    def __init__(self, targets: Sequence[Target], running: Counter[str]) -> None:
        self.running = running
        self._by_memory: dict[int, list[tuple[Target, Tensor]]] = {}
        for target in targets:
            if len(target.layout.shape) == 2 or target.layout.stacked:
                whole = target.weight.mT if target.layout.flip else target.weight
                self._by_memory.setdefault(whole.untyped_storage().data_ptr(), []).append((target, whole))

    def near(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a target."""
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and tensor.numel() > 0
        return plain and tensor.untyped_storage().data_ptr() in self._by_memory

    def parts(self, matrix: Tensor, x: Tensor) -> list[_Part]:
        """What is read when the rows of a matrix are multiplied with x."""
        found: list[_Part] = []
        for target, whole in self._by_memory.get(matrix.untyped_storage().data_ptr(), ()):
            if self.running[target.name]:
                continue
            if target.layout.stacked and matrix.shape == whole.shape and matrix.stride() == whole.stride():
                found += [_Part(target, slice(i, i + 1), each) for i, each in enumerate(x)] if x.ndim == 3 else []
                continue
            each = list(zip(matrix, x)) if matrix.ndim == 3 and x.ndim == 3 else [(matrix, x)] if matrix.ndim == 2 else []
            for part, own in each:
                if (groups := _groups(target, whole, part)) is not None:
                    found.append(_Part(target, groups, own))
        return found


@contextlib.contextmanager
def _product_calls(
    targets: Sequence[Target], passed: Passed, returned: Returned | None, running: Counter[str], before: bool
) -> Iterator[None]:
    """Replaces `F.linear` and torch's matrix products, inside the context, by functions that also report.

    A `TorchFunctionMode` would not see the calls that `F.multi_head_attention_forward` makes.
    """
    matrices = _Matrices(targets, running)
    own_linear = F.linear

    def report(parts: Sequence[_Part]) -> None:
        for target, groups, x in parts:
            passed(target, groups, x if before else x.detach())

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = matrices.parts(weight, input) if matrices.near(weight) else []
        if before:
            report(parts)
        output = own_linear(input, weight, bias)
        if not before:
            report(parts)
        for target, groups, _ in parts:
            output = returned(target, groups, output) if returned else output
        return output

    def reporting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs or len(args) != 2 or not any(isinstance(t, Tensor) and matrices.near(t) for t in args):
                return original(*args, **kwargs)
            one, other = args
            with _disable_current_modes():  # these views are not operators of the model
                right = matrices.parts(other.mT, one) if matrices.near(other) and other.ndim > 1 else []
                left = matrices.parts(one, other.mT) if matrices.near(one) and not right and other.ndim > 1 else []
            if before:
                report([*right, *left])
            output = original(one, other)
            if not before:
                report([*right, *left])
            return _outputs(right, left, returned, output) if returned else output

        return product

    originals = [(owner, name, vars(owner).get(name), getattr(owner, name)) for owner, name in _PRODUCTS]
    F.linear = linear
    for owner, name, _, original in originals:
        setattr(owner, name, reporting(original))
    try:
        yield
    finally:
        F.linear = own_linear
        for owner, name, own, _ in originals:
            setattr(owner, name, own) if own is not None else delattr(owner, name)


def _outputs(right: Sequence[_Part], left: Sequence[_Part], returned: Returned, output: Tensor) -> Tensor:
    """Reports the outputs of a product, and returns the tensor to go on with. Several experts are one axis of the output."""
    parts = right or left
    with _disable_current_modes():
        turned = output.mT if left else output
        each = list(turned) if len(parts) > 1 else [turned]
    new = [returned(part.target, part.groups, one) for part, one in zip(parts, each)]
    if not any(one.requires_grad for one in new):
        return output
    whole = torch.stack(new) if len(parts) > 1 else new[0]
    return whole.mT if left else whole


@contextlib.contextmanager
def _convolution_calls(
    targets: Sequence[Target], called: Called, returned: Returned | None, running: Counter[str], before: bool
) -> Iterator[None]:
    """Replaces `F.conv1d`, `F.conv2d` and `F.conv3d`, inside the context, by functions that also report."""
    layers = [target for target in targets if isinstance(target.slot.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    by_memory = {target.weight.untyped_storage().data_ptr(): target for target in layers}
    originals = {name: getattr(F, name) for name in ("conv1d", "conv2d", "conv3d")} if layers else {}

    def reporting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            plain = type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided
            target = by_memory.get(weight.untyped_storage().data_ptr()) if plain else None
            if target is None or running[target.name] or tuple(weight.shape) != target.layout.shape:
                return original(input, weight, bias, *args, **kwargs)
            layer = copy.copy(target.slot.module)
            given = dict(zip(("stride", "padding", "dilation", "groups"), args)) | kwargs
            vars(layer).update({"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "padding_mode": "zeros"} | given)
            if before:
                called(target, target.slot.attribute, layer, (input,), {})
            output = original(input, weight, bias, *args, **kwargs)
            if not before:
                called(target, target.slot.attribute, layer, (input.detach(),), {})
            return returned(target, slice(None), output) if returned else output

        return convolution

    for name, original in originals.items():
        setattr(F, name, reporting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


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
