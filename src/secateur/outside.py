"""Finds blocks of a model that share tensors with other code besides their arguments and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ._arguments import copied, tensors_of
from .edit import Inputs, run, tensors_inside
from .trace import main_outputs


def not_closed(model: nn.Module, blocks: Mapping[str, nn.Module], call: Inputs) -> set[str]:
    """Runs the model, and returns the blocks whose inner tensors are read elsewhere, and the blocks that read them."""
    watch = Watch()
    for name, block in blocks.items():
        for weight in block.parameters():
            watch.own(weight, name)
    with watch.calls_of(blocks):
        run(model, *copied(call, {}), under=watch)
    return {name for pair in watch.found for name in pair}


class Watch(TorchDispatchMode):
    """Records the block to which each storage belongs, and finds operators outside of that block that read it.

    `found` has the pairs (owner, reader). The name of code outside of blocks is empty.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self._inside: list[str] = []
        self._homes: dict[int, tuple[StorageWeakRef, str]] = {}  # as long as there is a reference, no id is used twice
        self._numbers: dict[str, int] = {}
        self._writers: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # for each byte, the number of the block that wrote it

    @contextlib.contextmanager
    def calls_of(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """A context in which calls of these blocks are noticed. Call the model inside, with the watch entered."""
        with contextlib.ExitStack() as stack:
            for name, block in blocks.items():
                stack.callback(block.register_forward_pre_hook(lambda *_, name=name: self.enter(name), prepend=True).remove)
                stack.callback(block.register_forward_hook(lambda *all_of_it: self.leave(all_of_it[-1])).remove)
            yield

    def own(self, tensor: Tensor, block: str) -> None:
        """States that a tensor belongs to a block. One that belongs to two of them belongs to none."""
        if key := _key(tensor):
            known = self._homes.get(key, (None, block))[1]
            self._homes[key] = StorageWeakRef(tensor.untyped_storage()), block if known == block else ""

    def enter(self, block: str) -> None:
        self._inside.append(block)

    def leave(self, output: Any) -> None:
        self._inside.pop()
        given = {_key(tensor) for tensor in tensors_inside(main_outputs(output))}
        self._homes = {k: home for k, home in self._homes.items() if k not in given and not home[0].expired()}
        self._writers = {k: one for k, one in self._writers.items() if k not in given and not one[0].expired()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now, tensors = self._inside[-1] if self._inside else "", tensors_of((args, kwargs or {}))
        read = {_key(tensor) for tensor in tensors}
        elsewhere = {self._homes[key][1] for key in read if key in self._homes}
        for tensor in tensors if self._writers and not _views(func) else ():
            if _key(tensor) in self._writers and not (func in _OVERWRITE and tensor is args[0]):
                elsewhere |= self._writers_of(tensor)
        self.found |= {(owner, now) for owner in elsewhere - {now, ""}}
        for tensor in _written(func, args, kwargs or {}):
            self._wrote(tensor, now)
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_of(output) if now else ():
            if _key(tensor) not in read:
                self.own(tensor, now)
        return output

    def _wrote(self, tensor: Tensor, block: str) -> None:
        """Notes that a block wrote to a part of a storage that was made elsewhere, such as that of a cache."""
        key = _key(tensor)
        if not key or key in self._homes or not (block or key in self._writers):
            return
        if key not in self._writers:
            storage = tensor.untyped_storage()
            self._writers[key] = StorageWeakRef(storage), torch.zeros(storage.nbytes(), dtype=torch.int16)
        _bytes_of(self._writers[key][1], tensor).fill_(self._numbers.setdefault(block, len(self._numbers) + 1) if block else 0)

    def _writers_of(self, tensor: Tensor) -> set[str]:
        """The blocks that wrote what a tensor holds."""
        numbers = set(_bytes_of(self._writers[_key(tensor)][1], tensor).unique().tolist())
        return {name for name, number in self._numbers.items() if number in numbers}


_OVERWRITE = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)  # do not read it


def _views(func: Any) -> bool:
    """Whether an operator returns a view of its input and reads no values."""
    given = func._schema.arguments if hasattr(func, "_schema") else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in given)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to. One that only changes the shape or strides of a tensor writes nothing."""
    if not hasattr(func, "_schema") or torch.Tag.inplace_view in func.tags:
        return []
    places = [(i, one.name) for i, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write]
    return [t for i, name in places for t in tensors_of(args[i] if i < len(args) else kwargs.get(name))]


def _bytes_of(marks: Tensor, tensor: Tensor) -> Tensor:
    """The marks of the first bytes of a tensor's elements."""
    size = tensor.element_size()
    return marks.as_strided(tensor.shape, [size * stride for stride in tensor.stride()], size * tensor.storage_offset())


def _key(tensor: Tensor) -> int:
    """The number of the storage of a tensor, 0 if it has none."""
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided else 0
