"""The numbers of a model that depend on its blocks: lengths of lists, and positions that blocks store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...blocks import Drop
from ...edit import Attribute, built_from, held_objects, number_at, numbers_of, object_at, with_numbers

_COUNT_NAME = re.compile("layer|depth|block")
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
