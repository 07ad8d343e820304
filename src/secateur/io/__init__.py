"""Saves and loads pruned models without pickle: `save`, `load`, and `dense_state_dict` for use without a model.

A saved model is a folder with a safetensors file, which any reader of that format opens, and the manifest `secateur.json`.

- `files`: safetensors files, written completely or not at all.
- `packed`: tensors with many zeros, stored as a bit for each element and the values.
- `scaled`: weights in fewer bits, with their scales.
- `compressed`: layers in sparse formats.
- `manifest`: the list of what the tensor file holds, and the cuts that made the model.
- `fill`: copies a file into a model.
- `hf`: configs for Hugging Face models.
- `folder`: folders of one or several safetensors files, read a few rows at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import sharded
from .._layers import layout_of
from .._tree import nearest
from ..edit import (
    Arguments,
    Cuts,
    Passing,
    Step,
    all_or_nothing,
    apply_cuts_,
    history,
    is_cut,
    owned_tensors,
    record_of,
    remember_,
    restore_record_,
)
from ..execute import Compressed, decompress_, zeros_of
from ..methods import without_soft_masks
from ..plans import Plan
from ..surgery import Shrunk
from . import compressed, hf, packed, scaled
from .files import (
    CODES,
    DTYPES,
    MANIFEST,
    BadFile,
    Entry,
    Tensors,
    alone,
    as_bytes,
    names_of,
    read_json,
    rename,
    replacing,
    write_tensors,
)
from .fill import check_kinds, dtype_of, fill_, read
from .folder import INDEX, JOURNAL, Folder, Journal, replacing_file, stale_weights, write_index
from .manifest import MAX, TENSOR_FILES, Manifest, Stored, about, check_file, from_text, shapes_of, to_text

__all__ = [
    "save", "load", "dense_state_dict", "BadFile", "MANIFEST", "record_in", "replaced", "write_text",
    "JOURNAL", "Entry", "Folder", "Journal", "Tensors", "as_bytes", "rename", "replacing", "replacing_file", "write_index",
    "write_tensors",  # for folders
]  # fmt: skip

CONFIG = "config.json"
_TRIES = 20  # how often a folder is read that others write to meanwhile
_FEW = 0.01  # a smaller fraction of zeros is taken for chance


def save(
    model: nn.Module, path: str | os.PathLike[str], *, packed: bool = False, plan: Plan | Shrunk | None = None
) -> dict[str, Any]:
    """Writes the model to the folder `path`, and returns the entry `about` of the manifest (model, history, versions).

    `packed`: stores tensors with many zeros as a bit for each element and the values. Without it the file holds the state dict
    as it is, including zeros; only the weights of compressed layers are always packed. A model that `shrink` made stores its
    cuts, and `load` cuts a fresh model by them. `plan` is needed only for a model that was rebuilt by other means. A model that
    is being pruned with `ste=True` is saved with its masks applied.

    The entry "history" lists what was done to the model, the first thing first: `["shrink", recipe]`, `["prune", recipe]`.
    "recipe" is that of `plan`, or the last one. `load` restores the history, and `sc.summary` shows it. "arguments" holds the
    arguments of each step, and `sc.Recipe.load(path)` returns them as a recipe that makes such a model again.

    For a Hugging Face model, `config.json` is written with the sizes of the small model. If a config can describe it (all
    layers cut alike), plain `from_pretrained(path)` loads the folder. The entry "from_pretrained" of the result is True then;
    otherwise it states the reason.
    """
    model = getattr(model, "_orig_mod", model)  # the module under torch.compile
    if not isinstance(model, nn.Module):
        raise TypeError(f"save takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(plan, Plan | Shrunk | None):
        raise TypeError(f"plan= must be what prune_ or shrink returned, not {type(plan).__name__}")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; save() writes a folder with {TENSOR_FILES[0]} and {MANIFEST} in it")
    model = without_soft_masks(model)
    tensors, tied = _tensors(model)
    cuts = _cuts(model, plan)
    layers = compressed.listed(model)
    listed, entries = _described(model, tensors, packed)
    said = about(model, None if plan is None else plan.recipe, _record(model, plan))
    against = "is packed; save it without packed=True" if packed else "has compressed layers; decompress_ it first"
    extra, note = hf.files(model, against if packed or layers else None)
    if note is not None:
        said["from_pretrained"] = note
    data = TENSOR_FILES[isinstance(note, str)]  # without a config, from_pretrained would fill a model of default size from it
    if taken := [name for name in (data, MANIFEST, *extra) if (folder / name).is_dir()]:
        raise ValueError(f"{folder / taken[0]} is a folder; save() writes a file of that name. Nothing was written.")
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        with ExitStack() as stack:
            new = {name: stack.enter_context(replacing(folder / name)) for name in (*extra, data, MANIFEST)}
            written = write_tensors(new[data], entries, {"format": "pt"})
            new[MANIFEST].write_bytes(to_text(Manifest(listed, tied, cuts, written, said, layers, data)))
            for name, text in extra.items():
                new[name].write_text(text, encoding="utf-8")
        _put(folder, new)
    return said


def load(path: str | os.PathLike[str], into: nn.Module | Callable[[], nn.Module], *, as_: str | None = None) -> nn.Module:
    """Loads the model that was saved in the folder `path`, and returns it in the mode (training or evaluation) of `into`.

    `into`: a function that builds the model as it was before any cut, or such a model, which is changed in place; it may be
    cut already. The model is cut as the saved one was, and all names, shapes and dtypes must match. Every byte is checked
    first: if anything is wrong, `BadFile` (a ValueError) is raised and the model is as it was. Compressed layers are
    compressed again, in the format that was saved; `as_="dense"` loads plain layers instead.
    """
    if as_ not in (None, "dense"):
        raise ValueError(f"as_={as_!r} must be 'dense' or left out.{nearest(str(as_), ['dense'])}")
    with _opened(Path(path)) as (manifest, file):
        given = into if isinstance(into, nn.Module) or not callable(into) else into()
        model = getattr(given, "_orig_mod", given)  # the module under torch.compile
        if not isinstance(given, nn.Module) or not isinstance(model, nn.Module):
            raise TypeError(f"into= must be a model or a function that builds one; this gave a {type(given).__name__}")
        check_kinds(model)
        with all_or_nothing(model):
            if compressed.layers_of(model):
                decompress_(model)
            if not (_fits(model, manifest) and all(is_cut(model, cuts) for cuts in manifest.cuts)):
                for cuts in manifest.cuts:
                    apply_cuts_(model, cuts)
            remember_(model, manifest.cuts)
            restore_record_(model, [one for one in manifest.record if as_ is None or one[0][0] != "compress"])
            fill_(model, manifest, file, {} if as_ == "dense" else manifest.layers)
    return given


def dense_state_dict(source: Mapping[str, Tensor] | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns a dense state dict from a folder that `save` wrote, or from what `safetensors.torch.load_file` returned.

    A folder is checked completely, and tied tensors are returned under all their names. The tensor file alone holds each of
    them once.
    """
    if isinstance(source, Mapping):
        return _unpacked(source)
    if isinstance(source, nn.Module):
        raise TypeError(
            f"dense_state_dict reads a folder that sc.save wrote, or a state dict, not a model ({type(source).__name__}); for "
            "the dense weights of a model call sc.decompress_(copy.deepcopy(model)).state_dict()"
        )
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"dense_state_dict reads a folder that sc.save wrote, or a state dict, not {type(source).__name__}")
    with _opened(Path(source)) as (manifest, file):
        found = {name: read(file, name, stored) for name, stored in manifest.tensors.items()}
        found |= {other: found[name] for other, name in manifest.tied.items()}
        return {name: tensor.to(DTYPES[dtype_of(name, manifest)]) for name, tensor in found.items()}


