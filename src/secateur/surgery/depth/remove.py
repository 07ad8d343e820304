"""Depth: whole blocks go, the least harmful one first.

How harmful that is, is measured: the relative change of the model's output on data, after each removal anew. Blocks of deep
models hardly change what passes through them (Men et al. 2024, ShortGPT; Gromov et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ...blocks import Drop, block_name, find_blocks, main_tensor
from ...edit import (
    Cuts,
    Inputs,
    RngGuard,
    check_fits,
    copied,
    is_cut,
    owned_tensors,
    plain_kernels,
    run,
    split_inputs,
    without,
    write_attribute,
)
from ...stats import split_batch
from ...trace import Trace, trace
from ..budget import tells, tolerance
from ..calibrate import checked, reestimate_
from ..optimizers import sliced_state
from ..pipeline import AnyCriterion, Done, shrunk
from ..request import (
    TARGETS,
    Options,
    check,
    check_criterion,
    check_model,
    excluded,
    names_to_leave,
    target_of,
    under,
)
from ..result import Row, Shrunk
from ..sizes import Counting, times
from ..verify import Verified, as_dtype, difference, tensors_of, verify, widened
from .blocks import Link, links_of, mended

# --- which of them go -----------------------------------------------------------------------------------------------


@contextmanager
def removed(model: nn.Module, drop: Drop, links: Mapping[str, list[Link]]) -> Iterator[None]:
    """The model itself without these blocks, and with the numbers that go with that, for a while."""
    numbers = mended(model, drop, links)
    with without(model, drop):
        for a in numbers:
            write_attribute(model, a)
        try:
            yield
        finally:
            for a in numbers:
                write_attribute(model, a._replace(old=a.new, new=a.old))


def choose_blocks(
    model: nn.Module, inputs: Inputs, depth: float, globs: Sequence[str], data: Iterable[Any] | None
) -> tuple[Drop, dict[str, str], float]:
    """Blocks to drop so that this fraction of them remains; blocks that cannot go, and why; how far the output moves."""
    if depth == 1:
        return {}, {}, 0.0
    blocks, refused = find_blocks(model, inputs)
    names = {(p, i): block_name(p, model.get_submodule(p), i) for p, places in blocks.items() for i in places}
    total, wanted = len(names), len(names) - round(depth * len(names))
    if wanted == 0:
        least = f"; {(total - 1) / total:.3g} would remove one" if total > 1 else ""
        why = "".join(f"; {name}: {why}" for name, why in list(refused.items())[:4])
        raise ValueError(f"depth={depth:g} removes none of the {total} blocks of {type(model).__name__}{least}{why}")
    refused |= {name: "excluded" for name in names.values() if under(name, globs)}
    links = links_of(model, blocks)
    batches = [inputs] if data is None else [split_batch(batch)[:2] for batch in data]
    whole = _whole(model, batches, "data=" if data is not None else "the example inputs")
    drop: Drop = {}
    effect = 0.0
    for _ in range(wanted):
        scores: dict[tuple[str, int], float] = {}
        for (path, place), name in names.items():
            if name in refused or place in drop.get(path, ()) or len(blocks[path]) - len(drop.get(path, ())) <= 1:
                continue
            try:
                with removed(model, {**drop, path: sorted([*drop.get(path, ()), place])}, links):
                    change = _change([tensors_of(run(model, *batch)) for batch in batches], whole)
            except Exception as error:
                change = f"the model does not run ({type(error).__name__}: {error})"
            if isinstance(change, str):
                refused[name] = f"without it {change}"
            else:
                scores[path, place] = change
        if not scores:
            done = sum(map(len, drop.values()))
            why = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[:4]) or "every list keeps one block"
            raise ValueError(
                f"depth={depth:g}: {wanted} of {total} blocks would have to go, and after {done} no other can ({why}). "
                "The model is as it was."
            )
        path, place = min(scores, key=lambda key: scores[key])
        effect = scores[path, place]
        drop = {**drop, path: sorted([*drop.get(path, ()), place])}
    return drop, refused, effect


def _whole(model: nn.Module, batches: Sequence[Inputs], source: str) -> list[list[Tensor]]:
    """What the whole model answers: all changes are measured against it, so it has to say something."""
    kind, found = type(model).__name__, []
    for number, batch in enumerate(batches):
        try:
            found.append(tensors_of(run(model, *batch)))
        except Exception as error:
            raise ValueError(
                f"{kind} does not run on batch {number} of {source}: {type(error).__name__}: {error}. The model is as it was."
            ) from error
    if not any(bool(t.isfinite().any()) for tensors in found for t in tensors):
        raise ValueError(
            f"{kind} answers with no finite number on {source}, so no block can be told from another; pass other data. The "
            "model is as it was."
        )
    return found


def _change(found: Sequence[Sequence[Tensor]], whole: Sequence[Sequence[Tensor]]) -> float | str:
    """The norm of the difference over the norm where that is finite, the mean over batches; or what is wrong."""
    shares = []
    for now, before in zip(found, whole, strict=True):
        if [t.shape for t in now] != [t.shape for t in before]:
            return f"the output has shapes {[tuple(t.shape) for t in now]}"
        if _lost(now, before):
            return "the output is not finite where it was"
        parts = [((a - b)[b.isfinite()].abs().double(), b[b.isfinite()].abs().double()) for a, b in zip(now, before)]
        moved, size = (sum(float(part.square().sum()) for part in each) for each in zip(*parts))
        shares.append((moved / max(size, 1e-30)) ** 0.5)
    return sum(shares) / len(shares)


def _lost(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Whether finite numbers became NaN or infinite."""
    return any(bool((b.isfinite() & ~a.isfinite()).any()) for a, b in zip(now, before, strict=True))


