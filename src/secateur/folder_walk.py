"""Prunes a model that lies in a folder of safetensors files, block by block, in memory for one block.

The model is built without memory for its weights. Each block is read, solved with calibration data, and written to a file of
its own. A run that was stopped goes on from its last journal entry and writes the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import tensors_of
from ._dist import Comm
from .blocks import repeated_blocks
from .edit import built
from .evidence import TensorEvidence
from .io import Entry, Tensors, as_bytes, rename, replacing, write_tensors
from .methods import STREAMED, LayerProblem, Method, OnDevice, Solution, as_mapping, from_mapping, solve_all
from .owners import scores_of
from .patterns import Pattern
from .settings import Settings
from .stats import check_evidence, split_batch
from .stream import Feed
from .targeting import Globs, Target, targets

INDEX, JOURNAL = "model.safetensors.index.json", "secateur-walk.json"
_SMALL, _EVERY = 64 << 20, 60.0  # streams up to so many bytes are saved after every block, larger ones after so many seconds


class Folder:
    """The tensors of a folder: one safetensors file, or several. Each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = sorted(path.glob("*.safetensors"))
        if (index := path / INDEX).exists():
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            found = [file for file in found if file.name in named]
            if missing := named - {file.name for file in found}:
                raise ValueError(f"{path} has no {sorted(missing)[0]!r}, which its {INDEX} names")
        if not found:
            raise ValueError(f"{path} holds no safetensors file; save the model there first (save_pretrained, or sc.save)")
        self.file_of: dict[str, Path] = {}
        self.entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for file in found:
            with self._opened(file) as tensors:
                self.entries |= tensors.entries
                self.file_of |= dict.fromkeys(tensors.entries, file)

    def read(self, name: str) -> Tensor:
        with self._opened(self.file_of[name]) as tensors:
            return tensors.read(name)

    @contextlib.contextmanager
    def _opened(self, file: Path) -> Iterator[Tensors]:
        with file.open("rb") as handle:
            tensors = Tensors(handle, str(file))
            try:
                yield tensors
            finally:
                tensors.close()


