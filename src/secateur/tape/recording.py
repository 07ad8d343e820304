"""Records the operators of one run of a module as a tape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import moved, tensors_of
from ..reads import listen
from ..stats import on_batch
from ..targeting import Target
from .runs import OUTSIDE, Again, Call, Made, Read, Run, State, Sum, Tape, is_plain, writes


class _Recording(Run):
    """Also writes the tape. `bits`: the storage of each weight of interest -> the bits of the targets in it."""

    def __init__(self, state: State, bits: Mapping[int, int]) -> None:
        super().__init__(state)
        self.new, self.bits = Tape(), bits
        self.depends: dict[int, int] = {}
        self.everything = 0  # targets on which the choice of operators depends

    def _follow(self, index: int, func: Any, kwargs: Any, inputs: Sequence[Tensor], keys: Sequence[int], output: Any) -> None:
        tape = self.new
        read = tuple(self.numbers.get(key, OUTSIDE) for key in keys)
        before = [self.seen(t) for t in inputs]
        tape.functions.append(func)
        tape.inputs.append(read)
        depends = [self._depends(number) | self.bits.get(key, 0) for number, key in zip(read, keys, strict=True)]
        both = self.everything
        for one in depends:
            both |= one
        for number in read:
            tape.last_use[number] = index
            if writes(func):
                tape.written.setdefault(number, []).append(index)
                self.depends[number] = self.depends.get(number, 0) | both
        super()._follow(index, func, kwargs, inputs, keys, output)
        outputs = tensors_of(output)
        if func in _ADDITIONS and len(inputs) == 2 and _is_plain_sum(inputs, kwargs) and before[0] and before[1]:
            tape.sums.append(Sum(index, before[0], before[1], (depends[0], depends[1]), self.seen(outputs[0])))
        for tensor in outputs:
            number = self.numbers.get(tensor.untyped_storage()._cdata, OUTSIDE)
            self.depends[number] = self.depends.get(number, 0) | both
            tape.born.setdefault(number, index)
            if number != OUTSIDE:
                tape.sizes.setdefault(number, tensor.untyped_storage().nbytes())
        for place, tensor in enumerate(outputs):
            if (made := self.seen(tensor)) is not None:
                tape.where.setdefault(made, (index, place))
        if _decides(func, inputs, outputs):
            tape.decides = min(tape.decides, index)
            if not outputs:
                self.everything |= both

    def _depends(self, number: int) -> int:
        return 0 if number == OUTSIDE else self.depends.get(number, 0)

    def seen(self, tensor: Tensor) -> Made | None:
        """The description of a tensor of this run; None for one from outside."""
        if not is_plain(tensor) or tensor.untyped_storage()._cdata not in self.numbers:
            return None
        return self.take(tensor)


_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def _is_plain_sum(inputs: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a + b, and not a + alpha b, without broadcasting or a change of dtype."""
    one, other = inputs
    return kwargs.get("alpha", 1) == 1 and one.shape == other.shape and one.dtype == other.dtype


def _decides(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether Python code, or the shapes of later tensors, may depend on the values that this operator returns."""
    if not inputs:
        return False
    if not outputs or func in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default):
        return True
    if func is torch.ops.aten.index.Tensor and any(t.dtype in (torch.bool, torch.uint8) for t in inputs[1:]):
        return True
    chosen = any(not t.is_floating_point() and t.dtype != torch.bool for t in outputs)
    return chosen and any(t.is_floating_point() for t in inputs)


def record(module: nn.Module, call: Call, targets: Sequence[Target], device: torch.device | None = None) -> Tape | None:
    """Runs a module on one call and returns the tape; None where its operators cannot be followed."""
    bits: dict[int, int] = {}
    for i, target in enumerate(targets):
        key = target.weight.untyped_storage()._cdata
        bits[key] = bits.get(key, 0) | 1 << i
    run = _Recording(State(*moved(call, device), tape=None, copies=True), bits)

    def note(target: Target, x: Tensor | None, groups: slice | None) -> None:
        with run.aside():
            known = None if x is None else run.seen(x)
            rows = None if groups is None else groups.indices(target.layout.groups)[:2]
            depends = run.everything | (run._depends(known.memory) if known else 0)
            version = 0 if x is None or x.is_inference() else x._version
            run.new.reads.append(Read(target.name, run.count, known, version, depends, rows))

    def called(target: Target, attribute: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        floats = [t for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        note(target, floats[0] if floats else None, None)

    def returned(target: Target, groups: slice, output: Tensor) -> Tensor:
        with run.aside():
            if made := run.seen(output):
                run.new.returned.setdefault(target.name, []).append(made)
        return output

    args, kwargs = run.arguments()
    for made, tensor in zip(run.state.made, tensors_of((args, kwargs)), strict=True):
        if made is not None:
            run.new.born[made.memory], run.new.sizes[made.memory] = -1, tensor.untyped_storage().nbytes()
    for place, made in enumerate(run.state.made):
        if made is not None:
            run.new.where.setdefault(made, (-1, place))
    try:
        with listen(targets, called, lambda t, groups, x: note(t, x, groups), returned, before=True):
            with on_batch(module, args, kwargs), run:
                output = module(*args, **kwargs)
            for tensor in tensors_of(output):
                if made := run.seen(tensor):
                    run.new.last_use[made.memory] = float("inf")
    except Again:
        return None
    return run.new
