"""The manifest: a checked JSON file that lists the tensors in the tensor file, their formats, and the cuts of the model."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import safetensors
import torch

from .._dist import class_of
from .._version import __version__
from ..edit import UNKNOWN, Arguments, Attribute, Cuts, Step
from ..progress import track
from .files import DTYPES, BadFile, TensorFiles, counts, names_of, read_json
from .packed import BITMASK, PARTS, SHAPE, VALUES
from .packed import check as check_bits
from .scaled import ALL as SCALED_PARTS
from .scaled import read as read_scaled

VERSION = 1
FILE_NAME = re.compile(r"(model|secateur)(-[0-9a-f]{8})?(-[0-9]{5}-of-[0-9]{5})?\.safetensors")  # one file, or one of several
MAX = 100_000_000  # bytes
_PARTS_OF = {"dense": ("",), "bitmask": PARTS, "scaled": SCALED_PARTS}  # what is appended to the name of a tensor
_TAIL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


@dataclass
class Stored:
    """A tensor in the file, in the format "dense" (as it is), "bitmask" (a bit for each element, and the values) or "scaled"
    (the same with values in fewer bits, and scales)."""

    dtype: str
    shape: tuple[int, ...]
    format: str
    zeros: int
    pattern: str | None


@dataclass(frozen=True)
class Layer:
    """A compressed layer: the format of its weight in memory, and the dtype of its dense weight."""

    format: str
    options: tuple[int, ...]
    dtype: str


class File(NamedTuple):
    """A tensor file: its bytes, and the digest of its header."""

    size: int
    header: str


@dataclass
class Manifest:
    """The content of a manifest.

    `tensors`: by name. `tied`: other name -> name in `tensors`. `cuts`: the first one first. `files`: the tensor files.
    `digests`: of every entry in them. `layers`: the compressed layers, by path. `gates`: by path, as `gated` writes them.
    """

    tensors: dict[str, Stored]
    tied: dict[str, str]
    cuts: list[Cuts]
    files: dict[str, File]
    digests: dict[str, str]
    about: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)
    gates: dict[str, Any] = field(default_factory=dict)

    @property
    def record(self) -> list[tuple[Step, Arguments]]:
        """What was done to the model. Files of earlier versions have no arguments, or list the cuts only."""
        if "history" not in self.about:
            return [(("shrink", cuts.recipe), UNKNOWN) for cuts in self.cuts if cuts.recipe]
        steps = [(what, recipe) for what, recipe in self.about["history"]]
        return list(zip(steps, self.about.get("arguments") or [UNKNOWN] * len(steps), strict=True))


def stored_names(name: str, stored: Stored) -> tuple[str, ...]:
    """The names of the entries in the file that a tensor is stored in."""
    return tuple(name + part for part in _PARTS_OF[stored.format])


# --- to JSON --------------------------------------------------------------------------------------------------------


def to_text(manifest: Manifest) -> bytes:
    """The manifest as JSON. Its last line is the digest of everything before it."""
    digests = manifest.digests
    files = [{"name": name, "bytes": file.size, "header": file.header} for name, file in manifest.files.items()]
    tensors = {
        name: {**vars(s), "sha256": [digests[part] for part in stored_names(name, s)]} for name, s in manifest.tensors.items()
    }
    content = {
        "format": "secateur",
        "version": VERSION,
        "about": manifest.about,
        **({"file": files[0]} if len(files) == 1 else {"files": files}),
        "cuts": [_cuts_to_data(cuts) for cuts in manifest.cuts],
        "tied": manifest.tied,
        **({"layers": {path: vars(layer) for path, layer in manifest.layers.items()}} if manifest.layers else {}),
        **({"gates": manifest.gates} if manifest.gates else {}),
        "tensors": tensors,
    }
    lines = [f" {json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _lines(value: Any) -> str:
    """JSON with a line for each entry of the outermost object."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()) + "\n }"


def _cuts_to_data(cuts: Cuts) -> dict[str, Any]:
    """Cuts as JSON data. Lists of indices that many tensors share are written once, as ranges, and referred to by position."""
    lists: dict[str, int] = {}
    tensors = {
        name: {str(d): lists.setdefault(ranges(kept), len(lists)) for d, kept in dims.items()}
        for name, dims in cuts.tensors.items()
    }
    for a in cuts.attributes:
        if not _plain(a.index) or not _plain(a.new) or not _plain(a.old):
            raise ValueError(f"the cut changes {a.path}.{a.name} from {a.old!r} to {a.new!r}, which JSON cannot hold")
    return {
        "recipe": cuts.recipe,
        "drop": cuts.drop,
        "lengths": cuts.lengths,
        "kept": list(lists),
        "tensors": tensors,
        "shapes": {name: list(shape) for name, shape in cuts.shapes.items()},
        "attributes": [list(a) for a in cuts.attributes],
        "added": {name: list(shape) for name, shape in cuts.added.items()},
    }


