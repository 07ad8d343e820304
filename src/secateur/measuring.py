"""What is measured of the dense model before its layers are solved: curvature, error curves, and an order of channels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .budgets import ByLoss
from .curvature import KINDS, Curvature, curvature
from .methods import error_curves
from .reorder import Reordering, find_orders, move_
from .settings import Settings
from .stats import Loss
from .targeting import Target


def measures(recipe: Settings) -> bool:
    """Whether the curvature of the dense model, or the inputs of its layers, are measured before the layers are solved."""
    return recipe.method.curvature != "none" or isinstance(recipe.spread, ByLoss)


def measure(
    model: nn.Module, recipe: Settings, found: Sequence[Target], data: Iterable[Any] | None, loss: Loss | None
) -> Curvature | None:
    """What the method and the spread need to know of the dense model, from one pass over the data; None if nothing."""
    spread = recipe.spread if isinstance(recipe.spread, ByLoss) else None
    if not measures(recipe):
        return None
    if data is None:
        raise TypeError(f"{recipe.method} with spread={spread} measures the model on data=; use sc.plan or sc.prune_ for it")
    kind = max(recipe.method.curvature, spread.curvature if spread else "none", key=KINDS.index)
    gram = "full" if spread else "diag" if _reorders(recipe) else "none"
    measured = curvature(model, found, data, kind=kind, gram=gram, loss=loss)
    if spread and spread.curvature == "none":
        why = "sparsities were chosen by errors relative to the outputs of each layer; no gradients were taken"
        return replace(measured, notes=measured.notes | {str(spread): why})
    return measured


def _reorders(recipe: Settings) -> bool:
    return recipe.method.reorders and recipe.pattern.keep is not None and recipe.pattern.elementwise


def find_order(
    model: nn.Module, recipe: Settings, found: Sequence[Target], data: Iterable[Any] | None, measured: Curvature | None
) -> tuple[Reordering | None, dict[str, str]]:
    """The order of channels that suits an n:m pattern, if the method asks for one, and why there is none."""
    if not _reorders(recipe):
        return None, {}
    names = [target.name for target in found]
    try:
        return find_orders(model, recipe.pattern, data=data, include=names, curvature=measured or "none"), {}
    except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        return None, {"order of channels": f"stays as it is, because the model cannot be traced: {error}"}


@contextlib.contextmanager
def reordered(model: nn.Module, order: Reordering | None) -> Iterator[None]:
    """Gives the model another order of channels inside the context."""
    if order is None:
        yield
        return
    move_order_(model, order)
    try:
        yield
    finally:
        move_order_(model, order, back=True)


def move_order_(model: nn.Module, order: Reordering, *, back: bool = False) -> None:
    """Gives the channels of the model their new order, or with `back` their old one, without a record in the model."""
    move_(model, [one.inverse for one in reversed(order.orders)] if back else [one.indices for one in order.orders])


def with_curves(recipe: Settings, found: Sequence[Target], measured: Curvature | None, step: int) -> Settings:
    """The settings with a spread that knows the errors of the layers, if it is one that needs them."""
    spread, sparsity = recipe.spread, recipe.at(step)
    if not isinstance(spread, ByLoss) or measured is None or sparsity is None:
        return recipe
    seen = measured if spread.curvature != "none" else replace(measured, G={})
    curves = error_curves(found, seen, spread.levels(sparsity), recipe.pattern, recipe.scope)
    return replace(recipe, spread=spread.measured(curves))
