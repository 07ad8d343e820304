"""What the files of a model hold: its tensors with the entries to write for them, and their distribution over files."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import Comm, held, local, sharded
from .._layers import layout_of
from ..execute import Compressed, zeros_of
from . import compressed, hf, packed, scaled
from .files import CODES, Entry
from .manifest import Stored, stored_names

_FEW = 0.01  # a smaller fraction of zeros is taken for chance


def tensors_to_save(model: nn.Module) -> tuple[compressed.State, dict[str, str]]:
    """The state dict with each tied tensor once, and {other name: name in the state dict} for the tied ones."""
    found: compressed.State = {}
    first: dict[Any, str] = {}
    state, tied = compressed.dense_view(model)
    names = sorted(state, key=lambda name: hf.is_tied_copy(model, name))  # transformers expects certain names in the file
    own = model.state_dict(keep_vars=True) if any(map(sharded, model.parameters())) else {}
    for name in names:
        stored = state[name]
        tensor = stored.get_buffer(stored.names[0]) if isinstance(stored, Compressed) else stored
        _check_tensor(name, tensor)
        if sharded(tensor):  # a process may hold nothing of a tensor, and has no address of it then
            key: Any = id(own[name])
        else:
            views = (tensor.is_conj(), tensor.is_neg())  # lazily conjugated or negated: the same memory, other values
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, str(tensor.device), views)
        if stored is tensor and tensor.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            found[name] = stored
    return found, {other: tied.get(name, name) for other, name in tied.items()}


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r} in the state dict is a {type(tensor).__name__}; only tensors can be saved without pickle")
    if tensor.layout != torch.strided or tensor.dtype not in CODES or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
        raise TypeError(f"{name!r} is {kind}; a file holds strided tensors of {', '.join(sorted(CODES.values()))}")
    if name != name.encode(errors="replace").decode():
        raise ValueError(f"{name!r} has characters that no file can hold (lone surrogates); rename it")
    if name.endswith(scaled.ALL) or name == "__metadata__":
        raise ValueError(f"{name!r} means something else in a file, like names that end in {', '.join(scaled.ALL)}; rename it")


def described(
    model: nn.Module, tensors: compressed.State, pack: bool, comm: Comm
) -> tuple[dict[str, Stored], dict[str, Entry]]:
    """For each tensor, its description in the manifest and the entries to write for it."""
    if not comm.alone:
        return _described_shards({name: _whole(tensor) for name, tensor in tensors.items()}, pack, comm)
    listed: dict[str, Stored] = {}
    entries: dict[str, Entry] = {}
    for name, source in tensors.items():
        again = partial(_whole, source)
        tensor = again()
        values = packed.count_values(tensor)
        if isinstance(source, Compressed) and source.rounded() is not None:
            made, kind = scaled.entries(name, source), "scaled"
        else:
            made = packed.entries(name, tensor, values, again) if pack or source is not tensor else None
            kind = "dense" if made is None else "bitmask"
        zeros = tensor.numel() - values
        listed[name] = Stored(CODES[tensor.dtype], tuple(tensor.shape), kind, zeros, _pattern(model, name, tensor, zeros))
        entries |= made or {name: Entry(tensor.dtype, tuple(tensor.shape), again)}
    return listed, entries


def _described_shards(tensors: Mapping[str, Tensor], pack: bool, comm: Comm) -> tuple[dict[str, Stored], dict[str, Entry]]:
    """The same for tensors of which several processes hold parts. The pattern of their zeros is not looked for."""
    if pack:
        raise ValueError("packed=True needs whole tensors, and this model is sharded; save it without packed=True")
    entries: dict[str, Entry] = {}
    for name, tensor in tensors.items():
        part, mine = held(name, tensor, comm.first) if sharded(tensor) else (None, comm.rank == 0)
        entries[name] = Entry(tensor.dtype, tuple(tensor.shape), partial(local, tensor), part, mine)
    comm.check_same(str([(name, entry.dtype, entry.shape) for name, entry in entries.items()]))
    values = comm.sum(*(packed.count_values(entry.data()) if entry.mine else 0 for entry in entries.values()))
    zeros = (math.prod(entry.shape) - kept for entry, kept in zip(entries.values(), values, strict=True))
    listed = {n: Stored(CODES[e.dtype], e.shape, "dense", z, None) for (n, e), z in zip(entries.items(), zeros, strict=True)}
    return listed, entries


def split(listed: Mapping[str, Stored], entries: Mapping[str, Entry], most: int | None) -> list[dict[str, Entry]]:
    """The entries of each file: in order, with the parts of one tensor in one file, as many as fit into `most` bytes."""
    files: list[dict[str, Entry]] = [{}]
    room = most
    for name, stored in listed.items():
        own = {part: entries[part] for part in stored_names(name, stored)}
        size = sum(entry.bytes for entry in own.values())
        if room is not None and most is not None:
            if size > room and files[-1]:
                files.append({})
                room = most
            room -= size
        files[-1] |= own
    return files


def names_of_files(data: str, number: int, folder: Path) -> list[str]:
    """Names for so many tensor files. One of several never replaces an old file: a crash would leave some of both."""
    if number == 1:
        return [data]
    base = data.removesuffix(".safetensors")
    for mark in itertools.chain([""], (f"-{secrets.token_hex(4)}" for _ in itertools.count())):
        names = [f"{base}{mark}-{i + 1:05d}-of-{number:05d}.safetensors" for i in range(number)]
        if not any((folder / name).exists() for name in names):
            return names
    raise AssertionError


def _pattern(model: nn.Module, name: str, tensor: Tensor, zeros: int) -> str | None:
    """The pattern of the zeros in a weight. None for other tensors, and where almost nothing or everything is zero."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not _FEW * tensor.numel() < zeros < tensor.numel():
        return None
    try:
        owner = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        owner = model
    return zeros_of(layout_of(owner, tuple(tensor.shape)).matrix(tensor.detach())).pattern


def _whole(source: Tensor | Compressed) -> Tensor:
    return source.weight if isinstance(source, Compressed) else source
