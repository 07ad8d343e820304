"""Finds the repeated blocks of a model: the entries of a ModuleList or Sequential, or several attributes of one type.

`repeated_blocks` reads the modules alone. `find_blocks` runs the model once and keeps the blocks that could be left out:
they run once, between their neighbours, and return a tensor of the shape that they receive. No names are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from .edit import Inputs, run

Drop = dict[str, list[int]]
_LISTS = (nn.ModuleList, nn.Sequential)


# --- from the modules alone -----------------------------------------------------------------------------------------


@dataclass
class Block:
    """A part of the model that can be run alone, and the names of the layers in it that are of interest."""

    module: nn.Module
    names: list[str]


def repeated_blocks(
    model: nn.Module, names: Iterable[str], lists: tuple[type[nn.Module], ...] = (nn.ModuleList,)
) -> list[Block]:
    """The entries of the longest list of modules that has some of the named layers in two entries or more.

    A list with most of the layers is preferred to longer ones, so that the experts in one block do not count as blocks. Names
    outside of the list form a last block, which is the whole model. `lists` are the container types that count; the entries of
    a Sequential count only where they have children of their own.
    """
    names = list(names)
    best: list[Block] = []
    rank = (False, 1)
    for path, module in model.named_modules():
        if not isinstance(module, lists) or (isinstance(module, nn.Sequential) and not _holds_blocks(module)):
            continue
        inside = [(child, f"{path}.{key}." if path else f"{key}.") for key, child in module.named_children()]
        parts = [Block(child, [n for n in names if n.startswith(prefix) or f"{n}." == prefix]) for child, prefix in inside]
        parts = [part for part in parts if part.names]
        own = (2 * sum(len(part.names) for part in parts) > len(names), len(parts))
        if len(parts) > 1 and own > rank:
            best, rank = parts, own
    covered = {name for block in best for name in block.names}
    outside = [name for name in names if name not in covered]
    return [*best, *([Block(model, outside)] if outside else [])]


def _holds_blocks(module: nn.Module) -> bool:
    return all(any(True for _ in child.children()) for child in module.children())


# --- from a run of the model ----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a block: its place in its list, the first tensor it received and returned; `bare`: it returned only that."""

    place: int
    taken: Tensor | None
    given: Tensor | None
    bare: bool


def find_blocks(model: nn.Module, inputs: Inputs) -> tuple[Drop, dict[str, str]]:
    """List -> places of the blocks that may be left out, and the entries beside them that may not, with the reason."""
    holders = {path: places for path, m in model.named_modules() if (places := _families(m))}
    calls = _watched(model, holders, inputs)
    found: dict[str, Drop] = {}
    refused: dict[str, str] = {}
    for path, families in holders.items():
        holder = model.get_submodule(path)
        reasons = {place: _not_a_block(holder, place, family, calls[path]) for family in families for place in family}
        if blocks := [place for place, why in reasons.items() if why is None]:
            found.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path), {})[path] = blocks
        refused |= {block_name(path, holder, place): why for place, why in reasons.items() if why and why != _NO_LAYERS}
    chosen = _disjoint(model, found)
    return chosen, {name: why for name, why in refused.items() if not chosen or name.rpartition(".")[0] in chosen}


_NO_LAYERS = "it holds no layers"


def _families(holder: nn.Module) -> list[list[int]]:
    """The places in a module that may form a row of blocks: all entries of a list, or its attributes of one type."""
    if isinstance(holder, _LISTS):
        return [list(range(len(holder._modules)))]
    kinds: dict[type[nn.Module], list[int]] = {}
    for place, module in enumerate(holder._modules.values()):
        if module is None or isinstance(module, _LISTS):
            continue
        if any(True for _ in module.children()):  # a single layer is not a block
            kinds.setdefault(type(module), []).append(place)
    return [places for places in kinds.values() if len(places) > 1]


def _not_a_block(holder: nn.Module, place: int, family: Sequence[int], calls: Sequence[Call]) -> str | None:
    """Why an entry cannot be left out, or None if it can."""
    block, listed = list(holder._modules.values())[place], isinstance(holder, _LISTS)
    calls = [call for call in calls if call.place in set(family)]
    own = [i for i, call in enumerate(calls) if call.place == place]
    if block is None or not any(True for _ in block.children()) or all(p.dim() < 2 for p in block.parameters()):
        return _NO_LAYERS
    if len(own) != 1:
        return f"it runs {len(own)} times"
    if listed and [call.place for call in calls] != sorted(call.place for call in calls):
        return "the modules of its list do not run one after the other"
    (_, taken, given, bare), at = calls[own[0]], own[0]
    if taken is None or given is None or taken.shape != given.shape or taken.dtype != given.dtype:
        return "its output does not have the shape of its input"
    if not listed and not bare:
        return "it returns more than one tensor"
    links = [a.given is b.taken for a, b in zip(calls[max(at - 1, 0) : at + 1], calls[max(at, 1) : at + 2])]
    return "its neighbours do not read its output" if (links or not listed) and not any(links) else None


def _watched(model: nn.Module, holders: Mapping[str, list[list[int]]], inputs: Inputs) -> dict[str, list[Call]]:
    """Runs the model once and records the calls of all candidates."""
    calls: dict[str, list[Call]] = {path: [] for path in holders}
    with ExitStack() as stack:
        for path, families in holders.items():
            places = {place for family in families for place in family}
            for place, module in enumerate(model.get_submodule(path)._modules.values()):
                if module is None or place not in places:
                    continue

                def see(_: Any, args: Any, kwargs: Any, out: Any, path: str = path, place: int = place) -> None:
                    taken = main_tensor((*args, *kwargs.values()))
                    calls[path].append(Call(place, taken, main_tensor(out), isinstance(out, Tensor)))

                stack.callback(module.register_forward_hook(see, with_kwargs=True).remove)
        run(model, *inputs)
    return calls


def main_tensor(value: Any) -> Tensor | None:
    """The first tensor in the arguments or the output of a module."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((t for item in items if (t := main_tensor(item)) is not None), None)


def _disjoint(model: nn.Module, families: Mapping[str, Drop]) -> Drop:
    """Lists that do not lie inside each other's blocks: outer ones that are mostly blocks first, then the largest."""

    def order(item: tuple[str, Drop]) -> tuple[bool, int, int]:
        drop = item[1]
        entries = sum(any(True for _ in m.parameters()) for path in drop for m in model.get_submodule(path).children())
        count = sum(map(len, drop.values()))
        stack = count >= 2 and 2 * count >= entries
        return (not stack, item[0].count(".") if stack else 0, -count)

    chosen: Drop = {}
    for _, drop in sorted(families.items(), key=order):
        names = {block_name(path, model.get_submodule(path), place) for path, places in drop.items() for place in places}
        taken = {block_name(path, model.get_submodule(path), place) for path, places in chosen.items() for place in places}
        if not any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in names for b in taken):
            chosen |= drop
    return chosen


def block_name(path: str, holder: nn.Module, place: int) -> str:
    """The full name of an entry of a container."""
    name = list(holder._modules)[place]
    return f"{path}.{name}" if path else name
