"""Names the layers that no input reaches while a model runs on the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from .._arguments import copied
from .._dist import Comm
from ..moments import NoInput
from ..reads import listen
from ..stats import on_batch, split_batch
from ..targeting import Target
from .stages import pattern


def no_input(model: nn.Module, targets: Sequence[Target], batches: Iterable[Any], comm: Comm, known: NoInput) -> NoInput:
    """The error that names all layers without inputs, not only those that are `known`.

    A module in which no layer has inputs is named by a glob. Experts that other experts of their kind stand for are not named.
    """
    read: set[str] = set()
    with listen(targets, lambda target, *_: read.add(target.name), lambda target, *_: read.add(target.name), before=True):
        for batch in batches:
            args, kwargs, _ = split_batch(batch)
            args, kwargs = copied((args, kwargs), {})
            with on_batch(model, args, kwargs):
                model(*args, **kwargs)
    names = [target.name for target in targets]
    read = {name for name, times in zip(names, comm.sum(*(name in read for name in names)), strict=True) if times}
    kinds = {pattern(name) for name in read}
    unread = [name for name in names if name not in read and pattern(name) not in kinds]
    return NoInput(_by_module(unread, read)) if unread else known


def _by_module(names: Sequence[str], read: Iterable[str]) -> list[str]:
    """Globs of the outermost modules that hold no name in `read`, and single names."""
    reached = {module for name in read for module in _modules(name)}
    found: dict[str, list[str]] = {}
    for name in names:
        outer = next((module for module in _modules(name) if module not in reached), name)
        found.setdefault(outer, []).append(name)
    return [own[0] if len(own) == 1 else f"{outer}.*" for outer, own in found.items()]


def _modules(name: str) -> list[str]:
    """The names of the modules that hold a parameter, from the outermost."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]
