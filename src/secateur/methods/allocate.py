"""Greedy allocation: spreads one sparsity over layers by what it costs the output, measured by running the layers.

Inside a block (Liu et al., 2024, TEAL): raise the sparsity of the layer whose next step costs the block's output least per
weight saved. Over blocks: follow the paths found that way together, with each block's error weighted by its effect on the
output of the whole model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from torch import Tensor, nn

from ..blocks import repeated_blocks
from ..progress import Progress
from ..stream import Replay, record, stream

STEP = 0.05
MOST = 0.95  # no layer is asked for more
REACH = 0.25  # paths go so far beyond what is asked
_DEPTH = 4  # how many objects deep an output is searched for tensors
Put = Callable[[str, float], None]


@dataclass
class Path:
    """The greedy steps of the gated layers in one block, and the weight of its error in the model's output."""

    names: list[str]
    steps: list[tuple[str, float, float, float]] = field(default_factory=list)  # (layer, sparsity before, after, error then)
    weight: float = 1.0


def greedy_sparsities(
    model: nn.Module, sizes: Mapping[str, int], put: Put, batches: Sequence[Any], asked: float, step: float = STEP
) -> dict[str, float]:
    """A sparsity for each layer, such that `asked` of all the weights (`sizes`) are skipped and the output changes least.

    `put(name, sparsity)` sets the gate of one layer. Two allocations are measured on the whole model and the better one is
    returned: the same sparsity for every block, as in TEAL, and blocks that compete.
    """
    blocks = repeated_blocks(model, sizes)
    for name in sizes:
        put(name, 0.0)
    progress = Progress("gates")
    inner = stream(model, [block.module for block in blocks if block.module is not model], batches)
    whole = Errors(record(model, model, batches))
    paths = []
    for number, block in enumerate(blocks, 1):
        progress(f"measuring block {number} of {len(blocks)}")
        errors = whole if block.module is model else Errors(next(inner))
        paths.append(_walk(Path(block.names), sizes, put, errors, asked, step))
    alike = {name: level for path in paths for name, level in _merge([path], sizes, asked).items()}
    if len(paths) == 1:
        return alike
    for number, path in enumerate(paths, 1):
        progress(f"weighing block {number} of {len(paths)}")
        alone = _measure(whole, put, {name: alike[name] for name in path.names})
        own = [error for name, _, level, error in path.steps if level <= alike[name]]
        path.weight = alone / max([*own, 1e-30])
    apart = _merge(paths, sizes, asked)
    return apart if _measure(whole, put, apart) < _measure(whole, put, alike) else alike


def squares(output: Any, dense: Any) -> tuple[float, float]:
    """The squared distance of an output from the dense one, and the squared size of that, over all their float tensors.

    Infinities that both have, as masked logits do, count in neither.
    """
    pairs = list(zip(_floats(output), _floats(dense), strict=True))
    if not pairs:
        raise ValueError(f"an output of type {type(output).__name__} holds no float tensor, so there is no error to measure")
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
    """The float tensors of an output, in tuples, lists, mappings, dataclasses and other objects.

    Other objects are searched only as deep as it takes to find a tensor: beside logits, a cache of keys and values would
    outweigh them.
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


class Errors:
    """Runs a part of the model again and compares its outputs with those it had at the beginning."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.dense = list(replay.run())

    def __call__(self) -> float:
        """The squared relative distance from the outputs at the beginning."""
        found = [squares(output, dense) for output, dense in zip(self.replay.run(), self.dense, strict=True)]
        error = sum(distance for distance, _ in found) / max(sum(size for _, size in found), 1e-30)
        if not math.isfinite(error):
            kind = type(self.replay.module).__name__
            raise ValueError(f"the output of {kind} is NaN or infinite; look at the calibration data")
        return error


def _measure(errors: Errors, put: Put, levels: Mapping[str, float]) -> float:
    """The error at these sparsities. The gates let everything through again afterwards."""
    for name, level in levels.items():
        put(name, level)
    error = errors()
    for name in levels:
        put(name, 0.0)
    return error


def _walk(block: Path, sizes: Mapping[str, int], put: Put, errors: Errors, asked: float, step: float) -> Path:
    """Finds the greedy steps of a block. Costs rarely fall as others rise, so only the cheapest layer is measured again."""
    most = max(MOST, asked)
    enough = min(asked + REACH, most) * sum(sizes[name] for name in block.names)
    levels = dict.fromkeys(block.names, 0.0)
    queue = [(-1.0, name, -1, 0.0) for name in block.names]  # (error per weight, layer, steps taken when measured, error)
    saved = now = 0.0
    while queue and saved < enough * (1 - 1e-9):
        cost, name, measured_at, error = heapq.heappop(queue)
        level = min(levels[name] + step, most)
        gain = (level - levels[name]) * sizes[name]
        if measured_at != len(block.steps):
            put(name, level)
            error = errors()
            put(name, levels[name])
            heapq.heappush(queue, ((error - now) / gain, name, len(block.steps), error))
            continue
        put(name, level)
        block.steps.append((name, levels[name], level, error))
        levels[name], now, saved = level, error, saved + gain
        if level < most:
            heapq.heappush(queue, (cost, name, -1, 0.0))
    for name in block.names:
        put(name, 0.0)
    return block


def _merge(blocks: Sequence[Path], sizes: Mapping[str, int], asked: float) -> dict[str, float]:
    """Follows the paths together, always the stretch that costs least error per weight, until the budget is met exactly."""
    levels = {name: 0.0 for block in blocks for name in block.names}
    left = asked * sum(sizes[name] for name in levels)
    at = [0] * len(blocks)
    while left > 1e-9:
        stretches = [_cheapest(block, position, sizes) for block, position in zip(blocks, at, strict=True)]
        chosen = min(range(len(blocks)), key=lambda i: stretches[i][0])
        if stretches[chosen][0] == math.inf:  # every path is at its end
            break
        for name, before, after, _ in blocks[chosen].steps[at[chosen] : stretches[chosen][1]]:
            taken = min((after - before) * sizes[name], max(left, 0.0))
            levels[name] = before + taken / sizes[name] if taken else levels[name]
            left -= taken
        at[chosen] = stretches[chosen][1]
    return levels


def _cheapest(block: Path, position: int, sizes: Mapping[str, int]) -> tuple[float, int]:
    """The stretch of a path from `position` that costs least error per weight, as (cost, end)."""
    start = block.steps[position - 1][3] if position else 0.0
    best, saved = (math.inf, position), 0.0
    for end, (name, before, after, error) in enumerate(block.steps[position:], position + 1):
        saved += (after - before) * sizes[name]
        best = min(best, (block.weight * (error - start) / saved, end))
    return best
