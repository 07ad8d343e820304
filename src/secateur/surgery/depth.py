"""Depth: whole blocks go, the least harmful one first.

How harmful that is, is measured: the relative change of the model's output on data, after each removal anew. Blocks of deep
models hardly change what passes through them (Men et al. 2024, ShortGPT; Gromov et al. 2024).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..graph import trace
from ..graph.trace import plain_kernels
from ..stats import split_batch
from .blocks import Drop, Inputs, Link, block_name, find_blocks, links_of, main_tensor, mended
from .budget import TOLERANCE
from .cut import Cuts, check_fits, is_cut, without, write_attribute
from .masked import run
from .optimizers import sliced_state
from .request import Options, check, excluded, split_inputs, target_of
from .shrunk import Row, Shrunk
from .sizes import Counting
from .verify import Verified, difference, tensors_of, verify
from .work import AnyCriterion, Done, shrunk
from .work import _times as times_of

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
    model: nn.Module, inputs: Inputs, depth: float, exclude: str | Iterable[str], data: Iterable[Any] | None
) -> tuple[Drop, dict[str, str], float]:
    """Blocks to drop so that this fraction of them remains; blocks that cannot go, and why; how far the output moves."""
    blocks, refused = find_blocks(model, inputs)
    names = {(p, i): block_name(p, model.get_submodule(p), i) for p, places in blocks.items() for i in places}
    total, wanted = len(names), len(names) - round(depth * len(names))
    if wanted == 0:
        least = f"; {(total - 1) / total:.3g} would remove one" if total > 1 else ""
        why = "".join(f"; {name}: {why}" for name, why in list(refused.items())[:4])
        raise ValueError(f"depth={depth:g} removes none of the {total} blocks of {type(model).__name__}{least}{why}")
    globs = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    refused |= {name: "excluded" for name in names.values() if any(fnmatchcase(name, glob) for glob in globs)}
    links = links_of(model, blocks)
    batches = [inputs] if data is None else [split_batch(batch)[:2] for batch in data]
    whole = [tensors_of(run(model, *batch)) for batch in batches]
    drop: Drop = {}
    effect = 0.0
    for _ in range(wanted):
        scores: dict[tuple[str, int], float] = {}
        for (path, place), name in names.items():
            if name in refused or place in drop.get(path, ()) or len(blocks[path]) - len(drop.get(path, ())) <= 1:
                continue
            try:
                with removed(model, {**drop, path: sorted([*drop.get(path, ()), place])}, links):
                    scores[path, place] = _change([tensors_of(run(model, *batch)) for batch in batches], whole)
            except Exception as error:
                refused[name] = f"without it the model does not run ({type(error).__name__}: {error})"
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


def _change(found: Sequence[Sequence[Tensor]], whole: Sequence[Sequence[Tensor]]) -> float:
    """The norm of the difference over the norm, the mean over batches. Raises where the shapes are not the same."""
    shares = []
    for now, before in zip(found, whole, strict=True):
        if [t.shape for t in now] != [t.shape for t in before]:
            raise ValueError(f"the output has shapes {[tuple(t.shape) for t in now]}")
        parts = [(a.double() - b.double(), b.double()) for a, b in zip(now, before)]
        moved, size = (sum(float(t[i].nan_to_num().square().sum()) for t in parts) for i in (0, 1))
        shares.append((moved / max(size, 1e-30)) ** 0.5)
    return sum(shares) / len(shares)


# --- the cut and its check ------------------------------------------------------------------------------------------


def cuts_of_blocks(model: nn.Module, drop: Drop) -> Cuts:
    lengths = {path: len(model.get_submodule(path)._modules) for path in drop}
    return Cuts(attributes=mended(model, drop, links_of(model, drop)), drop=drop, lengths=lengths)


def copied_without(model: nn.Module, drop: Drop) -> nn.Module:
    """A copy of what remains. The blocks that go are never copied."""
    with removed(model, drop, links_of(model, drop)):
        return copy.deepcopy(model)


def verify_blocks(original: nn.Module, small: nn.Module, cuts: Cuts, inputs: Inputs, *, each: bool = True) -> Verified:
    """The small model against the original with its blocks skipped and its units masked; per group, and per list of blocks."""
    check_fits(original, cuts)
    middle = copied_without(original, cuts.drop)
    left = [a for a in cuts.attributes if not is_cut(middle, Cuts(attributes=[a]))]
    rest = Cuts(cuts.tensors, cuts.shapes, left, cuts.added)
    try:
        skipped, dense, short = _answers(original, middle, cuts.drop, inputs, torch.float64)
        dtype = "float64"
    except Exception:
        skipped, dense, short = _answers(original, middle, cuts.drop, inputs, None)
        dtype = str(next(original.parameters()).dtype).removeprefix("torch.")
    error, moved = difference(short, skipped), difference(skipped, dense) > 1e-12
    if rest.tensors or rest.attributes or rest.added:
        found = verify(middle, small, rest, *inputs, each=each)
        groups = {**dict.fromkeys(cuts.drop, error), **found.groups}
        return Verified(max(error, found.max_error), groups, found.recut, found.moved or moved, found.dtype, found.note)
    now = _answer(small, inputs, torch.float64 if dtype == "float64" else None)
    return Verified(difference(now, skipped), dict.fromkeys(cuts.drop, error), error, moved, dtype)


def _answers(original: nn.Module, middle: nn.Module, drop: Drop, inputs: Inputs, dtype: torch.dtype | None) -> tuple[Any, ...]:
    twin = copy.deepcopy(original)
    for path, places in drop.items():
        for place in places:
            list(twin.get_submodule(path).children())[place].register_forward_hook(_skip, with_kwargs=True)
    return _answer(twin, inputs, dtype), _answer(original, inputs, dtype), _answer(middle, inputs, dtype)


def _skip(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
    """A block that passes on what it got, in whatever it packs its answer into."""
    taken, given = main_tensor((*args, *kwargs.values())), main_tensor(out)
    return tree_map(lambda value: taken if value is given else value, out)


def _answer(model: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> Any:
    def wide(value: Any) -> Any:
        return value.to(dtype) if dtype and isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(wide, inputs)
    made = copy.deepcopy(model)
    return run(made if dtype is None else made.to(dtype), args, kwargs)


# --- the way through ------------------------------------------------------------------------------------------------


def shrunk_in_depth(model: nn.Module, example_inputs: Any, criterion: AnyCriterion, options: Options) -> Done:
    """`shrunk`, with `depth=` before any other target; those count from the model as it was given."""
    depth = options.get("depth")
    rest: Options = {**options}
    rest.pop("depth", None)
    if depth is None:
        return shrunk(model, example_inputs, criterion, rest)
    check(options)
    inputs, optimizer = split_inputs(example_inputs), rest.pop("optimizer", None)
    data = options.get("data")
    if data is not None and iter(data) is data:
        data = rest["data"] = list(data)
    drop, refused, effect = choose_blocks(model, inputs, depth, options.get("exclude", ()), data)
    cuts, middle = cuts_of_blocks(model, drop), copied_without(model, drop)
    flops = _flops(model, inputs), _flops(middle, inputs)
    said = f"depth={depth:g} by the change of the output ({effect:.3g})"
    if any(options.get(key) is not None for key in ("channels", "params", "flops", "latency")):
        what, target = target_of(options)
        rest.update({what: _from_the_whole(what, target, model, middle, inputs, flops, rest)})  # type: ignore[typeddict-item]
        small, plan, _ = shrunk(middle, example_inputs, criterion, _known(rest, middle))
        plan.recipe = f"{said}, {what}={target:g} of the whole model; then {plan.recipe}"
        plan.cuts.attributes[:0] = cuts.attributes
        plan.cuts.drop, plan.cuts.lengths = cuts.drop, cuts.lengths
        plan.original, after = model, plan.totals["flops"][1]
    else:
        small, after = middle, flops[1]
        plan = Shrunk(said, [], {}, {}, cuts, {}, small, model, inputs)
    plan.groups[:0] = [_row(model, path, places) for path, places in drop.items()]
    plan.skipped |= refused
    plan.totals |= {"params": (_params(model), _params(small)), "flops": (flops[0], after)}
    state = {} if optimizer is None else sliced_state(optimizer, model, plan.cuts)
    return Done(small, plan, state)


def _row(model: nn.Module, path: str, places: Sequence[int]) -> Row:
    holder = model.get_submodule(path)
    names = tuple(block_name(path, holder, place) for place in places)
    return Row(path or "the model", len(holder._modules), len(holder._modules) - len(places), None, names)


def _from_the_whole(
    what: str, target: float, model: nn.Module, middle: nn.Module, inputs: Inputs, flops: tuple[int, int], options: Options
) -> float:
    """A target that counts from the whole model, as one that counts from what the removed blocks leave."""
    if what == "params":
        left = _params(middle) / _params(model)
    elif what == "flops":
        left = flops[1] / max(flops[0], 1)
    elif what == "latency":
        times = times_of(model, middle, inputs)
        left = times[1] / times[0]
    else:
        left = _units(middle, inputs, options) / max(_units(model, inputs, options), 1)
    if target > left * (1 + TOLERANCE):
        raise ValueError(
            f"{what}={target:g}: without the blocks {left:.3g} remains already; ask for less depth or for less {what}"
        )
    return min(target / left, 1.0)


def _known(options: Options, middle: nn.Module) -> Options:
    """`exclude` without the names that went with the blocks."""
    globs = options.get("exclude", ())
    globs = (globs,) if isinstance(globs, str) else tuple(globs)
    names = [name for name, _ in (*middle.named_modules(), *middle.named_parameters(), *middle.named_buffers())]
    return {**options, "exclude": tuple(glob for glob in globs if any(fnmatchcase(name, glob) for name in names))}


def _units(model: nn.Module, inputs: Inputs, options: Options) -> int:
    traced = trace(model, *inputs)
    left = excluded(traced, _known(options, model).get("exclude", ()))
    return sum(g.size for g in traced.prunable if g not in left)


def _params(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _flops(model: nn.Module, inputs: Inputs) -> int:
    with plain_kernels(), Counting() as counter:
        run(model, *inputs)
    return counter.total
