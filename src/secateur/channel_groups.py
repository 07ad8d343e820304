"""Channels that can be permuted without a change of the model's function, and orders of them for n:m patterns.

Channels that one layer produces and one layer reads (the inner channels of an MLP, the channels of a value head, those between
two convolutions) can be permuted in both. The groups are those that `shrink` cuts: `trace` finds them, and no model is known by
name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import copied, tensors_of
from ._dist import digest, reshard_, sharded
from ._layers import Layout
from ._tree import bare_name
from .axes import Atom, Cat, Expr, Fam, Group, Prod, atoms, norm
from .channel_order import best_order, kept_score
from .edit import Inputs, all_or_nothing, owned_tensors, put_, run, tensors_inside
from .targeting import Target
from .trace import GIVEN, Trace, main_outputs, trace

Place = tuple[str, int]  # a tensor and a dim of it
_ROUNDING = 0.03  # of the change that a wrong order makes; what is above is no rounding, even in half precision
_SAMPLE = 64  # channels of each group whose sums are compared


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

    def inside(self, start: str) -> Order:
        """The same order, with the names that its tensors have in a larger model; these begin with `start`."""
        return replace(
            self,
            reader=start + self.reader,
            indices={(start + name, dim): index for (name, dim), index in self.indices.items()},
        )

    def permuted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors in this order, by their names."""
        moved = dict(tensors)
        for (name, dim), index in self.indices.items():
            if name in moved:
                moved[name] = moved[name].index_select(dim, index.to(moved[name].device))
        return moved

    @property
    def inverse(self) -> dict[Place, Tensor]:
        return {place: index.argsort() for place, index in self.indices.items()}


def channel_sums(model: nn.Module, orders: Sequence[Order]) -> list[tuple[float, float]]:
    """Numbers by which two orders of channels can be told apart: sums of a few channels of each reader's weight.

    A pair holds the channel that is at a place now, and the one that the order puts there. Weights that are divided among
    processes are left out.
    """
    tensors = {bare_name(name): tensor for name, tensor in owned_tensors(model).values()}
    found: list[tuple[float, float]] = []
    for order in orders:
        for (name, dim), index in order.indices.items():
            tensor = tensors.get(bare_name(name))
            if name != order.reader or tensor is None or sharded(tensor) or tensor.ndim <= dim:
                continue
            sums = tensor.detach().movedim(dim, 0).flatten(1).sum(1, dtype=torch.float64).cpu()
            if len(sums) == len(index):
                found += zip(sums[:_SAMPLE].tolist(), sums[index[:_SAMPLE].cpu()].tolist(), strict=True)
    return found


def move_(model: nn.Module, moves: Sequence[Mapping[Place, Tensor]]) -> None:
    """Permutes the dims of tensors in place, one set of indices after the other: all of them or none."""
    reshard_(model)
    tensors = {bare_name(name): tensor for name, tensor in owned_tensors(model).values()}  # a wrapper may have been added
    moves = [{(bare_name(name), dim): index for (name, dim), index in indices.items()} for indices in moves]
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


@dataclass(frozen=True)
class Permutable:
    """A group of units that one weight, `reader`, reads along its axis of neighbours.

    `keys` are other axes that stand before the units wherever these occur (the heads before the channels of a head): for every
    index of them the units can have an order of their own.
    """

    traced: Trace
    group: Group
    reader: str
    layout: Layout
    keys: tuple[Atom, ...]

    @property
    def place(self) -> Place:
        """The axis along which the reader has its inputs."""
        return self.reader, 0 if self.layout.flip else 1

    @property
    def tensors(self) -> list[str]:
        """The tensors that carry the units."""
        return list(dict.fromkeys(member.tensor for member in self.group.members))

    def order(self, scores: Tensor, n: int, m: int) -> Order:
        """The best order that was found for scores of the reader; where none is better, the old one."""
        new: dict[tuple[int, ...], Tensor] = {}
        before = after = 0.0
        for index, parts in self._places(self.place).items():
            own = torch.cat([scores[:, at.to(scores.device)] for at in parts])
            old, best = torch.arange(own.shape[1]), best_order(own, n, m)
            was, is_now = kept_score(own, old, n, m), kept_score(own, best, n, m)
            new[index] = best if is_now > was else old
            before, after = before + was, after + max(was, is_now)
        total = max(float(scores.sum()), 1e-300)
        return Order(self.reader, self.group.size, len(new), before / total, after / total, self._moved(new))

    def shuffled(self) -> dict[Place, Tensor]:
        """Another order, for a test whether the function stays the same. Each index of the keys has one of its own."""
        seed = torch.Generator().manual_seed(0)
        return self._moved({index: torch.randperm(self.group.size, generator=seed) for index in self._places(self.place)})

    @property
    def digest(self) -> int:
        """A hash of the places and the indices that `shuffled` moves."""
        moves = self.shuffled().items()
        return digest(b"".join(f"{place}".encode() + index.numpy().tobytes() for place, index in moves))

    def _places(self, place: Place) -> dict[tuple[int, ...], list[Tensor]]:
        """The positions of the units on one dim, for each index of the keys; several where the units occur repeatedly."""
        axis = norm(self.traced.dims[place[0]][place[1]])
        found: dict[tuple[int, ...], list[Tensor]] = {}
        for index, at in _positions(axis, torch.arange(axis.size), self.group.atom, {}):
            found.setdefault(tuple(index[key] for key in self.keys), []).append(at)
        return found

    def _moved(self, new: Mapping[tuple[int, ...], Tensor]) -> dict[Place, Tensor]:
        """For each dim that carries the units, the old index of each new one, from the order for each index of the keys."""
        indices = {}
        for place in dict.fromkeys((member.tensor, member.dim) for member in self.group.members):
            moved = torch.arange(norm(self.traced.dims[place[0]][place[1]]).size)
            for index, parts in self._places(place).items():
                for at in parts:
                    moved[at] = at[new[index]]
            indices[place] = moved
        return indices


