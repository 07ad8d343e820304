"""Folders of safetensors files as Hugging Face writes them: one file, or several with an index. Read a few rows at a time.

`Journal` records how far a run is that writes such a folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .files import BESIDE, DTYPES, MANIFEST, TENSOR_FILES, BadFile, alone, read_json, rename, replacing

SINGLE, INDEX, JOURNAL = "model.safetensors", "model.safetensors.index.json", "secateur.journal"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack")  # endings of files that hold weights
_CHUNK = 1 << 22  # bytes that are copied at once


class Folder:
    """The tensors of a folder. `entries`: dtype and shape by name, in the order of the index; `file_of`: the file of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        self._reading = Lock()  # two threads may read, and a file has one position
        self.file_of = _listed(path)
        self.files = sorted(set(self.file_of.values()))
        self.entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._headers: dict[str, tuple[bytes, dict[str, Any]]] = {file: _header(path / file) for file in self.files}
        if not (path / INDEX).is_file():
            self.file_of = dict.fromkeys(self._headers[SINGLE][1], SINGLE)
        for name, file in self.file_of.items():
            entry = self._headers[file][1].get(name)
            if entry is None or entry["dtype"] not in DTYPES:
                raise BadFile(f"{path / file} holds no tensor {name!r} of a known dtype, which {INDEX} lists")
            self.entries[name] = DTYPES[entry["dtype"]], tuple(entry["shape"])

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    @property
    def gated(self) -> bool:
        """Whether the model that `save` wrote here has gates."""
        manifest = self.path / MANIFEST
        return manifest.is_file() and "gates" in read_json(manifest.read_bytes(), str(manifest))

    def check_listed(self) -> None:
        """Raises BadFile unless the index lists every tensor of its files, and each name is in one file only."""
        for file, (_, entries) in self._headers.items():
            for name in entries:
                if self.file_of.get(name) != file:
                    where = f"in {self.file_of[name]}" if name in self.file_of else "in no file"
                    raise BadFile(f"{self.path / file} holds {name!r}, which {INDEX} lists {where}; correct one of the two")

    def check_copies(self, copies: Mapping[str, str]) -> None:
        """Raises ValueError unless tensors that are one in a model have the same values: {other name: name}."""
        for other, name in copies.items():
            same = self.entries[other] == self.entries[name]
            if not same or any(a != b for a, b in zip(self.chunks(name), self.chunks(other), strict=True)):
                raise ValueError(
                    f"{name!r} and {other!r} are one tensor in the model of into=, and {self.path} holds different values for "
                    "them; exclude the tensor, or save the model with one of the two"
                )

    def size(self, file: str) -> int:
        return (self.path / file).stat().st_size

    def share(self, rank: int, size: int) -> list[str]:
        """The files of one of `size` processes: the largest first, each to the process that has the fewest bytes."""
        loads, mine = [0] * size, []
        for file in sorted(self.files, key=lambda name: (-self.size(name), name)):
            least = loads.index(min(loads))
            loads[least] += self.size(file)
            if least == rank:
                mine.append(file)
        return mine

    def stamp(self) -> list[list[int]]:
        """Sizes and times of the files, to see whether they changed between two runs."""
        found = [(self.path / file).stat() for file in self.files]
        return [[one.st_size, one.st_mtime_ns] for one in found]

    def header(self, file: str) -> bytes:
        return self._headers[file][0]

    def in_order(self, file: str) -> list[str]:
        """The tensors of a file in the order of their bytes."""
        return sorted(self._headers[file][1], key=lambda name: self._headers[file][1][name]["data_offsets"])

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self._read(name, 0, math.prod(self.entries[name][1])).reshape(self.entries[name][1])

    def rows(self, name: str, first: int, last: int, axis: int = 0) -> Tensor:
        """Some indices of an axis of a tensor. A vector is one row."""
        dtype, shape = self.entries[name]
        if len(shape) < 2:
            return self._read(name, 0, math.prod(shape)).reshape(1, -1)[first:last]
        width = math.prod(shape[1:])
        if axis == 0:
            return self._read(name, first * width, (last - first) * width).reshape(last - first, *shape[1:])
        step = max(_CHUNK // max(width * dtype.itemsize, 1), 1)
        parts = [(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]
        return torch.cat([self.rows(name, *part)[:, first:last] for part in parts])

    def _read(self, name: str, begin: int, number: int) -> Tensor:
        """`number` elements of a tensor, from the position `begin` of its flat values."""
        file, (dtype, _) = self.file_of[name], self.entries[name]
        head, entries = self._headers[file]
        if number == 0:
            return torch.empty(0, dtype=dtype)
        found = torch.empty(number, dtype=dtype)
        room: Any = found.view(torch.uint8).numpy()
        with self._reading:
            if file not in self._open:
                self._open[file] = (self.path / file).open("rb", buffering=0)
            self._open[file].seek(len(head) + entries[name]["data_offsets"][0] + begin * dtype.itemsize)
            while len(room):
                count = self._open[file].readinto(room)
                if not count:
                    raise BadFile(f"{self.path / file} ends within {name!r}; it was cut short")
                room = room[count:]
        return found

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, a chunk at a time."""
        head, entries = self._headers[self.file_of[name]]
        begin, end = entries[name]["data_offsets"]
        with (self.path / self.file_of[name]).open("rb") as file:
            file.seek(len(head) + begin)
            for left in range(end - begin, 0, -_CHUNK):
                chunk = file.read(min(left, _CHUNK))
                if len(chunk) != min(left, _CHUNK):
                    raise BadFile(f"{self.path / self.file_of[name]} ends within {name!r}; it was cut short")
                yield chunk

    def others(self, target: Path) -> tuple[list[Path], list[Path]]:
        """The other files of the folder and its subfolders, as relative paths: those without weights, and those with weights.

        Hidden subfolders, such as those of git, and the folder `target` are left out.
        """
        plain: list[Path] = []
        weights: list[Path] = []
        for root, folders, files in os.walk(self.path):
            here = Path(root)
            folders[:] = [name for name in folders if name[0] != "." and (here / name).resolve() != target.resolve()]
            for file in (here / name for name in files):
                path = file.relative_to(self.path)
                if file.is_file() and path.as_posix() not in self.files:
                    (weights if file.suffix in _WEIGHTS else plain).append(path)
        return sorted(plain), sorted(weights)

    def copy_rest(self, target: Path, index: bool = True) -> None:
        """Copies the files that hold no weights, except for the manifest, which has the digests of the old weights."""
        skipped = {Path(MANIFEST)} if index else {Path(MANIFEST), Path(INDEX)}
        for path in self.others(target)[0]:
            if path not in skipped:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                with replacing(target / path) as beside:  # on the disk before the journal is removed
                    shutil.copyfile(self.path / path, beside)
                rename(beside, target / path)


class Journal:
    """How far a run is that writes the folder `target`, in a file there until the run is finished.

    `run` describes the run in plain values. Each of several processes writes a part of the journal and reads all parts, so that
    another number of processes can go on. The process that calls `begin` locks the folder until the end of the `with`.
    """

    def __init__(self, target: Path, run: Mapping[str, Any], part: int = 0, overwrite: bool = False) -> None:
        self.target, self.run, self.file = target, dict(run), target / f"{JOURNAL}.{part}.json"
        self.overwrite, self._locked = overwrite, contextlib.ExitStack()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._locked.close()

    def read(self) -> list[dict[str, Any]]:
        """The parts that an unfinished run left. Raises ValueError if that run was another one."""
        found = [read_json(file.read_bytes(), str(file)) for file in sorted(self.target.glob(f"{JOURNAL}.*.json"))]
        if other := next((key for part in found for key, value in self.run.items() if part.get(key) != value), None):
            raise ValueError(
                f"{self.target} holds an unfinished run with another {other}; repeat that call, give another target, or remove "
                f"{JOURNAL}.* there to start again"
            )
        return found

    def begin(self) -> None:
        """Makes the folder. A run that does not go on with an earlier one removes the weights of an earlier model first.

        So a run that is stopped leaves no folder that readers take for a whole model. Raises FileExistsError if another process
        writes to the folder, or has written a model there since this run began.
        """
        self.target.mkdir(parents=True, exist_ok=True)
        self._locked.enter_context(alone(self.target, wait=False))
        check_free(self.target, self.overwrite)
        if not self.read():
            for old in {*stale_weights(self.target), MANIFEST, TENSOR_FILES[1]}:
                (self.target / old).unlink(missing_ok=True)

    def write(self, **known: Any) -> None:
        with replacing_file(self.file) as out:
            out.write(json.dumps({**self.run, **known}).encode())

    def remove(self) -> None:
        """Removes all parts, and the unfinished files of runs that were killed."""
        for file in self.target.iterdir():
            if file.name.startswith(f"{JOURNAL}.") or BESIDE.fullmatch(file.name):
                file.unlink()


def index_text(file_of: Mapping[str, str], size: int) -> str:
    """The index of a folder: the file of each tensor, and the bytes of all of them."""
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(file_of)}, indent=2, sort_keys=True)


def write_index(folder: Path, file_of: Mapping[str, str], size: int) -> None:
    with replacing_file(folder / INDEX) as out:
        out.write(index_text(file_of, size).encode())


def stale_weights(folder: Path) -> set[str]:
    """The names of the files that hold the weights of a folder: the index, the files that it lists, and the single file."""
    found = {name for name in (SINGLE, INDEX) if (folder / name).is_file()}
    with contextlib.suppress(BadFile, OSError):
        found |= {name for name in _listed(folder).values() if (folder / name).is_file()}
    return found


def check_free(folder: Path, overwrite: bool) -> None:
    """Raises FileExistsError if readers would take the folder for a whole model. The folder of an unfinished run is none."""
    there = [name for name in (SINGLE, INDEX, MANIFEST) if (folder / name).is_file() and not any(folder.glob(f"{JOURNAL}.*"))]
    if there and not overwrite:
        raise FileExistsError(
            f"target={str(folder)!r} holds a model already ({there[0]}); give another folder, or overwrite=True to replace it"
        )


def _listed(folder: Path) -> dict[str, str]:
    """The file of each tensor by the index; of a single file, no names are known yet."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            if not folder.exists():
                raise FileNotFoundError(f"{folder} does not exist; give a local folder that holds {SINGLE} or {INDEX}")
            raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return {"": SINGLE}
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in found.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadFile(f"{folder / INDEX} is not an index of safetensors files: {error}") from None
    if odd := [file for file in names.values() if Path(file).name != file or not file.endswith(".safetensors")]:
        raise BadFile(f"{folder / INDEX} lists {odd[0]!r}, which is no safetensors file of this folder")
    return names


def _header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The header of a file, and its entries. The safetensors library has checked both against the size of the file."""
    try:
        with safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            start = file.read(8)
            text = file.read(int.from_bytes(start, "little"))
    except (SafetensorError, FileNotFoundError) as error:
        raise BadFile(f"{path} is missing, damaged or cut short: {error}") from None
    return start + text, {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when it is whole and on the disk."""
    with replacing(path) as beside, beside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    rename(beside, path)
