"""`reorder_`: puts the channels inside a model into an order in which an n:m pattern costs less. The function stays the same.

Which n of m neighbouring weights are kept depends on who the neighbours are. Channels that one layer produces and one layer
reads (the inner channels of an MLP, the channels of a value head, those between two convolutions) can be permuted in both at no
cost at run time. The groups are those that `shrink` cuts: `trace` finds them, and no model is known by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ._dist import reshard_
from ._hints import hints
from ._tree import as_module
from .arguments import plain_arguments
from .axes import Atom, Cat, Expr, Fam, Group, Prod, atoms, norm
from .channel_order import best_order, kept_score
from .curvature import Curvature, curvature
from .display import Reported, Table, notes_by_reason
from .edit import UNKNOWN, Arguments, Inputs, all_or_nothing, forget_, owned_tensors, put_, record_, run, tensors_inside
from .patterns import Pattern
from .progress import Progress
from .stats import Loss, check_evidence, split_batch
from .targeting import Globs, Target, globs_of, targets
from .trace import Trace, main_outputs, trace

Place = tuple[str, int]  # a tensor and a dim of it


@dataclass(frozen=True)
class Order:
    """The new order of one group of units: `reader` is the weight whose inputs they are.

    `before` and `after` are the shares of the reader's scores that n of m keep. `indices` holds, for each dim of a tensor that
    carries the units, the old index of each new one.
    """

    reader: str
    units: int
    orders: int
    before: float
    after: float
    indices: dict[Place, Tensor] = field(repr=False)

    @property
    def inverse(self) -> dict[Place, Tensor]:
        return {place: index.argsort() for place, index in self.indices.items()}


@dataclass
class Reordering(Reported):
    """What `reorder_` did to a model: an `Order` for each group, and the reason for each weight that was left alone."""

    recipe: str
    orders: list[Order]
    skipped: dict[str, str]
    arguments: Arguments = field(default=UNKNOWN, repr=False)  # for `Recipe`: of the call that made it

    def apply_(self, model: nn.Module) -> Reordering:
        """Permutes the tensors of the model in place, all of them or none."""
        self.move_(model)
        record_(model, ("reorder", self.recipe), self.arguments)
        return self

    def undo_(self, model: nn.Module) -> None:
        """Puts the channels back into their old order, bit for bit."""
        self.move_(model, back=True)
        forget_(model, ("reorder", self.recipe))

    def move_(self, model: nn.Module, *, back: bool = False) -> None:
        """Permutes the tensors of the model, or with `back` restores their order. The record of the model does not change."""
        indices = [order.inverse for order in reversed(self.orders)] if back else [order.indices for order in self.orders]
        move_(model, indices)

    def of(self, measured: Curvature, found: Iterable[Target]) -> Curvature:
        """The curvature of the reordered model, from that of the model before."""
        G, H = dict(measured.G), dict(measured.H)
        for target in found:
            flip, name = target.layout.flip, target.name
            for order in self.orders:
                rows, columns = order.indices.get((name, int(flip))), order.indices.get((name, int(not flip)))
                if rows is not None and name in G:
                    G[name] = _permuted(G[name], rows)
                if columns is not None and name in H and target.layout.groups == 1:
                    H[name] = _permuted(H[name], columns)
        return Curvature(G, H, measured.tokens, measured.notes)

    def metrics(self) -> dict[str, Any]:
        """The numbers of groups, orders and skipped weights, and the share of the scores that is kept, before and after."""
        count = max(len(self.orders), 1)
        return {
            "groups": len(self.orders),
            "orders": sum(order.orders for order in self.orders),
            "skipped": len(self.skipped),
            "kept_before": sum(order.before for order in self.orders) / count,
            "kept_after": sum(order.after for order in self.orders) / count,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the orders themselves, as plain values that JSON can hold."""
        names = ("reader", "units", "orders", "before", "after")
        each = [{name: getattr(order, name) for name in names} for order in self.orders]
        return {"recipe": self.recipe, **self.metrics(), "layers": each, "skipped": dict(self.skipped)}

    def _table(self) -> Table:
        rows = [(o.reader, f"{o.units:,}", f"{o.orders}", f"{o.before:.2%}", f"{o.after:.2%}") for o in self.orders]
        header = ("inputs of", "units", "orders", "score kept before", "after")
        return Table(
            header, rows, right=range(1, 5), title=f"reorder, {self.recipe}", notes=notes_by_reason("left alone", self.skipped)
        )

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html(f"{len(self.skipped)} left alone", self.skipped.items())