@dataclass
class Written:
    """The folder that was written: for each pruned tensor the number of weights kept and of all, and notes by name."""

    path: Path
    recipe: str
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The counts as plain numbers."""
        kept, total = (sum(numbers) for numbers in zip(*self.counts.values(), strict=True))
        return {"tensors": len(self.counts), "total": total, "kept": kept, "sparsity": 1 - kept / total if total else 0.0}

    def __str__(self) -> str:
        found = self.metrics()
        head = f"{self.path}: {self.recipe}; {found['tensors']} tensors, {found['sparsity']:.2%} zeros"
        return "\n".join([head, *(f"{name}: {note}" for name, note in self.notes.items())])


def prune_folder(
    source: str | Path,
    target: str | Path,
    *,
    into: Callable[[], nn.Module],
    data: Iterable[Any],
    method: Method | str = "flow",
    sparsity: float | None = None,
    pattern: str | Pattern = "unstructured",
    scope: str | None = None,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    device: str | torch.device | None = None,
) -> Written:
    """Prunes a model that lies in a folder of safetensors files, in memory for one block. Arguments are those of `prune_`.

    `source` is the folder, `target` the one to write, and `into` builds the model without weights::

        config = AutoConfig.from_pretrained(source)
        prune_folder(source, target, into=lambda: AutoModelForCausalLM.from_config(config), data=batches, pattern="2:4")

    See `prune_blocks`.
    """
    settings = Settings.of("magnitude", pattern, scope, sparsity, None, None, method, 0.0)
    if settings.scheduled:
        raise TypeError(f"{settings.scheduled[0]} changes with the step; give a number to prune a folder")
    return prune_blocks(
        source, target, into, data, settings=settings, include=include, exclude=exclude, types=types, device=device
    )


def prune_blocks(
    source: str | Path,
    target: str | Path,
    into: Callable[[], nn.Module],
    data: Iterable[Any],
    *,
    settings: Settings,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    device: str | torch.device | None = None,
) -> Written:
    """Prunes the model in the folder `source` by a method that needs calibration data, and writes it to the folder `target`.

    `into` builds the model that the tensors belong to; its weights take no memory. One block at a time is read to `device`
    (default: the CPU), solved, and written, in files that Hugging Face's `from_pretrained` reads. The inputs of the blocks lie
    on the host. When the call is repeated after a crash, it goes on where it was and gives the same files.
    """
    source, target, batches = Path(source), Path(target), list(data)
    _check(settings, source, target)
    check_evidence(settings.needs & STREAMED, batches, None, of=str(settings.method))
    model = built(into).eval()
    found, _ = targets(model, include=include, exclude=exclude, types=types, meta=True)
    folder = Folder(source)
    target.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps([settings.describe(0), [t.name for t in found], str(source.resolve())]).encode())
    for batch in batches:
        for tensor in tensors_of(split_batch(batch)[:2]):
            digest.update(as_bytes(tensor))
    home = FromFolder(model, found, folder, target, torch.device(device or "cpu"), digest.hexdigest())
    written = Written(target, settings.describe(0), home.counts)
    with home:
        solve_all(model, found, settings.method.needs, batches, _solver(settings), written.notes, home)
        home.finish()
    return written


def _check(settings: Settings, source: Path, target: Path) -> None:
    """Raises where pruning needs more than one block at a time."""
    if source.resolve() == target.resolve():
        raise ValueError(f"source and target are the same folder, {source}; give another target")
    method: Method = settings.method
    if settings.scope == "global" or settings.spread is not None or settings.criterion.needs or method.curvature != "none":
        raise ValueError(
            f"{settings.describe(0)} compares layers of the whole model, or needs evidence from all of it, and a folder is "
            "pruned one block at a time; use scope='tensor' or 'row', no spread=, and a method without curvature"
        )
    if not method.needs & STREAMED:
        raise ValueError(f"{method} needs no data; prune the loaded model, or the files themselves")


def _solver(settings: Settings) -> Callable[[Target, Mapping[str, Any]], Solution]:
    def solve(target: Target, evidence: Mapping[str, Any]) -> Solution:
        known = TensorEvidence(target, {}, 0)
        scores = scores_of(settings.criterion, known)
        problem = LayerProblem(
            target.name,
            target.layout.matrix(target.weight),
            H=evidence.get("gram"),
            C=evidence.get("cross"),
            D=evidence.get("residual"),
            tokens=evidence.get("tokens"),
            scores=scores,
            evidence=known,
        )
        (amount,) = settings.amounts({target.name: scores}, 0, None, Comm()).values()
        return settings.method.solve(problem, settings.pattern, amount, None)

    return solve


class FromFolder(OnDevice):
    """Reads a block from a folder when it is needed, and writes it when it is solved."""

    def __init__(
        self, model: nn.Module, found: Sequence[Target], folder: Folder, target: Path, device: torch.device, digest: str
    ) -> None:
        super().__init__(device)
        self.folder, self.target, self.digest = folder, target, digest
        self.counts: dict[str, tuple[int, int]] = {}
        self._names: dict[tuple[int, str], list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for attribute in (*module._parameters, *module._buffers):
                own = f"{path}.{attribute}" if path else attribute
                self._names.setdefault((id(module), attribute), []).append(own)
        blocks = repeated_blocks(model, [t.name for t in found], lists=(nn.ModuleList, nn.Sequential))
        inner = [block.module for block in blocks if block.module is not model]
        self._number = {id(module): i for i, module in enumerate(inner)}
        self._of_blocks = {name for block in inner for name in self._stored(block)}
        self._changed: dict[str, Tensor] = {}  # solved tensors outside of blocks
        self._written: dict[str, str] = {}
        self._saved = time.monotonic()
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._check_names(model)

    def __enter__(self) -> FromFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.shutdown()

    def _check_names(self, model: nn.Module) -> None:
        for name, tensor in model.named_parameters():
            if tensor.is_meta and not any(name in own and self._in_folder(own) for own in self._names.values()):
                raise ValueError(f"{self.folder.path} has no tensor {name!r}; into= must build the model that was saved there")

    def _in_folder(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.folder.entries), None)

    def _stored(self, block: nn.Module) -> list[str]:
        """The names, in the folder, of the tensors of a block."""
        spaces = [(m, attribute) for m in block.modules() for attribute in (*m._parameters, *m._buffers)]
        return [name for m, attribute in spaces for name in self._names[id(m), attribute] if name in self.folder.entries]

    def fetch(self, module: nn.Module, attribute: str, tensor: Tensor) -> Tensor:
        name = self._in_folder(self._names[id(module), attribute])
        if name is None:
            return super().fetch(module, attribute, tensor)
        if self.folder.entries[name][1] != tuple(tensor.shape):
            shape = self.folder.entries[name][1]
            raise ValueError(f"{name!r} is {shape} in {self.folder.path} and {tuple(tensor.shape)} in the model of into=")
        return self.folder.read(name).to(self.device)

    @contextlib.contextmanager
    def inside(self, name: str, block: nn.Module) -> Iterator[None]:
        with self.brought(list(block.modules())) as there:
            yield
            by_name = {own: t for (m, attribute), t in there.items() for own in self._names[id(m), attribute]}
            tensors = {n: by_name[n].detach().cpu() for n in self._stored(block)}
            self._wait()  # so that at most one block waits for the disk
            self._writing = self._writer.submit(self._write, self._number[id(block)], tensors)

    def _wait(self) -> None:
        """Waits until the last block is written, and raises what went wrong."""
        if self._writing is not None:
            self._writing.result()

    def solved(self, name: str, solution: Solution) -> Solution:
        self.counts[name] = int(solution.mask.sum()), solution.mask.numel()
        if name not in self._of_blocks and solution.weight is not None:
            self._changed[name] = solution.weight.to("cpu", copy=True)
        return Solution(torch.empty(0, dtype=torch.bool))  # the rest is in the block, which is written

    # --- files ---

    def _file(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{len(self._number) + 1:05d}.safetensors"

    def _write(self, number: int, tensors: Mapping[str, Tensor | Callable[[], Tensor]]) -> None:
        entries = {}
        for name, tensor in tensors.items():
            dtype, shape = self.folder.entries[name]
            entries[name] = Entry(dtype, shape, tensor if callable(tensor) else lambda tensor=tensor: tensor)
        file = self.target / self._file(number)
        with replacing(file) as beside:
            write_tensors(beside, entries, {"format": "pt"})
        rename(beside, file)
        self._written |= dict.fromkeys(tensors, file.name)

    def resume(self, feeds: tuple[Feed, Feed]) -> int:
        journal = self.target / JOURNAL
        if not journal.exists():
            return 0
        known = json.loads(journal.read_text(encoding="utf-8"))
        if known["digest"] != self.digest:
            raise ValueError(
                f"{self.target} holds an unfinished run with other settings, data or source; give another target, or remove "
                f"{journal.name} there"
            )
        with (self.target / known["streams"]).open("rb") as handle:
            tensors = Tensors(handle, known["streams"])
            found = {name: tensors.read(name) for name in tensors.entries}
            tensors.close()
        for feed, name in zip(feeds, ("pruned", "dense"), strict=True):
            from_mapping(feed, name, found)
        self.counts |= {name: (kept, total) for name, (kept, total) in known["counts"].items()}
        self._written |= known["files"]
        return known["blocks"]

    def finished(self, number: int, feeds: tuple[Feed, Feed]) -> None:
        tensors = {**as_mapping(feeds[0], "pruned"), **as_mapping(feeds[1], "dense")}
        large = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()) > _SMALL
        if number == len(self._number) or (large and time.monotonic() - self._saved < _EVERY):
            return
        self._wait()
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        streams = self.target / f"secateur-walk-{number}.safetensors"
        with replacing(streams) as beside:
            entries = {name: Entry(t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()}
            write_tensors(beside, entries, {})
        rename(beside, streams)
        known = {
            "digest": self.digest,
            "blocks": number,
            "streams": streams.name,
            "counts": self.counts,
            "files": self._written,
        }
        with replacing(self.target / JOURNAL) as beside:
            beside.write_text(json.dumps(known), encoding="utf-8")
        rename(beside, self.target / JOURNAL)
        self._clean(but=streams.name)
        self._saved = time.monotonic()

    def _clean(self, but: str = "") -> None:
        for file in self.target.glob("secateur-walk-*.safetensors"):
            if file.name != but:
                file.unlink()

    def finish(self) -> None:
        """Writes the tensors outside of blocks, one at a time, the index, and the other files of the source."""
        self._wait()
        rest = [name for name in self.folder.entries if name not in self._of_blocks]
        self._write(
            len(self._number),
            {name: self._changed.get(name, lambda name=name: self.folder.read(name)) for name in rest},
        )
        for file in self.folder.path.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "secateur.json"):
                shutil.copyfile(file, self.target / file.name)
        size = sum(Entry(dtype, shape, torch.empty).bytes for dtype, shape in self.folder.entries.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": self._written}, indent=2, sort_keys=True)
        with replacing(self.target / INDEX) as beside:
            beside.write_text(text, encoding="utf-8")
        rename(beside, self.target / INDEX)
        (self.target / JOURNAL).unlink(missing_ok=True)
        self._clean()
