"""Scores of units by what their consumers cannot say without them, measured on calibration data.

Units leave one after the other, each time the one whose loss hurts least: how much worse does the best linear fit of the
consumers' outputs get (backward elimination with the surgeon's formula: Hassibi and Stork, 1993; for channels: He et al., 2017,
and Luo et al., 2017)? One run with half of a group gone then says how much of such an error arrives at the model's output,
which makes the scores of all groups comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graph import Atom, Group, Member, Trace, plan_counts
from ..select import keep_largest
from ..stats import split_batch
from .importance import Scores, units_along
from .refit import CONVS, Sums, checked, patches
from .sizes import Model

_WIDE = 4096  # columns of a weight, from which on the elimination would take hours
_ROWS = 1 << 24  # numbers in one block of input patches


class Reader(NamedTuple):
    """A layer that reads the units: its module, and for each unit the columns of its weight (outputs, inputs x kernel)."""

    module: Any
    columns: Tensor

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        weight, bias = weight.reshape(self.module.weight.shape).to(x), bias.to(x)
        if isinstance(self.module, nn.Linear):
            return nn.functional.linear(x, weight, bias)
        return self.module._conv_forward(x, weight, bias)


class Order(NamedTuple):
    """Units in the order in which they leave, and the error when each has left."""

    units: list[int]
    errors: list[float]


def unit_errors(
    trace: Trace, groups: Sequence[Group], data: Iterable[Any], *, refit: bool = True, ridge: float = 1e-4
) -> tuple[Scores, dict[Group, str]]:
    """The rise of the mean squared error of the model's output for each unit, and the groups that cannot be scored, with why.

    With `refit`, consumers are fitted to what is left (so fit them after the cut); without, they lose the units as they are.
    Divide the scores of a group by what one of its units costs, and the units that go first are the best buy.
    """
    batches, model = checked(data), trace.model
    readers: dict[Group, list[Reader]] = {}
    left: dict[Group, str] = {}
    for group in groups:
        found = _readers(trace, group)
        if isinstance(found, str):
            left[group] = found
        else:
            readers[group] = found
    modules = {r.module: r for found in readers.values() for r in found}
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
        whole, sums = _answer(model, batches[0]), _gather(model, list(modules), batches)
        scores: Scores = {}
        for group, found in readers.items():
            moments = [sums[r.module].moments(centred=refit) for r in found]
            order = eliminate(
                [(s, r.module.weight.detach().flatten(1).double(), r.columns) for (_, s), r in zip(moments, found)],
                refit,
                ridge,
            )
            share = _arrives(model, whole, found, moments, order, batches[0], refit, ridge)
            scores[group] = _as_scores(order, share, group.size)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return scores, left


def _readers(trace: Trace, group: Group) -> list[Reader] | str:
    modules = dict(trace.model.named_modules())
    found: list[Reader] = []
    for member in (m for m in group.members if m.role == "consume"):
        reader = _reader(trace, group, member, modules.get(member.tensor.rpartition(".")[0]))
        if isinstance(reader, str):
            return reader
        found.append(reader)
    return found or "nothing that could be fitted reads these units"


def _reader(trace: Trace, group: Group, member: Member, module: Any) -> Reader | str:
    plain = isinstance(module, nn.Linear) or (isinstance(module, CONVS) and module.groups == 1)
    if not plain or not member.tensor.endswith("weight") or member.dim != 1:
        return f"{member.tensor} reads these units; only linear layers and convolutions in one group can be scored"
    span = module.weight[0, 0].numel() if module.weight.dim() > 2 else 1
    if module.weight.shape[1] * span > _WIDE:
        return f"{member.tensor} has {module.weight.shape[1] * span} columns; up to {_WIDE} can be scored"
    places = units_along(trace.dims[member.tensor][1], group.atom)
    columns = torch.cat(
        [(along[None] == torch.arange(group.size)[:, None]).nonzero()[:, 1].view(group.size, -1) for along in places], 1
    )
    return Reader(module, (columns[:, :, None] * span + torch.arange(span)).flatten(1))


def _gather(model: nn.Module, modules: Sequence[Any], batches: Sequence[Any]) -> dict[Any, Sums]:
    """Sums of the inputs of all readers, in one pass."""
    sums = {module: Sums() for module in modules}

    def see(module: Any, args: tuple[Any, ...]) -> None:
        x = args[0] if args[0].dtype in (torch.float32, torch.float64) else args[0].float()
        conv = isinstance(module, CONVS)
        x = x if conv else x.reshape(-1, x.shape[-1])
        step = max(1, _ROWS // max(1, x[0].numel() * (module.weight[0, 0].numel() if conv else 1)))
        for part in x.split(step):
            rows = patches(module, part) if conv else part
            sums[module].add(rows)

    hooks = [m.register_forward_pre_hook(see) for m in modules]
    try:
        with torch.no_grad():
            for batch in batches:
                args, kwargs, _ = split_batch(batch)
                model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def eliminate(parts: list[tuple[Tensor, Tensor, Tensor]], refit: bool, ridge: float) -> Order:
    """Take units away until one is left. `parts`: for each consumer the moments of its inputs, its weight, columns of units."""
    size = len(parts[0][2])
    states = [_Surgeon(*part, ridge) if refit else _Plain(*part) for part in parts]
    alive, order = torch.ones(size, dtype=torch.bool), Order([], [])
    total = 0.0
    while len(order.units) < size - 1:
        rise = torch.stack([state.rise() for state in states]).sum(0).masked_fill(~alive, torch.inf)
        unit = int(rise.argmin())
        alive[unit] = False
        total = max(total, total + float(rise[unit]))
        for state in states:
            state.remove(unit)
        order.units.append(unit)
        order.errors.append(total)
    return order


class _Surgeon:
    """A least-squares fit that loses units: w_u (P_uu)^-1 w_u' is what the error rises by, P the inverse of the moments."""

    def __init__(self, moments: Tensor, weight: Tensor, columns: Tensor, ridge: float) -> None:
        moments = moments.clone()
        level = float(moments.diagonal().mean())
        moments.diagonal().add_(ridge * level if level > 0 else 1.0)
        self.inverse, self.weight, self.columns = torch.linalg.inv(moments), weight.clone(), columns
        self.gone: list[int] = []

    def rise(self) -> Tensor:
        c = self.columns
        blocks, weights = self.inverse[c[:, :, None], c[:, None, :]], self.weight[:, c].permute(1, 2, 0)
        blocks[self.gone] = torch.eye(c.shape[1], dtype=blocks.dtype)
        return (weights * torch.linalg.solve(blocks, weights)).sum((1, 2))

    def remove(self, unit: int) -> None:
        c = self.columns[unit]
        rows = torch.linalg.solve(self.inverse[c][:, c], self.inverse[c])
        self.weight -= self.weight[:, c] @ rows
        self.inverse -= self.inverse[:, c] @ rows
        self.weight[:, c] = 0
        self.gone.append(unit)


