"""`reconstruction`: scores units by the error of the model's output without them, measured on calibration data.

The units of a group are removed one by one, each time the one that raises the error of the layers that read them least. The
error is the one that remains after the requested repair: none (a removed unit is the constant that folding makes of it),
`reestimate` (a BatchNorm after the reader restores mean and variance of each channel, so only correlation counts), or `refit`
(the best linear fit to the remaining units: backward elimination with the formula of the optimal brain surgeon, Hassibi and
Stork, 1993; for channels: He et al., 2017, and Luo et al., 2017). Runs with part of one group removed measure how much of
such an error arrives at the output, which makes the scores of all groups comparable: groups compete by score per cost of a
unit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from ...axes import Group, Member
from ...edit import eval_mode
from ...progress import track
from ...stats import Loss, check_evidence, on_batch, split_batch, valid_positions
from ...trace import Trace
from ..exact import units_along
from ..masked import mask_
from .elimination import RIDGE, Normed, Order, Plain, State, Surgeon, as_scores, eliminate
from .importance import Repair, UnitCriterion, Units
from .norms import list_batches
from .regression import CONVS, Regression, rows_for, samples

_WIDE = 4096  # columns of a weight; for more, the elimination would take hours
_GONE = (0.25, 0.5, 0.75)  # removed parts of a group for which the error is measured at the output
_FEW = 64  # examples for that, or as many rows of an output that has several for each example


class Reader(NamedTuple):
    """A layer that reads the units. `columns`: for each unit, its columns of the weight matrix (outputs, inputs x kernel)."""

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


class InputMoments(NamedTuple):
    """The inputs of a reader: mean, covariance, and values of masked units. `normed`: a BatchNorm follows the reader."""

    mean: Tensor
    spread: Tensor
    masked: Tensor
    normed: bool


def unit_errors(
    trace: Trace, groups: Sequence[Group], data: Iterable[Any] | None, repair: Repair, loss: Loss | None = None
) -> dict[Group, Tensor | str]:
    """By how much each unit's removal raises the mean squared error of the output; or why a group cannot be scored."""
    check_evidence(frozenset({"activations"}), data, None)
    assert data is not None
    batches, model = list_batches(data), trace.model
    answers: dict[Group, Tensor | str] = {}
    readers: dict[Group, list[Reader]] = {}
    for group in groups:
        found = _readers(trace, group)
        if isinstance(found, str):
            answers[group] = found
        else:
            readers[group] = found
    with eval_mode(model):
        inputs = _inputs(trace, readers, batches, repair)
        few = _few(model, batches[0])
        whole = _answer(model, few)
        for group, found in track(readers.items(), "scores", lambda entry: entry[0].members[0].tensor):
            known = [inputs[r.module] for r in found]
            order = eliminate([_state(r, known, repair) for r, known in zip(found, known)], group.size)
            shares = _arriving(model, whole, found, known, order, few, repair)
            answers[group] = as_scores(Order(order.units, [e * share for e, share in zip(order.errors, shares)]), group.size)
    return answers


def _score(units: Units) -> Tensor | str:
    return units.evidence


reconstruction = UnitCriterion("reconstruction", _score, gather=unit_errors, priced=True)
"""How well the layers that read a unit work without it, measured on `data` after refitting them by least squares."""


# ---------------------------------------------------------------- readers and their inputs


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
        return f"reconstruction: {member.tensor} reads these units and is no linear layer or convolution with groups=1"
    span = weight[0, 0].numel() if weight.dim() > 2 else 1
    if (wide := weight.shape[member.dim] * span) > _WIDE:
        return f"reconstruction: {member.tensor} has {wide} columns; up to {_WIDE} can be scored"
    places = units_along(trace.dims[member.tensor][member.dim], group.atom)
    columns = torch.cat(
        [(along[None] == torch.arange(group.size)[:, None]).nonzero()[:, 1].view(group.size, -1) for along in places], 1
    )
    return Reader(module, (columns[:, :, None] * span + torch.arange(span)).flatten(1), turned)


