"""What is found out beside the solutions of layers: the curvature of the dense model, error curves, and orders of channels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ._dist import Comm, run_of, sharded, together
from .budgets import ByLoss
from .channel_groups import Order, Permutable, permutable
from .channel_order import weight_scores
from .curvature import KINDS, Curvature, curvature
from .edit import Inputs
from .methods import STREAMED, Amount, LayerProblem, Solution, error_curves, solve_checked
from .reorder import Reordering
from .settings import Settings
from .stats import Loss, check_evidence
from .targeting import Target


def check_streamed(recipe: Settings, found: Sequence[Target], data: object, loss: object) -> None:
    """Raises unless the evidence that is taken block by block can be collected."""
    if streamed := recipe.needs & STREAMED:
        check_evidence(streamed, data, loss, of=str(recipe.method))
        if any(sharded(target.tensor) for target in found):
            raise NotImplementedError(f"{recipe.method} runs the model block by block; prune before sharding it")
    if isinstance(recipe.spread, ByLoss):
        check_evidence(frozenset({"inputs"}), data, loss, of=f"spread={recipe.spread}")


def measures(recipe: Settings) -> bool:
    """Whether the curvature of the dense model, or the inputs of its layers, are measured before the layers are solved."""
    return recipe.method.curvature != "none" or isinstance(recipe.spread, ByLoss)


def notes_of_unread(recipe: Settings, data: object) -> dict[str, str]:
    """A note if `data=` was passed and neither the criterion nor the method nor the spread reads it."""
    if data is None or recipe.needs or measures(recipe):
        return {}
    return {"data=": f"nothing read it: {recipe.criterion} scores weights alone; sc.wanda and method='flow' use data"}


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
    measured = curvature(model, found, data, kind=kind, gram="full" if spread else "none", loss=loss)
    if spread and spread.curvature == "none":
        why = "sparsities were chosen by errors relative to the outputs of each layer; no gradients were taken"
        return replace(measured, notes=measured.notes | {str(spread): why})
    return measured


class ChannelOrders:
    """Orders of channels for an n:m pattern, found while the blocks of a model are solved.

    The model keeps its order until then: the problem of a layer is permuted, and its solution is permuted back. `orders` has
    what `prune_` does to the model in the end. Channels are permuted within one block, so that a block of a model that lies on
    a disk can be solved on its own.
    """

    def __init__(self, model: nn.Module, recipe: Settings, comm: Comm) -> None:
        self.recipe, self.comm = recipe, comm
        self.notes: dict[str, str] = {}
        self.orders: list[Order] = []
        self.taken = 0  # how many orders `take` has returned
        self.skipped: dict[str, str] = {}
        self._inside = "" if run_of(model) is model else "module."  # of DistributedDataParallel
        self._groups: dict[str, tuple[str, Permutable]] = {}
        self._checked: set[Any] = set()
        names: dict[int, list[str]] = {}
        for name, tensor in run_of(model).named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
        self._shared = {name for own in names.values() if len(own) > 1 for name in own}

    @staticmethod
    def of(model: nn.Module, recipe: Settings, comm: Comm) -> ChannelOrders | None:
        """Orders for these settings; None if the method or the pattern has no use for them. The processes of `comm` agree."""
        wanted = recipe.method.reorder and recipe.pattern.keep is not None and recipe.pattern.elementwise
        return ChannelOrders(model, recipe, comm) if wanted else None

    def enter(self, name: str, block: nn.Module, calls: Sequence[Inputs], found: Sequence[Target]) -> None:
        """Finds the channels of a block that can be permuted."""
        self._groups, start = {}, f"{name}." if name else ""
        own = {target.name.removeprefix(start): target for target in found}
        with together(self.comm, f"trace {name}"):
            groups, skipped = self._permutable(name, block, calls, own)
        for reader, group in list(groups.items()):
            if any(start + tensor in self._shared for tensor in group.tensors):
                skipped[reader] = "its inputs are made by weights that are used elsewhere too"
                del groups[reader]
        digests = [groups[reader].digest if reader in groups else 0 for reader in own]
        for reader, same in zip(own, self.comm.same(digests), strict=True):
            if not same and groups.pop(reader, None):
                skipped[reader] = "not all processes find that its inputs can be moved"
        start = self._inside + start
        self._groups = {start + reader: (start, group) for reader, group in groups.items()}
        self.skipped |= {start + reader: why for reader, why in skipped.items()}

    def _permutable(
        self, name: str, block: nn.Module, calls: Sequence[Inputs], own: Mapping[str, Target]
    ) -> tuple[dict[str, Permutable], dict[str, str]]:
        assert self.recipe.pattern.keep
        try:
            return permutable(block, calls, own, self.recipe.pattern.keep[1], self._checked)
        except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            self.notes[f"channels of {name}" if name else "channels"] = f"keep their order, as the trace failed: {error}"
            return {}, {}

    def solve(self, problem: LayerProblem, amount: Amount, previous: Tensor | None) -> Solution:
        """Solves a layer with its inputs in the best order, and returns the solution in the order of the model."""
        method, pattern = self.recipe.method, self.recipe.pattern
        if problem.name not in self._groups:
            return solve_checked(method, problem, pattern, amount, previous)
        assert pattern.keep
        start, group = self._groups[problem.name]
        order = group.order(weight_scores(problem.W, problem.H, problem.G), *pattern.keep)
        self.orders.append(order.inside(start))
        index = order.indices[group.place].to(problem.W.device)
        held = None if previous is None else previous.index_select(1, index)
        found, back = solve_checked(method, problem.permuted(index), pattern, amount, held), index.argsort()
        weight = None if found.weight is None else found.weight.index_select(1, back)
        return replace(found, mask=found.mask.index_select(1, back), weight=weight)

    def take(self) -> list[Order]:
        """The orders that were found since the last call."""
        found, self.orders = self.orders, []
        self.taken += len(found)
        return found

    def reordering(self) -> Reordering:
        """All orders that were found."""
        return Reordering(f"channels for {self.recipe.pattern}", self.orders, self.skipped)


def with_curves(recipe: Settings, found: Sequence[Target], measured: Curvature | None, step: int) -> Settings:
    """The settings with a spread that knows the errors of the layers, if it is one that needs them."""
    spread, sparsity = recipe.spread, recipe.at(step)
    if not isinstance(spread, ByLoss) or measured is None or sparsity is None:
        return recipe
    seen = measured if spread.curvature != "none" else replace(measured, G={})
    curves = error_curves(found, seen, spread.levels(sparsity), recipe.pattern, recipe.scope)
    return replace(recipe, spread=spread.measured(curves))
