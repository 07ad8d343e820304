"""Safetensors files: written completely or not at all, one tensor at a time, and read by the safetensors library.

Writing is our own because the library's writer takes all tensors at once, and packed or compressed weights are made one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..progress import track
from .behind import writing_behind

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
MANIFEST = "secateur.json"
TENSOR_FILES = ("model.safetensors", "secateur.safetensors")  # the second: a name that transformers does not look for
_CHUNK = 1 << 20
BESIDE = re.compile(r".+\.secateur-[0-9a-f]{8}\.tmp")  # the names that `replacing` gives its files


class BadFile(ValueError):
    """Raised for a file that is damaged, incomplete, or not written by secateur."""


class Entry(NamedTuple):
    """A tensor to write. `data()` makes it when it is written, so that only one has to be in memory.

    Of a sharded tensor, `data()` is the part of this process, a range of each axis. `mine`: whether this process writes it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Callable[[], Tensor]
    part: Sequence[tuple[int, int]] | None = None
    mine: bool = True

    @property
    def bytes(self) -> int:
        return _size(self.dtype, self.shape)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


class Written(NamedTuple):
    """The bytes of a written file, and the digests of its header and of every tensor."""

    size: int
    header: str
    tensors: dict[str, str]


# --- writing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(folder: Path, wait: bool = True) -> Iterator[None]:
    """Locks the folder against others that write to it, and removes the unfinished files of those that were killed.

    If another one writes to it, this waits for that, or without `wait` raises FileExistsError. Where folders cannot be locked
    (Windows, some network disks), nothing of this happens.
    """
    handle = _lock(folder, wait)
    try:
        for left in folder.iterdir() if handle is not None else ():
            if BESIDE.fullmatch(left.name) and left.is_file():
                with contextlib.suppress(OSError):  # it may belong to another user
                    left.unlink()
        yield
    finally:
        if handle is not None and fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough if a process forked meanwhile holds the handle too
            os.close(handle)


def _lock(folder: Path, wait: bool) -> int | None:
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BaseException as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise FileExistsError(f"another process writes to {folder} now; wait for its end, or give another folder") from None
        if isinstance(error, OSError):
            return None
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path for a new file beside `path`. After the block it is on the disk, for the caller to rename; an error removes it."""
    beside = path.with_name(f"{path.name}.secateur-{secrets.token_hex(4)}.tmp")
    try:
        yield beside
        if beside.exists():
            with beside.open("rb+") as file:
                os.fsync(file.fileno())
    except BaseException as error:
        with contextlib.suppress(OSError):  # on a disk that became read-only, the first error is enough
            beside.unlink(missing_ok=True)
        error.add_note(f"{path} is as it was before")
        raise


def rename(beside: Path, path: Path) -> None:
    """Replaces `path` by the file `beside` in one atomic step, and waits until that is on the disk."""
    os.replace(beside, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_tensors(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> Written:
    """Writes a safetensors file, tensor by tensor."""
    head, order, size = header_of(entries, metadata)
    digests: dict[str, str] = {}
    with path.open("wb") as file, writing_behind(file) as write:
        write(head)
        for name in track(order, "save", str):
            raw = as_bytes(entries[name].data())
            if len(raw) != entries[name].bytes:
                raise RuntimeError(f"{name!r} changed while it was being written; save a model that nothing else is writing to")
            digests[name] = hashlib.sha256(raw).hexdigest()
            write(raw)
    return Written(size, hashlib.sha256(head).hexdigest(), digests)


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The header of a file, where each tensor begins in the file, and its size.

    The widest dtypes come first, so that every tensor is aligned.
    """
    if sys.byteorder != "little":
        raise NotImplementedError("files are little-endian, and this machine is not")
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins: dict[str, int] = {}
    place = 0
    for name in sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name)):
        entry = entries[name]
        header[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, place + entry.bytes]}
        begins[name] = place
        place += entry.bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}, len(head) + place


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor in row-major order, as an object that can be written and hashed."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


# --- reading --------------------------------------------------------------------------------------------------------


