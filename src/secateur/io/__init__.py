"""Saves and loads pruned models without pickle: `save`, `load`, and `dense_state_dict` for use without a model.

A saved model is a folder with a safetensors file, which any reader of that format opens, and the manifest `secateur.json`.

- `files`: safetensors files, written completely or not at all.
- `packed`: tensors with many zeros, stored as a bit for each element and the values.
- `scaled`: weights in fewer bits, with their scales.
- `compressed`: layers in sparse formats.
- `gated`: gates of layers.
- `manifest`: the list of what the tensor file holds, and the cuts that made the model.
- `fill`: copies a file into a model.
- `entries`: the tensors of a model as entries of files.
- `hf`: configs for Hugging Face models.
- `folder`: folders of one or several safetensors files, read a few rows at a time.
- `opening`: opens the folder of a model, every byte checked.
- `shared`: files that several processes write together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import Comm, mesh_comm, reshard_, together
from .._tree import nearest
from ..edit import (
    Arguments,
    Cuts,
    Passing,
    Step,
    all_or_nothing,
    apply_cuts_,
    check_no_arguments,
    history,
    is_cut,
    owned_tensors,
    record_of,
    remember_,
    restore_record_,
    saved_module,
)
from ..execute import decompress_
from ..methods import without_soft_masks
from ..plans import Plan
from ..surgery import Shrunk
from . import compressed, gated, hf, packed, scaled
from .behind import writing_behind
from .entries import described, names_of_files, split, tensors_to_save
from .files import (
    CODES,
    DTYPES,
    MANIFEST,
    TENSOR_FILES,
    BadFile,
    Entry,
    Tensors,
    Written,
    alone,
    as_bytes,
    names_of,
    rename,
    replacing,
    write_tensors,
)
from .fill import check_kinds, dtype_of, fill_, read
from .folder import (
    INDEX,
    JOURNAL,
    Folder,
    Journal,
    check_free,
    index_text,
    replacing_file,
    stale_weights,
    write_index,
)
from .manifest import File, Manifest, about, shapes_of, to_text
from .opening import NEXT, UNCUT, earlier_files, finish_killed, opened
from .shared import write_shared

__all__ = [
    "save", "load", "dense_state_dict", "BadFile", "MANIFEST", "UNCUT", "record_in", "replaced", "write_text",
    "JOURNAL", "Entry", "Folder", "Journal", "Tensors", "as_bytes", "rename", "replacing", "replacing_file", "write_index",
    "writing_behind", "check_free",
    "write_tensors",  # for folders
]  # fmt: skip


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    packed: bool = False,
    plan: Plan | Shrunk | None = None,
    max_file_bytes: int | None = None,
) -> dict[str, Any]:
    """Writes the model to the folder `path`, and returns the entry `about` of the manifest (model, history, versions).

    `packed`: stores tensors with many zeros as a bit for each element and the values. Without it the file holds the state dict
    as it is, including zeros; only the weights of compressed layers are always packed. A model that `shrink` made stores its
    cuts, and `load` cuts a fresh model by them. Gates are saved too. `plan` is needed only for a model that was rebuilt by
    other means. A model that is being pruned with `ste=True` is saved with its masks applied.

    The entry "history" lists what was done to the model, the first thing first: `["shrink", recipe]`, `["prune", recipe]`.
    "recipe" is that of `plan`, or the last one. `load` restores the history, and `sc.summary` shows it. "arguments" holds the
    arguments of each step, and `sc.Recipe.load(path)` returns them as a recipe that makes such a model again.

    With `max_file_bytes`, tensors are spread over files of at most that many bytes (larger only for a tensor that is larger
    itself), with `model.safetensors.index.json`. Weights of an earlier model in the folder are removed.

    A sharded model (FSDP2, tensor parallel) is saved by all processes of its mesh, which all call `save`. Each writes the parts
    that it holds to the same files, on a disk that all of them reach. The files are those of the gathered model. Of a model in
    torch.compile or DistributedDataParallel the module inside is saved, under its own names.

    For a Hugging Face model, `config.json` is written with the sizes of the small model. If a config can describe it (all
    layers cut alike), plain `from_pretrained(path)` loads the folder. The entry "from_pretrained" of the result is True then,
    and otherwise a text with the reason. Compare it with `is True`: a text counts as true in `if`. For other models there is
    no such entry.
    """
    model = saved_module(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"save takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(plan, Plan | Shrunk | None):
        raise TypeError(f"plan= must be what prune_ or shrink returned, not {type(plan).__name__}")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; save() writes a folder with {TENSOR_FILES[0]} and {MANIFEST} in it")
    if folder.suffix == ".safetensors" and not folder.exists():
        wanted = folder.parent if folder.name in TENSOR_FILES else folder.with_suffix("")
        raise ValueError(
            f"{folder} names a file; save() writes a folder with {TENSOR_FILES[0]} and {MANIFEST} in it, so pass the path of a "
            f"folder, such as {str(wanted)!r}"
        )
    if max_file_bytes is not None and (type(max_file_bytes) is not int or max_file_bytes < 1):
        raise ValueError(f"max_file_bytes={max_file_bytes!r} must be a positive integer, or None for one file")
    model = without_soft_masks(model)
    reshard_(model)
    comm = mesh_comm([*model.parameters(), *model.buffers()])
    tensors, tied = tensors_to_save(model)
    cuts = _cuts(model, plan)
    layers, gates = compressed.listed(model), gated.gates_of(model)
    listed, entries = described(model, tensors, packed, comm)
    said = about(model, None if plan is None else plan.recipe, _record(model, plan))
    against = {
        "is packed; save it without packed=True": packed,
        "has compressed layers; decompress_ it first": layers,
        "has adapters; merge them first (sc.merge_lora_(model))": hasattr(model, "peft_config"),
        "has gates; remove them first (sc.Gates.of(model).undo_())": gates,
    }
    extra, note = hf.files(model, next((why for why, given in against.items() if given), None))
    if note is not None:
        said["from_pretrained"] = note
    data = TENSOR_FILES[isinstance(note, str)]  # without a config, from_pretrained would fill a model of default size from it
    parts = split(listed, entries, max_file_bytes)

    def manifest(written: Mapping[str, Written]) -> bytes:
        files = {name: File(each.size, each.header) for name, each in written.items()}
        digests = {name: digest for each in written.values() for name, digest in each.tensors.items()}
        return to_text(Manifest(listed, tied, cuts, files, digests, said, layers, gates))

    with ExitStack() as stack:
        _write(folder, data, parts, extra, manifest, comm, stack)
    return said


def load(path: str | os.PathLike[str], into: nn.Module | Callable[[], nn.Module], *, as_: str | None = None) -> nn.Module:
    """Loads the model that was saved in the folder `path`, and returns it in the mode (training or evaluation) of `into`.

    `into`: a function that builds the model as it was before any cut, or such a model, which is changed in place; it may be
    cut already. The model is cut as the saved one was, and all names, shapes and dtypes must match. Every byte is checked
    first: if anything is wrong, `BadFile` (a ValueError) is raised and the model is as it was. Compressed layers are
    compressed again, in the format that was saved; `as_="dense"` loads plain layers instead. The gates that were saved, if
    any, replace those of `into`.

    A folder that `save_pretrained` or `prune_folder` wrote is loaded too; it has no digests. A sharded model (FSDP2, tensor
    parallel) is loaded by all processes of its mesh, which all call `load` and read the parts that they hold.
    """
    if as_ not in (None, "dense"):
        raise ValueError(f"as_={as_!r} must be 'dense' or left out.{nearest(str(as_), ['dense'])}")
    given: Any = into
    if not isinstance(into, nn.Module) and callable(into):
        check_no_arguments(into)
        given = into()
    model = saved_module(given)
    if not isinstance(given, nn.Module) or not isinstance(model, nn.Module):
        raise TypeError(f"into= must be a model or a function that builds one; this gave a {type(given).__name__}")
    check_kinds(model)
    reshard_(model)
    comm = mesh_comm([*model.parameters(), *model.buffers()])
    with opened(Path(path), comm) as (manifest, file):
        parallel = isinstance(given, nn.DataParallel | nn.parallel.DistributedDataParallel)
        if parallel and all(name.startswith("module.") for name in manifest.tensors):
            model = given  # earlier versions kept the names that the wrapper adds
        if not manifest.files:
            manifest.tied = _ties_of(model, manifest)
        if not comm.alone and (manifest.layers or any(stored.format != "dense" for stored in manifest.tensors.values())):
            raise ValueError(f"{path} holds packed tensors, which are not read into shards; load it before sharding the model")
        if not comm.alone and not _fits(model, manifest) and manifest.cuts:
            raise ValueError(f"{path} holds a model that was cut; load it before sharding the model, or shard one cut alike")
        if parallel and manifest.cuts and not _fits(model, manifest):
            raise ValueError(
                f"{path} holds a model that was cut, and {type(given).__name__} keeps buckets and hooks for the tensors as they"
                " are; load it into the module under it (.module), and wrap the result"
            )
        gates = gated.read_gates(manifest.gates)
        with all_or_nothing(model):
            if compressed.layers_of(model):
                decompress_(model)
            if not (_fits(model, manifest) and all(is_cut(model, cuts) for cuts in manifest.cuts)):
                for cuts in manifest.cuts:
                    apply_cuts_(model, cuts)
            remember_(model, manifest.cuts)
            with gated.attached(model, gates):
                fill_(model, manifest, file, {} if as_ == "dense" else manifest.layers)
            restore_record_(model, [one for one in manifest.record if as_ is None or one[0][0] != "compress"])
    return given


def dense_state_dict(source: Mapping[str, Tensor] | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns a dense state dict from a folder that `save` wrote, or from the mapping that safetensors' `load_file` returned.

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
    with opened(Path(source)) as (manifest, file):
        found = {name: read(file, name, stored) for name, stored in manifest.tensors.items()}
        found |= {other: found[name] for other, name in manifest.tied.items()}
        return {name: tensor.to(DTYPES[dtype_of(name, manifest)]) for name, tensor in found.items()}


def record_in(folder: Path) -> list[tuple[Step, Arguments]]:
    """What was done to the model in a folder that `save` wrote: each step, and its arguments for a recipe."""
    with opened(folder) as (manifest, _):
        return manifest.record


def write_text(path: Path, text: str) -> None:
    """Writes a text file completely or not at all. Devices and pipes are written to; links stay, and their files change."""
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    with replaced(path.resolve() if path.is_symlink() else path) as beside:
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


def _write(
    folder: Path,
    data: str,
    parts: Sequence[Mapping[str, Entry]],
    extra: Mapping[str, str],
    manifest: Callable[[Mapping[str, Written]], bytes],
    comm: Comm,
    locked: ExitStack,
) -> None:
    """Writes the files beside the old ones, and renames them when all are whole.

    The first process makes the files, and all write their parts of the tensors to them.
    """
    files: list[str] = []
    new: dict[str, Path] = {}
    with ExitStack() as stack:
        with together(comm, f"make files in {folder}"):
            if comm.rank == 0:
                several = len(parts) > 1
                index = [INDEX] if several and data == TENSOR_FILES[0] else []
                if taken := [name for name in (*extra, *index, MANIFEST, *[data] * (not several)) if (folder / name).is_dir()]:
                    raise ValueError(
                        f"{folder / taken[0]} is a folder; save() writes a file of that name. Nothing was written."
                    )
                folder.mkdir(parents=True, exist_ok=True)
                locked.enter_context(alone(folder))
                files = names_of_files(data, len(parts), folder)  # names that no other save takes meanwhile
                new = {name: stack.enter_context(replacing(folder / name)) for name in (*extra, *files, *index, MANIFEST)}
        files, new = comm.gather((files, new))[0]
        written = {name: write_shared(new[name], part, {"format": "pt"}, comm) for name, part in zip(files, parts, strict=True)}
        with together(comm, f"write {MANIFEST}"):
            if comm.rank == 0:
                new[MANIFEST].write_bytes(manifest(written))
                for name, text in extra.items():
                    new[name].write_text(text, encoding="utf-8")
                if INDEX in new:
                    size = sum(entry.bytes for part in parts for entry in part.values())
                    file_of = {name: file for file, part in zip(files, parts, strict=True) for name in part}
                    new[INDEX].write_text(index_text(file_of, size), encoding="utf-8")
    with together(comm, "rename the files"):
        if comm.rank == 0:
            _put(folder, new)


def _cuts(model: nn.Module, plan: Plan | Shrunk | None) -> list[Cuts]:
    known = list(history(model))
    if not isinstance(plan, Shrunk) or any(plan.cuts is cuts or plan.cuts == cuts for cuts in known):
        return known
    _check_cut(model, plan.cuts)
    return [*known, plan.cuts]


def _record(model: nn.Module, plan: Plan | Shrunk | None) -> list[tuple[Step, Arguments]]:
    """What was done to the model, with the given plan at the end if the model has no record of it."""
    record = record_of(model)
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


def _put(folder: Path, new: Mapping[str, Path]) -> None:
    """Renames the written files. The new manifest has a name of its own until its tensors are in place.

    So a crash at any moment leaves a manifest with its tensors: see `opened`. Files of an earlier save that this one does not
    replace are removed.
    """
    waiting, stale = folder / NEXT, (earlier_files(folder) | _old_index(folder)) - new.keys()
    try:
        finish_killed(folder)
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


# --- loading --------------------------------------------------------------------------------------------------------


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


def _ties_of(model: nn.Module, manifest: Manifest) -> dict[str, str]:
    """The tied names of a model that plain files leave out: {other name: name in the files}."""
    state = model.state_dict(keep_vars=True)
    known = {id(tensor): name for name, tensor in state.items() if name in manifest.tensors}
    return {n: known[id(tensor)] for n, tensor in state.items() if n not in manifest.tensors and id(tensor) in known}


def _fits(model: nn.Module, manifest: Manifest) -> bool:
    state = model.state_dict(keep_vars=True)
    return {name: tuple(t.shape) for name, t in state.items() if isinstance(t, Tensor)} == shapes_of(manifest)
