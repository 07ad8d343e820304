"""`reconstruction`: units scored by what the model's output loses without them, measured on calibration data.

Units of a group leave one after the other, each time the one whose loss hurts the layers that read them least. What hurts is
the error that is left after the repair that was asked for: none (a removed unit is the constant that folding makes of it),
`reestimate` (a batch normalisation behind the reader gives each channel its mean and variance back, so that only correlation
counts), or `refit` (the best linear fit to what is left: backward elimination with the surgeon's formula, Hassibi and Stork,
1993; for channels: He et al., 2017, and Luo et al., 2017). Runs with a part of one group gone then say how much of such an
error arrives at the output, which makes the scores of all groups comparable: a unit's score over what it costs is its price.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from ...axes import Group, Member
from ...stats import check_evidence, on_batch, split_batch
from ...trace import Trace
from ..exact import units_along
from ..masked import silence_
from .elimination import RIDGE, Normed, Order, Plain, State, Surgeon, eliminate
from .importance import Repair, UnitCriterion, Units
from .norms import checked
from .refit import CONVS, Sums, rows_for, samples

_WIDE = 4096  # columns of a weight, from which on the elimination would take hours
_GONE = (0.25, 0.5, 0.75)  # of a group: where its error is measured at the output
_FEW = 64  # examples, or as many rows of an answer that has several to an example, are enough for that


class Reader(NamedTuple):
    """A layer that reads the units: its module, for each unit the columns of its weight (outputs, inputs x kernel)."""

    module: Any
    columns: Tensor
    turned: bool

    def matrix(self) -> Tensor:
        weight = self.module.weight.detach().double().cpu()
        return weight.T if self.turned else weight.flatten(1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if isinstance(self.module, CONVS):
            return self.module._conv_forward(x, weight.reshape(self.module.weight.shape).to(x), bias.to(x))
        return nn.functional.linear(x, weight.to(x), bias.to(x))


class Inputs(NamedTuple):
    """What is known of the inputs of a reader: mean, covariance, what silent units say, whether a BatchNorm follows it."""

    mean: Tensor
    spread: Tensor
    silent: Tensor
    normed: bool


def unit_errors(trace: Trace, groups: Sequence[Group], data: Iterable[Any] | None, repair: Repair) -> dict[Group, Tensor | str]:
    """The rise of the mean squared error of the model's output for each unit; for a group that cannot be scored, why."""
    check_evidence(frozenset({"activations"}), data, None)
    assert data is not None
    batches, model = checked(data), trace.model
    answers: dict[Group, Tensor | str] = {}
    readers: dict[Group, list[Reader]] = {}
    for group in groups:
        found = _readers(trace, group)
        if isinstance(found, str):
            answers[group] = found
        else:
            readers[group] = found
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
        few = _few(model, batches[0])
        whole = _answer(model, few)
        inputs = _inputs(trace, readers, batches, repair)
        for group, found in readers.items():
            known = [inputs[r.module] for r in found]
            order = eliminate([_state(r, known, repair) for r, known in zip(found, known)], group.size)
            answers[group] = _as_scores(order, _arriving(model, whole, found, known, order, few, repair), group.size)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return answers


def _score(units: Units) -> Tensor | str:
    return units.evidence


reconstruction = UnitCriterion("reconstruction", _score, gather=unit_errors, priced=True)


# ---------------------------------------------------------------- who reads, and what


def _readers(trace: Trace, group: Group) -> list[Reader] | str:
    modules = dict(trace.model.named_modules())
    found: list[Reader] = []
    for member in (m for m in group.members if m.role == "consume"):
        reader = _reader(trace, group, member, modules.get(member.tensor.rpartition(".")[0]))
        if isinstance(reader, str):
            return reader
        found.append(reader)
    return found or "reconstruction: no linear layer or convolution reads these units"