def move_(model: nn.Module, moves: Sequence[Mapping[Place, Tensor]]) -> None:
    """Permutes the dims of tensors in place, one set of indices after the other: all of them or none."""
    reshard_(model)
    tensors = dict(owned_tensors(model).values())
    for name, dim in (place for indices in moves for place in indices):
        if name not in tensors or tensors[name].ndim <= dim:
            raise ValueError(f"the model has no {name!r} with a dim {dim}; this order was made for another model")
    with all_or_nothing(model), torch.no_grad():
        for indices in moves:
            for (name, dim), index in indices.items():
                tensor = tensors[name]
                if len(index) != tensor.shape[dim]:
                    raise ValueError(f"dim {dim} of {name!r} has {tensor.shape[dim]} entries, and the order has {len(index)}")
                index = index.to(tensor.device)
                put_(tensor, tensor.detach().index_select(dim, index))
                if tensor.is_leaf and tensor.grad is not None:
                    tensor.grad = tensor.grad.index_select(dim, index)


@hints
def reorder_(
    model: nn.Module,
    pattern: str | Pattern = "2:4",
    *,
    data: Iterable[Any] | None = None,
    include: Globs = (),
    exclude: Globs = (),
    curvature: str = "none",
    loss: Loss | None = None,
) -> Reordering:
    """Permutes channels inside the model, in place, so that an n:m pattern keeps more. The model computes the same function.

    Call it before pruning with that pattern. A channel's importance is the square of its weights times the mean square of its
    inputs on `data=`; with `curvature="diag"`, times the effect of each output on the loss (backward passes). Channels are
    moved where exactly one layer reads them, so the residual stream of a transformer keeps its order. The model is run before
    and after, and orders that change its output are taken back.

    The result prints as a table, and `result.undo_(model)` restores the old order.
    """
    include, exclude = globs_of("include", include), globs_of("exclude", exclude)
    found = find_orders(model, pattern, data=data, include=include, exclude=exclude, curvature=curvature, loss=loss)
    found.arguments = plain_arguments(reorder_, locals())
    return found.apply_(as_module(model))


def find_orders(
    model: nn.Module,
    pattern: str | Pattern = "2:4",
    *,
    data: Iterable[Any] | None = None,
    include: Globs = (),
    exclude: Globs = (),
    curvature: str | Curvature = "none",
    loss: Loss | None = None,
) -> Reordering:
    """What `reorder_` with the same arguments does. The model is unchanged. `curvature` can be one that was measured before."""
    model, shape = as_module(model), neighbour_pattern(pattern)
    assert shape.keep
    check_evidence(frozenset({"inputs"}), data, loss, of="reorder_")
    found, _ = targets(model, include=include, exclude=exclude)
    batches = list(data or ())
    if not batches:
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    inputs = split_batch(batches[0])[:2]
    measured = _measured(model, found, batches, curvature, loss)
    traced = trace(model, *inputs)
    by_name = {target.name: target for target in found}
    orders, skipped = [], {}
    same = _SameOutput(model, inputs)
    with Progress("reorder", len(found)) as progress:
        candidates = list(_candidates(traced, by_name, shape.keep[1], skipped))
        for candidate in candidates:
            progress(candidate.reader.name)
            orders.append(candidate.order(traced, _scores(candidate.reader, measured), *shape.keep))
        if not same(orders):  # rare: heads that are compared with each other, or something that the trace missed
            orders = []
            for candidate in candidates:
                scores = _scores(candidate.reader, measured)
                tries = (replace(candidate, keys=keys).order(traced, scores, *shape.keep) for keys in {candidate.keys, ()})
                order = next((order for order in sorted(tries, key=lambda order: -order.after) if same([order])), None)
                if order is None:
                    skipped[candidate.reader.name] = "moving its inputs changes the output of the model"
                else:
                    orders.append(order)
    return Reordering(f"channels for {shape}", orders, skipped)