def _inputs(
    trace: Trace, readers: dict[Group, list[Reader]], batches: Sequence[Any], repair: Repair
) -> dict[Any, InputMoments]:
    """The moments of the inputs of all readers from one pass over the data; the values of masked units from one batch."""
    modules = {r.module: r for found in readers.values() for r in found}
    sums, outputs, normed = {module: Regression() for module in modules}, dict[Any, Any](), set[Any]()
    valid: list[Tensor | None] = [None]  # of the batch that runs
    draw = torch.Generator().manual_seed(0)

    def see(module: Any, args: tuple[Any, ...], output: Any) -> None:
        for x, _ in samples(module, args[0], None, rows_for(module, len(batches)), draw, valid[0]):
            sums[module].add(x)
        outputs[module] = output

    def follow(_: nn.Module, args: tuple[Any, ...]) -> None:
        normed.update(m for m, output in outputs.items() if output is args[0])

    hooks = [m.register_forward_hook(see) for m in modules]
    hooks += [m.register_forward_pre_hook(follow) for m in trace.model.modules() if _is_norm(m)]
    with _removing(hooks), torch.no_grad():
        for batch in track(batches, "inputs of layers"):
            args, kwargs, _ = split_batch(batch)
            valid[0] = valid_positions(batch)
            with on_batch(trace.model, args, kwargs):
                trace.model(*args, **kwargs)
    names = {module: name for name, module in trace.model.named_modules()}
    if unseen := next((m for m, s in sums.items() if not s.count), None):
        if unseen in outputs:
            why, advice = "no row of data= reached it", "pass more data or exclude it"
        else:
            why = "the model did not call this layer on data= (some models use the weight of a layer directly)"
            advice = "use another criterion, such as 'obs', or exclude it"
        raise ValueError(f"{names[unseen]}: {why}, so its inputs cannot be scored; {advice}")
    found = {m: s.moments() for m, s in sums.items()}
    for module in (m for m, moments in found.items() if not bool(moments[1].isfinite().all())):
        raise ValueError(f"{names[module]}: its inputs are not finite on data=; check the data and the model")
    masked = _masked_inputs(trace, readers, batches[0]) if repair != "refit" else {}
    return {
        m: InputMoments(a.cpu(), b.cpu(), masked.get(m, torch.zeros(len(a)).double()), m in normed)
        for m, (a, b) in found.items()
    }


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats


def _masked_inputs(trace: Trace, readers: dict[Group, list[Reader]], batch: Any) -> dict[Any, Tensor]:
    """The inputs of each reader when all units are masked. They are constants, so all units can be masked at once."""
    masked_model = mask_(copy.deepcopy(trace.model), trace, {g.atom: torch.zeros(g.size, dtype=torch.bool) for g in readers})
    twins, found = dict(masked_model.named_modules()), dict[Any, Tensor]()
    names = {module: name for name, module in trace.model.named_modules()}

    def see(module: Any) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            conv = isinstance(module, CONVS)
            x = args[0].movedim(args[0].dim() - module.weight.dim() + 1, -1) if conv else args[0]
            mean = x.reshape(-1, x.shape[-1]).double().mean(0).nan_to_num(0, 0, 0).cpu()
            if conv and module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice):
                mean.zero_()  # a constant next to zero padding cannot be folded, so the unit leaves nothing
            found[module] = mean.repeat_interleave(module.weight[0, 0].numel()) if conv else mean

        return hook

    hooks = [twins[names[r.module]].register_forward_pre_hook(see(r.module)) for each in readers.values() for r in each]
    with _removing(hooks):
        _answer(masked_model, batch)
    return found


class _removing:
    def __init__(self, hooks: Sequence[Any]) -> None:
        self.hooks = hooks

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


def _state(reader: Reader, known: InputMoments, repair: Repair) -> State:
    weight = reader.matrix()
    power = float(((weight @ known.spread) * weight).sum())
    weight = weight / power**0.5 if power > 0 else weight  # so that all readers of a group count equally
    if repair == "refit":
        return Surgeon(known.spread, weight, reader.columns)
    if repair == "reestimate" and known.normed:
        return Normed(known.spread, weight, reader.columns)
    off = known.mean - known.masked
    return Plain(known.spread + torch.outer(off, off), weight, reader.columns)


# ---------------------------------------------------------------- at the output


def _arriving(
    model: nn.Module,
    whole: list[Tensor],
    found: list[Reader],
    known: list[InputMoments],
    order: Order,
    batch: Any,
    repair: Repair,
) -> list[float]:
    """The error of the output over the error of the readers, for each number of removed units; measured for a few of them."""
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
    """The first examples of a batch, if its tensors agree on the number of examples: enough for many rows of the output."""
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
    """The floating-point tensors of the model's output, without the positions that are padding."""
    args, kwargs, _ = split_batch(batch)
    valid = valid_positions(batch)
    with torch.no_grad(), on_batch(model, args, kwargs):
        found = _tensors(model(*args, **kwargs))
    return found if valid is None else [t[valid.to(t.device)] if t.shape[:2] == valid.shape else t for t in found]


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [t for value in values for t in _tensors(value)]


def _less(reader: Reader, known: InputMoments, gone: list[int], repair: Repair) -> Callable[..., Tensor]:
    """A forward hook that changes the layer's output as removing these units does, after the repair."""
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
        centre = known.masked

    def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + reader.forward(args[0], change, -change @ centre)

    return hook
