"""Opens the folder of a model: one that `save` wrote, every byte checked, or plain safetensors files of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .._dist import Comm
from .files import CODES, MANIFEST, TENSOR_FILES, BadFile, TensorFiles, Tensors, read_json, rename
from .folder import INDEX, Folder
from .manifest import FILE_NAME, MAX, Manifest, Stored, check_files, from_text, listed_files
from .scaled import ALL as PARTS

CONFIG, NEXT = "config.json", f"{MANIFEST}.next"
UNCUT = "secateur.config.json"  # the config that builds the model as it was before any cut, where none describes it as it is
_TRIES = 20  # how often a folder is read that others write to meanwhile


@contextmanager
def opened(folder: Path, comm: Comm | None = None) -> Iterator[tuple[Manifest, TensorFiles]]:
    """Opens the manifest and the tensor files that it was written for, all checked completely.

    The processes of `comm` share the work, and all of them raise if one does. A folder without a manifest is opened too if it
    holds the safetensors files of a Hugging Face model; such files have no digests.
    """
    comm = comm or Comm()
    for _ in range(_TRIES):
        before, error, found = _stamps(folder), None, None
        with ExitStack() as stack:
            try:
                found = _checked(folder, stack, comm)
            except (BadFile, OSError) as wrong:
                error = wrong
            failed, changed = comm.sum(int(error is not None), int(_stamps(folder) != before))
            if found is not None and not failed:
                yield found
                return
        if not changed:
            raise error or BadFile(f"another process cannot load {folder}, and says why")
        # otherwise another save has replaced the files meanwhile
    raise BadFile(f"{folder} is being saved to again and again; load it when that has ended")


def earlier_files(folder: Path) -> set[str]:
    """The tensor files of earlier saves into this folder, also of one that was killed, and the configs that belong to them.

    With one of them left behind, transformers would make a model with random weights.
    """
    found = {UNCUT}
    for name in (MANIFEST, NEXT):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            data = read_json(_text(folder / name), name)
            found |= {CONFIG} if data["about"].get("from_pretrained") is True else set()
            found |= set(listed_files(data))
    return found


def finish_killed(folder: Path) -> None:
    """Finishes a save that was killed after its tensor files had their names: gives its manifest the final name.

    A later save uses the other name for its own manifest, and if it was killed as well, no manifest would fit the files.
    """
    if (folder / NEXT).is_file():
        with ExitStack() as stack, suppress(BadFile, FileNotFoundError):
            if _fitting(folder, stack, Comm())[0] == NEXT:
                rename(folder / NEXT, folder / MANIFEST)


def _text(path: Path) -> bytes:
    """The bytes of a file, at most one more than a manifest may have."""
    with path.open("rb") as file:
        return file.read(MAX + 1)


def _stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """Inode, size and time of each file, to see whether one of them was replaced."""
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*"):
        if file.suffix == ".safetensors" or file.name in (MANIFEST, NEXT, INDEX):
            try:
                now = file.stat()
            except OSError:
                continue
            found[file.name] = now.st_ino, now.st_size, now.st_mtime_ns
    return found


def _checked(folder: Path, stack: ExitStack, comm: Comm) -> tuple[Manifest, TensorFiles]:
    plain = (folder / INDEX).is_file() or (folder / TENSOR_FILES[0]).is_file()
    if plain and not any((folder / name).is_file() for name in (MANIFEST, NEXT)):
        return _plain(folder, stack)
    _, manifest, files = _fitting(folder, stack, comm)
    return manifest, files


def _fitting(folder: Path, stack: ExitStack, comm: Comm) -> tuple[str, Manifest, TensorFiles]:
    """The first manifest that fits the tensor files, with its name and these files."""
    names = [name for name in (MANIFEST, NEXT) if (folder / name).is_file()]
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors") if FILE_NAME.fullmatch(file.name)}
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist; pass a folder that sc.save wrote")
    if not names and any(folder.glob("shard-*.safetensors")):
        raise FileNotFoundError(
            f"{folder} holds only parts of tensors, as torch's HuggingFaceStorageWriter writes them on each process; save with "
            "enable_consolidation=True"
        )
    if not names or not sizes:
        missing = "is a file" if folder.is_file() else f"holds no {TENSOR_FILES[0] if names else MANIFEST}"
        hint = f"; pass the path of the folder, {str(folder.parent)!r}" if folder.is_file() else ""
        raise FileNotFoundError(f"{folder} {missing}: it is not a folder that sc.save wrote{hint}")
    wrong: list[BadFile] = []
    for name in names:
        try:
            manifest = from_text(_text(folder / name), str(folder / name), sizes)
            files = TensorFiles([_open(folder / each, stack) for each in manifest.files])
            check_files(manifest, files, slice(comm.rank, None, comm.size))
            return name, manifest, files
        except BadFile as error:
            wrong.append(error)
    raise wrong[0]


def _open(path: Path, stack: ExitStack) -> Tensors:
    file = Tensors(stack.enter_context(path.open("rb")), str(path))
    stack.callback(file.close)
    return file


def _plain(folder: Path, stack: ExitStack) -> tuple[Manifest, TensorFiles]:
    """The files of a Hugging Face model, with a manifest of what their headers say."""
    with Folder(folder) as listed:
        files = TensorFiles([_open(folder / name, stack) for name in listed.files])
        if odd := [name for name in listed.entries if name.endswith(PARTS)]:
            raise BadFile(f"{odd[0]!r} is part of a packed tensor, and {folder} has lost the {MANIFEST} that it was saved with")
        tensors = {name: Stored(CODES[dtype], shape, "dense", 0, None) for name, (dtype, shape) in listed.entries.items()}
    return Manifest(tensors, {}, [], {}, {}), files
