"""Prunes a model that lies in a folder of safetensors files by methods that need calibration data, one block at a time.

The model is built without memory for its weights. Each block is read, solved, and written to a file of its own. A run that was
stopped goes on from its journal and writes the same files. Several processes split the batches: all of them solve each block
with the sums of all, and the first one writes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ._dist import Comm, DataRanks, digest, together
from ._transfers import finish
from .blocks import repeated_blocks
from .evidence import TensorEvidence
from .io import JOURNAL, Entry, Folder, Journal, Tensors, as_bytes, rename, replacing, write_index, write_tensors
from .measuring import ChannelOrders
from .methods import LayerProblem, Method, OnDevice, Solution, as_mapping, from_mapping, on_cpu, solve_all, solve_checked
from .owners import scores_of
from .settings import Settings
from .stream import Feed
from .targeting import Target

_SMALL, _EVERY = 64 << 20, 60.0  # streams up to so many bytes are saved after every block, larger ones after so many seconds


def prune_blocks(
    model: nn.Module,
    found: Sequence[Target],
    folder: Folder,
    journal: Journal,
    batches: Iterable[Any],
    settings: Settings,
    device: torch.device,
    ranks: DataRanks,
) -> tuple[dict[str, int], dict[str, str]]:
    """Solves the blocks of a model on the meta device, and writes them. Returns how much of each tensor is kept, and notes.

    One block at a time is read to `device`. The inputs of the blocks lie on the host. Each of `ranks` has its own `batches`.
    """
    check_blocks(settings)
    notes: dict[str, str] = {}
    orders = ChannelOrders.of(model, settings, ranks.comm)
    with FromFolder(model, found, folder, journal, device, ranks.comm, orders) as home:
        journal.read()  # raises for another run, before any work is done
        method, enter = settings.method, orders.enter if orders else None
        solve_all(model, found, method.needs, batches, _solver(settings, orders), notes, home, method.blend, ranks, enter)
        home.finish()
    if orders is not None:
        notes |= orders.notes
        if orders.taken:
            notes["channels"] = "reordered inside blocks; the order by itself does not change the output of the model"
    return home.kept, notes


def check_blocks(settings: Settings) -> None:
    """Raises where pruning needs more than one block at a time."""
    method: Method = settings.method
    if settings.scope == "global" or settings.spread is not None or settings.criterion.needs or method.curvature != "none":
        raise ValueError(
            f"{settings.describe()} compares layers of the whole model, or needs evidence from all of it, and a folder is "
            "pruned one block at a time; use scope='tensor' or 'row', no spread=, and a method without curvature"
        )


def _solver(settings: Settings, orders: ChannelOrders | None) -> Callable[[Target, Mapping[str, Any]], Solution]:
    def solve(target: Target, evidence: Mapping[str, Any]) -> Solution:
        known = TensorEvidence(target, {}, 0)
        scores = scores_of(settings.criterion, known)
        problem = LayerProblem(
            target.name,
            target.layout.matrix(target.weight),
            H=evidence.get("gram"),
            C=evidence.get("cross"),
            D=evidence.get("residual"),
            shift=evidence.get("shift"),
            tokens=evidence.get("tokens"),
            scores=scores,
            evidence=known,
        )
        (amount,) = settings.amounts({target.name: scores}, 0, None, Comm()).values()
        if orders is not None:
            return orders.solve(problem, amount, None)
        return solve_checked(settings.method, problem, settings.pattern, amount, None)

    return solve


class FromFolder(OnDevice):
    """Reads a block from a folder when it is needed, and writes it when it is solved."""

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[Target],
        folder: Folder,
        journal: Journal,
        device: torch.device,
        comm: Comm,
        orders: ChannelOrders | None = None,
    ) -> None:
        super().__init__(device)
        self.orders = orders
        self.folder, self.journal, self.target, self.comm = folder, journal, journal.target, comm
        self.kept: dict[str, int] = {}
        self._names: dict[tuple[int, str], list[str]] = {}
        self._tied: dict[int, list[str]] = {}  # tensor -> its names in all modules that share it
        for path, module in model.named_modules(remove_duplicate=False):
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                own = f"{path}.{attribute}" if path else attribute
                self._names.setdefault((id(module), attribute), []).append(own)
                self._tied.setdefault(id(tensor), []).append(own)
        blocks = repeated_blocks(model, [t.name for t in found], lists=(nn.ModuleList, nn.Sequential))
        inner = [block.module for block in blocks if block.module is not model]
        self._blocks, self._number = inner, {id(module): i for i, module in enumerate(inner)}
        self._of_blocks = {name for block in inner for name in self._stored(block)}
        self._in_files = {target.name: [name for name in target.names if name in folder.entries] for target in found}
        self._changed: dict[str, Solution] = {}  # of tensors outside of blocks
        self._written: dict[str, str] = {}
        self._saved = time.monotonic()
        self._writer, self._reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._ahead: dict[str, Future[Tensor]] = {}  # tensors of the next block
        self._writing: Future[None] | None = None
        self._check_names(model)
        self._check_apart(found, inner)
        folder.check_copies({other: own[0] for own in self._in_files.values() for other in own[1:]})

    def __enter__(self) -> FromFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.shutdown()
        self._reader.shutdown(cancel_futures=True)

    def _check_names(self, model: nn.Module) -> None:
        there = {name for names in self._tied.values() if self._in_folder(names) for name in names}
        for name, tensor in model.named_parameters():
            if tensor.is_meta and name not in there:
                raise ValueError(f"{self.folder.path} has no tensor {name!r}; into= must build the model that was saved there")

    def _check_apart(self, found: Sequence[Target], blocks: Sequence[nn.Module]) -> None:
        inside = [{id(module) for module in block.modules()} for block in blocks]
        for target in found:
            owners = {id(owner) for owner, _ in target.slot.owners}
            apart = [bool(owners & one) for one in (*inside, owners.difference(*inside))]
            if sum(apart) > 1:
                others = "a block and a layer outside of it" if apart[-1] else "several blocks"
                raise ValueError(
                    f"{others} share {target.name!r}, so that blocks cannot be pruned one at a time; load the whole model and "
                    "use prune_, or exclude it"
                )

    def _in_folder(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.folder.entries), None)

    def _stored(self, block: nn.Module) -> list[str]:
        """The names, in the folder, of the tensors of a block."""
        own = ((m, attribute, t) for m in block.modules() for attribute, t in (*m._parameters.items(), *m._buffers.items()))
        spaces = [(m, attribute) for m, attribute, tensor in own if tensor is not None]
        return [name for m, attribute in spaces for name in self._names[id(m), attribute] if name in self.folder.entries]

    def fetch(self, module: nn.Module, attribute: str, tensor: Tensor) -> Tensor:
        name = self._in_folder([*self._names[id(module), attribute], *self._tied.get(id(tensor), ())])
        if name is None:
            return super().fetch(module, attribute, tensor)
        if self.folder.entries[name][1] != tuple(tensor.shape):
            shape = self.folder.entries[name][1]
            raise ValueError(f"{name!r} is {shape} in {self.folder.path} and {tuple(tensor.shape)} in the model of into=")
        ahead = self._ahead.pop(name, None)
        return (self.folder.read(name) if ahead is None else ahead.result()).to(self.device)

    def _read_ahead(self, number: int) -> None:
        """Reads the tensors of a block from the disk while a GPU solves the block before it."""
        if self.device is None or self.device.type == "cpu" or number >= len(self._blocks):
            return
        self._ahead = {name: self._reader.submit(self.folder.read, name) for name in self._stored(self._blocks[number])}

    @contextlib.contextmanager
    def inside(self, name: str, block: nn.Module) -> Iterator[None]:
        with self.brought(list(block.modules())) as there:
            self._read_ahead(self._number[id(block)] + 1)
            # Runs of the block may write to its buffers.
            buffers = {place: tensor.clone() for place, tensor in there.items() if not isinstance(tensor, nn.Parameter)}
            yield
            by_name = {own: t for (m, attribute), t in (there | buffers).items() for own in self._names[id(m), attribute]}
            tensors = {n: by_name[n].detach() for n in self._stored(block)}
            for order in self.orders.take() if self.orders is not None else ():
                tensors = order.permuted(tensors)
            tensors = on_cpu(tensors)
            finish(self.device)
            self._check_same(name, tensors)
            self._wait()  # so that at most one block waits for the disk
            self._writing = self._writer.submit(self._write, self._number[id(block)], tensors)

    def _check_same(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Raises on all processes unless they solved a block alike."""
        if not self.comm.alone and not all(self.comm.same([digest(as_bytes(tensor)) for tensor in tensors.values()])):
            raise RuntimeError(f"the processes of group= got different weights for {name!r}; run them on devices of one kind")

    def _wait(self) -> None:
        """Waits until the last block is written, and raises on all processes what went wrong."""
        with together(self.comm, "write its block"):
            if self._writing is not None:
                self._writing.result()

    def solved(self, name: str, solution: Solution) -> Solution:
        self.kept[name] = int(solution.mask.sum())
        for stored in self._in_files[name]:
            if stored not in self._of_blocks:
                weight = None if solution.weight is None else solution.weight.to("cpu", copy=True)
                self._changed[stored] = replace(solution, mask=solution.mask.cpu(), weight=weight)
        return Solution(torch.empty(0, dtype=torch.bool))  # the rest is in the block, which is written

    def _read_changed(self, name: str) -> Tensor:
        """A tensor outside of blocks, as it was solved."""
        solution = self._changed.get(name)
        if solution is None:
            return self.folder.read(name)
        return self.folder.read(name).masked_fill_(~solution.mask, 0) if solution.weight is None else solution.weight

    # --- files ---

    def _file(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{len(self._number) + 1:05d}.safetensors"

    def _write(self, number: int, tensors: Mapping[str, Tensor | Callable[[], Tensor]]) -> None:
        entries = {}
        for name, tensor in tensors.items():
            dtype, shape = self.folder.entries[name]
            entries[name] = Entry(dtype, shape, tensor if callable(tensor) else lambda tensor=tensor: tensor)
        file = self.target / self._file(number)
        if self.comm.rank == 0:
            with replacing(file) as beside:
                write_tensors(beside, entries, {"format": "pt"})
            rename(beside, file)
        self._written |= dict.fromkeys(tensors, file.name)

    def _streams(self, number: int | str) -> str:
        """The name of the file with what this process's batches are after so many blocks."""
        return f"{JOURNAL}.{self.comm.rank}.{number}.safetensors"

    def resume(self, feeds: tuple[Feed, Feed]) -> int:
        with together(self.comm, f"make {self.target}"):
            if self.comm.rank == 0:
                self.journal.begin()
        for known in self.journal.read():
            streams = self._streams(known["blocks"])
            with together(self.comm, f"read {streams}"), (self.target / streams).open("rb") as handle:
                tensors = Tensors(handle, streams)
                found = {name: tensors.read(name) for name in tensors.entries}
                tensors.close()
            for feed, name in zip(feeds, ("pruned", "dense"), strict=True):
                from_mapping(feed, name, found)
            self.kept |= known["kept"]
            self._written |= known["files"]
            return known["blocks"]
        return 0

    def finished(self, number: int, feeds: tuple[Feed, Feed]) -> None:
        tensors = {**as_mapping(feeds[0], "pruned"), **as_mapping(feeds[1], "dense")}
        large = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()) > _SMALL
        wait = number == len(self._number) or (large and time.monotonic() - self._saved < _EVERY)
        if self.comm.sum(not wait)[0] == 0:  # all processes save the same blocks
            return
        self._wait()
        with together(self.comm, "save its batches"):
            self._save_streams(number, tensors)
        with together(self.comm, "write the journal"):  # when all have saved, so that one file says how far all of them are
            if self.comm.rank == 0:
                self.journal.write(blocks=number, kept=self.kept, files=self._written)
        for file in self.target.glob(self._streams("*")):
            if file.name != self._streams(number):
                file.unlink()
        self._saved = time.monotonic()

    def _save_streams(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        finish(self.device)
        streams = self.target / self._streams(number)
        with replacing(streams) as beside:
            entries = {name: Entry(t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()}
            write_tensors(beside, entries, {})
        rename(beside, streams)

    def finish(self) -> None:
        """Writes the tensors outside of blocks, one at a time, the index, and the other files of the source."""
        self._wait()
        with together(self.comm, "write the rest"):
            rest = [name for name in self.folder.entries if name not in self._of_blocks]
            self._write(len(self._number), {name: partial(self._read_changed, name) for name in rest})
            if self.comm.rank == 0:
                self.folder.copy_rest(self.target, index=False)
                size = sum(Entry(dtype, shape, torch.empty).bytes for dtype, shape in self.folder.entries.values())
                write_index(self.target, self._written, size)
                self.journal.remove()