# --- the cut and its check ------------------------------------------------------------------------------------------


def cuts_of_blocks(model: nn.Module, drop: Drop) -> Cuts:
    lengths = {path: len(model.get_submodule(path)._modules) for path in drop}
    return Cuts(attributes=mended(model, drop, links_of(model, drop)), drop=drop, lengths=lengths)


def copied_without(model: nn.Module, drop: Drop) -> nn.Module:
    """A copy of what remains. The blocks that go are never copied."""
    with removed(model, drop, links_of(model, drop)):
        return copied(model)


def verify_blocks(original: nn.Module, small: nn.Module, cuts: Cuts, inputs: Inputs, *, each: bool = True) -> Verified:
    """The small model against the original with its blocks skipped and its units masked; per group, and per list of blocks."""
    check_fits(original, cuts)
    middle = copied_without(original, cuts.drop)
    left = [a for a in cuts.attributes if not is_cut(middle, Cuts(attributes=[a]))]
    rest = Cuts(cuts.tensors, cuts.shapes, left, cuts.added)
    wide, dtype, note = torch.float64, "float64", ""
    try:
        skipped, dense, short = _answers(original, middle, cuts.drop, inputs, wide)
    except Exception as failure:
        wide, dtype = None, str(next(original.parameters()).dtype).removeprefix("torch.")
        note = f"not in float64, where the model fails ({type(failure).__name__}: {failure})"
        skipped, dense, short = _answers(original, middle, cuts.drop, inputs, wide)
    error, moved = difference(short, skipped), difference(skipped, dense) > 1e-12
    if _lost(tensors_of(skipped), tensors_of(dense)):  # two answers that are no numbers are equal, which proves nothing
        error, note = float("inf"), "without the blocks the output is not finite where it was"
    groups = dict.fromkeys(cuts.drop, error)
    if rest.tensors or rest.attributes or rest.added:
        found = verify(middle, small, rest, *inputs, each=each)
        dtype, note = found.dtype if dtype == "float64" else dtype, note or found.note
        return Verified(max(error, found.max_error), groups | found.groups, found.recut, found.moved or moved, dtype, note)
    worst = max(difference(_answer(small, inputs, wide), skipped), error)
    return Verified(worst, groups, error, moved, dtype, note)


def _answers(original: nn.Module, middle: nn.Module, drop: Drop, inputs: Inputs, dtype: torch.dtype | None) -> tuple[Any, ...]:
    twin = copied(original)
    for path, places in drop.items():
        for place in places:
            list(twin.get_submodule(path)._modules.values())[place].register_forward_hook(_skip, with_kwargs=True)  # type: ignore[union-attr]
    dense = _answer(original, inputs, dtype)
    if dtype is not None and any(bool(t.isnan().any()) for t in tensors_of(dense)):
        raise ArithmeticError("its answer is not a number there")
    return _answer(twin, inputs, dtype), dense, _answer(middle, inputs, dtype)


