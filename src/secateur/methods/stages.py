"""Stages: layers of a block that can be solved together, since none of them reads what another of them returns.

They are found from a tape of the block, not from names. Layers that read the same tensor share the evidence of the first. A
layer whose output is added to a tensor that is there before it (the residual stream) is found by that sum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .._layers import is_product
from ..tape import Made, Read, Tape
from ..targeting import Target


@dataclass
class Stage:
    """Layers to solve together. `leaders`: layer -> the layer with the same input whose evidence it shares, often itself.

    `pools`: leaders that are the same layer of several experts, which see some of the inputs each.
    """

    leaders: dict[str, str]
    pools: list[list[str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return list(self.leaders)


@dataclass
class Window:
    """Where a stage lies in one tape.

    `start`: the operator from which the next run goes on, at or before the first call of its layers. `reads`: the number of
    reads by leaders after which a run can stop; None if that depends on the data. `streams`: leader -> layer -> the tensor that
    the layer's output is added to, as the number of the operator that returns it and its place among the outputs.
    """

    start: int | None = None
    reads: int | None = None
    streams: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)


def find_stages(targets: Sequence[Target], tapes: Sequence[Tape]) -> tuple[list[Stage], list[list[Window]]] | str:
    """The stages of a block, and the window of each in every tape; or the reason why they cannot be found."""
    by_name = {target.name: target for target in targets}
    found = [_levels(list(by_name), tape) for tape in tapes]
    levels = found[0]
    if any(one is None for one in found) or levels is None:
        return "its layers depend on each other"
    if any(one != levels for one in found):
        return "its layers depend on each other in other ways on other batches"
    leaders = [_leaders(by_name, tape, levels) for tape in tapes]
    common = {name: name if any(one.get(name) != lead for one in leaders) else lead for name, lead in leaders[0].items()}
    _lead_unseen(common, list(by_name))
    order = list(dict.fromkeys([*(read.name for read in tapes[0].reads), *by_name]))
    stages = []
    for level in sorted(set(levels.values())):
        names = [name for name in order if levels[name] == level]
        stages.append(Stage({name: common[name] for name in names}))
        stages[-1].pools = _pools(stages[-1], by_name, tapes)
    return stages, [[_window(stage, tape, by_name, levels) for stage in stages] for tape in tapes]


def _levels(names: Sequence[str], tape: Tape) -> dict[str, int] | None:
    """The length of the longest chain of layers that ends at each; None where two layers depend on each other."""
    levels: dict[str, int] = {}

    def before(read: Read) -> list[str]:
        return [name for i, name in enumerate(names) if read.depends >> i & 1 and name != read.name]

    for read in tape.reads:
        level = 1 + max((levels.get(name, 0) for name in before(read)), default=0)
        levels[read.name] = max(levels.get(read.name, 0), level)
    if any(levels.get(name, 0) >= levels[read.name] for read in tape.reads for name in before(read)):
        return None
    alike = {pattern(name): level for name, level in levels.items()}
    last = max(levels.values(), default=1)
    return {name: levels.get(name, alike.get(pattern(name), last)) for name in names}


def pattern(name: str) -> str:
    """The name without its numbers: an expert that saw no token here belongs where the other experts are."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _leaders(by_name: Mapping[str, Target], tape: Tape, levels: Mapping[str, int]) -> dict[str, str]:
    """For each layer the first that reads the same tensor. Only layers that are called once and multiply the tensor itself."""
    reads: dict[str, list[Read]] = {}
    for read in tape.reads:
        reads.setdefault(read.name, []).append(read)
    first: dict[object, str] = {}
    leaders = {}
    for name, own in reads.items():
        target = by_name[name]
        plain = len(own) == 1 and own[0].x and own[0].groups is None and is_product(target.slot.module, target.layout)
        key = (own[0].x, own[0].version, target.layout.cols, levels[name]) if plain else name
        leaders[name] = first.setdefault(key, name)
    return leaders


def _lead_unseen(leaders: dict[str, str], names: Sequence[str]) -> None:
    """Gives layers that did not run the leader that the same layer of another expert has."""
    for name in [name for name in names if name not in leaders]:
        parts, leaders[name] = name.split("."), name
        for other, leader in list(leaders.items()):
            away = [i for i, (a, b) in enumerate(zip(parts, other.split("."))) if a != b]
            if other != name and pattern(other) == pattern(name) and len(away) == 1:
                own = leader.split(".")
                own[away[0]] = parts[away[0]]
                leaders[name] = ".".join(own) if ".".join(own) in names else name
                break
    for name, leader in leaders.items():
        leaders[name] = leader if leaders[leader] == leader else name


def _pools(stage: Stage, by_name: Mapping[str, Target], tapes: Sequence[Tape]) -> list[list[str]]:
    """Leaders of one shape whose names differ in numbers only, and that read inputs which the data sends to them."""
    early = {read.name for tape in tapes for read in tape.reads if read.at <= tape.decides}
    pools: dict[object, list[str]] = {}
    for name in dict.fromkeys(stage.leaders.values()):
        if name not in early and by_name[name].layout.groups == 1:
            pools.setdefault((pattern(name), by_name[name].layout.shape), []).append(name)
    return [pool for pool in pools.values() if len(pool) > 1]


def _window(stage: Stage, tape: Tape, by_name: Mapping[str, Target], levels: Mapping[str, int]) -> Window:
    leading = set(stage.leaders.values())
    reads = [read for read in tape.reads if read.name in leading]
    if not reads:
        return Window()
    window = Window(tape.best_start(reads[0].at), len(reads) if reads[-1].at <= tape.decides else None)
    for name, leader in stage.leaders.items():
        at = [read.at for read in reads if read.name == leader]
        stream = _stream(name, tape, by_name, levels, at[0]) if len(at) == 1 else None
        if stream is not None:
            window.streams.setdefault(leader, {})[name] = tape.where[stream]
    return window


def _stream(name: str, tape: Tape, by_name: Mapping[str, Target], levels: Mapping[str, int], at: int) -> Made | None:
    """The tensor that the output of a layer is added to, if it is there before operator `at`, and is not a branch itself."""
    outputs = tape.returned.get(name, [])
    reads = [read for read in tape.reads if read.name == name]
    if len(outputs) != 1 or len(reads) != 1 or reads[0].groups is not None or by_name[name].layout.groups != 1:
        return None
    output = outputs[0]
    sums = [one for one in tape.sums if output in (one.one, one.other)]
    if len(sums) != 1 or sums[0].one == sums[0].other:
        return None
    (found,) = sums
    stream, depends = (found.other, found.depends[1]) if found.one == output else (found.one, found.depends[0])
    settled = all(levels[other] < levels[name] for i, other in enumerate(by_name) if depends >> i & 1)
    there = stream in tape.where and tape.where[stream][0] < at
    changed = any(at <= write < found.at for memory in (stream.memory, output.memory) for write in tape.written.get(memory, ()))
    return None if not settled or not there or changed or stream in _branches(tape) else stream


def _branches(tape: Tape) -> set[Made]:
    """The outputs of layers, and sums of nothing but those: parts of what is added to a stream, not the stream."""
    branches = {made for outputs in tape.returned.values() for made in outputs}
    for one in tape.sums:
        if one.one in branches and one.other in branches and one.result is not None:
            branches.add(one.result)
    return branches
