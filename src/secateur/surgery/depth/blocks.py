"""Finds the blocks of a model that can be removed, and the numbers of the model that depend on them.

A block is an entry of a ModuleList or Sequential, or one of several attributes of one type. It runs once, between its
neighbours, and returns a tensor of the shape of its input, so that the next block can read that input instead. Blocks are
found by how they run, not by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...edit import Attribute, Inputs, built_from, held_objects, number_at, numbers_of, object_at, run, with_numbers

Drop = dict[str, list[int]]


class Call(NamedTuple):
    """One run of an entry of a list: its first input and output tensors. `bare`: it returned nothing but one tensor."""

    place: int
    taken: Tensor | None
    given: Tensor | None
    bare: bool


# --- which blocks there are -----------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, inputs: Inputs) -> tuple[Drop, dict[str, str]]:
    """The positions of removable blocks by the path of their list, and the other entries with the reason."""
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


_COUNT_NAME = re.compile("layer|depth|block")
_NO_LAYERS = "it holds no layers"


def _families(holder: nn.Module) -> list[list[int]]:
    """Positions in a module that may form a row of blocks: all entries of a list, or attributes of one type."""
    if isinstance(holder, nn.ModuleList | nn.Sequential):
        return [list(range(len(holder._modules)))]
    kinds: dict[type[nn.Module], list[int]] = {}
    for place, module in enumerate(holder._modules.values()):
        if module is None or isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(True for _ in module.children()):  # a single layer is no block
            kinds.setdefault(type(module), []).append(place)
    return [places for places in kinds.values() if len(places) > 1]


def _not_a_block(holder: nn.Module, place: int, family: Sequence[int], calls: Sequence[Call]) -> str | None:
    block, listed = list(holder._modules.values())[place], isinstance(holder, nn.ModuleList | nn.Sequential)
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
    """The first tensor in the inputs or outputs of a module."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((t for item in items if (t := main_tensor(item)) is not None), None)


def _disjoint(model: nn.Module, families: Mapping[str, Drop]) -> Drop:
    """Lists of blocks of which none is inside a block of another. Outer lists of mostly blocks come first, then the largest."""

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
    name = list(holder._modules)[place]
    return f"{path}.{name}" if path else name


# --- numbers that depend on them -----------------------------------------------------------------------------------


Link = tuple[str, str, Any, bool]  # owner, attribute, index of a number; True: a list with an entry for each block


def links_of(model: nn.Module, paths: Iterable[str]) -> dict[str, list[Link]]:
    """For each list of modules: the numbers in the model and its configs that are its length."""
    listed = {path: isinstance(model.get_submodule(path), nn.ModuleList | nn.Sequential) for path in paths}
    return {
        path: list(_counted(model, path, len(model.get_submodule(path)._modules))) if here else []
        for path, here in listed.items()
    }


def mended(model: nn.Module, drop: Drop, links: Mapping[str, list[Link]]) -> list[Attribute]:
    """The numbers that change with the blocks: lengths, positions stored in blocks, and lists with an entry for each."""
    found: list[Attribute] = []
    for path, gone in drop.items():
        holder = model.get_submodule(path)
        count = len(holder._modules)
        stay = [i for i in range(count) if i not in set(gone)]
        if isinstance(holder, nn.ModuleList | nn.Sequential):
            found += _renumbered(path, holder, list(holder._modules.values()), stay)
        for at, name, index, entries in links[path]:
            value = list(getattr(object_at(model, at), name)) if entries else count
            found.append(Attribute(at, name, index, value, [value[i] for i in stay] if isinstance(value, list) else len(stay)))
    return list({(a.path, a.name, a.index): a for a in found}.values())


def _renumbered(path: str, holder: nn.Module, blocks: Sequence[Any], stay: Sequence[int]) -> Iterator[Attribute]:
    """Integers that are the position of their block in every block that has them: key-value caches use these."""
    seen: dict[tuple[str, str], dict[int, Any]] = {}
    for i, block in enumerate(blocks):
        for inner, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    seen.setdefault((inner, name), {})[i] = value
    numbered = all(name == str(i) for i, name in enumerate(holder._modules))
    names = list(holder._modules)
    for (inner, name), values in seen.items():
        if len(values) >= 2 and all(value == i for i, value in values.items()):
            for new, old in enumerate(stay):
                if old in values and new != old:
                    at = ".".join(part for part in (path, str(new) if numbered else names[old], inner) if part)
                    yield Attribute(at, name, None, old, new)


def _counted(model: nn.Module, path: str, count: int) -> Iterator[Link]:
    """Numbers of the modules around a list and of their configs: its length, and lists with an entry for each block."""
    parts = path.split(".") if path else []
    around = [".".join(parts[:n]) for n in range(len(parts))]
    owners: dict[int, tuple[str, Any]] = {}
    for outer in around:
        for at, config in held_objects(model.get_submodule(outer), outer):
            if not at.rpartition(".")[2].startswith("_"):
                owners.setdefault(id(config), (at, config))
    for at, owner in [(p, model.get_submodule(p)) for p in around[-1:]] + list(owners.values()):
        for name, value in vars(owner).items():
            if type(value) is int and value == count and _counts(model, path, at, (name,)):
                yield at, name, None, False
            elif isinstance(value, list | tuple) and not name.startswith("_"):
                own = [i for i, v in enumerate(value) if type(v) is int and v == count and _counts(model, path, at, (name, i))]
                yield from ((at, name, i, False) for i in own)
                plain = all(v is None or isinstance(v, int | float | str) for v in value)
                if not own and len(value) == count and plain and _COUNT_NAME.search(name):
                    yield at, name, None, True


def _counts(model: nn.Module, path: str, at: str, place: tuple[Any, ...]) -> bool:
    """True if this number is the length of the list: a model built from a changed config shows it; else the name decides."""
    config = getattr(model, "config", None)
    if at.partition(".")[0] == "config" and hasattr(config, "to_dict"):
        inside = (*at.split(".")[1:], *place)
        if inside in numbers_of(config):
            try:
                less = built_from(type(model), with_numbers(config, {inside: number_at(config, inside) - 1}))
                return len(less.get_submodule(path)._modules) != number_at(config, inside)
            except Exception:
                return False
    return len(place) == 1 and bool(_COUNT_NAME.search(place[0]))