def _skip(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """A block that passes on what it got, in whatever it packs its answer into."""
    taken, given = main_tensor((*args, *kwargs.values())), main_tensor(out)
    return tree_map(lambda value: taken if value is given else value, out)


def _answer(model: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> Any:
    args, kwargs = as_dtype(dtype, inputs)
    made = copied(model)
    return run(made if dtype is None else widened(made, dtype), args, kwargs)


# --- the way through ------------------------------------------------------------------------------------------------


def shrunk_in_depth(model: nn.Module, example_inputs: Any, criterion: AnyCriterion, options: Options, rng: RngGuard) -> Done:
    """`shrunk`, with `depth=` before any other target; those count from the model as it was given."""
    check_model(model)
    check(options)
    depth, more = options.get("depth"), any(options.get(key) is not None for key in TARGETS)
    rest: Options = {**options}
    rest.pop("depth", None)
    if depth is None or (depth == 1 and more):
        return shrunk(model, example_inputs, criterion, rest, rng)
    what, target = target_of(options) if more else ("", 1.0)
    check_criterion(criterion)
    globs = rest["exclude"] = names_to_leave(options.get("exclude", ()))
    inputs, optimizer = split_inputs(example_inputs), rest.pop("optimizer", None)
    traced = trace(model, *inputs)
    excluded(traced, globs)  # raises where one is not known
    data = rest["data"] = None if (given := options.get("data")) is None else checked(given)
    drop, refused, effect = choose_blocks(model, inputs, depth, globs, data)
    cuts, middle = cuts_of_blocks(model, drop), copied_without(model, drop)
    flops = _flops(model, inputs), _flops(middle, inputs)
    said = f"depth={depth:g} by the change of the output ({effect:.3g})"
    if more:
        rest["exclude"] = _known(model, drop, globs)
        units = (_units(traced, globs), _units(trace(middle, *inputs), rest["exclude"])) if what == "channels" else (1, 1)
        rest.update({what: _from_the_whole(what, target, model, middle, inputs, flops, units)})  # type: ignore[typeddict-item]
        small, plan, _ = shrunk(middle, example_inputs, criterion, rest, rng, model)
        plan.recipe = f"{said}, {what}={target:g} of the whole model; then {plan.recipe}"
        plan.cuts.attributes[:0] = cuts.attributes
        plan.cuts.drop, plan.cuts.lengths = cuts.drop, cuts.lengths
        plan.original, after = model, plan.totals["flops"][1]
    else:
        small, after = middle, flops[1]
        if options.get("reestimate") and data is not None:
            reestimate_(small, data)
        plan = Shrunk(said, [], {}, {}, cuts, {}, small, model, inputs)
    plan.groups[:0] = [_row(model, path, places) for path, places in drop.items()]
    plan.skipped |= refused
    plan.totals |= {"params": (_params(model), _params(small)), "flops": (flops[0], after)}
    state = {} if optimizer is None else sliced_state(optimizer, model, plan.cuts)
    return Done(small, plan, state)


def _row(model: nn.Module, path: str, places: Sequence[int]) -> Row:
    holder = model.get_submodule(path)
    names = tuple(block_name(path, holder, place) for place in places)
    modules = list(holder._modules.values())
    kinds = {type(modules[place]) for place in places}
    listed = isinstance(holder, nn.ModuleList | nn.Sequential)
    before = len(modules) if listed else sum(type(module) in kinds for module in modules)
    return Row(path or "the model", before, before - len(places), None, names)


def _from_the_whole(
    what: str,
    target: float,
    model: nn.Module,
    middle: nn.Module,
    inputs: Inputs,
    flops: tuple[int, int],
    units: tuple[int, int],
) -> float:
    """A target that counts from the whole model, as one that counts from what the removed blocks leave."""
    spread = None
    if what == "params":
        left = _params(middle) / _params(model)
    elif what == "flops":
        left = flops[1] / max(flops[0], 1)
    elif what == "latency":
        timing = times(model, middle, inputs, lambda t: tells(t, target), seconds=(0.1, 1.0))
        left, spread = timing.ratio, timing.spread
    else:
        left = units[1] / max(units[0], 1)
    if target > left + tolerance(target, spread):
        raise ValueError(
            f"{what}={target:g}: without the blocks {left:.3g} remains already; ask for a larger depth= or a smaller {what}="
        )
    return target if what == "latency" else min(target / left, 1.0)  # a time is compared with that of the whole anyway


def _known(model: nn.Module, drop: Drop, globs: Sequence[str]) -> tuple[str, ...]:
    """What is excluded, by the names it has without the blocks: those behind them move up, and some names go with them."""

    def names() -> dict[int, str]:
        modules = {id(module): name for name, module in model.named_modules() if name}
        return modules | {key: name for key, (name, _) in owned_tensors(model).items()}

    before = names()
    with without(model, drop):
        after = names()
    meant = {after[key] for key, name in before.items() if key in after and any(fnmatchcase(name, glob) for glob in globs)}
    return tuple(escape(name) for name in sorted(meant) if not under(name.rpartition(".")[0], map(escape, meant)))


def _units(traced: Trace, globs: Sequence[str]) -> int:
    left = excluded(traced, globs)
    return sum(g.size for g in traced.prunable if g not in left)


def _params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _flops(model: nn.Module, inputs: Inputs) -> int:
    with plain_kernels(), Counting() as counter:
        run(model, *inputs)
    return counter.total