def _reader(trace: Trace, group: Group, member: Member, module: Any) -> Reader | str:
    plain = isinstance(module, nn.Linear) or (isinstance(module, CONVS) and module.groups == 1)
    weight: Any = getattr(module, "weight", None)
    turned = not plain and isinstance(weight, nn.Parameter) and weight.dim() == 2 and hasattr(module, "bias")
    if not member.tensor.endswith("weight") or member.dim != (1 if plain else 0 if turned else -1):
        return f"reconstruction: {member.tensor} reads these units, which is no linear layer or convolution in one group"
    span = weight[0, 0].numel() if weight.dim() > 2 else 1
    if (wide := weight.shape[member.dim] * span) > _WIDE:
        return f"reconstruction: {member.tensor} has {wide} columns; up to {_WIDE} can be scored"
    places = units_along(trace.dims[member.tensor][member.dim], group.atom)
    columns = torch.cat(
        [(along[None] == torch.arange(group.size)[:, None]).nonzero()[:, 1].view(group.size, -1) for along in places], 1
    )
    return Reader(module, (columns[:, :, None] * span + torch.arange(span)).flatten(1), turned)


def _inputs(trace: Trace, readers: dict[Group, list[Reader]], batches: Sequence[Any], repair: Repair) -> dict[Any, Inputs]:
    """One pass over the data for the moments of all readers, and one over a batch for what silent units say."""
    modules = {r.module: r for found in readers.values() for r in found}
    sums, outputs, normed = {module: Sums() for module in modules}, dict[Any, Any](), set[Any]()
    draw = torch.Generator().manual_seed(0)

    def see(module: Any, args: tuple[Any, ...], output: Any) -> None:
        for x, _ in samples(module, args[0], None, rows_for(module, len(batches)), draw):
            sums[module].add(x)
        outputs[module] = output

    def follow(_: nn.Module, args: tuple[Any, ...]) -> None:
        normed.update(m for m, output in outputs.items() if output is args[0])

    hooks = [m.register_forward_hook(see) for m in modules]
    hooks += [m.register_forward_pre_hook(follow) for m in trace.model.modules() if _is_norm(m)]
    with _removing(hooks), torch.no_grad():
        for batch in batches:
            args, kwargs, _ = split_batch(batch)
            with on_batch(trace.model, args, kwargs):
                trace.model(*args, **kwargs)
    found = {m: s.moments() for m, s in sums.items()}
    names = {module: name for name, module in trace.model.named_modules()}
    for module in (m for m, moments in found.items() if not bool(moments[1].isfinite().all())):
        raise ValueError(f"{names[module]}: its inputs are not finite on data=; look at the data and at the model")
    silent = _silent(trace, readers, batches[0]) if repair != "refit" else {}
    return {
        m: Inputs(a.cpu(), b.cpu(), silent.get(m, torch.zeros(len(a)).double()), m in normed) for m, (a, b) in found.items()
    }


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats


def _silent(trace: Trace, readers: dict[Group, list[Reader]], batch: Any) -> dict[Any, Tensor]:
    """What the columns of each reader hold when all units are silent: constants, so it does not matter that all are at once."""
    still = silence_(copy.deepcopy(trace.model), trace, {g.atom: torch.zeros(g.size, dtype=torch.bool) for g in readers})
    twins, found = dict(still.named_modules()), dict[Any, Tensor]()
    names = {module: name for name, module in trace.model.named_modules()}

    def see(module: Any) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            conv = isinstance(module, CONVS)
            x = args[0].movedim(args[0].dim() - module.weight.dim() + 1, -1) if conv else args[0]
            mean = x.reshape(-1, x.shape[-1]).double().mean(0).nan_to_num(0, 0, 0).cpu()
            if conv and module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice):
                mean.zero_()  # a constant beside padding cannot be folded: the unit is gone altogether
            found[module] = mean.repeat_interleave(module.weight[0, 0].numel()) if conv else mean

        return hook

    hooks = [twins[names[r.module]].register_forward_pre_hook(see(r.module)) for each in readers.values() for r in each]
    with _removing(hooks):
        _answer(still, batch)
    return found


class _removing:
    def __init__(self, hooks: Sequence[Any]) -> None:
        self.hooks = hooks

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _state(reader: Reader, known: Inputs, repair: Repair) -> State:
    weight = reader.matrix()
    power = float(((weight @ known.spread) * weight).sum())
    weight = weight / power**0.5 if power > 0 else weight  # so that all readers of a group have a say
    if repair == "refit":
        return Surgeon(known.spread, weight, reader.columns)
    if repair == "reestimate" and known.normed:
        return Normed(known.spread, weight, reader.columns)
    off = known.mean - known.silent
    return Plain(known.spread + torch.outer(off, off), weight, reader.columns)


# ---------------------------------------------------------------- at the output


