"""Solves the layers of a model block by block, and stage by stage inside a block.

A layer is solved with the inputs that the solved layers before it produce. The dense model's inputs are computed beside them
where a method asks for them. The model is changed on the way and comes out as it was.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .._arguments import apart, copied, first_row, moved, same, signature
from .._dist import DataRanks, data_ranks_of, run_of, together
from .._transfers import finish
from .._tree import Loose
from ..blocks import repeated_blocks
from ..display import format_seconds
from ..moments import Moments, NoInput, Seen
from ..outside import not_closed
from ..progress import Progress, track
from ..reads import listen
from ..stats import as_it_was, on_batch, split_batch, valid_positions, warn_of_unused_input
from ..stream import Chain, Feed, record
from ..tape import Call, Enough, Parts, Tape
from ..tape import record as record_tape
from ..targeting import Target
from .batches import usable
from .calls import detached, distance, first_samples, size_of
from .changes import Changes, checked
from .residence import Residence, on_cpu, without_blocks
from .seam import Solution
from .stages import Stage, Window, find_stages
from .unread import no_input

STREAMED = frozenset({"gram", "cross", "residual"})  # evidence that is taken block by block
Solve = Callable[[Target, Mapping[str, Any]], Solution]
Enter = Callable[[str, nn.Module, Sequence[Call], Sequence[Target]], None]
Evidence = dict[str, dict[str, Any]]
_ROUGH = 0.05  # the relative difference of the inputs of a block from which on the dense one is run with rounded products
_log = logging.getLogger("secateur")


def solve_all(
    model: nn.Module,
    found: Sequence[Target],
    needs: frozenset[str],
    data: Iterable[Any] | None,
    solve: Solve,
    notes: dict[str, str] | None = None,
    residence: Residence | None = None,
    blend: tuple[float, float] | None = None,
    ranks: DataRanks | None = None,
    enter: Enter | None = None,
) -> dict[str, Solution]:
    """A solution for each target. Without streamed evidence all targets see the model as it is.

    `solve(target, evidence)` gets a mapping with "gram", "cross" and "residual", as far as `needs` has them, "tokens" (the
    number of inputs) and "stage" (its number in the block). "residual" is there for layers whose output is added to the
    residual stream. With `blend` (see `Method.blend`), some layers have "shift" in place of "cross" and "residual". `notes`
    receives sentences about layers, blocks and batches, by name. `residence` says where blocks are while they are solved.
    `ranks` are the processes that each have a part of the data; by default those of DistributedDataParallel.
    `enter(name, block, calls, targets)` is called before the layers of a block are solved, with a few of the block's calls.
    """
    if not needs & STREAMED:
        items = track(found, "solve", lambda target: target.name)
        return {target.name: checked(target, solve(target, {})) for target in items}
    assert data is not None
    if isinstance(model, Loose):
        raise TypeError("this method runs a model on data=, and these are tensors without one")
    notes = {} if notes is None else notes
    ranks = ranks or data_ranks_of(model, {target.name: target.tensor for target in found}, "Gram matrices")
    run, given = run_of(model), {target.name: target for target in found}
    if run is not model:  # the names of targets begin with that of the module inside of DistributedDataParallel
        given = {name.removeprefix("module."): target for name, target in given.items()}
        found = [Target(replace(target.slot, name=name), target.layout) for name, target in given.items()]
    batches, counts = usable(data, notes, ranks)
    warn_of_unused_input(run, batches[0])
    solutions: dict[str, Solution] = {}
    with torch.inference_mode(False), torch.no_grad(), as_it_was(run), Changes() as changes:
        home = residence or Residence()
        walk = _Walk(run, found, needs & STREAMED, batches, changes, notes, home, blend, ranks, counts, enter)
        try:
            for part, table in walk.evidence():
                for target in part:
                    solution = checked(target, solve(given[target.name], table.pop(target.name)))
                    solutions[target.name] = walk.residence.solved(target.name, solution)
                    changes.write(target, solution)
                    walk.errors.append(solution.error)
        except NoInput as error:
            if home.device is not None:  # the whole model cannot run
                raise
            raise no_input(run, found, batches, ranks.comm, error) from None
    return {target.name: solutions[name] for name, target in given.items() if name in solutions}


@dataclass
class _Walk:
    """Goes through the blocks of a model. `errors` and `tokens` are those of the present block."""

    model: nn.Module
    found: Sequence[Target]
    needs: frozenset[str]
    batches: Sequence[Any]
    changes: Changes
    notes: dict[str, str]
    residence: Residence
    blend: tuple[float, float] | None = None
    ranks: DataRanks = field(default_factory=DataRanks)
    counts: bool = True  # whether the batches of this process count
    enter: Enter | None = None
    errors: list[float | None] = field(default_factory=list)
    tokens: int = 0
    feeds: tuple[Feed, Feed] | None = None
    now: tuple[bool, int] = (False, 0)  # whether the dense model runs, and on which batch
    _summary: str = ""

    def __post_init__(self) -> None:
        self.valid = [valid_positions(batch) for batch in self.batches]
        self.both = bool(self.needs & {"cross", "residual"})

    def evidence(self) -> Iterator[tuple[list[Target], Evidence]]:
        """The targets of each stage and their evidence, with the stages before as they are by then."""
        by_name = {target.name: target for target in self.found}
        blocks = repeated_blocks(self.model, by_name, lists=(nn.ModuleList, nn.Sequential))
        inner = [block.module for block in blocks if block.module is not self.model]
        if blocks and blocks[-1].module is self.model and inner:
            early = self._early(inner, [by_name[name] for name in blocks[-1].names])
            if self.residence.device is None and early:
                yield from self._solved_early([by_name[name] for name in early])
                blocks[-1].names = [name for name in blocks[-1].names if name not in early]
                blocks = blocks if blocks[-1].names else blocks[:-1]
            else:
                for name in early:
                    self.note(name, "solved after the blocks, which saw the inputs that its dense weights produce")
        chain = self._chain(inner)
        if isinstance(chain, str) and self.residence.device is not None:
            kind = type(self.model).__name__
            few = f"{kind} has no list in which two blocks have layers to prune, so they"
            found = f"the blocks of {kind} do not feed each other ({chain}), so they" if inner else few
            raise ValueError(f"{found} cannot run one at a time; load the whole model and use prune_")
        chain = None if isinstance(chain, str) else chain
        self.feeds = feeds = self._feeds(chain, inner)
        names = {id(module): name for name, module in self.model.named_modules()}
        closed = self._closed({names[id(module)]: module for module in inner})
        start = self.residence.resume(feeds) if feeds is not None else 0
        with Progress("block by block", len(blocks) - start) as progress:
            for i, block in list(enumerate(blocks))[start:]:
                name = names[id(block.module)] or "outside of blocks"
                progress(name + self._summary)
                begin, self.errors, self.tokens = time.monotonic(), [], 0
                own = [by_name[name] for name in block.names]
                last = i + 1 == len(inner) < len(blocks)
                with self._there(name, block.module, inner):
                    with self.alike():
                        calls = self._calls(block.module, i, feeds)
                    if not all(self.ranks.flags(bool(calls[0]))):
                        raise NoInput(block.names)
                    if len(set(calls[2])) < len(calls[2]):
                        self.note(
                            name, "runs more than once for a batch; solved with the inputs that its own dense weights produce"
                        )
                    part = _Block(self, name, block.module, own, *calls)
                    if self.enter is not None and names[id(block.module)] in closed:
                        self.enter(names[id(block.module)], block.module, part.examples(), own)
                    yield from part.evidence()
                    if chain is not None and feeds is not None and (i in chain.last_use or last):
                        chain.last_use.setdefault(i, len(inner))
                        outputs = part.outputs(part.pruned)
                        if part.dense is not None:
                            outputs = list(outputs) if part.unchanged else outputs
                            feeds[1].put(i, outputs if part.unchanged else part.outputs(part.dense))
                        feeds[0].put(i, outputs)
                if self.residence.device is not None:
                    self.changes.forget()
                if feeds is not None and block.module is not self.model:
                    self.residence.finished(i + 1, feeds)
                self._report(name, time.monotonic() - begin, len(blocks) - i - 1)

    def _early(self, inner: Sequence[nn.Module], outside: Sequence[Target]) -> list[str]:
        """The layers outside of the blocks that are called before the first block is: embeddings, an encoder, a stem."""
        found: dict[str, None] = {}

        def stop(*_: Any) -> None:
            raise Enough

        with self.alike(), self.residence.outside(self.model, inner, ()), contextlib.ExitStack() as stack:
            stack.callback(inner[0].register_forward_pre_hook(stop).remove)
            for target in outside:
                for owner, _ in target.slot.owners:
                    hook = owner.register_forward_pre_hook(lambda *_, name=target.name: found.setdefault(name))
                    stack.callback(hook.remove)
            batch = self.batches[0] if self.residence.device is None else self._there_now(self.batches[0])
            args, kwargs, _ = split_batch(batch)
            args, kwargs = copied((args, kwargs), {})
            with contextlib.suppress(Enough), on_batch(self.model, args, kwargs):
                self.model(*args, **kwargs)
        return list(found)

    def _solved_early(self, own: list[Target]) -> Iterator[tuple[list[Target], Evidence]]:
        """Solves layers that run before the blocks, as parts of the whole model."""
        begin, self.errors, self.tokens = time.monotonic(), [], 0
        with self.alike():
            calls = self._calls(self.model, 0, None)
        yield from _Block(self, "before the blocks", self.model, own, *calls).evidence()
        self._report("before the blocks", time.monotonic() - begin, 0)

    def _closed(self, inner: Mapping[str, nn.Module]) -> set[str]:
        """The blocks that exchange their arguments and outputs alone. It is not known of blocks on a disk, one at a time."""
        if not inner or self.enter is None or self.residence.device is not None:
            return set(inner) or {""}
        with self.alike():
            call = min((split_batch(batch)[:2] for batch in self.batches), key=size_of)
            try:
                found = not_closed(self.model, inner, first_row(call))
            except Exception:  # it takes batches of other sizes
                found = not_closed(self.model, inner, call)
        for name, times in zip(inner, self.ranks.comm.sum(*(name in found for name in inner)), strict=True):
            if times:
                found.add(name)
                why = "keep their order: more is read from the block, or by it, than arguments and outputs"
                self.notes[f"channels of {name}"] = why
        return set(inner) - found

    def _chain(self, inner: Sequence[nn.Module]) -> Chain | str:
        with self.alike(), self.residence.outside(self.model, inner, inner[:1]):
            if self.residence.device is None:
                return Chain.of(self.model, inner, self.batches)
            return Chain.of(self.model, inner, map(self._there_now, self.batches), on_cpu, present=False)

    def _feeds(self, chain: Chain | None, inner: Sequence[nn.Module]) -> tuple[Feed, Feed] | None:
        """What the blocks get, in the model as it is now and in the dense one."""
        if chain is None:
            return None
        if not self.both or not len(self.changes):
            return chain.feed(), chain.feed()
        with self.changes.out(self.model):
            dense = self._chain(inner)
        return None if isinstance(dense, str) else (chain.feed(), dense.feed())

    def note(self, name: str, text: str) -> None:
        """Adds a sentence to what is known about a layer."""
        self.notes[name] = f"{self.notes[name]}; {text}" if name in self.notes else text

    def alike(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the batches of this process run. If that fails on one process, all of them raise."""
        return together(self.ranks.comm, "run on its batches of data=")

    def _there_now(self, batch: Any) -> Any:
        """A batch on the device where blocks run."""
        args, kwargs, _ = split_batch(batch)
        return moved(kwargs if kwargs else (args, None), self.residence.device)

    @contextlib.contextmanager
    def _there(self, name: str, block: nn.Module, inner: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which one block runs, or the model without its blocks."""
        if block is not self.model or self.residence.device is None:
            with self.residence.inside(name, block):
                yield
            return
        assert self.feeds is not None
        feeds = self.feeds

        def last() -> Any:
            return feeds[self.now[0]].output(len(inner) - 1, self.now[1])

        with self.residence.outside(self.model, inner, ()), without_blocks(inner, last, self.residence.device):
            yield

    def _report(self, name: str, seconds: float, left: int) -> None:
        """Logs what is known about a block that was solved, and keeps it for the progress line of the next."""
        errors = [error for error in self.errors if error is not None]
        mean = f"error {sum(errors) / len(errors):.3g}, " if errors else ""
        summary = f"{mean}{self.tokens:,} tokens, {format_seconds(seconds)}"
        _log.info("solved %s: %s; %s left", name, summary, format_seconds(seconds * left))
        self._summary = f" (last block: {summary})"

    def _calls(
        self, module: nn.Module, i: int, feeds: tuple[Feed, Feed] | None
    ) -> tuple[list[Call], list[Call] | None, list[int]]:
        """The calls of a block in the model as it is now, those in the dense one, and the number of the batch of each."""
        if module is not self.model and feeds is not None:
            calls = feeds[0].calls(i)
            return calls, feeds[1].calls(i) if self.both else None, list(range(len(calls)))
        found = record(self.model, module, self.batches)
        if module is self.model or not self.both:
            return found.calls, found.calls if self.both else None, found.batches
        with self.changes.out(self.model):
            return found.calls, record(self.model, module, self.batches).calls, found.batches


@dataclass
class _Block:
    """One block: finds its stages, and collects the evidence of one after the other."""

    walk: _Walk
    name: str
    module: nn.Module
    targets: list[Target]
    calls: list[Call]
    dense_calls: list[Call] | None
    batches: list[int]  # the number of the batch of each call
    dense: Parts | None = None

    def evidence(self) -> Iterator[tuple[list[Target], Evidence]]:
        by_name = {target.name: target for target in self.targets}
        with self.walk.alike():
            stages, windows, tapes = self._plan()
        self.walk.ranks.comm.check_same(f"{self.name}: {[dict(stage.leaders) for stage in stages]}")
        device = self.walk.residence.device
        self.pruned = Parts(self.module, self.calls, tapes, device)
        if self.dense_calls is not None:
            self.dense = Parts(self.module, self.dense_calls, tapes, device)
            self._round(self.calls[0], self.dense_calls[0])
        for number, stage in enumerate(stages):
            table = self._collect(number, stage, [own[number] for own in windows], by_name)
            yield [by_name[name] for name in stage.names], table

    @cached_property
    def _alike(self) -> bool:
        """Whether the pruned model and the dense one pass the same values to the block."""
        if self.module is self.walk.model and self.walk.residence.device is not None:
            return False  # its blocks return what was stored of them, pruned and dense
        finish(self.walk.residence.device)
        return same(self.calls, self.dense_calls)

    @property
    def unchanged(self) -> bool:
        """Whether the block still computes in the pruned model what it computes in the dense one."""
        return not self.walk.changes.differ(self.module) and self._alike

    def examples(self) -> list[Call]:
        """The first samples of the smallest call, and of the largest one of each kind, on the device where the block is."""
        calls = sorted(self.calls, key=size_of)
        largest = {signature(call): call for call in calls}
        chosen = [calls[0], *(call for call in largest.values() if call is not calls[0])]
        return [first_samples(self.module, moved(call, self.walk.residence.device)) for call in chosen]

    def _plan(self) -> tuple[list[Stage], list[list[Window]], list[Tape | None]]:
        """The stages of the block, and for each call the window of every stage and the tape."""
        kinds = [signature(call) for call in self.calls]
        tapes: dict[Any, Tape | None] = {}
        for kind in dict.fromkeys(kinds):
            own = [i for i, other in enumerate(kinds) if other == kind]
            smallest = min(own, key=lambda i: size_of(self.calls[i]))
            self.walk.now = False, smallest
            tapes[kind] = record_tape(self.module, self.calls[smallest], self.targets, self.walk.residence.device)
        known = [tape for tape in tapes.values() if tape is not None]
        found = find_stages(self.targets, known) if known and len(known) == len(tapes) else "its operators cannot be followed"
        if not isinstance(found, str):
            stages, windows = found
            of = dict(zip(tapes, windows, strict=True))
            return stages, [of[kind] for kind in kinds], [tapes[kind] for kind in kinds]
        self.walk.notes[self.name] = f"solved as one stage, with inputs that its own layers do not change: {found}"
        whole = Stage({target.name: target.name for target in self.targets})
        return [whole], [[Window()] for _ in kinds], [None for _ in kinds]

    def _collect(self, number: int, stage: Stage, windows: Sequence[Window], by_name: Mapping[str, Target]) -> Evidence:
        leading = [by_name[name] for name in stage.names if stage.leaders[name] == name]
        moments = Moments(leading, self.walk.needs, stage.pools)
        if self.walk.blend is not None:
            shared = [leader for name, leader in stage.leaders.items() if name != leader]
            moments.blend(*self.walk.blend, [target for target in leading if target.name not in shared])
        with self.walk.alike():
            self._run(moments, windows, leading)
        if self.walk.ranks.size > 1:
            moments.add_up(self.walk.ranks, self.walk.counts)
        table = moments.table()
        for name in moments.unplaced:
            self.walk.note(name, "padding could not be left out: its inputs have no axes for batch and position")
        for name, experts in moments.unused.items():
            which = f"experts {', '.join(map(str, experts))}" if experts else "this expert"
            self.walk.note(name, f"{which} saw no token; solved with the inputs of the other experts")
        self.walk.tokens = max([self.walk.tokens, *(table[target.name]["tokens"] for target in leading)])
        found: Evidence = {}
        for name, leader in stage.leaders.items():
            found[name] = {kind: value for kind, value in table[leader].items() if kind != "residual"} | {"stage": number}
            if "residual" in table.get(name, {}):
                found[name]["residual"] = table[name]["residual"]
        return found

    def _round(self, value: Any, dense: Any) -> None:
        """Lets a CPU round products of the dense block where only a difference counts that is large against their error."""
        if self.dense is not None and self.walk.residence.device in (None, torch.device("cpu")) and not self.dense.rough:
            self.dense.rough = distance(value, dense) > _ROUGH

    def _run(self, moments: Moments, windows: Sequence[Window], leading: Sequence[Target]) -> None:
        """Runs all calls through a stage, in the dense block and in the pruned one. One run does for two that are equal."""
        alike = self.dense is not None and self.unchanged
        for call, window in enumerate(windows):
            moments.next_batch(self.walk.valid[self.batches[call]])
            dense: list[Seen] = []
            if self.dense is not None and not alike:
                with self.walk.changes.out(self.module):
                    dense = self._reads(self.dense, call, window, leading)
            reads = self._reads(self.pruned, call, window, leading)
            if self.dense is not None:
                moments.feed(reads if alike else dense, dense=True)
            moments.feed(reads)
            if dense and not call:
                self._round([one[3:] for one in reads], [one[3:] for one in dense])

    def _reads(self, parts: Parts, number: int, window: Window, leading: Sequence[Target]) -> list[Seen]:
        """Runs one call up to the last read of a stage, and returns its reads. The next run goes on from its start."""
        found: list[Seen] = []

        def note(seen: Seen) -> None:
            run = parts.run
            if run is None:
                found.append(detached(seen, {}))
                return
            with run.aside():
                run.save()  # the run may end before the next operator
                streams = window.streams.get(seen.target.name, {}) if run.same else {}
                tensors = {name: run.tensor(*place) for name, place in streams.items()}
                last = run.same and window.reads is not None and len(found) + 1 >= window.reads
                there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
                seen = seen._replace(picked=run.picked)
                stays = last and (parts is self.pruned or run.has((seen.args, dict(seen.kwargs), seen.x)))
                found.append(seen._replace(streams=there) if stays else detached(seen, there))
            if last:
                raise Enough

        with listen(
            leading,
            lambda target, attribute, layer, args, kwargs: note(Seen(target, attribute, layer, args, kwargs)),
            lambda target, groups, x: note(Seen(target, groups=groups, x=x)),
            before=True,
        ):
            self.walk.now = parts is self.dense, number
            parts.go(number, window.start, found.clear)
        return found

    def outputs(self, parts: Parts) -> Iterator[Any]:
        """What the block returns, call by call."""
        for number in range(len(parts.states)):
            with self.walk.changes.out(self.module) if parts is self.dense else contextlib.nullcontext():
                output = parts.go(number, None)
            parts.states[number].reset()
            output = apart(output)  # a block may return memory of its own, which the next call writes to
            yield on_cpu(output) if parts.device is not None else output
