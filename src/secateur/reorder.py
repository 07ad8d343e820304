"""`reorder_`: permutes the channels inside a model so that an n:m pattern costs less. The model computes the same function.

An n:m pattern keeps n of m neighbouring weights, so the order of channels matters. Channels that one layer produces and one
layer reads can be permuted in both at no cost at run time (see `channel_groups`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from torch import nn

from ._hints import hints
from ._tree import as_module
from .arguments import plain_arguments
from .channel_groups import Order, channel_sums, move_, permutable
from .channel_order import weight_scores
from .curvature import curvature as measure
from .display import Reported, Shown, Table, notes_by_reason
from .edit import UNKNOWN, Arguments, forget_, order_of, record_, set_order_
from .patterns import Pattern
from .progress import track
from .stats import Loss, batches_of, check_evidence, split_batch
from .targeting import Globs, globs_of, targets

_SAME = 0.01  # channels are in the old order where they are this much closer to it than the new order is


@dataclass(repr=False)
class Reordering(Shown, Reported):
    """The result of `reorder_`: an `Order` for each group, and the reason for each weight whose inputs were not permuted."""

    recipe: str
    orders: list[Order]
    skipped: dict[str, str]
    arguments: Arguments = UNKNOWN  # for `Recipe`: of the call that made it
    key: str = field(default_factory=lambda: uuid4().hex, compare=False)  # by which models remember that they have it

    def apply_(self, model: nn.Module) -> Reordering:
        """Permutes the tensors of the model in place, all of them or none."""
        self.move_(model)
        record_(model, ("reorder", self.recipe), self.arguments)
        return self

    def undo_(self, model: nn.Module) -> None:
        """Puts the channels back into their old order, bit for bit."""
        self.move_(model, back=True)
        forget_(model, ("reorder", self.recipe))

    def is_in(self, model: nn.Module) -> bool:
        """Whether the channels of the model, or of the model that it is a copy of, were put into this order.

        It is False again after `load_state_dict` with the weights from before.
        """
        known = order_of(model, self.key)
        if known is None:
            return False
        old, new = known[::2], known[1::2]
        now = [own for own, _ in channel_sums(model, self.orders)]
        if len(now) != len(old):
            return True
        apart = sum((a - b) ** 2 for a, b in zip(old, new, strict=True))
        moved = sum((a - b) ** 2 for a, b in zip(old, now, strict=True))
        return apart == 0 or moved > _SAME * apart

    def move_(self, model: nn.Module, *, back: bool = False) -> None:
        """Permutes the tensors of the model, or with `back` restores their order. The record of the model does not change."""
        indices = [order.inverse for order in reversed(self.orders)] if back else [order.indices for order in self.orders]
        sums = None if back else [number for pair in channel_sums(model, self.orders) for number in pair]
        move_(model, indices)
        set_order_(model, self.key, sums)

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

    def _repr_html_(self) -> str:
        return self._table().html(f"{len(self.skipped)} left alone", self.skipped.items())


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
    moved where exactly one layer reads them, so the residual stream of a transformer keeps its order. The model is run on the
    first batch with its channels shuffled, and channels that change its output are not moved.

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
    curvature: str = "none",
    loss: Loss | None = None,
) -> Reordering:
    """Returns the result of `reorder_` with the same arguments, without changing the model."""
    model, shape = as_module(model), neighbour_pattern(pattern)
    assert shape.keep
    check_evidence(frozenset({"inputs"}), data, loss, of="reorder_")
    found, _ = targets(model, include=include, exclude=exclude)
    batches = batches_of(data)
    inputs = split_batch(batches[0])[:2]
    measured = measure(model, found, batches, kind="diag" if curvature == "fisher" else curvature, gram="diag", loss=loss)
    by_name = {target.name: target for target in found}
    groups, skipped = permutable(model, [inputs], by_name, shape.keep[1])
    orders = []
    for name in track(groups, "reorder", lambda name: name):
        weight = by_name[name].layout.matrix(by_name[name].weight)
        orders.append(groups[name].order(weight_scores(weight, measured.H.get(name), measured.G.get(name)), *shape.keep))
    return Reordering(f"channels for {shape}", orders, skipped)


def neighbour_pattern(pattern: str | Pattern) -> Pattern:
    """Reads the pattern of `reorder_`. Raises ValueError unless it is n:m."""
    if not isinstance(pattern, str | Pattern):
        given = type(pattern).__name__
        raise TypeError(f"reorder_ takes a pattern such as '2:4' as its second argument, not {given}; pass batches as data=")
    shape = Pattern.parse(pattern)
    if not shape.keep or not shape.elementwise:
        raise ValueError(f"reorder_ is for patterns n:m such as '2:4', not {str(shape)!r}: others have no neighbours to choose")
    return shape