class Tensors:
    """An open safetensors file, read by the safetensors library, which checks the header against the size of the file.

    `entries`: dtype and shape of every tensor. `header`: the digest of the header. Tensors are read when asked for. The library
    copies them with pread: a memory map of a file that someone truncates would end the process. Digests are taken from the
    bytes of the file, since the library has no way to pass over a large tensor without memory for all of it.
    """

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.where, self._bytes = where, file
        try:
            self._file = safe_open(file.name, framework="pt", backend="pread")
            slices = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
        except SafetensorError as error:
            raise BadFile(f"{where} is not a safetensors file, or was damaged or cut short: {_short(error)}") from None
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
            raise BadFile(f"{where} was replaced by another file while it was opened; load it again")
        start = self._bytes.read(8)
        header = start + self._bytes.read(int.from_bytes(start, "little"))
        self.header = hashlib.sha256(header).hexdigest()
        self.entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._begin: dict[str, int] = {}
        place = len(header)
        for name, part in slices.items():  # in the order of the file, where the library found no gaps
            if part.get_dtype() not in DTYPES:
                raise BadFile(f"{where}: {name!r} has dtype {part.get_dtype()}; expected one of {', '.join(sorted(DTYPES))}")
            self.entries[name], self._begin[name] = (DTYPES[part.get_dtype()], tuple(part.get_shape())), place
            place += _size(*self.entries[name])

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def digest(self, name: str) -> str:
        found, left, piece = hashlib.sha256(), _size(*self.entries[name]), memoryview(bytearray(_CHUNK))
        self._bytes.seek(self._begin[name])
        while left:
            count = self._bytes.readinto(piece[: min(left, _CHUNK)])  # type: ignore[attr-defined]
            if not count:
                raise BadFile(f"{self.where} ends within {name!r}; it was cut short while it was open")
            found.update(piece[:count])
            left -= count
        return found.hexdigest()

    def read(self, name: str, part: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """A tensor, or the part of it that lies in a range of each axis."""
        try:
            if not part:
                return self._file.get_tensor(name)
            return self._file.get_slice(name)[tuple(slice(*ends) for ends in part)]
        except (SafetensorError, RuntimeError, TypeError) as error:  # shapes that torch refuses, a file cut short just now
            shape = _short(self.entries[name][1])
            raise BadFile(f"{self.where}: {name!r} of shape {shape} cannot be read: {_short(error)}") from None


class TensorFiles:
    """Open safetensors files, read as one. `entries`: dtype and shape of every tensor."""

    def __init__(self, files: Sequence[Tensors]) -> None:
        self.files, self._file_of = files, {name: file for file in files for name in file.entries}
        self.entries = {name: file.entries[name] for name, file in self._file_of.items()}
        for file in files:
            if twice := [name for name in file.entries if self._file_of[name] is not file]:
                raise BadFile(f"{twice[0]!r} is in {file.where} and in {self._file_of[twice[0]].where}")

    def where(self, name: str) -> str:
        """The path of the file that holds a tensor."""
        return self._file_of[name].where

    def digest(self, name: str) -> str:
        return self._file_of[name].digest(name)

    def read(self, name: str, part: Sequence[tuple[int, int]] | None = None) -> Tensor:
        return self._file_of[name].read(name, part)


def shaped(flat: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Reshapes `flat` to a shape that was read from a file. Raises BadFile for shapes that torch refuses."""
    try:
        return flat.reshape(shape)
    except (RuntimeError, TypeError) as error:
        raise BadFile(f"{name!r} cannot have shape {_short(shape)}: {_short(error)}") from None


def read_json(text: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object. Raises BadFile if a name occurs in it twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise BadFile(f"{where} is damaged: a name occurs twice in it")
        return dict(pairs)

    try:
        found = json.loads(text.decode(), object_pairs_hook=once)
    except BadFile:
        raise
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{where} is damaged: {type(error).__name__}: {_short(str(error))}") from None
    if not isinstance(found, dict):
        raise BadFile(f"{where} is damaged: an object is expected, not {_short(found)}")
    return found


def counts(value: Any, most: int) -> bool:
    """True for a list of at most `most` integers from 0 to 2**62 - 1."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def names_of(names: Iterable[str]) -> str:
    """The first four names and the number of the others."""
    shown = sorted(names)
    return ", ".join(map(repr, shown[:4])) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