def record_in(folder: Path) -> list[tuple[Step, Arguments]]:
    """What was done to the model in a folder that `save` wrote: each step, and its arguments for a recipe."""
    with _opened(folder) as (manifest, _):
        return manifest.record


def write_text(path: Path, text: str) -> None:
    """Writes a text file completely or not at all."""
    with replaced(path) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path for a new file, which replaces `path` after the block. If anything raises, `path` is as it was."""
    with replacing(path) as beside:
        yield beside
    try:
        rename(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


# --- saving ---------------------------------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> tuple[compressed.State, dict[str, str]]:
    """The state dict with each tied tensor once, and {other name: name in the state dict} for the tied ones."""
    found: compressed.State = {}
    first: dict[Any, str] = {}
    state, tied = compressed.dense_view(model)
    names = sorted(state, key=lambda name: hf.is_tied_copy(model, name))  # transformers expects certain names in the file
    for name in names:
        held = state[name]
        tensor = held.get_buffer(held.names[0]) if isinstance(held, Compressed) else held
        _check_tensor(name, tensor)
        views = (tensor.is_conj(), tensor.is_neg())  # lazily conjugated or negated: the same memory, other values
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, str(tensor.device), views)
        if held is tensor and tensor.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            found[name] = held
    return found, {other: tied.get(name, name) for other, name in tied.items()}


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r} in the state dict is a {type(tensor).__name__}; only tensors can be saved without pickle")
    if sharded(tensor) or tensor.layout != torch.strided or tensor.dtype not in CODES or tensor.is_meta:
        kind = "sharded" if sharded(tensor) else "on the meta device" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
        raise TypeError(f"{name!r} is {kind}; a file holds whole strided tensors of {', '.join(sorted(CODES.values()))}")
    if name != name.encode(errors="replace").decode():
        raise ValueError(f"{name!r} has characters that no file can hold (lone surrogates); rename it")
    if name.endswith(scaled.ALL) or name == "__metadata__":
        raise ValueError(f"{name!r} means something else in a file, like names that end in {', '.join(scaled.ALL)}; rename it")


def _cuts(model: nn.Module, plan: Plan | Shrunk | None) -> list[Cuts]:
    known = list(history(model))
    if not isinstance(plan, Shrunk) or any(plan.cuts is cuts or plan.cuts == cuts for cuts in known):
        return known
    _check_cut(model, plan.cuts)
    return [*known, plan.cuts]


def _record(model: nn.Module, plan: Plan | Shrunk | None) -> list[tuple[Step, Arguments]]:
    """What was done to the model, with the given plan at the end if the model has no record of it."""
    record = [one for one in record_of(model) if one[0][0] != "gate"]  # gates are hooks, which the file does not hold
    if plan is not None and plan.recipe not in [recipe for (_, recipe), _ in record]:
        record.append((("prune" if isinstance(plan, Plan) else "shrink", plan.recipe), plan.arguments))
    return record


def _check_cut(model: nn.Module, cuts: Cuts) -> None:
    """Raises ValueError unless the model has the sizes that these cuts leave; otherwise the file could not be loaded."""
    tensors = dict(owned_tensors(model).values())
    for path in cuts.drop:
        if not _without(model, path, cuts):
            raise ValueError(f"plan= removes modules of {path or 'the model'} and this model holds them; {_NOT_CUT}")
    for name, kept in cuts.tensors.items():
        left = tuple(len(kept.get(d, range(size))) for d, size in enumerate(cuts.shapes[name]))
        if name in tensors and tuple(tensors[name].shape) != left:
            raise ValueError(f"plan= leaves {name!r} as {left} and this model holds {tuple(tensors[name].shape)}; {_NOT_CUT}")
    if cuts.tensors and not cuts.tensors.keys() & tensors.keys() and not compressed.layers_of(model):
        raise ValueError(f"plan= cuts {next(iter(cuts.tensors))!r}, and this model has no such tensor; {_NOT_CUT}")


_NOT_CUT = "save the small model that the plan was made with, or leave plan= out. Nothing was written."


def _without(model: nn.Module, path: str, cuts: Cuts) -> bool:
    """True if a list of modules has the length that the cuts leave, or if its named modules are replaced by `Passing`."""
    try:
        held = model.get_submodule(path)
    except AttributeError:
        return False
    modules, gone = list(held._modules.values()), cuts.drop[path]
    if isinstance(held, nn.ModuleList | nn.Sequential):
        return len(modules) == cuts.lengths[path] - len(gone)
    return len(modules) == cuts.lengths[path] and all(isinstance(modules[place], Passing) for place in gone)


def _described(model: nn.Module, tensors: compressed.State, pack: bool) -> tuple[dict[str, Stored], dict[str, Entry]]:
    """For each tensor, its description in the manifest and the entries to write for it."""
    listed: dict[str, Stored] = {}
    entries: dict[str, Entry] = {}
    for name, held in tensors.items():
        again = partial(_whole, held)
        tensor = again()
        values = packed.count_values(tensor)
        if isinstance(held, Compressed) and held.rounded() is not None:
            made, kind = scaled.entries(name, held), "scaled"
        else:
            made = packed.entries(name, tensor, values, again) if pack or held is not tensor else None
            kind = "dense" if made is None else "bitmask"
        zeros = tensor.numel() - values
        listed[name] = Stored(CODES[tensor.dtype], tuple(tensor.shape), kind, zeros, _pattern(model, name, tensor, zeros))
        entries |= made or {name: Entry(tensor.dtype, tuple(tensor.shape), again)}
    return listed, entries


def _pattern(model: nn.Module, name: str, tensor: Tensor, zeros: int) -> str | None:
    """The pattern of the zeros in a weight. None for other tensors, and where almost nothing or everything is zero."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or not _FEW * tensor.numel() < zeros < tensor.numel():
        return None
    try:
        owner = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        owner = model
    return zeros_of(layout_of(owner, tuple(tensor.shape)).matrix(tensor.detach())).pattern


