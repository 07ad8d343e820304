"""`prune_folder`: prunes the safetensors files of a folder without building the model, a slab of rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import kernels
from ._dist import Box, Comm, Group
from ._hints import hints
from ._layers import Layout
from .budgets import Spread
from .criteria import Criterion, magnitude
from .digits import Part, Pool, find_cuts, keep
from .evidence import random_scores
from .folder_walk import prune_blocks
from .io import Folder, replacing_file
from .methods import STREAMED, Method
from .patterns import Pattern
from .scores import RANKED, Scores, nan_in
from .select import elements, fold, select
from .settings import Settings
from .shards import Facts, budget_of, facts_of
from .targeting import Globs, globs_of, targets

JOURNAL = "secateur.journal.json"
_SLAB = 1 << 22  # elements that are read at once


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
) -> Any:
    """Prunes the safetensors files of a folder into another folder, without building the model. Returns counts.

    The weights are those that `prune_` with the same arguments would leave in the loaded model, bit for bit. Files are read in
    slabs of rows, so the memory does not depend on their size (except for pattern "in", which needs one tensor at a time).
    All other files of the folder are copied. A run that was stopped goes on with the files that are missing.

    Args:
        source: a folder of Hugging Face, with `model.safetensors` or with several files and `model.safetensors.index.json`.
        target: the folder to write. It may exist; its old weights are replaced.
        criterion: an expression without data, computed element by element, such as `sc.magnitude` or `sc.random(0)`.
        sparsity, count, pattern, scope, exclude, types, spread: as for `prune_`.
        include: globs over names. Without `into` it is required, because files do not say which tensors are weights.
        method, data, device: a method that needs calibration data (`sc.methods.sparsegpt()`), with `into=`; the model is then
            read, solved on the device and written one block at a time.
        into: a function that builds the model. It is called on the meta device, and says which tensors are weights of which
            layers, as `prune_` chooses them, and their order among equal scores.
        group: a process group whose processes all call this function and share the files.
    """
    settings = Settings.of(criterion, pattern, scope, sparsity, count, spread, method)
    if settings.method.needs & STREAMED:
        if into is None or data is None:
            raise ValueError(
                f"{settings.method} runs the model block by block; pass into= (a function that builds it) and data="
            )
        which = {"include": include, "exclude": exclude, "types": types}
        return prune_blocks(Path(source), Path(target), into, data, settings=settings, device=device, **which)
    _check(settings)
    written = Path(target)
    if written.exists() and (not written.is_dir() or written.resolve() == Path(source).resolve()):
        raise ValueError(f"target={str(target)!r} must be another folder than the source")
    comm = Comm() if group is None else Comm([group])
    with Folder(Path(source)) as folder:
        chosen, skipped = _chosen(folder, into, include, exclude, types)
        job = _Job(folder, settings, chosen, skipped, comm, _files_of(folder, comm))
        cuts = job.cuts()
        written.mkdir(parents=True, exist_ok=True)
        return _finished(job, _write(job, cuts, written), written)


def _check(settings: Settings) -> None:
    if settings.needs or settings.method.rewrites or settings.method.revives:
        raise NotImplementedError(
            f"{settings.criterion} with {settings.method} needs data or changes weights; prune_folder takes criteria without "
            "data. Load the model and use prune_."
        )
    if not settings.criterion.elementwise:
        raise NotImplementedError(f"{settings.criterion} looks at whole tensors, and prune_folder reads slabs; use prune_")
    if settings.scheduled:
        raise TypeError(f"{settings.scheduled[0]} changes with the step; pass a number to prune once")


def _chosen(
    folder: Folder,
    into: Callable[[], nn.Module] | None,
    include: Globs,
    exclude: Globs,
    types: Sequence[type[nn.Module]] | None,
) -> tuple[dict[str, Layout], dict[str, str]]:
    """The tensors to prune with their layouts, in the order of the model, and why others are skipped."""
    if into is None:
        named, without = globs_of("include", include), globs_of("exclude", exclude)
        if not named:
            raise ValueError("say which tensors are pruned: into= builds the model on the meta device, or include= names them")
        found = {n: e for n, e in folder.entries.items() if _any(n, named) and not _any(n, without) and e[0] in RANKED}
        flat = {name for name, (_, shape) in found.items() if len(shape) < 2 and name not in named}
        return {name: Layout(shape) for name, (_, shape) in found.items() if name not in flat}, dict.fromkeys(flat, "a vector")
    with torch.device("meta"):
        model = into()
    wanted, skipped = targets(model, include=include, exclude=exclude, types=types, meta=True)
    chosen: dict[str, Layout] = {}
    for one in wanted:
        names = [name for name in (one.name, *one.slot.also) if name in folder.entries]
        if not names:
            raise ValueError(f"the folder holds no {one.name!r}, which the model of into= has")
        if folder.entries[names[0]][1] != one.layout.shape:
            raise ValueError(f"{names[0]!r} is {folder.entries[names[0]][1]} in the folder and {one.layout.shape} in the model")
        if one.layout.flip and one.layout.groups > 1:
            raise NotImplementedError(f"{names[0]!r} belongs to a transposed convolution in groups; exclude it")
        chosen[names[0]] = one.layout
    return chosen, skipped


def _any(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob) for glob in globs)


def _files_of(folder: Folder, comm: Comm) -> list[str]:
    """The files of this process: the largest first, each to the process that has the fewest bytes."""
    loads = [0] * comm.size
    mine = []
    for file in sorted(folder.files, key=lambda name: (-folder.size(name), name)):
        least = loads.index(min(loads))
        loads[least] += folder.size(file)
        if least == comm.rank:
            mine.append(file)
    return mine


@dataclass
class _Rows:
    """The weight of one tensor of a folder as evidence for a criterion, read from the disk when asked for."""

    folder: Folder
    name: str
    layout: Layout
    step: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def rows(self, leaf: str, first: int, last: int) -> Tensor:
        part = self.folder.rows(self.name, first, last, axis=1 if self.layout.flip else 0)
        part = part.transpose(0, 1) if self.layout.flip else part
        return part.reshape(last - first, self.layout.cols)

    def random(self, seed: int, first: int, last: int) -> Tensor:
        return random_scores(self.name, seed, 0, self.layout, Box((first, last), (0, self.layout.cols)), self.device)

    def scores(self, criterion: Criterion) -> Scores:
        def rows(first: int, last: int) -> Tensor:
            return self.rows("weight", first, last).abs() if criterion == magnitude else criterion.slab(self, first, last)

        return Scores(self.layout, self.device, rows)

    def slabs(self, multiple: int) -> Iterator[tuple[int, int]]:
        step = max(_SLAB // max(self.layout.cols, 1) // multiple, 1) * multiple
        return ((first, min(first + step, self.layout.rows)) for first in range(0, self.layout.rows, step))


@dataclass(frozen=True)
class _Job:
    """What is pruned, how, and which files this process reads and writes."""

    folder: Folder
    settings: Settings
    chosen: Mapping[str, Layout]
    skipped: Mapping[str, str]
    comm: Comm
    mine: Sequence[str]

    @property
    def small(self) -> bool:
        """Whether every pool lies within a few rows, so that slabs can be ranked apart."""
        return bool(self.settings.pattern.keep) or self.settings.scope == "row"

    def scores(self) -> dict[str, Scores]:
        return {name: _Rows(self.folder, name, layout).scores(self.settings.criterion) for name, layout in self.chosen.items()}

    def cuts(self) -> dict[str, tuple[Pool, Facts, int]]:
        """The cut of each tensor's pool: nothing for small pools, which are ranked as they are written."""
        settings, scores = self.settings, self.scores()
        self.comm.check_same(f"{settings.describe()} {list(self.chosen)}")
        if self.small or not scores:
            return {}
        shares = settings.shares(scores, 0)
        facts = facts_of(scores, settings.pattern, Comm())
        groups = [list(scores)] if settings.scope == "global" else [[name] for name in scores]
        numbers = {name: number for number, name in enumerate(scores)}
        pools = []
        for names in groups:
            own = facts if settings.scope == "global" else facts_of({n: scores[n] for n in names}, settings.pattern, Comm())
            drop, weighted = budget_of(names, own, settings.pattern, shares, settings.count)
            parts = [self.part(name, scores[name], numbers[name]) for name in names if self.folder.file_of[name] in self.mine]
            pools.append(Pool(parts, drop, own.units, weighted))
        if find_cuts(pools, facts.bits, self.comm.add_, longest=facts.longest):
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
        return Part(own, number, down * across, across, (top, 0), sizes=sizes)

    def mask(self, name: str, first: int, last: int, cut: tuple[Pool, Facts, int] | None) -> Tensor:
        """The mask of some rows of a tensor."""
        settings, layout = self.settings, self.chosen[name]
        whole = _Rows(self.folder, name, layout).scores(settings.criterion)
        slab = Scores.of(whole.rows(first, last), _layout_of_rows(layout, last - first, settings.pattern))
        if cut is None:
            share = settings.shares({name: slab}, 0) if not settings.pattern.keep else None
            how = {"scope": settings.scope, "sparsity": share, "count": settings.count}
            return select({name: slab}, settings.pattern, **how)[name]
        pool, facts, number = cut
        kept = keep(pool, self.part(name, whole, number, (first, last)), facts.bits)
        return kept if settings.pattern.elementwise else elements(name, slab, settings.pattern, kept)


