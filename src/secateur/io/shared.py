"""Safetensors files that several processes write together: each writes the parts of tensors that it holds, at their places.

No process holds a whole tensor that is sharded. The files lie where all processes reach them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .._dist import Comm, together
from .files import Entry, Tensors, Written, as_bytes, header_of, write_tensors


def write_shared(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], comm: Comm) -> Written:
    """Writes a safetensors file, which the first process makes. Every process takes the digests of a share of the tensors."""
    if comm.alone:
        return write_tensors(path, entries, metadata)
    head, begins, size = header_of(entries, metadata)
    with together(comm, f"make {path.name}"):
        if comm.rank == 0:
            with path.open("wb") as file:
                file.write(head)
                file.truncate(size)
    with together(comm, f"write to {path.name}"), path.open("rb+", buffering=0) as file:
        for name, entry in entries.items():
            if entry.mine:
                for place, piece in _pieces(entry):
                    file.seek(begins[name] + place)
                    file.write(piece)
        os.fsync(file.fileno())
    digests: dict[str, str] = {}
    with together(comm, f"read {path.name} back"), path.open("rb") as file:
        written = Tensors(file, str(path))
        digests = {name: written.digest(name) for name in list(entries)[comm.rank :: comm.size]}
        written.close()
    every = {name: digest for part in comm.gather(digests) for name, digest in part.items()}
    return Written(size, hashlib.sha256(head).hexdigest(), {name: every[name] for name in entries})


def _pieces(entry: Entry) -> Iterator[tuple[int, memoryview]]:
    """The runs of bytes that a part of a tensor covers in the whole tensor, with the place of each."""
    raw = memoryview(as_bytes(entry.data()))
    part = entry.part or [(0, size) for size in entry.shape]
    length = _run(entry.shape, part) * entry.dtype.itemsize
    for number, at in enumerate(_starts(entry.shape, part)) if raw else ():
        yield at * entry.dtype.itemsize, raw[number * length : (number + 1) * length]


def _cut(shape: Sequence[int], part: Sequence[tuple[int, int]]) -> int:
    """The last axis of which the part has not everything, or 0."""
    return max((axis for axis, ends in enumerate(part) if ends != (0, shape[axis])), default=0)


def _run(shape: Sequence[int], part: Sequence[tuple[int, int]]) -> int:
    """The number of elements of a part that lie one after the other in the whole tensor."""
    last = _cut(shape, part)
    return math.prod(end - begin for begin, end in part[last : last + 1]) * math.prod(shape[last + 1 :])


def _starts(shape: Sequence[int], part: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Where the runs of a part begin in the whole tensor, in elements."""
    last = _cut(shape, part)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    base = part[last][0] * steps[last] if shape else 0
    for places in itertools.product(*(range(*ends) for ends in part[:last])):
        yield base + sum(place * step for place, step in zip(places, steps))
