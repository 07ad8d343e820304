"""Copies a file into a model. Everything is checked before the first number is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._dist import held, local, sharded
from .._tree import nearest
from . import compressed, packed, scaled
from .files import CODES, BadFile, TensorFiles, names_of
from .manifest import Layer, Manifest, Stored, shapes_of, stored_names


def read(file: TensorFiles, name: str, stored: Stored) -> Tensor:
    if stored.format == "dense":
        return file.read(name)
    if stored.format == "scaled":
        return scaled.read(name, {part: file.read(part) for part in stored_names(name, stored)})
    bits, values = (file.read(name + part) for part in (packed.BITMASK, packed.VALUES))
    return packed.unpack(name, bits, values, stored.shape)


def dtype_of(name: str, manifest: Manifest) -> str:
    """The dtype of a tensor in the model. The file may hold the weight of a compressed layer in a narrower one."""
    layer = manifest.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
    return manifest.tensors[manifest.tied.get(name, name)].dtype if layer is None else layer.dtype


def check_kinds(model: nn.Module) -> None:
    """Raises BadFile if the model holds a tensor that no file can fill: lazy, not strided, or sharded on the meta device."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and (is_lazy(tensor) or tensor.layout != torch.strided):
            kind = "not initialised" if is_lazy(tensor) else str(tensor.layout)
            raise BadFile(f"{name!r} is {kind} in the model; load fills tensors that are initialised and strided")
        if isinstance(tensor, Tensor) and sharded(tensor) and tensor.is_meta:
            raise BadFile(f"{name!r} is sharded and on the meta device; give it memory first (model.to_empty(device=...))")


def fill_(model: nn.Module, manifest: Manifest, file: TensorFiles, layers: Mapping[str, Layer]) -> None:
    """Checks names, shapes and dtypes, makes the compressed layers, and only then copies the tensors."""
    state = model.state_dict(keep_vars=True)
    expected = shapes_of(manifest)
    if missing := expected.keys() - state.keys():
        raise BadFile(f"the model has no {names_of(missing)}, which the file holds.{nearest(min(missing), state)}")
    if extra := state.keys() - expected.keys():
        raise BadFile(f"the file holds no {names_of(extra)}, which the model has.{nearest(min(extra), expected)}")
    for name, tensor in state.items():
        stored = manifest.tensors[manifest.tied.get(name, name)]
        if tuple(tensor.shape) != stored.shape:
            raise BadFile(f"{name!r} is {tuple(tensor.shape)} in the model and {stored.shape} in the file")
        if CODES.get(tensor.dtype) != (dtype := dtype_of(name, manifest)):
            raise BadFile(f"{name!r} is {tensor.dtype} in the model and {dtype} in the file; build the model in that dtype")
    filled = {id(tensor) for tensor in state.values()}
    if left := [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta and id(t) not in filled]:
        raise BadFile(f"{names_of(left)} are on the meta device and not in the file; build the model on a real device")

    def weight(path: str) -> Tensor:
        name = manifest.tied.get(f"{path}.weight", f"{path}.weight")
        return read(file, name, manifest.tensors[name])

    made = compressed.made_again(model, layers, weight)
    _copy(model, state, manifest, file, {f"{path}.weight" for path in layers})
    compressed.put_(model, made)


def _copy(model: nn.Module, state: Mapping[str, Tensor], manifest: Manifest, file: TensorFiles, done: set[str]) -> None:
    """Copies tensor by tensor, except those that only belong to layers in `done`."""
    names: dict[str, list[str]] = {name: [name] for name in manifest.tensors}
    for other, name in manifest.tied.items():
        names[name].append(other)
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    if any(id(tensor) not in own for tensor in state.values()):  # the model has its own state_dict(): use its load_state_dict()
        _load_state_dict(model, {n: read(file, name, stored) for name, stored in manifest.tensors.items() for n in names[name]})
        return
    packed_ones = {f"{path}.weight" for path in manifest.layers}
    uses = Counter(id(tensor) for tensor in state.values())
    apart: dict[str, bool] = {}
    for name in manifest.tensors:
        if not done.issuperset(names[name]):
            others = sum(uses[i] for i in {id(state[n]) for n in names[name]}) > len(names[name])
            apart[name] = others and packed_ones.issuperset(names[name])  # compression rounded it: no longer tied

    def value(name: str) -> Tensor:
        return read(file, name, manifest.tensors[name])

    whole = {n: (state[n], name) for name, alone in apart.items() if not alone for n in names[name] if not sharded(state[n])}
    _check_memory(whole, value)
    with torch.no_grad():
        for name, alone in apart.items():
            parts = {id(state[n]): state[n] for n in names[name] if sharded(state[n])}
            for tensor in parts.values():
                local(tensor).detach().copy_(file.read(name, held(name, tensor)[0]))
            if parts:
                continue
            _write(model, state, names[name], value(name), alone)


