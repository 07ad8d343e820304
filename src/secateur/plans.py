"""A plan: which elements are pruned, which values the others get, and what is skipped and why. Making one changes nothing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from . import kernels
from ._dist import (
    Group,
    Meeting,
    check_alike,
    check_copies,
    comm_of,
    counts,
    like,
    local,
    mesh_comm,
    model_comm,
    refuse_stage,
    replicas_of,
    reshard_,
    sharded,
    together,
)
from ._hints import hints
from ._tree import Prunable, as_module, bare_name, check_unpacked, slots
from .arguments import plain_arguments
from .budgets import Spread
from .criteria import Criterion, magnitude
from .curvature import Curvature
from .display import Reported, Table, format_seconds, notes_by_reason
from .edit import UNKNOWN, Arguments, forget_, record_
from .evidence import TensorEvidence
from .masks import Masks, count_kept
from .measuring import ChannelOrders, check_streamed, measure, measures, notes_of_unread, with_curves
from .methods import STREAMED, LayerProblem, Method, Solution, solve_all, solve_checked, what_to_know, write_
from .owners import scores_of
from .patterns import Pattern
from .reorder import Reordering
from .schedules import Number
from .settings import Settings
from .stats import Loss, collect, frames_inside
from .stats import Table as EvidenceTable
from .targeting import Globs, Target, globs_of, targets

_HEAD = 4096


@dataclass(frozen=True)
class Layer:
    """One line of a plan: a tensor, and how much of it is kept."""

    name: str
    shape: tuple[int, ...]
    kept: int
    total: int

    @property
    def sparsity(self) -> float:
        return 1 - self.kept / self.total


@dataclass(frozen=True)
class Solved:
    """How a method that measures its errors solved one layer.

    `asked` is the sparsity that was asked for, None for a number of units. `before` and `error` are the errors of the layer's
    outputs with the mask alone and with the new weights, relative to the outputs. `tokens` is the number of inputs behind
    them, `stage` the place of the layer in its block, counted from 0, and `seconds` the time that solving took.
    """

    asked: float | None
    before: float
    error: float
    seconds: float
    tokens: int | None = None
    stage: int | None = None


@dataclass
class Plan(Reported):
    """What pruning does to a model: `masks` (True = kept), new values for the kept weights where the method gives them
    (`weights`), and what was skipped, with the reason. `print` shows a table.

    `solved` holds the errors and times of each layer, for methods that measure them. `notes` lists the layers and blocks that
    were treated differently, with the reason. `order` is a new order of channels, in which the masks and weights are, or None.
    `zeros` counts the kept weights that were zero before, by tensor: the masks keep them, and the table shows them.
    """

    masks: Masks
    skipped: dict[str, str]
    recipe: str
    dense: dict[str, Tensor] = field(default_factory=dict, repr=False)
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    arguments: Arguments = field(default=UNKNOWN, repr=False, compare=False)  # for `Recipe`: of the call that made the plan
    solved: dict[str, Solved] = field(default_factory=dict, repr=False, compare=False)
    notes: dict[str, str] = field(default_factory=dict, repr=False)
    order: Reordering | None = field(default=None, repr=False, compare=False)
    zeros: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    _changed: Prunable | None = field(default=None, init=False, repr=False, compare=False)  # the model that `undo_` restores
    _kept: InitVar[Sequence[int] | None] = None  # the counts of each tensor, if they are known already

    def apply_(self, model: Prunable, *, keep_dense: bool = False) -> Plan:
        """Writes the zeros, and the new weights, into the model. `keep_dense=True` remembers what they replace, for `undo_`."""
        tensors = self._tensors(model)
        if keep_dense and self.dense and any(not self._is_applied(name, tensor) for name, tensor in tensors.items()):
            raise ValueError("this plan keeps the dense values of another application; undo that first, or make a new plan")
        new = {name: weight.to(tensors[name]) for name, weight in self.weights.items()}
        left = (tensor[~local(self.masks[name])].any() for name, tensor in tensors.items())
        if self.order is not None and not self.order.is_in(as_module(model)) and any(left):  # a loaded model has none left
            self.order.move_(as_module(model))
            tensors = self._tensors(model)
        if keep_dense and not self.dense:
            self.dense = {name: self._replaced(name, tensor).clone() for name, tensor in tensors.items()}
            self._changed = model
        for name, tensor in tensors.items():
            if name in new:
                write_(tensor, new[name])
            kernels.zero_(tensor, local(self.masks[name]))
        record_(as_module(model), ("prune", self.recipe), self.arguments)
        return self

    def reorder(self, order: Reordering) -> None:
        """Puts the masks and weights into another order of channels, which the model gets first when the plan is applied."""
        for one in order.orders:
            self.masks, self.weights = Masks(one.permuted(dict(self.masks))), one.permuted(self.weights)
        self.order = order

    def undo_(self, model: Prunable | None = None) -> None:
        """Puts back, bit for bit, the values that `apply_(keep_dense=True)` replaced, in the model that it changed.

        Pass `model` for a plan that was loaded or copied: it does not remember the model.
        """
        if self.masks and not self.dense:
            raise ValueError(
                "this plan kept no dense values, or was undone already; apply it with keep_dense=True to be able to undo it"
            )
        model = self._changed if model is None else model
        if model is None:
            raise ValueError("this plan is a copy and does not remember its model; call undo_(model)")
        for name, tensor in self._tensors(model).items():
            if name in self.weights:
                write_(tensor, self.dense[name])
            else:
                tensor[~local(self.masks[name])] = self.dense[name].to(tensor)
        if self.order is not None:
            self.order.move_(as_module(model), back=True)
        self.dense, self._changed = {}, None
        forget_(as_module(model), ("prune", self.recipe))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_changed": None}  # a copy or a file holds no model

    def _replaced(self, name: str, tensor: Tensor) -> Tensor:
        """The values of a tensor that the plan replaces: all of them, or those that become zero."""
        return tensor if name in self.weights else tensor[~local(self.masks[name])]

    def _is_applied(self, name: str, tensor: Tensor) -> bool:
        if name in self.weights:
            return torch.equal(tensor, self.weights[name].to(tensor))
        return not bool(self._replaced(name, tensor).any())

    def _tensors(self, model: Prunable) -> dict[str, Tensor]:
        """The tensors that the plan changes, all checked before any is written to."""
        model = as_module(model)
        reshard_(model)
        found = {slot.name: slot.tensor for slot in slots(model)}
        bare = {bare_name(name): tensor for name, tensor in found.items()}  # plan and model may differ in torch.compile
        found |= {name: bare[bare_name(name)] for name in self.masks if name not in found and bare_name(name) in bare}
        if missing := [name for name in self.masks if name not in found]:
            check_unpacked(model, f"this plan changes {missing[0]!r}")
            raise ValueError(f"the model has no {missing[0]!r} ({len(missing)} such tensors); this plan is of another model")
        for name, mask in self.masks.items():
            if found[name].shape != mask.shape:
                raise ValueError(f"{name!r} is {tuple(found[name].shape)} in the model and {tuple(mask.shape)} in the plan")
            check_alike(name, found[name], mask)
        return {name: local(found[name]).detach() for name in self.masks}

    def __post_init__(self, _kept: Sequence[int] | None) -> None:
        if _kept is not None:
            self.layers = self._layers(_kept)
        elif any(sharded(mask) for mask in self.masks.values()):
            _ = self.layers  # every process has to count, and later one of them alone may print

    @cached_property
    def layers(self) -> list[Layer]:
        """The counts of each tensor."""
        return self._layers(counts(self.masks))

    def _layers(self, kept: Sequence[int]) -> list[Layer]:
        each = zip(self.masks.items(), kept, strict=True)
        return [Layer(name, tuple(mask.shape), number, mask.numel()) for (name, mask), number in each]

    @cached_property
    def empty(self) -> list[str]:
        """The tensors of which nothing is left, so that their layers pass nothing on (layer collapse)."""
        if any(sharded(mask) for mask in self.masks.values()):
            return [layer.name for layer in self.layers if not layer.kept]
        # The first elements of nearly every mask show that it is not empty, and few masks have to be read whole.
        heads = {name: mask.reshape(-1)[:_HEAD].any() for name, mask in self.masks.items() if mask.numel()}
        by_device: dict[torch.device, list[str]] = {}
        for name, head in heads.items():
            by_device.setdefault(head.device, []).append(name)
        seen = {
            name: any_kept
            for names in by_device.values()
            for name, any_kept in zip(names, torch.stack([heads[name] for name in names]).tolist(), strict=True)
        }
        return [name for name, any_kept in seen.items() if not any_kept and not bool(self.masks[name].any())]

    def metrics(self) -> dict[str, float]:
        """Plain numbers in a flat dictionary, for TensorBoard and the like: totals, and `sparsity/NAME` for each tensor."""
        layers = self.layers
        total, kept = sum(layer.total for layer in layers), sum(layer.kept for layer in layers)
        return {
            "tensors": len(layers),
            "total": total,
            "kept": kept,
            "pruned": total - kept,
            "sparsity": 1 - kept / total if total else 0.0,
            **({"zeros": total - kept + sum(self.zeros.values())} if self.zeros else {}),
            "skipped": len(self.skipped),
            "rewritten": len(self.weights),
            **{f"sparsity/{layer.name}": layer.sparsity for layer in layers},
            **{f"error/{name}": one.error for name, one in self.solved.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tensors, as plain values that JSON can hold."""
        layers = {one.name: {"kept": one.kept, "total": one.total, "sparsity": one.sparsity} for one in self.layers}
        totals = {key: value for key, value in self.metrics().items() if "/" not in key}
        for name, one in self.solved.items():
            layers[name] |= asdict(one)
        for name, number in self.zeros.items():
            layers[name]["zeros"] = layers[name]["total"] - layers[name]["kept"] + number
        return {"recipe": self.recipe, **totals, "layers": layers, "skipped": dict(self.skipped), "notes": dict(self.notes)}

    def _table(self) -> Table:
        empty = self.empty

        def row(layer: Layer) -> tuple[str, ...]:
            counts = f"{layer.kept:,}", f"{layer.total:,}", f"{layer.sparsity:.2%}", *self._share_of_zeros(layer)
            flag = ("empty" if layer.name in empty else "",) if empty else ()
            return layer.name, "x".join(map(str, layer.shape)), *counts, *self._how_solved(layer.name), *flag

        whole = self.metrics()
        more = ("asked", "tokens", "stage", "before", "error", "time") if self.solved else ()
        zeros = (f"{whole['zeros'] / whole['total']:.2%}",) if self.zeros else ()
        counted = f"{whole['kept']:,}", f"{whole['total']:,}", f"{whole['sparsity']:.2%}", *zeros
        total = ("in all", "", *counted, *("" for _ in more))
        flags = notes_by_reason("empty", dict.fromkeys(empty, "nothing is left (layer collapse); floor= prevents it"))
        changed = [f"the weights that stay were changed too, in {len(self.weights)} tensors"] if self.weights else []
        if self.order is not None and self.order.orders:
            changed.append(f"channels inside the model get another order first, in {len(self.order.orders)} groups")
        if self.zeros:
            changed.append(
                f"zeros: of the weights after pruning; {sum(self.zeros.values()):,} that were zero before, or were rounded to "
                "zero, are not pruned here, and count as kept. sc.Pruner.hold(model) keeps such zeros in training"
            )
        if self.solved:
            changed.append("before, error: of the outputs, relative to them, with the mask alone and with the new weights")
        return Table(
            ("tensor", "shape", "kept", "of", "sparsity", *(["zeros"] if zeros else []), *more, *([""] if empty else [])),
            [row(layer) for layer in self.layers],
            [(*total, *([""] if empty else []))],
            right=range(2, 5 + len(zeros) + len(more)),
            title=self.recipe,
            notes=[*flags, *changed, *notes_by_reason("note", self.notes), *notes_by_reason("skipped", self.skipped)],
        )

    def _share_of_zeros(self, layer: Layer) -> tuple[str, ...]:
        """The cell with the zeros of a weight after pruning, where some weights had zeros before."""
        zeros = layer.total - layer.kept + self.zeros.get(layer.name, 0)
        return (f"{zeros / layer.total:.2%}",) if self.zeros else ()

    def _how_solved(self, name: str) -> tuple[str, ...]:
        """The cells of a layer that say how it was solved; empty ones where the method did not measure its errors."""
        if not self.solved:
            return ()
        if (one := self.solved.get(name)) is None:
            return ("",) * 6
        asked = "" if one.asked is None else f"{one.asked:.2%}"
        tokens, stage = ("" if value is None else f"{value:,}" for value in (one.tokens, one.stage))
        return asked, tokens, stage, f"{one.before:.4f}", f"{one.error:.4f}", format_seconds(one.seconds)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html(f"{len(self.skipped)} skipped", self.skipped.items())


