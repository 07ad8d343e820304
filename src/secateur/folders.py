"""`prune_folder`: prunes the safetensors files of a folder, of which only a part has to fit into memory.

Criteria without data read a slab of rows at a time, and the model is not built. Methods that need data run it block by block
(`folder_walk`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import kernels
from ._arguments import tensors_of
from ._dist import Box, Comm, DataRanks, Group, together
from ._hints import hints
from ._layers import Layout
from .budgets import Spread
from .criteria import Criterion, magnitude
from .digits import READ, Part, Pool, find_cuts, keep
from .display import Table, notes_by_reason
from .edit import built_model
from .evidence import random_scores
from .folder_targets import choose
from .folder_walk import check_blocks, prune_blocks
from .io import Folder, Journal, as_bytes, check_free, replacing_file, writing_behind
from .methods import STREAMED, Method
from .patterns import Pattern
from .plans import Layer
from .scores import Scores, nan_in
from .select import elements, fold, keep_each, row_budget
from .settings import Settings
from .shards import Facts, budget_of, facts_of
from .stats import check_evidence, split_batch
from .targeting import Globs


@dataclass(frozen=True)
class PrunedFolder:
    """The folder that `prune_folder` wrote: the counts of each tensor, what was skipped and why, and notes by name."""

    path: Path
    recipe: str
    layers: list[Layer]
    skipped: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """The counts as plain numbers."""
        total, kept = sum(layer.total for layer in self.layers), sum(layer.kept for layer in self.layers)
        counts = {"total": total, "kept": kept, "pruned": total - kept, "sparsity": 1 - kept / total if total else 0.0}
        return {"tensors": len(self.layers), **counts, "skipped": len(self.skipped)}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        layers = {one.name: {"kept": one.kept, "total": one.total, "sparsity": one.sparsity} for one in self.layers}
        about = {"path": str(self.path), "recipe": self.recipe}
        return {**about, **self.metrics(), "layers": layers, "skipped": self.skipped, "notes": self.notes}

    def _table(self) -> Table:
        rows = [(one.name, "x".join(map(str, one.shape)), f"{one.kept:,}", f"{one.total:,}") for one in self.layers]
        shares = [f"{one.sparsity:.2%}" for one in self.layers]
        whole = self.metrics()
        return Table(
            ("tensor", "shape", "kept", "of", "sparsity"),
            [(*row, share) for row, share in zip(rows, shares, strict=True)],
            [("in all", "", f"{whole['kept']:,}", f"{whole['total']:,}", f"{whole['sparsity']:.2%}")],
            right=range(2, 5),
            title=f"{self.path}: {self.recipe}",
            notes=[*notes_by_reason("note", self.notes), *notes_by_reason("skipped", self.skipped)],
        )

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html(f"{len(self.skipped)} skipped", self.skipped.items())


@hints
def prune_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    criterion: Criterion | str = magnitude,
    *,
    sparsity: float | None = None,
    count: int | None = None,
    pattern: str | Pattern = "unstructured",
    scope: str | None = None,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    spread: Spread | Mapping[str, float] | str | None = None,
    method: Method | str | None = None,
    data: Iterable[Any] | None = None,
    into: Callable[[], nn.Module] | None = None,
    device: str | torch.device | None = None,
    group: Group | None = None,
    overwrite: bool = False,
) -> PrunedFolder:
    """Prunes the safetensors files of a folder into another folder, and returns the counts. The files may exceed the memory.

    The weights are those that `prune_` with the same arguments would leave in the loaded model, bit for bit, except where
    `notes` of the result say that a layer in front of the blocks was solved after them. Without `data`,
    files are read in slabs of rows and written as they are read (for pattern "in", and weights stored as (in, out), one tensor
    at a time). With a method that needs `data`, one block of the model at a time is read, solved and written. All other files
    of the folder and its subfolders are copied, except for those with weights. After a crash, the same call continues where it
    stopped.

    Args:
        source: a folder of Hugging Face, with `model.safetensors` or with several files and `model.safetensors.index.json`.
        target: the folder to write. It may exist. If it holds a model already, `overwrite` has to be True.
        criterion: an expression without data, computed element by element, such as `sc.magnitude` or `sc.random(0)`.
        sparsity, count, pattern, scope, exclude, types, spread: as for `prune_`.
        include: globs over names. Without `into` it is required, because files do not say which tensors are weights.
        method: as for `prune_`. Methods that need data, such as "sparsegpt" and "flow", need `into` and `data`. Only one
            block is loaded at a time, so a model is refused if a block reads values that another block stored in a cache
            which both get as an argument. Values that blocks store in attributes are not noticed: use `prune_` for such models.
        data: calibration batches, as for `prune_`. With `group`, those of this process.
        into: a function that builds the model; its weights take no memory. It says which tensors are weights of which layers,
            as `prune_` chooses them, and their order among equal scores.
        device: where blocks are solved, by default the CPU.
        group: a process group whose processes all call this function. They share the files, or with `data` the batches.
        overwrite: True replaces a model that `target` holds. Its weights are removed before the first new ones are written.

    Raises:
        FileExistsError: `target` holds a whole model, not an unfinished run of this call, or another process writes to it.
    """
    ranks = DataRanks(group)
    with contextlib.ExitStack() as stack:
        with together(ranks.comm, "use its arguments"):
            if not isinstance(source, str | os.PathLike):
                raise TypeError(f"source= is the folder of a model, not {type(source).__name__}; prune_ takes models")
            settings = Settings.of(criterion, pattern, scope, sparsity, count, spread, method)
            written, blocks = Path(target), bool(settings.method.needs & STREAMED)
            batches = _check(settings, blocks, data, into)
            if written.exists() and (not written.is_dir() or written.resolve() == Path(source).resolve()):
                raise ValueError(f"target={str(target)!r} must be another folder than the source")
            folder = stack.enter_context(Folder(Path(source)))
            folder.check_listed()
            if folder.gated:
                raise ValueError(f"{source} holds a model with gates, which would be lost; load it, prune_ it and save it")
            model = None if into is None else built_model(into)
            chosen, found, skipped = choose(folder, model, include, exclude, types)
            tied = [(n, other) for n, one in zip(chosen, found) for other in one.names if other in folder.entries]
            copies = {other: name for name, other in tied if other != name}
            folder.check_copies({} if blocks else copies)  # prune_blocks first looks for blocks that share tensors
            run = _run_of(settings, folder, chosen)
            check_free(written, overwrite)
        ranks.comm.check_same(str(run))
        seen = ranks.comm.gather(_digest(batches)) if blocks else []
        journal = stack.enter_context(Journal(written, {**run, "data": seen}, ranks.rank, overwrite))
        if blocks:
            assert model is not None
            where = torch.device(device or "cpu")
            kept, notes = prune_blocks(model, found, folder, journal, batches, settings, where, ranks)
            kept = {name: kept[one.name] for name, one in zip(chosen, found, strict=True)}
        else:
            names = {name: one.name for name, one in zip(chosen, found)}  # none without a model
            job = _Job(folder, settings, chosen, names, copies, ranks.comm, folder.share(ranks.comm.rank, ranks.comm.size))
            kept, notes = _prune_slabs(job, journal), {}
        if left := folder.others(written)[1]:
            notes["files"] = f"not copied, because they hold weights: {', '.join(path.as_posix() for path in left)}"
    layers = [Layer(name, layout.shape, kept[name], layout.rows * layout.cols) for name, layout in chosen.items()]
    return PrunedFolder(written, settings.describe(), layers, skipped, notes)


def _check(settings: Settings, blocks: bool, data: Iterable[Any] | None, into: object) -> list[Any]:
    """The batches, if blocks are solved with them. Raises where the arguments ask for more than a folder allows."""
    if settings.scheduled:
        raise TypeError(f"{settings.scheduled[0]} changes with the step; pass a number to prune once")
    if blocks:
        check_blocks(settings)
        check_evidence(settings.needs & STREAMED, data, None, of=str(settings.method))
        batches = list(data or ())
        if into is None:
            raise ValueError(f"{settings.method} runs the model block by block; pass into= (a function that builds the model)")
        return batches
    if settings.needs or settings.method.rewrites or settings.method.revives:
        raise NotImplementedError(
            f"{settings.criterion} with {settings.method} needs data or changes weights; prune_folder takes criteria without "
            "data, and methods that solve a block at a time: method='sparsegpt' or 'flow', with into= and data=. Or load the "
            "model and use prune_."
        )
    if not settings.criterion.elementwise:
        raise NotImplementedError(f"{settings.criterion} looks at whole tensors, and prune_folder reads slabs; use prune_")
    return []


def _run_of(settings: Settings, folder: Folder, chosen: Mapping[str, Layout]) -> dict[str, Any]:
    """What a run does, for its journal: a repeated call goes on only if all of this is the same."""
    names = hashlib.sha256("\n".join(f"{name} {layout}" for name, layout in chosen.items()).encode())
    recipe = [settings.describe(), dict(settings.spread) if isinstance(settings.spread, Mapping) else None]
    source = [str(folder.path.resolve()), folder.stamp()]
    return {"recipe": recipe, "source": source, "choice of tensors": names.hexdigest()}


def _digest(batches: Sequence[Any]) -> str:
    seen = hashlib.sha256()
    for batch in batches:
        for tensor in tensors_of(split_batch(batch)[:2]):
            seen.update(as_bytes(tensor))
    return seen.hexdigest()


@dataclass
class _Rows:
    """The weight of one tensor of a folder as evidence for a criterion, read from the disk when asked for."""

    folder: Folder
    name: str
    layout: Layout
    known: str  # its name in the model, by which random scores are drawn
    step: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    held: tuple[int, int, Tensor] | None = None  # rows that were read already: the first, the end, and their values

    def hold(self, first: int, last: int) -> Tensor:
        """Reads rows and keeps them until others are held."""
        self.held = None
        self.held = first, last, self.values(first, last)
        return self.held[2]

    def rows(self, leaf: str, first: int, last: int) -> Tensor:
        if self.held is not None and self.held[0] <= first and last <= self.held[1]:
            return self.held[2][first - self.held[0] : last - self.held[0]]
        if self.layout.flip and self.layout.stacked:
            height = self.layout.rows // self.layout.groups
            experts = self.folder.rows(self.name, first // height, -(-last // height), axis=0).mT.flatten(0, 1)
            return experts[first - first // height * height :][: last - first]
        part = self.folder.rows(self.name, first, last, axis=1 if self.layout.flip else 0)
        part = part.transpose(0, 1) if self.layout.flip else part
        return part.reshape(last - first, self.layout.cols)

    def random(self, seed: int, first: int, last: int) -> Tensor:
        return random_scores(self.known, seed, 0, self.layout, Box((first, last), (0, self.layout.cols)), self.device)

    def scores(self, criterion: Criterion) -> Scores:
        def rows(first: int, last: int) -> Tensor:
            return self.rows("weight", first, last).abs() if criterion == magnitude else criterion.slab(self, first, last)

        return Scores(self.layout, self.device, rows)

    def values(self, first: int, last: int) -> Tensor:
        """Rows of the weight itself."""
        return self.rows("weight", first, last).contiguous()

    def slabs(self, multiple: int) -> Iterator[tuple[int, int]]:
        step = max(READ // max(self.layout.cols, 1) // multiple, 1) * multiple
        return ((first, min(first + step, self.layout.rows)) for first in range(0, self.layout.rows, step))


_Cut = tuple[Pool, Facts, int] | Callable[[int], int]  # of a large pool; the number to prune from a small pool of a size


@dataclass(frozen=True)
class _Job:
    """What is pruned, how, and which files this process reads and writes."""

    folder: Folder
    settings: Settings
    chosen: Mapping[str, Layout]
    names: Mapping[str, str]  # of chosen tensors in the model
    copies: Mapping[str, str]  # other names of chosen tensors in the folder
    comm: Comm
    mine: Sequence[str]

    @property
    def ranked(self) -> Criterion:
        """The criterion by which elements are ranked: a power of magnitudes by the magnitudes, as `prune_` does."""
        criterion = self.settings.criterion
        return magnitude if self.settings.pattern.elementwise and criterion.power_of_magnitude > 0 else criterion

    def weight(self, name: str) -> _Rows:
        return _Rows(self.folder, name, self.chosen[name], self.names.get(name, name))

    def scores(self, criterion: Criterion) -> dict[str, Scores]:
        return {name: self.weight(name).scores(criterion) for name in self.chosen}

    def cuts(self) -> Mapping[str, _Cut]:
        """The cut of each tensor: of the pool that it is in, or the budget of its small pools, which are ranked as written."""
        settings, pattern = self.settings, self.settings.pattern
        if pattern.keep:
            return dict.fromkeys(self.chosen, lambda size, n=pattern.keep[0]: size - n)
        if not self.chosen:
            return {}
        shares = settings.shares(self.scores(settings.criterion), 0)
        if settings.scope == "row":
            budgets = {name: row_budget(name, one, pattern, shares, settings.count, 0.0) for name, one in self.chosen.items()}
            for name, layout in self.chosen.items():
                budgets[name](pattern.grid(layout)[1])  # raises before anything is written
            return budgets
        scores = self.scores(self.ranked)
        facts = facts_of(scores, pattern, Comm())
        groups = [list(scores)] if settings.scope == "global" else [[name] for name in scores]
        numbers = {name: number for number, name in enumerate(scores)}
        pools = []
        for names in groups:
            own = facts if settings.scope == "global" else facts_of({n: scores[n] for n in names}, pattern, Comm())
            drop, weighted = budget_of(names, own, pattern, shares, settings.count)
            parts = [self.part(name, scores[name], numbers[name]) for name in names if self.folder.file_of[name] in self.mine]
            pools.append(Pool(parts, drop, own.units, weighted))
        if find_cuts(pools, facts.bits, self.comm, longest=facts.longest, tensors=facts.tensors):
            raise nan_in("a tensor of the folder")
        return {name: (pool, facts, numbers[name]) for names, pool in zip(groups, pools, strict=True) for name in names}

    def part(self, name: str, scores: Scores, number: int, rows: tuple[int, int] | None = None) -> Part:
        """The units of a tensor, or of some of its rows (in multiples of a unit), folded when they are asked for."""
        pattern, layout = self.settings.pattern, self.chosen[name]
        height, _ = pattern.block(layout)
        down, across = pattern.grid(layout)
        first, last = (0, layout.rows) if rows is None else rows
        top, units = first // height, -(-(last - first) // height)

        def folded(a: int, b: int) -> Tensor:
            begin, end = first + a * height, min(first + b * height, layout.rows)
            grid = fold(Scores.of(scores.rows(begin, end), _layout_of_rows(layout, end - begin, pattern)), pattern)
            return grid.rows(0, grid.layout.rows)

        if pattern.elementwise:
            own = Scores(Layout((last - first, layout.cols)), scores.device, lambda a, b: scores.rows(first + a, first + b))
        else:
            own = Scores(Layout((units, across)), scores.device, folded)
        sizes = None if pattern.elementwise else pattern.sizes(_layout_of_rows(layout, last - first, pattern))
        plain = rows is None and pattern.elementwise and self.ranked == magnitude and not layout.flip
        values = self.weight(name).values if plain else None
        return Part(own, number, down * across, across, (top, 0), sizes=sizes, values=values)

    def mask(self, weight: _Rows, first: int, last: int, cut: _Cut) -> Tensor:
        """The mask of some rows of a tensor."""
        settings, layout, name = self.settings, weight.layout, weight.name
        whole = weight.scores(self.ranked)
        if not callable(cut) and settings.pattern.elementwise:
            part = self.part(name, whole, cut[2], (first, last))
            if self.ranked == magnitude:
                part = replace(part, scores=Scores.magnitude(weight.values(first, last)))
            return keep(cut[0], part, cut[1].bits)
        slab = Scores.of(whole.rows(first, last), _layout_of_rows(layout, last - first, settings.pattern))
        if callable(cut):
            units = fold(slab, settings.pattern)
            size = settings.pattern.keep[1] if settings.pattern.keep else units.layout.cols
            return elements(name, slab, settings.pattern, keep_each(name, units, size, cut))
        pool, facts, number = cut
        kept = keep(pool, self.part(name, whole, number, (first, last)), facts.bits)
        return elements(name, slab, settings.pattern, kept)


def _layout_of_rows(layout: Layout, rows: int, pattern: Pattern) -> Layout:
    if pattern.unit != "in":
        return Layout((rows, layout.cols))
    return Layout((rows, layout.cols // layout.span, layout.span), groups=max(rows * layout.groups // max(layout.rows, 1), 1))


def _prune_slabs(job: _Job, journal: Journal) -> dict[str, int]:
    """Writes the files of this process that are not written yet. Returns how many elements of each tensor are kept."""
    cuts, target = job.cuts(), journal.target
    with together(job.comm, f"make {target}"):
        if job.comm.rank == 0:
            journal.begin()
        done = {file: kept for part in journal.read() for file, kept in part["done"].items()}
    with together(job.comm, "write its files"):
        for file in job.mine:
            if file not in done or not _same_size(target / file, job.folder.size(file)):
                (target / file).unlink(missing_ok=True)  # a run that stops after the journal would take an old file for its own
                with replacing_file(target / file) as out:
                    done[file] = _write_file(job, cuts, file, out)
                    journal.write(done=done)  # before the file gets its name: a file without a journal is a whole model
    kept = {name: number for file in job.mine for name, number in done[file].items()}
    every = job.comm.sum(*(kept.get(name, 0) for name in job.chosen))
    with together(job.comm, "copy the other files"):
        if job.comm.rank == 0:
            job.folder.copy_rest(target)
            journal.remove()
    return dict(zip(job.chosen, every, strict=True))


def _same_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _write_file(job: _Job, cuts: Mapping[str, _Cut], file: str, out: Any) -> dict[str, int]:
    kept: dict[str, int] = {}
    with writing_behind(out) as write:
        write(job.folder.header(file))
        for name in job.folder.in_order(file):
            if (own := job.copies.get(name, name)) in job.chosen:
                kept[name] = _write_pruned(job, own, cuts[own], write)
            else:
                for chunk in job.folder.chunks(name):
                    write(chunk)
    return kept


def _write_pruned(job: _Job, name: str, cut: _Cut, write: Callable[[Any], None]) -> int:
    layout, kept = job.chosen[name], 0
    weight, (height, _) = job.weight(name), job.settings.pattern.block(layout)
    whole: list[Tensor] = []  # columns of a weight that is stored as (in, out), which is written when all of them are there
    for first, last in weight.slabs(height):
        values = weight.hold(first, last)
        mask = job.mask(weight, first, last, cut)
        kept += int(np.count_nonzero(mask.numpy()))  # faster than the sum of a mask
        bits = values.view(kernels.BITS[values.element_size()]).numpy()
        np.multiply(bits, mask.numpy(), out=bits)  # as `kernels.zero_`, but threads of torch would stall on a busy processor
        if layout.flip:
            whole.append(values)
        else:
            write(as_bytes(values))
    if whole:
        write(as_bytes(layout.restore(torch.cat(whole))))
    return kept
