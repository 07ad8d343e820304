"""Files that are there whole or not at all: a writer of safetensors that streams, a reader that believes nothing it reads.

The format is that of safetensors (a length, a JSON header, the bytes of the tensors), so any reader of it can open the file.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

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
_MAX_HEADER = 100_000_000  # the limit of safetensors itself
_CHUNK = 1 << 20
_BESIDE = re.compile(r".+\.secateur-[0-9a-f]{8}\.tmp")  # how `replacing` names its files, and nobody else


class BadFile(ValueError):
    """A file that is damaged, incomplete, or not one of ours."""


class Entry(NamedTuple):
    """A tensor to write; `data` makes it when its turn comes, so that only one has to be in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Written(NamedTuple):
    """Digests of a written file: its size, its header, every tensor."""

    size: int
    header: str
    tensors: dict[str, str]


# --- writing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While inside, other saves into this folder wait. So what lies here half written is of one that was killed, and goes.

    Where folders cannot be locked (Windows, some network disks) nobody waits, and nothing goes.
    """
    handle = _lock(folder)
    try:
        for left in folder.iterdir() if handle is not None else ():
            if _BESIDE.fullmatch(left.name) and left.is_file():
                with contextlib.suppress(OSError):  # another user's, which is not ours to remove
                    left.unlink()
        yield
    finally:
        if handle is not None and fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile may hold the handle too
            os.close(handle)


def _lock(folder: Path) -> int | None:
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return handle
    except BaseException as error:
        os.close(handle)
        if isinstance(error, OSError):
            return None
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`. When the block ends it is on the disk, for the caller to rename; when it raises, it is gone."""
    beside = path.with_name(f"{path.name}.secateur-{secrets.token_hex(4)}.tmp")
    try:
        yield beside
        if beside.exists():
            with beside.open("rb+") as file:
                os.fsync(file.fileno())
    except BaseException as error:
        with contextlib.suppress(OSError):  # a disk that became read-only says so once
            beside.unlink(missing_ok=True)
        error.add_note(f"{path} is as it was before")
        raise


def rename(beside: Path, path: Path) -> None:
    """Put a file in the place of another, in one step that a crash leaves done or undone."""
    os.replace(beside, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_tensors(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> Written:
    """Write a safetensors file, tensor by tensor; the widest dtypes first, so that every tensor is aligned."""
    if sys.byteorder != "little":
        raise NotImplementedError("files are little-endian, and this machine is not")
    order = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name in order:
        entry = entries[name]
        header[name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [place, place + entry.bytes]}
        place += entry.bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digests: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(head)
        for name in order:
            raw = as_bytes(entries[name].data())
            if len(raw) != entries[name].bytes:
                raise RuntimeError(f"{name!r} changed while it was being written; save a model that nothing else is writing to")
            digests[name] = hashlib.sha256(raw).hexdigest()
            file.write(raw)
    return Written(len(head) + place, hashlib.sha256(head).hexdigest(), digests)


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor in row-major order, as something that can be written and hashed."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


# --- reading --------------------------------------------------------------------------------------------------------


class Tensors:
    """A safetensors file that is open: the header checked against the size of the file, tensors read when asked for."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.file, self.where = file, where
        self.size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(self.size - 8, _MAX_HEADER):
            raise BadFile(f"{where} is no safetensors file, or cut short: {self.size} bytes, with a header of {length}")
        text = file.read(length)
        self.header = hashlib.sha256(start + text).hexdigest()
        self.begin = 8 + length
        self.entries = _parse(text, self.size - self.begin, where)

    def raw(self, name: str, chunk: int | None = None) -> Iterator[bytes]:
        """The bytes of a tensor in pieces."""
        _, _, place, end = self.entries[name]
        self.file.seek(self.begin + place)
        while place < end:
            piece = self.file.read(min(chunk or end - place, end - place))
            if not piece:
                raise BadFile(f"{self.where} ends within {name!r}; it was cut short while it was open")
            place += len(piece)
            yield piece

    def digest(self, name: str) -> str:
        found = hashlib.sha256()
        for piece in self.raw(name, _CHUNK):
            found.update(piece)
        return found.hexdigest()

    def read(self, name: str) -> Tensor:
        dtype, shape, place, end = self.entries[name]
        tensor = torch.empty(end - place, dtype=torch.uint8)
        self.file.seek(self.begin + place)
        if end > place and self.file.readinto(tensor.numpy()) != end - place:  # type: ignore[attr-defined]
            raise BadFile(f"{self.where} ends within {name!r}; it was cut short while it was open")
        return shaped(tensor.view(dtype), shape, name)


def shaped(flat: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """`flat` in a shape that was read from a file: also sizes that torch refuses are no reason to crash."""
    try:
        return flat.reshape(shape)
    except (RuntimeError, TypeError) as error:
        raise BadFile(f"{name!r} cannot have shape {_short(shape)}: {_short(error)}") from None


_Stored = tuple[torch.dtype, tuple[int, ...], int, int]


def _parse(text: bytes, data: int, where: str) -> dict[str, _Stored]:
    header = read_json(text, f"the header of {where}")
    found: dict[str, _Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise BadFile(f"{where}: the header says of {name!r} {_short(entry)}; dtype, shape and data_offsets are expected")
        dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        shape, offsets = entry["shape"], entry["data_offsets"]
        if dtype is None or not counts(shape, 64) or not counts(offsets, 2) or len(offsets) != 2:
            raise BadFile(f"{where}: the header says of {name!r} {_short(entry)}, which is no tensor")
        if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0] or offsets[1] > data:
            raise BadFile(
                f"{where}: {name!r} of shape {_short(shape)} does not fit into bytes {offsets[0]} to {offsets[1]} of {data}: "
                "the file was cut short, or its header is damaged"
            )
        found[name] = (dtype, tuple(shape), offsets[0], offsets[1])
    place = 0
    for name, (_, _, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != place:
            raise BadFile(f"{where}: {name!r} begins at byte {begin} and the tensor before it ends at {place}")
        place = end
    if place != data:
        raise BadFile(f"{where} holds {data} bytes of tensors and its header speaks of {place}: cut short, or not one file")
    return found


def read_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object, every name in it once."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise BadFile(f"{where} says something twice")
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
    """Whether this is a list of at most so many whole numbers from 0 up, none of them beyond what a file can hold."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def names_of(names: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    shown = sorted(names)
    return ", ".join(map(repr, shown[:4])) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