def _layout_of_rows(layout: Layout, rows: int, pattern: Pattern) -> Layout:
    if pattern.unit != "in":
        return Layout((rows, layout.cols))
    return Layout((rows, layout.cols // layout.span, layout.span), groups=max(rows * layout.groups // max(layout.rows, 1), 1))


def _write(job: _Job, cuts: Mapping[str, tuple[Pool, Facts, int]], target: Path) -> dict[str, int]:
    """Writes the files of this process that are not written yet. Returns how many elements of each tensor are kept."""
    journal = target / (JOURNAL if job.comm.size == 1 else f"{JOURNAL}.{job.comm.rank}")
    told = {"recipe": job.settings.describe(), "source": str(job.folder.path.resolve()), "stamp": job.folder.stamp()}
    done = _done(journal, told)
    for file in job.mine:
        if file in done and (target / file).is_file() and (target / file).stat().st_size == job.folder.size(file):
            continue
        kept: dict[str, int] = {}
        with replacing_file(target / file) as out:
            out.write(job.folder.header(file))
            for name in job.folder.in_order(file):
                if name in job.chosen:
                    kept[name] = _write_pruned(job, name, cuts.get(name), out)
                else:
                    for chunk in job.folder.chunks(name):
                        out.write(chunk)
        done[file] = kept
        with replacing_file(journal) as out:
            out.write(json.dumps({**told, "done": done}).encode())
    return {name: number for file in job.mine for name, number in done[file].items()}


def _write_pruned(job: _Job, name: str, cut: tuple[Pool, Facts, int] | None, out: Any) -> int:
    layout, kept = job.chosen[name], 0
    weight, (height, _) = _Rows(job.folder, name, layout), job.settings.pattern.block(layout)
    whole: list[Tensor] = []  # columns of a weight that is stored as (in, out), which is written when all of them are there
    for first, last in weight.slabs(height):
        mask = job.mask(name, first, last, cut)
        kept += int(mask.sum())
        values = weight.rows("weight", first, last).contiguous()
        kernels.zero_(values, mask)
        if layout.flip:
            whole.append(values)
        else:
            out.write(_bytes(values))
    if whole:
        out.write(_bytes(layout.restore(torch.cat(whole))))
    return kept


def _bytes(values: Tensor) -> Any:
    return values.contiguous().view(-1).view(torch.uint8).numpy()


def _done(journal: Path, told: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The files that an earlier run with the same arguments has written."""
    try:
        found = json.loads(journal.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found["done"] if {key: found.get(key) for key in told} == dict(told) else {}


def _finished(job: _Job, kept: Mapping[str, int], target: Path) -> dict[str, Any]:
    """Copies the other files, takes old weights away, and returns the counts of all processes."""
    every = dict(zip(job.chosen, job.comm.sum(*(kept.get(name, 0) for name in job.chosen)), strict=True))
    if job.comm.rank == 0:
        job.folder.copy_rest(target)
        for journal in target.glob(f"{JOURNAL}*"):
            journal.unlink()
    job.comm.sum(1)  # all wait until the folder is whole
    sizes = {name: layout.rows * layout.cols for name, layout in job.chosen.items()}
    total, left = sum(sizes.values()), sum(every.values())
    return {
        "tensors": len(every),
        "total": total,
        "kept": left,
        "pruned": total - left,
        "sparsity": 1 - left / total if total else 0.0,
        "skipped": dict(job.skipped),
        "layers": {name: {"kept": every[name], "total": sizes[name]} for name in every},
    }