def _load_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Uses the model's own `load_state_dict`, and restores all tensors if it fails."""
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        model.load_state_dict(state)
    except Exception as error:
        with torch.no_grad():
            for tensor, old in before:
                tensor.copy_(old)
        raise BadFile(f"{type(model).__name__}.load_state_dict refuses what is in the file: {error}") from error


def _check_memory(tensors: Mapping[str, tuple[Tensor, str]], value: Callable[[str], Tensor]) -> None:
    """Raises BadFile if tensors of the model share memory and the file has different numbers for them.

    `tensors`: by name, the tensor and its name in the file. Numbers are compared only where memory is shared.
    """
    by_memory: dict[int, dict[Any, str]] = {}
    for name, (tensor, source) in tensors.items():
        if tensor.is_meta or not tensor.numel():
            continue
        if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride())):
            raise BadFile(
                f"the elements of {name!r} share memory in the model (expanded); give it memory of its own (clone it)"
            )
        place = (source, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), {}).setdefault(place, name)
    for names in map(list, (found.values() for found in by_memory.values())):
        end = 0
        for begin, after, size in sorted(_extent(tensors[name][0]) for name in names):
            if begin < end or size > after - begin:
                _check_numbers({name: tensors[name] for name in names}, value)
                break
            end = after


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """The first and last address of a tensor, and the bytes of its elements, which may have gaps or overlap."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    begin, item = tensor.data_ptr(), tensor.dtype.itemsize
    return begin, begin + (last + 1) * item, tensor.numel() * item


def _check_numbers(tensors: Mapping[str, tuple[Tensor, str]], value: Callable[[str], Tensor]) -> None:
    """Writes all of them to a copy of the memory that they share, and compares each with the file afterwards."""
    storage = torch.UntypedStorage(max(tensor.untyped_storage().nbytes() for tensor, _ in tensors.values()))
    places = {
        n: torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride()) for n, (t, _) in tensors.items()
    }

    def number(name: str) -> Tensor:
        tensor, found = tensors[name][0], value(tensors[name][1])
        found = found.conj().resolve_conj() if tensor.is_conj() else found
        return -found if tensor.is_neg() else found

    for name, place in places.items():
        place.copy_(number(name))
    for name, place in places.items():
        if not torch.equal(packed.bits_of(place), packed.bits_of(number(name))):
            raise BadFile(
                f"{names_of(tensors)} share memory in the model, and the file has numbers for {name!r} that differ from those "
                "of the others; build the model so that each has memory of its own"
            )


def _write(model: nn.Module, state: Mapping[str, Tensor], names: Sequence[str], value: Tensor, apart: bool) -> None:
    """Writes a value under its names. A tensor on the meta device is replaced by a real one, the same under every name.

    With `apart` the tensor is replaced too, because the model uses the old one under other names.
    """
    made: dict[int, Tensor] = {}
    for name in names:
        tensor = state[name]
        if not (tensor.is_meta or apart):
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():  # torch refuses other writes
                tensor.copy_(value)
            continue
        path, _, attribute = name.rpartition(".")
        module, parameter = model.get_submodule(path), isinstance(tensor, nn.Parameter)
        new = value.to(tensor.dtype) if tensor.is_meta else value.to(tensor)
        new = made.setdefault(id(tensor), nn.Parameter(new, tensor.requires_grad) if parameter else new)
        vars(module)["_parameters" if parameter else "_buffers"][attribute] = new
