"""Greedy allocation: one sparsity spread over layers by what it costs the output, measured by running the layers.

Inside a block (Liu et al., 2024, TEAL): raise the sparsity of the layer whose next step costs the block's output least per
weight saved. Over blocks: the paths found that way are walked together, each block's error weighted by what it does to the
output of the whole model.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn

from ..display import Progress
from ..stats import split_batch

STEP = 0.05
MOST = 0.95  # no layer is asked for more
REACH = 0.25  # paths go so far beyond what is asked
_DEPTH = 4  # objects in objects that an output may be hidden in
Put = Callable[[str, float], None]


@dataclass
class Block:
    """A part of the model that can be run alone, the layers gated in it, and the path of their greedy steps."""

    module: nn.Module
    names: list[str]
    path: list[tuple[str, float, float, float]] = field(default_factory=list)  # (layer, sparsity before, after, error then)
    weight: float = 1.0


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[Block]:
    """The children of the longest ModuleList with gated layers in two of them or more; what lies outside is one block."""
    names = list(names)
    found: list[tuple[int, list[Block]]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside = [(child, f"{path}.{key}." if path else f"{key}.") for key, child in module.named_children()]
            parts = [Block(child, [n for n in names if n.startswith(prefix) or f"{n}." == prefix]) for child, prefix in inside]
            parts = [part for part in parts if part.names]
            found.append((len(parts), parts))
    count, blocks = max(found, key=lambda one: one[0], default=(0, []))
    blocks = blocks if count > 1 else []
    inside = {name for block in blocks for name in block.names}
    outside = [name for name in names if name not in inside]
    return [*blocks, *([Block(model, outside)] if outside else [])]


def allocate(
    model: nn.Module, sizes: Mapping[str, int], put: Put, batches: Sequence[Any], asked: float, step: float = STEP
) -> dict[str, float]:
    """A sparsity for each layer, so that `asked` of all the weights (`sizes`) are skipped and the output moves least.

    `put(name, sparsity)` sets the gate of one layer. Two answers are measured on the whole model and the better one is taken:
    every block alike, as TEAL has it, and blocks that compete.
    """
    blocks = blocks_of(model, sizes)
    for name in sizes:
        put(name, 0.0)
    tell = Progress("gates")
    for number, block in enumerate(blocks, 1):
        tell(f"measuring block {number} of {len(blocks)}")
        _walk(block, sizes, put, _Replay(model, block.module, batches), asked, step)
    whole = _Replay(model, model, batches)
    alike = {name: level for block in blocks for name, level in _merge([block], sizes, asked).items()}
    if len(blocks) == 1:
        return alike
    for number, block in enumerate(blocks, 1):
        tell(f"weighing block {number} of {len(blocks)}")
        alone = _measure(whole, put, {name: alike[name] for name in block.names})
        own = [error for name, _, level, error in block.path if level <= alike[name]]
        block.weight = alone / max([*own, 1e-30])
    apart = _merge(blocks, sizes, asked)
    return apart if _measure(whole, put, apart) < _measure(whole, put, alike) else alike


def squares(output: Any, dense: Any) -> tuple[float, float]:
    """The squared distance of an output from the dense one, and the squared size of that, over all their float tensors.

    Infinities that both have, as masked logits do, are no distance and no size.
    """
    pairs = list(zip(_floats(output), _floats(dense), strict=True))
    if not pairs:
        raise ValueError(
            f"no float tensor was found in an output of type {type(output).__name__}, so there is no error to measure"
        )
    distance = size = 0.0
    for one, other in pairs:
        if one.shape != other.shape:
            raise ValueError(
                f"an output is {tuple(one.shape)} with gates and {tuple(other.shape)} without; no error to measure"
            )
        distance += float((one - other).masked_fill(one == other, 0).double().square().sum())
        size += float(other.masked_fill(other.isinf(), 0).double().square().sum())
    return distance, size


def _floats(output: Any) -> list[Tensor]:
    """The float tensors of an output, whatever holds them: tuples, lists, mappings, dataclasses, other objects.

    Other objects are looked into only as deep as it takes to find any: beside logits, a cache of keys and values is what the
    model works with, and would outweigh them.
    """
    return next((found for depth in range(_DEPTH) if (found := _floats_at(output, depth))), [])


def _floats_at(output: Any, depth: int) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        parts: Iterable[Any] = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    elif depth or is_dataclass(output):
        parts, depth = getattr(output, "__dict__", {}).values(), depth - (not is_dataclass(output))
    else:
        return []
    return [tensor for part in parts for tensor in _floats_at(part, depth)]


class _Replay:
    """The calls that a part of the model gets from the data, kept so that it can be run again alone."""

    def __init__(self, model: nn.Module, module: nn.Module, batches: Sequence[Any]) -> None:
        self.module = module
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        # A copy, because a call may write to what it was given (in place, or into a cache of keys and values).
        see = lambda _, args, kwargs: self.calls.append(copy.deepcopy((args, kwargs)))  # noqa: E731
        handle = module.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
        try:
            for batch in batches:
                args, kwargs, _ = split_batch(batch)
                model(*args, **kwargs)
        finally:
            handle.remove()
        self.dense = list(self._outputs())

    def _outputs(self) -> Iterator[Any]:
        for call in self.calls:
            args, kwargs = copy.deepcopy(call)
            yield self.module(*args, **kwargs)

    def error(self) -> float:
        """The squared relative distance from the outputs at the beginning."""
        found = [squares(output, dense) for output, dense in zip(self._outputs(), self.dense, strict=True)]
        error = sum(distance for distance, _ in found) / max(sum(size for _, size in found), 1e-30)
        if not math.isfinite(error):
            raise ValueError(f"the output of {type(self.module).__name__} is NaN or infinite; look at the calibration data")
        return error


def _measure(replay: _Replay, put: Put, levels: Mapping[str, float]) -> float:
    """The error at these sparsities; the gates are open again afterwards."""
    for name, level in levels.items():
        put(name, level)
    error = replay.error()
    for name in levels:
        put(name, 0.0)
    return error


def _walk(block: Block, sizes: Mapping[str, int], put: Put, replay: _Replay, asked: float, step: float) -> None:
    """The greedy path of a block. Costs rarely fall as others rise, so only the layer that looks cheapest is measured again."""
    most = max(MOST, asked)
    enough = min(asked + REACH, most) * sum(sizes[name] for name in block.names)
    levels = dict.fromkeys(block.names, 0.0)
    queue = [(-1.0, name, -1, 0.0) for name in block.names]  # (error per weight, layer, steps taken when measured, error)
    saved = now = 0.0
    while queue and saved < enough * (1 - 1e-9):
        cost, name, measured_at, error = heapq.heappop(queue)
        level = min(levels[name] + step, most)
        gain = (level - levels[name]) * sizes[name]
        if measured_at != len(block.path):
            put(name, level)
            error = replay.error()
            put(name, levels[name])
            heapq.heappush(queue, ((error - now) / gain, name, len(block.path), error))
            continue
        put(name, level)
        block.path.append((name, levels[name], level, error))
        levels[name], now, saved = level, error, saved + gain
        if level < most:
            heapq.heappush(queue, (cost, name, -1, 0.0))
    for name in block.names:
        put(name, 0.0)


def _merge(blocks: Sequence[Block], sizes: Mapping[str, int], asked: float) -> dict[str, float]:
    """Walk the paths together, each time the stretch that costs least error per weight, until the budget is met exactly."""
    levels = {name: 0.0 for block in blocks for name in block.names}
    left = asked * sum(sizes[name] for name in levels)
    at = [0] * len(blocks)
    while left > 1e-9:
        stretches = [_cheapest(block, position, sizes) for block, position in zip(blocks, at, strict=True)]
        chosen = min(range(len(blocks)), key=lambda i: stretches[i][0])
        if stretches[chosen][0] == math.inf:  # every path is at its end
            break
        for name, before, after, _ in blocks[chosen].path[at[chosen] : stretches[chosen][1]]:
            taken = min((after - before) * sizes[name], max(left, 0.0))
            levels[name] = before + taken / sizes[name] if taken else levels[name]
            left -= taken
        at[chosen] = stretches[chosen][1]
    return levels


def _cheapest(block: Block, position: int, sizes: Mapping[str, int]) -> tuple[float, int]:
    """The stretch of a path from here that costs least error per weight, as (cost, its end)."""
    start = block.path[position - 1][3] if position else 0.0
    best, saved = (math.inf, position), 0.0
    for end, (name, before, after, error) in enumerate(block.path[position:], position + 1):
        saved += (after - before) * sizes[name]
        best = min(best, (block.weight * (error - start) / saved, end))
    return best