def _arriving(
    model: nn.Module, whole: list[Tensor], found: list[Reader], known: list[Inputs], order: Order, batch: Any, repair: Repair
) -> list[float]:
    """How much of the readers' error arrives at the output, for each number of units gone: measured at a few of them."""
    places = sorted({max(1, round(part * len(order.units))) for part in _GONE if order.units})
    shares: dict[int, float] = {}
    for gone in (n for n in places if order.errors[n - 1] > 0):
        hooks = [r.module.register_forward_hook(_less(r, k, order.units[:gone], repair)) for r, k in zip(found, known)]
        with _removing(hooks):
            fewer = _answer(model, batch)
        numbers = sum(t.numel() for t in whole)
        error = sum(float((a - b).float().square().sum()) for a, b in zip(whole, fewer)) / max(1, numbers)
        shares[gone] = error / order.errors[gone - 1]
    if not shares:
        return [1.0] * len(order.units)
    return numpy.interp(range(1, len(order.units) + 1), list(shares), list(shares.values())).tolist()


def _few(model: nn.Module, batch: Any) -> Any:
    """The first examples of a batch, where its tensors agree on what an example is: enough for many rows of the answer."""
    args, kwargs, _ = split_batch(batch)
    values = [*args, *kwargs.values()]
    lengths = {len(v) for v in values if isinstance(v, Tensor) and v.dim()}
    if len(lengths) != 1 or (args and kwargs):
        return batch

    def first(n: int) -> Any:
        cut = [v[:n] if isinstance(v, Tensor) and v.dim() else v for v in values]
        return dict(zip(kwargs, cut)) if kwargs else (tuple(cut), None)

    rows = max((t.numel() // max(1, t.shape[-1]) for t in _answer(model, first(1)) if t.dim()), default=1)
    return first(max(1, -(-8 * _FEW // rows)) if rows > 8 else _FEW)


def _answer(model: nn.Module, batch: Any) -> list[Tensor]:
    args, kwargs, _ = split_batch(batch)
    with torch.no_grad(), on_batch(model, args, kwargs):
        return _tensors(model(*args, **kwargs))


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's answer."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [t for value in values for t in _tensors(value)]


def _less(reader: Reader, known: Inputs, gone: list[int], repair: Repair) -> Callable[..., Tensor]:
    """A hook that adds what the layer's output changes by when these units are gone, after the repair."""
    weight, spread, centre = reader.matrix(), known.spread, known.mean
    drop = reader.columns[gone].reshape(-1)
    kept = torch.ones(weight.shape[1], dtype=torch.bool).index_fill_(0, drop, False).nonzero()[:, 0]
    change = torch.zeros_like(weight).index_copy_(1, drop, -weight[:, drop])
    if repair == "refit":
        inner = spread[kept][:, kept]
        inner.diagonal().add_(RIDGE * float(spread.diagonal().mean()) + 1e-300)
        change[:, kept] = torch.linalg.solve(inner, spread[kept][:, drop] @ weight[:, drop].T).T
    elif repair == "reestimate" and known.normed:
        left = weight + change
        before, after = (((w @ spread) * w).sum(1) for w in (weight, left))
        change = left * (before / after.clamp(min=1e-300)).sqrt().nan_to_num(0, 0, 0)[:, None] - weight
    else:
        centre = known.silent

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + reader.forward(args[0], change, -change @ centre)

    return hook


def _as_scores(order: Order, shares: Sequence[float], size: int) -> Tensor:
    """What each unit adds to the output's error: slopes of the curve's lower convex hull, so that cheap ones come first.

    The last unit is never taken. Later units of one slope score a hair more, so that units leave in this order.
    """
    curve = [0.0, *(error * share for error, share in zip(order.errors, shares))]
    corners = [0]
    for i in range(1, len(curve)):
        while len(corners) > 1 and _slope(curve, corners[-2], corners[-1]) >= _slope(curve, corners[-1], i):
            corners.pop()
        corners.append(i)
    scores = torch.full((size,), torch.inf, dtype=torch.float64)
    for a, b in pairwise(corners):
        for i in range(a, b):
            scores[order.units[i]] = max(0.0, _slope(curve, a, b)) * (1 + 1e-9 * i)
    finite = scores[scores.isfinite()]
    return scores.nan_to_num(posinf=float(finite.max()) * 10 + 1e-300 if len(finite) else 1.0)


def _slope(curve: Sequence[float], a: int, b: int) -> float:
    return (curve[b] - curve[a]) / (b - a)