class _Plain:
    """Consumers that stay as they are: the error is the squared sum of all that is missing."""

    def __init__(self, moments: Tensor, weight: Tensor, columns: Tensor) -> None:
        joint = (weight.T @ weight) * moments
        size, span = columns.shape
        self.joint = joint[columns.reshape(-1)][:, columns.reshape(-1)].reshape(size, span, size, span).sum((1, 3))
        self.missing = torch.zeros(size, dtype=joint.dtype)

    def rise(self) -> Tensor:
        return self.joint.diagonal() + 2 * self.missing

    def remove(self, unit: int) -> None:
        self.missing += self.joint[unit]


def _arrives(
    model: nn.Module,
    whole: Tensor,
    found: list[Reader],
    moments: list[tuple[Tensor, Tensor]],
    order: Order,
    batch: Any,
    refit: bool,
    ridge: float,
) -> float:
    """How much of an error of the consumers arrives at the output: measured with half of the units gone."""
    half = max(1, len(order.units) // 2)
    if order.errors[half - 1] <= 0:
        return 1.0
    hooks = [r.module.register_forward_hook(_less(r, m, order.units[:half], refit, ridge)) for r, m in zip(found, moments)]
    try:
        fewer = _answer(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return float((whole - fewer).square().mean()) / order.errors[half - 1]


def _answer(model: nn.Module, batch: Any) -> Tensor:
    args, kwargs, _ = split_batch(batch)
    with torch.no_grad():
        return _numbers(model(*args, **kwargs))


def _less(reader: Reader, moments: tuple[Tensor, Tensor], gone: list[int], refit: bool, ridge: float) -> Callable[..., Tensor]:
    """A hook that adds what the layer's output changes by when these units are gone."""
    mean, second = moments
    weight = reader.module.weight.detach().flatten(1).double()
    drop = reader.columns[gone].reshape(-1)
    kept = torch.ones(weight.shape[1], dtype=torch.bool).index_fill_(0, drop, False).nonzero()[:, 0]
    change = torch.zeros_like(weight).index_copy_(1, drop, -weight[:, drop])
    shift = torch.zeros(len(weight), dtype=weight.dtype)
    if refit:
        inner = second[kept][:, kept]
        inner.diagonal().add_(ridge * float(second.diagonal().mean()) + 1e-300)
        change[:, kept] = torch.linalg.solve(inner, second[kept][:, drop] @ weight[:, drop].T).T
        shift = -change @ mean

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + reader.forward(args[0], change, shift)

    return hook


def _numbers(output: Any) -> Tensor:
    """All numbers of a model's answer in one row."""
    if isinstance(output, Tensor):
        return output.reshape(-1).double() if output.is_floating_point() else output.new_zeros(0, dtype=torch.float64)
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return torch.cat([_numbers(v) for v in values] or [torch.zeros(0, dtype=torch.float64)])


def _as_scores(order: Order, share: float, size: int) -> Tensor:
    """What each unit adds to the error when its turn comes, never less than those before it; the last one is never taken."""
    scores = torch.full((size,), torch.inf, dtype=torch.float64)
    before = highest = 0.0
    for unit, error in zip(order.units, order.errors):
        highest = max(highest, (error - before) * share)
        before = error
        scores[unit] = highest
    finite = scores[scores.isfinite()]
    return scores.nan_to_num(posinf=float(finite.max()) * 10 + 1e-300 if len(finite) else 1.0)


def keep_for_flops(trace: Trace, scores: Scores, remains: float) -> dict[Atom, Tensor]:
    """The units to keep so that this share of the FLOPs remains: those go that save most for what they add to the error."""
    sizes = Model(trace)
    whole = sizes.flops({})
    prices = {g: s / max(1, whole - sizes.flops({g.atom: g.size - 1})) for g, s in scores.items()}
    levels = torch.cat(list(prices.values())).sort().values

    def counts(at: int) -> dict[Group, int]:
        wanted = {g: max(1, int((p > levels[at - 1]).sum())) if at else g.size for g, p in prices.items()}
        return plan_counts(trace, wanted).counts

    def share(at: int) -> float:
        return sizes.flops({g.atom: n for g, n in counts(at).items()}) / whole

    low, high = 0, len(levels)
    while low < high:  # the first level at which no more remains than asked
        middle = (low + high) // 2
        low, high = (middle + 1, high) if share(middle) > remains else (low, middle)
    if share(low) > remains:
        raise ValueError(
            f"{remains:.3g} of the FLOPs cannot be reached: with one unit left in each group {share(low):.3g} remain"
        )
    return {g.atom: keep_largest(scores[g], g.size - n) for g, n in counts(low).items() if n < g.size}