@hints
def plan(
    model: Prunable,
    criterion: Criterion | Callable[..., Tensor] | str = magnitude,
    *,
    sparsity: Number | None = None,
    count: int | None = None,
    pattern: str | Pattern = "unstructured",
    scope: str | None = None,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    spread: Spread | Mapping[str, Number] | str | None = None,
    method: Method | str | None = None,
    floor: float = 0.0,
    group: Group | None = None,
) -> Plan:
    """What `prune_` with the same arguments would do. The model is not touched."""
    include, exclude = globs_of("include", include), globs_of("exclude", exclude)
    arguments = plain_arguments(plan, locals())
    model = as_module(model)
    with together(model_comm(model), "use its arguments") as meeting:
        recipe = Settings.of(criterion, pattern, scope, sparsity, count, spread, method, floor)
        if recipe.scheduled:
            raise TypeError(f"{recipe.scheduled[0]} changes with the step; use sc.Pruner for it, and a number to prune once")
        if recipe.method.revives:
            raise TypeError(f"{recipe.method} brings weights back as training goes on; use sc.Pruner for it")
        found, skipped = targets(model, include=include, exclude=exclude, types=types)
        check_streamed(recipe, found, data, loss)
        meeting.text = " ".join(_doings(recipe, found))
    once = recipe.needs - STREAMED
    if data is not None and bool(once) + bool(recipe.needs & STREAMED) + measures(recipe) > 1:
        data = list(data)  # it is run through more than once
    measured = measure(model, recipe, found, data, loss)
    table, orders = collect(model, found, once, data, loss), ChannelOrders.of(model, recipe, replicas_of(model))
    how: dict[str, Any] = {"data": data, "loss": loss, "measured": measured, "group": group, "orders": orders}
    made = make_plan(model, recipe, found, skipped, table, meeting=meeting, **how)
    made.arguments = arguments
    made.notes |= notes_of_unread(recipe, data)
    if orders is not None:
        made.notes |= orders.notes
        made.reorder(orders.reordering())
    return made