def _whole(held: Tensor | Compressed) -> Tensor:
    return held.weight if isinstance(held, Compressed) else held


def _put(folder: Path, new: Mapping[str, Path]) -> None:
    """Renames the written files. The new manifest has a name of its own until its tensors are in place.

    So a crash at any moment leaves a manifest with its tensors: see `_opened`. Files of an earlier save that this one does not
    replace are removed.
    """
    waiting, stale = folder / f"{MANIFEST}.next", (_earlier(folder) | _old_index(folder)) - new.keys()
    try:
        rename(new[MANIFEST], waiting)
        for name, beside in new.items():
            if name != MANIFEST:
                rename(beside, folder / name)
        for name in stale:
            (folder / name).unlink(missing_ok=True)
        rename(waiting, folder / MANIFEST)
    finally:
        for beside in new.values():  # left over after an error
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def _old_index(folder: Path) -> set[str]:
    """The index of a folder of Hugging Face, and the files that it lists: readers would prefer them to the new file."""
    return stale_weights(folder) - {TENSOR_FILES[0]} if (folder / INDEX).is_file() else set()


def _earlier(folder: Path) -> set[str]:
    """The tensor file of an earlier save into this folder, and the config if that save wrote it.

    With either left behind, transformers would make a model with random weights.
    """
    try:
        data = read_json(_text(folder / MANIFEST), MANIFEST)
        config = {CONFIG} if data["about"].get("from_pretrained") is True else set()
        return config | ({data["file"]["name"]} & {*TENSOR_FILES})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