def permutable(
    model: nn.Module, calls: Sequence[Inputs], found: Mapping[str, Target], m: int, checked: set[Any] | None = None
) -> tuple[dict[str, Permutable], dict[str, str]]:
    """The groups that can be permuted for n of m, by the weight that reads them; and why the other weights have none.

    `found` are targets by their names in `model`. The first of `calls` is traced. The model is run on all of them in its own
    order and with its channels shuffled, and groups that change its output are left out. `checked` is for models that are built
    alike, such as the blocks of a larger one: those with modules of the same types and the same groups are run once.
    """
    traced = trace(model, *copied(calls[0], {}))
    skipped: dict[str, str] = {}
    all_of_them = {one.reader: one for one in _candidates(traced, found, m, skipped)}
    stored = _stored(model)
    for name, one in list(all_of_them.items()):
        if lost := [tensor for tensor in one.tensors if tensor not in stored]:
            skipped[name] = f"its inputs pass {lost[0]!r}, which is in no state dict: a loaded model would have its old order"
            del all_of_them[name]
    types = tuple((name, type(module)) for name, module in model.named_modules())
    kind = types, tuple(one.digest for one in all_of_them.values())
    if not all_of_them or (checked is not None and kind in checked):
        return all_of_them, skipped
    same = _SameOutput(model, calls)
    if same(list(all_of_them.values())):
        if checked is not None:
            checked.add(kind)
        return all_of_them, skipped
    kept = {}
    for name, one in all_of_them.items():  # rare: heads that are compared with each other, or something that the trace missed
        tries = (replace(one, keys=keys) for keys in dict.fromkeys((one.keys, ())))
        if (fit := next((each for each in tries if same([each])), None)) is not None:
            kept[name] = fit
        else:
            skipped[name] = "moving its inputs changes the output of the model"
    return kept, skipped


def _stored(model: nn.Module) -> set[str]:
    """The names of the tensors that a state dict holds: parameters and persistent buffers."""
    lost = {id(module._buffers[name]) for module in model.modules() for name in module._non_persistent_buffers_set}
    buffers = (name for name, buffer in model.named_buffers() if id(buffer) not in lost)
    return {name for name, _ in model.named_parameters()} | set(buffers)


def _candidates(traced: Trace, found: Mapping[str, Target], m: int, skipped: dict[str, str]) -> Iterator[Permutable]:
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
        yield Permutable(traced, group, name, target.layout, _keys(traced, group))


def _why_not(traced: Trace, target: Target, group: Group | None, m: int) -> str | None:
    """Why the inputs of a weight keep their order, or None."""
    if target.layout.stacked:
        return "it holds the matrices of several experts; only the inputs of single matrices are reordered"
    if target.layout.groups > 1:
        return "it is a grouped convolution, whose inputs are not reordered"
    if target.layout.span > 1:
        return "its neighbouring weights are those of one kernel, not of different inputs"
    if group is None:
        return "its inputs are not the units of one layer"
    if group.frozen == GIVEN:
        return "it reads the inputs of the block or of the model, which keep their order"
    if group.frozen:
        return f"its inputs cannot be moved: {group.frozen}"
    if len({member.tensor for member in group.members if member.role == "consume"}) > 1:
        return "other layers read its inputs too"
    if group.size % m:
        return f"its inputs can be reordered only within groups of {group.size}, which is not a multiple of {m}"
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


class _SameOutput:
    """Checks that channels can be moved: the output of a model changes by rounding alone. The model is restored afterwards.

    Sums are taken in another order, so the output does change a little. That is compared with the change from moving the
    inputs of the readers alone, because the channels may add little to a residual stream that has large values.
    """

    def __init__(self, model: nn.Module, calls: Sequence[Inputs]) -> None:
        self.model, self.calls = model, calls
        self.wanted = self._outputs()
        dtypes = {tensor.dtype for tensor in (*model.parameters(), *self.wanted) if tensor.is_floating_point()}
        self.slack = min(100 * max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.75, _ROUNDING)

    def __call__(self, groups: Sequence[Permutable]) -> bool:
        moves = [one.shuffled() for one in groups]
        alone = [{one.place: move[one.place]} for one, move in zip(groups, moves, strict=True)]
        return self._change(moves) <= self.slack * self._change(alone)

    def _change(self, moves: Sequence[Mapping[Place, Tensor]]) -> float:
        """How far the outputs are from those in the old order; infinite if other ones of them are finite."""
        with all_or_nothing(self.model) as before:
            move_(self.model, moves)
            found = self._outputs()
            before.restore_tensors_()
        return sum(_distance(one, other) for one, other in zip(found, self.wanted, strict=True))

    def _outputs(self) -> list[Tensor]:
        """The tensors that the model returns, and those in its arguments, which it may have changed."""
        found = []
        for call in self.calls:
            args, kwargs = copied(call, {})
            output = run(self.model, args, kwargs)
            found += [*tensors_inside(main_outputs(output)), *tensors_of((args, kwargs))]
        return [tensor for tensor in found if tensor.is_floating_point()]


def _distance(one: Tensor, other: Tensor) -> float:
    finite = other.isfinite()
    if one.shape != other.shape or not torch.equal(one.isfinite(), finite):
        return math.inf
    return float(torch.where(finite, one.double() - other.double(), 0).abs().sum())