def make_plan(
    model: nn.Module,
    recipe: Settings,
    found: Sequence[Target],
    skipped: dict[str, str],
    table: EvidenceTable,
    *,
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    measured: Curvature | None = None,
    step: int = 0,
    previous: Masks | None = None,
    group: Group | None = None,
    orders: ChannelOrders | None = None,
    meeting: Meeting | None = None,
) -> Plan:
    """The plan for these targets and this evidence, at a step of a schedule. What `previous` prunes stays pruned.

    `meeting` is given by a call that prunes once: its processes have compared `_doings`, and zeros are counted.
    """
    if recipe.scope == "global" and group is None:
        refuse_stage(model)
    comm = comm_of({target.name: target.share for target in found}, group)
    if not comm.alone:
        how, own = _doings(recipe, found, step)
        if comm.stages is not None:
            comm.check_same(how)
        if meeting is None or not meeting.agreed(comm.within):
            comm.within.check_same(f"{how}: {own}")
    with torch.no_grad():
        evidence = {t.name: TensorEvidence(t, table[t.name], step) for t in found}
        scores = {name: scores_of(recipe.criterion, one, number) for number, (name, one) in enumerate(evidence.items())}
        held = {t.name: t.layout.matrix(local(previous[t.name])) for t in found} if previous is not None else None
        measured = measured or measure(model, recipe, found, data, loss)
        notes = dict(measured.notes) if measured else {}
        amounts = with_curves(recipe, found, measured, step).amounts(scores, step, held, comm)
        to_be_empty = {
            name for name, one in amounts.items() if (recipe.at(step) if one.sparsity is None else one.sparsity) == 1
        }

        solved: dict[str, Solved] = {}
        weighing = dict(measured.G) if measured is not None and recipe.method.curvature != "none" else {}

        def solve(target: Target, streamed: Mapping[str, Any]) -> Solution:
            name, begin = target.name, time.perf_counter()
            problem = LayerProblem(
                name,
                target.layout.matrix(target.weight),
                H=streamed.get("gram"),
                C=streamed.get("cross"),
                D=streamed.get("residual"),
                shift=streamed.get("shift"),
                G=weighing.pop(name, None),
                tokens=streamed.get("tokens"),
                scores=scores[name],
                evidence=evidence[name],
                step=step,
            )
            amount = amounts.pop(name)
            before = held[name] if held else None
            if orders is None:
                found = solve_checked(recipe.method, problem, recipe.pattern, amount, before)
            else:
                found = orders.solve(problem, amount, before)
            for text in what_to_know(problem, found):
                notes[name] = f"{notes[name]}; {text}" if name in notes else text
            if isinstance(found, Solution) and found.before is not None and found.error is not None:
                asked, took = amount.asked(problem.W.numel(), recipe.pattern), time.perf_counter() - begin
                solved[name] = Solved(asked, found.before, found.error, took, problem.tokens, streamed.get("stage"))
            return found

        enter = None if orders is None else orders.enter
        solutions = solve_all(model, found, recipe.method.needs, data, solve, notes, blend=recipe.method.blend, enter=enter)
    masks = Masks({t.name: like(solutions[t.name].mask, t.tensor) for t in found})
    weights = {name: solution.weight for name, solution in solutions.items() if solution.weight is not None}
    partly = len({sharded(mask) for mask in masks.values()}) > 1
    if recipe.needs or (partly and not comm.alone):
        check_copies(replicas_of(model) if comm.within.alone else mesh_comm(masks.values()), comm.within, masks, weights)
    kept, zeros = count_kept(masks, {t.name: weights.get(t.name, t.weight) for t in found}) if meeting else (None, {})
    made = Plan(masks, skipped, recipe.describe(step), weights=weights, solved=solved, notes=notes, zeros=zeros, _kept=kept)
    _warn_of_collapse(made, to_be_empty, previous)
    return made


def _doings(recipe: Settings, found: Sequence[Target], step: int = 0) -> tuple[str, str]:
    """What all processes have to do alike, and to which tensors, to compare it."""
    shares = dict(recipe.spread) if isinstance(recipe.spread, Mapping) else ""
    own = str([(t.name, tuple(t.tensor.shape), t.tensor.dtype) for t in found])
    return f"{recipe.describe(step)} {shares} at step {step}", own


def _warn_of_collapse(made: Plan, asked: Set[str], previous: Masks | None) -> None:
    """Warns, once, of all tensors of which nothing is left now, unless a sparsity of 1 was asked for them."""
    new = [name for name in made.empty if name not in asked and (previous is None or bool(local(previous[name]).any()))]
    if new:
        shown = ", ".join(map(repr, new[:8])) + (f" and {len(new) - 8} more" if len(new) > 8 else "")
        warnings.warn(
            f"nothing is left of {shown}, so the outputs of such a layer no longer depend on its inputs; pass floor= (0.01 "
            "keeps at least 1 % of every tensor), exclude it, or prune less",
            stacklevel=frames_inside(),
        )
