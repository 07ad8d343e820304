"""Chooses blocks and removes them: first the block whose removal changes the output least.

The change is measured on data, again after each removal: that of the output, or of the loss (`effect`). Many blocks of deep
models change their input only a little (Men et al., 2024, ShortGPT; Gromov et al., 2024). The blocks in front of a removed one
are not run again (`prefix`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...blocks import Drop, block_name, find_blocks, main_tensor
from ...edit import Cuts, Inputs, copied, run, without, write_attribute
from ...progress import track
from ..compare import difference, lost_finite, tensors_of
from ..names import matches
from .effect import LOSS, OUTPUT, Effect
from .lengths import Link, links_of, mended
from .prefix import Prefixes, can_skip

_INEXACT = "a removed block also returned other tensors, which the model uses"


class BlockList(NamedTuple):
    """A list of blocks: how many it had and has, the names of the removed ones, and why that is not exact, if so."""

    path: str
    before: int
    after: int
    removed: tuple[str, ...]
    why: str | None


class RemovedBlocks(NamedTuple):
    """A copy of the model without some blocks. `effect`: what the removal changes; `kept`: blocks that had to stay."""

    model: nn.Module
    cuts: Cuts
    lists: list[BlockList]
    kept: dict[str, str]
    effect: str


def remove_blocks(
    model: nn.Module,
    inputs: Inputs,
    depth: float,
    *,
    exclude: Sequence[str] = (),
    batches: Sequence[Inputs] | None = None,
    exact_only: bool = False,
    by_loss: bool = False,
) -> RemovedBlocks:
    """Remove blocks so that this fraction of them remains. The model is unchanged.

    The change of the output is measured on `batches`, else on the example inputs. With `by_loss` it is the increase of the
    loss, for models that return logits. Removal is exact where the model without a block computes what it computes with the
    block skipped; `exact_only` keeps the other blocks.
    """
    effect = LOSS if by_loss else OUTPUT
    drop, kept, change = _choose(model, inputs, depth, exclude, batches, exact_only, effect)
    why = None if not drop or _is_exact(model, drop, links_of(model, drop), inputs) else _INEXACT
    lengths = {path: len(model.get_submodule(path)._modules) for path in drop}
    cuts = Cuts(attributes=mended(model, drop, links_of(model, drop)), drop=drop, lengths=lengths)
    lists = [_listed(model, path, places, why) for path, places in drop.items()]
    return RemovedBlocks(copied_without(model, drop), cuts, lists, kept, f"{effect.name} ({change:.3g})")


def copied_without(model: nn.Module, drop: Drop) -> nn.Module:
    """A copy of the model without these blocks, which are never copied."""
    with _removed(model, drop, links_of(model, drop)):
        return copied(model)


@contextmanager
def skipping(model: nn.Module, drop: Drop) -> Iterator[nn.Module]:
    """The model itself, with these blocks returning their input instead of their main output."""
    with ExitStack() as stack:
        for path, places in drop.items():
            for place in places:
                block: Any = list(model.get_submodule(path)._modules.values())[place]
                stack.callback(block.register_forward_hook(_skip, with_kwargs=True).remove)
        yield model


def _skip(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """A forward hook: replaces the main tensor of the output by that of the input. Other outputs stay."""
    taken, given = main_tensor((*args, *kwargs.values())), main_tensor(out)
    return tree_map(lambda value: taken if value is given else value, out)


@contextmanager
def _removed(model: nn.Module, drop: Drop, links: Mapping[str, list[Link]]) -> Iterator[None]:
    """Removes these blocks from the model itself, with the numbers that depend on them, and puts them back on exit."""
    numbers = mended(model, drop, links)
    with without(model, drop):
        for a in numbers:
            write_attribute(model, a)
        try:
            yield
        finally:
            for a in numbers:
                write_attribute(model, a._replace(old=a.new, new=a.old))


def _is_exact(model: nn.Module, drop: Drop, links: Mapping[str, list[Link]], inputs: Inputs) -> bool:
    """True if the model without the blocks returns what it returns with them skipped."""
    with skipping(model, drop):
        skipped = run(model, *inputs)
    with _removed(model, drop, links):
        short = run(model, *inputs)
    dtypes = [t.dtype for t in tensors_of(skipped) if t.is_floating_point()]
    rounding = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return difference(short, skipped) <= 4 * rounding


def _listed(model: nn.Module, path: str, places: Sequence[int], why: str | None) -> BlockList:
    holder = model.get_submodule(path)
    names = tuple(block_name(path, holder, place) for place in places)
    modules = list(holder._modules.values())
    kinds = {type(modules[place]) for place in places}
    listed = isinstance(holder, nn.ModuleList | nn.Sequential)
    before = len(modules) if listed else sum(type(module) in kinds for module in modules)
    return BlockList(path or "the model", before, before - len(places), names, why)


# --- which blocks ---------------------------------------------------------------------------------------------------


def _choose(
    model: nn.Module,
    inputs: Inputs,
    depth: float,
    exclude: Sequence[str],
    batches: Sequence[Inputs] | None,
    exact_only: bool,
    effect: Effect,
) -> tuple[Drop, dict[str, str], float]:
    """The blocks to remove, the blocks that cannot be removed with the reason, and what the removal changes."""
    if depth == 1:
        return {}, {}, 0.0
    blocks, kept = find_blocks(model, inputs)
    names = {(p, i): block_name(p, model.get_submodule(p), i) for p, places in blocks.items() for i in places}
    wanted = _number_to_remove(model, depth, len(names), kept)
    kept |= {name: "excluded" for name in names.values() if matches(name, exclude)}
    links = links_of(model, blocks)
    source, batches = ("the example inputs", [inputs]) if batches is None else ("data=", batches)
    whole = _answers(model, batches, source, effect)
    skips = can_skip(model, blocks, batches)
    drop, last = Drop(), 0.0
    for number in range(1, wanted + 1):
        changes: dict[tuple[str, int], float] = {}
        task = f"remove block {number} of {wanted}"
        start = _prefixes(model, blocks, drop, links, batches) if skips else nullcontext
        for (path, place), name in track(names.items(), task, lambda entry: f"without {entry[1]}"):
            if place in drop.get(path, ()) or len(blocks[path]) - len(drop.get(path, ())) <= 1:
                continue
            started = start()
            if name in kept:
                continue
            more = {**drop, path: sorted([*drop.get(path, ()), place])}
            change = _change_without(model, more, links, batches, whole, started, effect)
            if exact_only and not isinstance(change, str) and not _is_exact(model, more, links, inputs):
                kept[name] = f"exact_only: {_INEXACT}"
            elif isinstance(change, str):
                kept[name] = f"without it {change}"
            else:
                changes[path, place] = change
        if not changes:
            why = "; ".join(f"{name}: {why}" for name, why in list(kept.items())[:4]) or "every list keeps one block"
            raise ValueError(
                f"depth={depth:g} removes {wanted} of {len(names)} blocks, and after {sum(map(len, drop.values()))} no other "
                f"can be removed ({why}). The model is unchanged."
            )
        path, place = min(changes, key=lambda key: changes[key])
        last = changes[path, place]
        drop = {**drop, path: sorted([*drop.get(path, ()), place])}
    return drop, kept, last


def _prefixes(
    model: nn.Module, blocks: Drop, drop: Drop, links: Mapping[str, list[Link]], batches: Sequence[Inputs]
) -> Callable[[], AbstractContextManager[Any]]:
    path = next(iter(blocks))
    return Prefixes(model, path, drop.get(path, ()), batches, lambda: _removed(model, drop, links)).start


def _number_to_remove(model: nn.Module, depth: float, total: int, kept: Mapping[str, str]) -> int:
    wanted = total - round(depth * total)
    if wanted == 0:
        least = f"; {(total - 1) / total:.3g} would remove one" if total > 1 else ""
        why = "".join(f"; {name}: {why}" for name, why in list(kept.items())[:4])
        raise ValueError(f"depth={depth:g} removes none of the {total} blocks of {type(model).__name__}{least}{why}")
    return wanted


def _answers(model: nn.Module, batches: Sequence[Inputs], source: str, effect: Effect) -> list[list[Tensor]]:
    """The outputs of the whole model for each batch. Raises if it does not run, or returns no finite number."""
    kind, found = type(model).__name__, []
    for number, batch in enumerate(batches):
        try:
            output = run(model, *batch)
        except Exception as error:
            raise ValueError(
                f"{kind} does not run on batch {number} of {source}: {type(error).__name__}: {error}. The model is unchanged."
            ) from error
        found.append(effect.read(output))
    if not any(bool(t.isfinite().any()) for tensors in found for t in tensors):
        raise ValueError(
            f"{kind} returns no finite number on {source}, so the effect of a block cannot be measured; pass other data. The "
            "model is unchanged."
        )
    return found


def _change_without(
    model: nn.Module,
    drop: Drop,
    links: Mapping[str, list[Link]],
    batches: Sequence[Inputs],
    whole: Sequence[list[Tensor]],
    started: AbstractContextManager[Any],
    effect: Effect,
) -> float | str:
    """What the model without these blocks changes, the mean over batches; or what goes wrong."""
    try:
        with _removed(model, drop, links), started:
            changes = [_change(batch, run(model, *batch), before, effect) for batch, before in zip(batches, whole, strict=True)]
    except Exception as error:
        return f"the model does not run ({type(error).__name__}: {error})"
    return next((each for each in changes if isinstance(each, str)), None) or sum(map(float, changes)) / len(changes)


def _change(batch: Inputs, output: Any, before: list[Tensor], effect: Effect) -> float | str:
    """The change of one output, or what is wrong with it."""
    now = effect.read(output)
    if [t.shape for t in now] != [t.shape for t in before]:
        return f"the output has shapes {[tuple(t.shape) for t in now]}"
    if lost_finite(now, before):
        return "the output is not finite where it was"
    return effect.change(batch, now, before)