# --- loading --------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Manifest, Tensors]]:
    """Opens the manifest and the tensor file that it was written for, both checked completely."""
    for _ in range(_TRIES):
        before = _stamps(folder)
        with ExitStack() as stack:
            try:
                found = _checked(folder, stack)
            except (BadFile, FileNotFoundError):
                if _stamps(folder) == before:
                    raise
                continue  # another save has replaced the files meanwhile
            yield found
            return
    raise BadFile(f"{folder} is being saved to again and again; load it when that has ended")


def _text(path: Path) -> bytes:
    """The bytes of a file, at most one more than a manifest may have."""
    with path.open("rb") as file:
        return file.read(MAX + 1)


def _stamps(folder: Path) -> list[tuple[int, ...] | None]:
    """Inode, size and time of each file, to see whether one of them was replaced."""
    found: list[tuple[int, ...] | None] = []
    for name in (*TENSOR_FILES, MANIFEST, f"{MANIFEST}.next"):
        try:
            now = (folder / name).stat()
            found.append((now.st_ino, now.st_size, now.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _checked(folder: Path, stack: ExitStack) -> tuple[Manifest, Tensors]:
    names = [n for n in (MANIFEST, f"{MANIFEST}.next") if (folder / n).is_file()]
    sizes = {name: (folder / name).stat().st_size for name in TENSOR_FILES if (folder / name).is_file()}
    if not names or not sizes:
        missing = "is a file" if folder.is_file() else f"holds no {TENSOR_FILES[0] if names else MANIFEST}"
        raise FileNotFoundError(f"{folder} {missing}: it is not a folder that sc.save wrote")
    wrong: list[BadFile] = []
    for name in names:
        try:
            manifest = from_text(_text(folder / name), str(folder / name), sizes)
            where = folder / manifest.file
            file = Tensors(stack.enter_context(where.open("rb")), str(where))
            stack.callback(file.close)
            check_file(manifest, file)
            return manifest, file
        except BadFile as error:
            wrong.append(error)
    raise wrong[0]


def _unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unpacks the tensors of a file that was read without its manifest."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name!r} is a {type(tensor).__name__}; a mapping of names to tensors is expected, as load_file returns"
            )
        base, mark, part = name.rpartition("#")
        if mark + part not in scaled.ALL:
            found[name] = tensor
            continue
        parts = scaled.ALL if base + scaled.SCALES in tensors else packed.PARTS
        if missing := [base + p for p in parts if base + p not in tensors]:
            raise BadFile(f"{name!r} has no {names_of(missing)} beside it")
        if mark + part == scaled.SCALES:
            found[base] = scaled.read(base, {base + p: tensors[base + p].cpu() for p in parts}).to(tensor.device)
        if mark + part == packed.BITMASK and parts is packed.PARTS:
            shape, values = tensors[base + packed.SHAPE], tensors[base + packed.VALUES]
            if shape.dtype != torch.int64 or shape.dim() != 1 or bool((shape < 0).any()):
                raise BadFile(f"{base + packed.SHAPE!r} must hold a shape: one row of int64 from 0 up")
            if values.dtype not in CODES or values.dim() != 1 or values.layout != torch.strided:
                raise BadFile(
                    f"{base + packed.VALUES!r} must be a row of numbers, not {values.dtype} of shape {tuple(values.shape)}"
                )
            if base in tensors:
                raise BadFile(f"{base!r} is there twice: dense and packed")
            found[base] = packed.unpack(base, tensor.cpu(), values.cpu(), tuple(shape.tolist())).to(values.device)
    return found


def _fits(model: nn.Module, manifest: Manifest) -> bool:
    state = model.state_dict(keep_vars=True)
    return {name: tuple(t.shape) for name, t in state.items() if isinstance(t, Tensor)} == shapes_of(manifest)