def _measured(
    model: nn.Module, found: Sequence[Target], batches: Sequence[Any], kind: str | Curvature, loss: Loss | None
) -> Curvature:
    if isinstance(kind, Curvature):
        return kind
    return curvature(model, found, batches, kind="diag" if kind == "fisher" else kind, gram="diag", loss=loss)


def _scores(target: Target, measured: Curvature) -> Tensor:
    """What each weight of a layer contributes to the loss, or to the layer's outputs: W^2 diag(H) diag(G)."""
    scores = target.layout.matrix(target.weight).float().square()
    for factor, axis in ((measured.H.get(target.name), 0), (measured.G.get(target.name), 1)):
        if factor is not None:
            diagonal = factor.diagonal() if factor.ndim == 2 else factor
            scores = scores * diagonal.to(scores).unsqueeze(axis)
    return scores


# --- which units can be permuted ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A group whose units one weight reads, along its axis of neighbours.

    `keys` are other axes that stand before the units wherever these occur (the heads before the channels of a head): for every
    index of them the units can have an order of their own.
    """

    group: Group
    reader: Target
    keys: tuple[Atom, ...]

    def places(self, traced: Trace, place: Place) -> dict[tuple[int, ...], list[Tensor]]:
        """The positions of the units on one dim, for each index of the keys; several where the units occur repeatedly."""
        axis = norm(traced.dims[place[0]][place[1]])
        found: dict[tuple[int, ...], list[Tensor]] = {}
        for index, at in _positions(axis, torch.arange(axis.size), self.group.atom, {}):
            found.setdefault(tuple(index[key] for key in self.keys), []).append(at)
        return found

    def order(self, traced: Trace, scores: Tensor, n: int, m: int) -> Order:
        """The best order that was found, or the old one for indices of the keys where none is better."""
        dim = 0 if self.reader.layout.flip else 1
        new: dict[tuple[int, ...], Tensor] = {}
        before = after = 0.0
        for index, parts in self.places(traced, (self.reader.name, dim)).items():
            own = torch.cat([scores[:, at.to(scores.device)] for at in parts])
            old, best = torch.arange(own.shape[1]), best_order(own, n, m)
            was, is_now = kept_score(own, old, n, m), kept_score(own, best, n, m)
            new[index] = best if is_now > was else old
            before, after = before + was, after + max(was, is_now)
        total = max(float(scores.sum()), 1e-300)
        indices = {}
        for place in dict.fromkeys((member.tensor, member.dim) for member in self.group.members):
            moved = torch.arange(norm(traced.dims[place[0]][place[1]]).size)
            for index, parts in self.places(traced, place).items():
                for at in parts:
                    moved[at] = at[new[index]]
            indices[place] = moved
        return Order(self.reader.name, self.group.size, len(new), before / total, after / total, indices)


def _candidates(traced: Trace, found: Mapping[str, Target], m: int, skipped: dict[str, str]) -> Iterator[_Candidate]:
    """The groups to permute. Weights that no group serves are added to `skipped` with the reason."""
    reads: dict[str, list[Group]] = {}
    for group in traced.groups:
        for name in {member.tensor for member in group.members if member.role == "consume"}:
            reads.setdefault(name, []).append(group)
    for name, target in found.items():
        dim = 0 if target.layout.flip else 1
        axis = norm(traced.dims[name][dim]) if name in traced.dims else None
        last = axis.parts[-1] if isinstance(axis, Prod) and axis.parts else axis
        group = next((g for g in reads.get(name, ()) if g.atom is last), None)
        why = _why_not(traced, target, group, m)
        if why:
            skipped[name] = why
            continue
        assert group is not None
        yield _Candidate(group, target, _keys(traced, group))


def _why_not(traced: Trace, target: Target, group: Group | None, m: int) -> str | None:
    """Why the inputs of a weight keep their order, or None."""
    if target.layout.span > 1 or target.layout.groups > 1:
        return "the neighbours of a weight are in its own kernel or group"
    if group is None:
        return "its inputs are not the units of one layer"
    if group.frozen:
        return f"its inputs cannot be moved: {group.frozen}"
    if len({member.tensor for member in group.members if member.role == "consume"}) > 1:
        return "other layers read its inputs too"
    if group.size % m:
        return f"its inputs come in runs of {group.size}, which {m} does not divide"
    if any(isinstance(part, Fam) for member in group.members for part in _parts(traced.dims[member.tensor][member.dim])):
        return "its inputs are split in a way that depends on another axis"
    return None


def _keys(traced: Trace, group: Group) -> tuple[Atom, ...]:
    """The axes that stand before the units at every place where these occur."""
    common: set[Atom] | None = None
    for member in group.members:
        axis = norm(traced.dims[member.tensor][member.dim])
        for index, _ in _positions(axis, torch.arange(axis.size), group.atom, {}):
            common = set(index) if common is None else common & set(index)
    first = norm(traced.dims[group.members[0].tensor][group.members[0].dim])
    return tuple(atom for atom in dict.fromkeys(atoms(first)) if atom in (common or ()))


def _positions(e: Expr, at: Tensor, wanted: Atom, index: dict[Atom, int]) -> Iterator[tuple[dict[Atom, int], Tensor]]:
    """Where the units of an atom lie on an axis: runs of positions, one for each unit, with the indices of the axes before.

    `at` holds the positions that the expression covers.
    """
    e = norm(e)
    if e is wanted:
        yield index, at
    elif isinstance(e, Cat):
        for part, own in zip(e.parts, at.split([part.size for part in e.parts]), strict=True):
            yield from _positions(part, own, wanted, index)
    elif isinstance(e, Prod) and wanted in atoms(e):
        first, rest = e.parts[0], Prod(e.parts[1:])
        grid = at.view(first.size, -1)
        if wanted in atoms(first):
            for column in grid.T:
                yield from _positions(first, column, wanted, index)
        for i in range(first.size if wanted in atoms(rest) else 0):
            yield from _positions(rest, grid[i], wanted, {**index, first: i} if isinstance(first, Atom) else index)


def _parts(e: Expr) -> Iterator[Expr]:
    e = norm(e)
    yield e
    for part in () if isinstance(e, Atom) else e.parts:
        yield from _parts(part)


def _permuted(factor: Tensor, index: Tensor) -> Tensor:
    index = index.to(factor.device)
    return factor[index] if factor.ndim == 1 else factor[index][:, index]


# --- the check ------------------------------------------------------------------------------------------------------


class _SameOutput:
    """Checks that orders leave the output of a model unchanged. The model is as it was after each check."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs, self.wanted = model, inputs, _outputs(model, inputs)

    def __call__(self, orders: Sequence[Order]) -> bool:
        with all_or_nothing(self.model):
            move_(self.model, [order.indices for order in orders])
            try:
                return _close(_outputs(self.model, self.inputs), self.wanted)
            finally:
                move_(self.model, [order.inverse for order in reversed(orders)])


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return [tensor for tensor in tensors_inside(main_outputs(run(model, *inputs))) if tensor.is_floating_point()]


def _close(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether outputs differ by rounding alone: sums are taken in another order."""
    for one, other in zip(found, wanted, strict=True):
        finite = other.isfinite()
        slack = 100 * torch.finfo(other.dtype).eps ** 0.75 * float(other[finite].abs().max() if finite.any() else 0)
        if not bool(((one == other) | ((one - other).abs() <= slack)).all()):
            return False
    return True


def neighbour_pattern(pattern: str | Pattern) -> Pattern:
    """Reads the pattern of `reorder_`. Raises ValueError unless it is n:m."""
    shape = Pattern.parse(pattern)
    if not shape.keep or not shape.elementwise:
        raise ValueError(f"reorder_ is for patterns n:m such as '2:4', not {str(shape)!r}: others have no neighbours to choose")
    return shape