def ranges(indices: list[int]) -> str:
    """Indices in ascending order as text such as "0-3,7", which `indices` reads."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, int | float | str | bool)


# --- from JSON ------------------------------------------------------------------------------------------------------


def from_text(text: bytes, where: str, sizes: Mapping[str, int]) -> Manifest:
    """Parses what `to_text` wrote, for tensor files of these sizes. Raises BadFile if a byte of it was changed."""
    if len(text) > MAX:
        raise BadFile(f"{where} is longer than {MAX} bytes, the most that a manifest may have")
    data = read_json(text, where)
    if data.get("format") != "secateur":
        raise BadFile(f"{where} is not a manifest that sc.save wrote")
    if type(data.get("version")) is not int or data["version"] != VERSION:  # true is 1, and 1.0 is
        raise BadFile(f"{where} is of version {str(data.get('version'))[:20]}; this version of secateur reads {VERSION}")
    tail = _TAIL.search(text)
    if tail is None or hashlib.sha256(text[: tail.start()]).hexdigest().encode() != tail[1]:
        how = " (its line ends were changed, as by git's autocrlf: mark it as -text there)" if b"\r\n" in text else ""
        raise BadFile(f"{where} is damaged: its content does not have the digest in its last line{how}")
    try:
        return _from_data(data, sizes)
    except BadFile as error:
        raise BadFile(f"{where}: {error}") from None


def _from_data(data: dict[str, Any], sizes: Mapping[str, int]) -> Manifest:
    files, listed = _files(data, sizes), _of(data, "tensors", dict)
    tensors: dict[str, Stored] = {}
    digests: dict[str, str] = {}
    for name, entry in listed.items():
        if not isinstance(entry, dict) or entry.keys() != {*Stored.__annotations__, "sha256"}:
            raise BadFile(f"{name!r} lacks a field of a tensor, or has one too many")
        found = entry.pop("sha256")
        stored = tensors[name] = Stored(**entry)
        if str(stored.dtype) not in DTYPES or not counts(stored.shape, 64) or stored.format not in _PARTS_OF:
            raise BadFile(f"{name!r} has an unknown dtype, shape or format")
        stored.shape = tuple(stored.shape)
        if type(stored.zeros) is not int or not 0 <= stored.zeros <= math.prod(stored.shape):
            raise BadFile(f"{name!r} is said to have {str(stored.zeros)[:20]} zeros")
        if not isinstance(stored.pattern, str | None):
            raise BadFile(f"{name!r} is said to have the pattern {str(stored.pattern)[:20]}")
        parts = stored_names(name, stored)
        if not isinstance(found, list) or len(found) != len(parts) or not all(isinstance(d, str) for d in found):
            raise BadFile(f"{name!r} must have one digest for each of its {len(parts)} parts")
        digests |= dict(zip(parts, found))
    tied = _of(data, "tied", dict)
    for other, name in tied.items():
        if not isinstance(name, str) or name not in tensors or other in tensors:
            raise BadFile(f"{other!r} is tied to {str(name)[:80]!r}, which is not in the file, or is there itself")
    # How many more indices are allowed: each kept one stands for at least one element in the files.
    room = [max(sum(file.size for file in files.values()), 1 << 20)]
    cuts = [_cuts_from_data(entry, room) for entry in _of(data, "cuts", list)]
    layers = _layers(_of(data, "layers", dict), {*tensors, *tied}) if "layers" in data else {}
    gates = _of(data, "gates", dict) if "gates" in data else {}
    return Manifest(tensors, tied, cuts, files, digests, _about(data), layers, gates)


def listed_files(data: Any) -> list[str]:
    """The names of the tensor files that the data of a manifest list. Raises BadFile for names that `save` never gives."""
    files = _of(data, "files", list) if "files" in data else [_of(data, "file", dict)]
    names = [_of(file, "name", str) for file in files]
    if len(set(names)) != len(names) or not names or not all(map(FILE_NAME.fullmatch, names)):
        raise BadFile(f"the tensor files must have different names, as sc.save gives them, not {str(names)[:80]}")
    return names


def _files(data: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, File]:
    found: dict[str, File] = {}
    for name, file in zip(listed_files(data), data.get("files") or [data["file"]], strict=True):
        size = sizes.get(name)
        if size is None:
            raise BadFile(f"the tensor file {name!r} is not beside it")
        if _of(file, "bytes", int) != size:
            raise BadFile(
                f"the tensor file {name} is {size} bytes long and should be {file['bytes']}: one of the two was replaced or "
                "cut short"
            )
        found[name] = File(size, _of(file, "header", str))
    return found


def _about(data: dict[str, Any]) -> dict[str, Any]:
    found = _of(data, "about", dict)
    steps = found.get("history", [])
    pairs = isinstance(steps, list) and all(isinstance(step, list) and len(step) == 2 for step in steps)
    if not pairs or not all(isinstance(text, str) for step in steps for text in step):
        raise BadFile("the history of the model must be a list of pairs of strings")
    arguments = found.get("arguments", [])
    whole = isinstance(arguments, list) and ("history" not in found or len(arguments) in (0, len(steps)))
    if not whole or not all(isinstance(one, dict | str) for one in arguments):
        raise BadFile("the arguments of the history must be a list with a mapping or a reason for each step")
    return found


def _layers(data: dict[str, Any], names: set[str]) -> dict[str, Layer]:
    found: dict[str, Layer] = {}
    for path, entry in data.items():
        if not isinstance(entry, dict) or entry.keys() != Layer.__annotations__.keys() or f"{path}.weight" not in names:
            raise BadFile(f"{path!r} lacks a field of a compressed layer, has one too many, or its weight is not in the file")
        form, options, dtype = entry["format"], entry["options"], entry["dtype"]
        if not isinstance(form, str) or not counts(options, 8) or not isinstance(dtype, str) or dtype not in DTYPES:
            raise BadFile(f"{path!r} has an unknown format or dtype")
        found[path] = Layer(form, tuple(options), dtype)
    return found


def _of(data: Any, key: str, kind: type) -> Any:
    value = data.get(key) if isinstance(data, dict) else None
    if type(value) is not kind:
        raise BadFile(f"{key!r} should be a {kind.__name__}")
    return value


def _cuts_from_data(data: Any, room: list[int]) -> Cuts:
    shapes = {name: tuple(shape) for name, shape in _shapes(data, "shapes").items()}
    lists = _of(data, "kept", list)
    read: dict[tuple[int, int], list[int]] = {}
    tensors: dict[str, dict[int, list[int]]] = {}
    for name, dims in _of(data, "tensors", dict).items():
        if not isinstance(dims, dict) or name not in shapes:
            raise BadFile(f"the cut of {name!r} must map dims to lists of indices, and the shape of that tensor must be given")
        for dim, place in dims.items():
            d = int(dim) if re.fullmatch("[0-9]{1,2}", dim) else len(shapes[name])
            if d >= len(shapes[name]) or type(place) is not int or not 0 <= place < len(lists):
                raise BadFile(f"the cut of {name!r} names dim {dim[:20]} or a list of indices, and one of the two is missing")
            key = place, shapes[name][d]
            if key not in read:
                read[key] = indices(lists[place], shapes[name][d], name, room)
            tensors.setdefault(name, {})[d] = read[key]
    attributes = []
    for entry in _of(data, "attributes", list):
        if not isinstance(entry, list) or len(entry) != 6 or not _plain(entry[2:5]) or any(type(v) is bool for v in entry[2:5]):
            raise BadFile("an attribute is not described as one")
        attribute = Attribute(*entry)
        if not all(isinstance(s, str) and "__" not in s for s in attribute[:2]) or type(attribute.own) is not bool:
            raise BadFile("an attribute is not described as one")
        attributes.append(attribute)
    drop = _of(data, "drop", dict)
    if not all(counts(places, MAX) for places in drop.values()):
        raise BadFile("removed blocks must be given by their positions")
    lengths = _of(data, "lengths", dict)
    if not counts(list(lengths.values()), MAX):
        raise BadFile("lengths must be integers from 0 up")
    added = {name: tuple(shape) for name, shape in _shapes(data, "added").items()}
    return Cuts(tensors, shapes, attributes, added, drop, lengths, _of(data, "recipe", str))


def _shapes(data: Any, key: str) -> dict[str, list[int]]:
    found = _of(data, key, dict)
    for name, shape in found.items():
        if not counts(shape, 64):
            raise BadFile(f"{key} of {name!r} must be integers from 0 up")
    return found


def indices(text: Any, size: int, name: str, room: list[int]) -> list[int]:
    """Parses ranges such as "0-3,7" into indices below `size` in ascending order. `room` limits how many there may be."""
    found: list[int] = []
    for part in text.split(",") if isinstance(text, str) else [""]:
        ends = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        if not (found[-1] if found else -1) < first <= last < size:
            raise BadFile(f"{name!r} keeps {str(text)[:60]!r}; expected indices below {size} in ascending order")
        room[0] -= last + 1 - first
        if room[0] < 0:
            raise BadFile(f"the cuts keep more units than the file can hold ({name!r})")
        found.extend(range(first, last + 1))
    return found


# --- against the tensor file ----------------------------------------------------------------------------------------


def check_files(manifest: Manifest, file: TensorFiles, digests: slice = slice(None)) -> None:
    """Raises BadFile unless the files hold exactly the tensors of the manifest, bit for bit.

    `digests`: the tensors whose bytes this process compares.
    """
    for each, written in zip(file.files, manifest.files.values(), strict=True):
        if each.header != written.header:
            raise BadFile(
                f"{each.where} is not the file that its manifest was written for: one of the two was replaced or damaged"
            )
    if odd := file.entries.keys() ^ manifest.digests.keys():
        raise BadFile(f"{file.files[0].where} and its manifest do not list the same tensors: {names_of(odd)}")
    for name, stored in manifest.tensors.items():
        if stored.format == "scaled":
            continue
        part = name + (VALUES if stored.format == "bitmask" else "")
        (dtype, shape), where = file.entries[part], file.where(part)
        if dtype != DTYPES[stored.dtype] or (stored.format == "dense" and shape != stored.shape):
            raise BadFile(f"{name!r} is {dtype} of shape {shape} in {where} and different in the manifest")
        if stored.format == "bitmask" and not _parts_fit(file, name, stored):
            raise BadFile(f"the bitmask, values and shape of {name!r} in {where} do not make a tensor of {stored.shape}")
    for name, digest in track(list(manifest.digests.items())[digests], "check files", lambda item: item[0]):
        if file.digest(name) != digest:
            raise BadFile(f"{name!r} in {file.where(name)} is damaged: its bytes do not have the digest in the manifest")
    for name, stored in manifest.tensors.items():
        if stored.format == "bitmask":
            check_bits(name, file.read(name + BITMASK), file.entries[name + VALUES][1][0], stored.shape)
            if file.read(name + SHAPE).tolist() != list(stored.shape):
                raise BadFile(f"{name!r} has another shape in {file.where(name + SHAPE)} than in the manifest")
        if stored.format == "scaled":
            weight = read_scaled(name, {part: file.read(part) for part in stored_names(name, stored)})
            if (DTYPES[stored.dtype], stored.shape) != (weight.dtype, tuple(weight.shape)):
                raise BadFile(f"{name!r} has another dtype or shape in {file.where(name + SHAPE)} than in the manifest")


def _parts_fit(file: TensorFiles, name: str, stored: Stored) -> bool:
    (bits, bits_shape), (_, values_shape), (sizes, sizes_shape) = (
        file.entries[name + part] for part in (BITMASK, VALUES, SHAPE)
    )
    right = (DTYPES["U8"], (-(-math.prod(stored.shape) // 8),), DTYPES["I64"], (len(stored.shape),))
    return (bits, bits_shape, sizes, sizes_shape) == right and len(values_shape) == 1


def about(model: Any, recipe: str | None, record: Sequence[tuple[Step, Arguments]]) -> dict[str, Any]:
    """The origin of a file: the class of the model, the recipe, what was done to it, the versions of the libraries."""
    versions = {"torch": str(torch.__version__), "safetensors": safetensors.__version__}  # with the build, such as +cu132
    done, arguments = [list(step) for step, _ in record], [each for _, each in record]
    recipe = recipe or (done[-1][1] if done else None)
    said = {"model": class_of(model).__name__, "recipe": recipe, "history": done, "arguments": arguments}
    return {**said, "secateur": __version__, **versions}


def shapes_of(manifest: Manifest) -> Mapping[str, tuple[int, ...]]:
    """The shape of every name in the state dict of the model, including tied names."""
    own = {name: stored.shape for name, stored in manifest.tensors.items()}
    return own | {other: own[name] for other, name in manifest.tied.items()}
