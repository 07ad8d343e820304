"""Pruning in place: `prune_` prunes once, `Pruner` while a model trains. The weights hold zeros, the pruner holds the masks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import kernels
from ._dist import like, local, reshard_, sharded
from ._tree import Prunable, as_module
from .budgets import Spread
from .criteria import Criterion, magnitude
from .masks import Masks
from .methods import STREAMED, Method, SoftMasks, drop_and_grow, write_
from .patterns import Pattern
from .plans import Plan, check_streamed, make_plan, plan
from .recipe import Recipe
from .schedules import Number
from .stats import Loss, Table, add_gradient, check_evidence, collect
from .targeting import Globs, targets


def prune_(
    model: Prunable,
    criterion: Criterion | Callable[..., Tensor] | str = magnitude,
    *,
    sparsity: float | None = None,
    count: int | None = None,
    pattern: str | Pattern = "unstructured",
    scope: str | None = None,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    spread: Spread | Mapping[str, Number] | None = None,
    method: Method | str | None = None,
    floor: float = 0.0,
    keep_dense: bool = False,
) -> Plan:
    """Prunes a model in place, once, and returns the plan that was carried out. `print(plan)` shows a table of its layers.

    Tensors that are in no module are pruned as a mapping: `prune_({"codebook": tensor}, sparsity=0.5)`.

    `criterion` scores every element, and the lowest scores are pruned: an expression (`sc.wanda`), its text ("wanda",
    "abs(weight*grad)") or a function. `sparsity` is the fraction of the original weights to prune,
    `count` the number of units to prune in each pool. `pattern` says what is pruned together ("unstructured", "2:4", "16x1",
    "out", ...) and `scope` which units compete: those of a "tensor" (the default), of a "row", or of all tensors ("global").
    `include`, `exclude` and `types` choose tensors. `data` and `loss` feed criteria and methods that need inputs or gradients.
    `spread` gives each tensor its own sparsity. `floor` is the fraction of each tensor that stays at least: with
    `scope="global"` or a spread the other tensors lose more instead, so that the total is still exact. `method` is how the
    weights answer: `sc.methods.rank()` (the default) prunes the lowest scores, `sc.methods.sparsegpt()` also corrects the
    weights that stay. `keep_dense=True` remembers what was replaced, so that `plan.undo_(model)` restores it.

    When anything raises, the model is unchanged.
    """
    made = plan(
        model,
        criterion,
        sparsity=sparsity,
        count=count,
        pattern=pattern,
        scope=scope,
        include=include,
        exclude=exclude,
        types=types,
        data=data,
        loss=loss,
        spread=spread,
        method=method,
        floor=floor,
    )
    return made.apply_(model, keep_dense=keep_dense)


class Pruner:
    """Prunes a model while it trains.

    The arguments are those of `prune_`, and `sparsity` may be a schedule::

        pruner = Pruner(model, magnitude, sparsity=cubic(0.9, start=1_000, end=10_000, every=100))
        pruner.attach(optimizer)      # the training loop stays yours
        ...
        print(pruner.finish())

    A hook that runs after each `optimizer.step` puts the zeros back and, when the schedule says so, makes new masks. What was
    pruned stays pruned. Criteria that need gradients use those of the training itself, averaged since the last masks, unless
    `data` and `loss` are given.

    `grow` and `swap` are short for `method=sc.methods.drop_and_grow(grow, swap)`, dynamic sparse training: whenever the
    schedule `swap` is due, that fraction of the kept weights is dropped and as many of the pruned ones that score highest by
    `grow` come in (`abs(grad)`: RigL; `random()`: SET). `ste=True` keeps training the dense weights and masks them only in the
    forward pass, with gradients passed straight through; on a constant budget the masks are made anew every `every` steps, so
    that a weight can come back. `keep_dense=True` remembers what the zeros replaced, for `undo_`.
    """

    def __init__(
        self,
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
        spread: Spread | Mapping[str, Number] | None = None,
        method: Method | str | None = None,
        floor: float = 0.0,
        grow: Criterion | Callable[..., Tensor] | str | None = None,
        swap: Callable[[int], float] | None = None,
        ste: bool = False,
        every: int = 1,
        keep_dense: bool = False,
    ):
        self.model = model = as_module(model)
        method = _method(method, grow, swap)
        self.recipe = Recipe.of(criterion, pattern, scope, sparsity, count, spread, method, floor)
        self._every = every
        self._needs = self.recipe.needs - STREAMED
        if data is not None or self._needs - {"grad", "grad_square"}:
            check_evidence(self._needs, data, loss)
        _check_ste(self.recipe, ste, every)
        self._targets, self.skipped = targets(model, include=include, exclude=exclude, types=types)
        check_streamed(self.recipe, self._targets, data, loss)
        self._sharded = any(sharded(target.tensor) for target in self._targets)
        if ste and self._sharded:
            raise NotImplementedError("ste=True puts a mask into the forward pass, which FSDP2 does not see; use it unsharded")
        self._data, self._loss = data, loss
        self._gathers = bool(self._needs) and data is None  # gradients come from the training loop
        self._gathered: Table = {target.name: {} for target in self._targets}
        self._batches = 0
        self._step = 0
        self._due = self.recipe.due(0)  # masks are wanted and not made yet
        self._pruned_by_attach = False
        self._masks = Masks({t.name: like(torch.ones_like(t.weight, dtype=torch.bool), t.tensor) for t in self._targets})
        self._keep_dense = keep_dense
        self._dense: dict[str, Tensor] = {t.name: t.weight.clone() for t in self._targets} if keep_dense and not ste else {}
        self._followed: dict[Optimizer, RemovableHandle] = {}
        self._leader: Optimizer | None = None  # the optimizer with which the schedule advances
        self._soft = SoftMasks(self._targets, self._masks) if ste else None

    # --- training ----------------------------------------------------------------------------------------------------
    def attach(self, *optimizers: Optimizer) -> Pruner:
        """Follows these optimizers: puts zeros back after a step of any, and advances the schedule with the first.

        Masks that are due at the start are made now, so that training begins with them.
        """
        optimizers = tuple(_innermost(optimizer) for optimizer in optimizers)
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
                given = type(optimizer).__name__
                raise TypeError(f"attach takes torch optimizers, not {given}; for others call pruner.step() after each step")
            if optimizer in self._followed or optimizers.count(optimizer) > 1:
                raise ValueError(f"this {type(optimizer).__name__} is attached already")
            if not self._trains(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} updates none of the pruned tensors; attach the one that trains them"
                )
        if self._due and not (self._gathers and self.recipe.criterion.needs):
            self._update()
            self._pruned_by_attach = any(bool((~local(mask)).any()) for mask in self._masks.values())
        for optimizer in optimizers:
            if self._leader is None or not self._trains(self._leader):
                self._leader = optimizer
            self._followed[optimizer] = optimizer.register_step_post_hook(self._after_step)
        return self

    def _trains(self, optimizer: Optimizer) -> bool:
        mine = {id(target.tensor) for target in self._targets}
        return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # on overflow a fused optimizer changes nothing
        if overflow is not None and bool(overflow):
            return
        if optimizer is self._leader:
            self.step()
        else:
            self.apply_()

    def step(self) -> None:
        """Records that a training step is done: gathers gradients, puts the zeros back, and makes masks that are due."""
        self._step += 1
        self._pruned_by_attach = False
        if self._gathers:
            self._gather()
        self.apply_()
        soft = self._soft is not None and not self.recipe.scheduled and self._step % self._every == 0
        if self._due or soft or self.recipe.due(self._step) or self.recipe.method.due(self._step):
            self._update()

    @torch.no_grad()
    def apply_(self) -> None:
        """Puts the zeros back into the weights."""
        if self._sharded:
            reshard_(self.model)
        if self._soft is None:
            for target in self._targets:
                kernels.zero_(target.weight, local(self._masks[target.name]))

    @torch.no_grad()
    def _gather(self) -> None:
        for target in self._targets:
            if target.tensor.grad is not None:  # layers that did not run in this step have none
                add_gradient(target, target.tensor.grad, self._needs, self._gathered[target.name])
        self._batches += 1

    def _evidence(self) -> Table:
        if not self._gathers:
            return collect(self.model, self._targets, self._needs, self._data, self._loss)
        if self._batches == 0:  # the first masks are made without gradients
            return self._gathered
        if frozen := [t.name for t in self._targets if not self._gathered[t.name] and not t.tensor.requires_grad]:
            raise RuntimeError(f"{frozen} had no gradient, being frozen, and the criterion needs it; exclude them")
        for target in self._targets:
            if not self._gathered[target.name]:  # has not run since the last masks
                add_gradient(target, torch.zeros_like(target.tensor), self._needs, self._gathered[target.name])
        return {name: {kind: value / self._batches for kind, value in entry.items()} for name, entry in self._gathered.items()}

    def _update(self) -> None:
        table = self._evidence()
        held = self._masks if self._soft is None else None
        made = make_plan(
            self.model, self.recipe, self._targets, self.skipped, table, data=self._data, step=self._step, previous=held
        )
        for target in self._targets:
            if target.name in self._dense:  # follows a weight while it is kept, and stays where it was pruned
                kept = local(self._masks[target.name])
                self._dense[target.name] = torch.where(kept, target.weight, self._dense[target.name])
            if target.name in made.weights:
                write_(target.weight, made.weights[target.name])
        self._masks = made.masks
        if self._soft is not None:
            self._soft.set(made.masks)
        self.apply_()
        self._due, self._batches = False, 0
        self._gathered = {name: {} for name in self._gathered}

    # --- looking, saving, ending -------------------------------------------------------------------------------------
    @property
    def masks(self) -> Masks:
        """The current masks (True = kept)."""
        return self._masks

    @property
    def sparsity(self) -> float:
        """The fraction of the targets that is pruned now."""
        return self._masks.sparsity

    def plan(self) -> Plan:
        """What has been pruned so far, as a plan to print or to apply to a copy of the model."""
        dense = {name: self._dense[name][~local(self._masks[name])] for name in self._dense}
        return Plan(self._masks, self.skipped, self.recipe.describe(self._step), dense)

    @torch.no_grad()
    def verify(self) -> None:
        """Raises unless every pruned weight is zero. A step of an optimizer that is not attached can change that."""
        if self._soft is not None:
            return
        if self._sharded:
            reshard_(self.model)
        alive = {t.name: int((t.weight[~local(self._masks[t.name])] != 0).sum()) for t in self._targets}
        if broken := {name: number for name, number in alive.items() if number}:
            raise RuntimeError(
                f"pruned weights are not zero: {broken}. Something changed them after the last pruner.step(): an "
                "optimizer that is not attached, one that steps in the backward pass, or a checkpoint. Attach it, or call "
                "pruner.apply_()."
            )

    def finish(self) -> Plan:
        """Stops following the optimizers, leaves plain weights with exact zeros in the model, and returns the plan.

        Warns if the schedule has not reached its end.
        """
        end = max((schedule.end for schedule in self.recipe.scheduled), default=0)
        if self._due or self._step < end:
            warnings.warn(
                f"pruning is not finished: this is step {self._step}, and the last masks are due at {end}", stacklevel=2
            )
        self._release()
        self.apply_()
        return self.plan()

    def undo_(self) -> None:
        """Stops following the optimizers and puts back what the zeros replaced. Needs `keep_dense=True`."""
        if not self._keep_dense:
            raise ValueError("this pruner kept no dense values; make it with keep_dense=True to be able to undo it")
        soft = self._soft is not None  # soft masks replace nothing
        self._release()
        if not soft:
            self.plan().undo_(self.model)
        self._masks = Masks({name: torch.ones_like(mask) for name, mask in self._masks.items()})

    def _release(self) -> None:
        for handle in self._followed.values():
            handle.remove()
        self._followed, self._leader = {}, None
        if self._soft is not None:
            self._soft.remove()
            self._soft = None

    def state_dict(self) -> dict[str, Any]:
        """The state that is needed to resume: plain tensors and numbers, with one bit per mask element."""
        return {
            "version": 1,
            "step": self._step,
            "due": self._due,
            "masks": self._masks.pack(),
            "gathered": {name: {k: v.clone() for k, v in entry.items()} for name, entry in self._gathered.items()},
            "batches": self._batches,
            "dense": {name: dense.clone() for name, dense in self._dense.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state, on a model with the same tensors. Load first, then attach."""
        masks = self._check_state(state)
        if self._pruned_by_attach:
            raise RuntimeError(
                "attach() has pruned this model already; load the model's and the pruner's state first, then attach"
            )
        self._masks = Masks({t.name: like(masks[t.name].to(t.weight.device), t.tensor) for t in self._targets})
        for target in self._targets:
            device = target.weight.device
            self._gathered[target.name] = {k: v.to(device, copy=True) for k, v in state["gathered"][target.name].items()}
            if target.name in self._dense:
                self._dense[target.name] = state["dense"][target.name].to(device, copy=True)
        self._step, self._due, self._batches = state["step"], state["due"], state["batches"]
        if self._soft is not None:
            self._soft.set(self._masks)
        self.apply_()

    def _check_state(self, state: Mapping[str, Any]) -> Masks:
        """Returns the masks of a state. Raises, before anything changes, if the state does not fit this pruner."""
        if state.get("version") != 1:
            raise ValueError(f"this is version {state.get('version')!r} of a pruner's state; this package reads version 1")
        if missing := {"step", "due", "masks", "gathered", "batches", "dense"} - state.keys():
            raise ValueError(f"this is no whole state of a pruner: {sorted(missing)} missing")
        masks = Masks.unpack(state["masks"])
        if odd := (masks.keys() ^ self._masks.keys()) | (state["gathered"].keys() ^ self._masks.keys()):
            raise ValueError(f"the state and this pruner have different tensors: {sorted(odd)}")
        if absent := self._dense.keys() - state["dense"].keys():
            raise ValueError(f"the state holds no dense values of {sorted(absent)}; it is of a pruner without keep_dense=True")
        for name, mask in masks.items():
            if mask.shape != local(self._masks[name]).shape:
                raise ValueError(
                    f"the mask of {name!r} is {tuple(mask.shape)}, the tensor {tuple(local(self._masks[name]).shape)}"
                )
        return masks

    def __getstate__(self) -> dict[str, Any]:
        """A copy follows no optimizer until it is attached, because copies of optimizers have no hooks."""
        return {**self.__dict__, "_followed": {}, "_leader": None}

    def __repr__(self) -> str:
        share = "sharded" if self._sharded else f"{self.sparsity:.2%} sparse"  # every process would have to count
        now = f"step {self._step}, {len(self._targets)} tensors, {share}"
        return f"Pruner({self.recipe.describe(self._step)}; {now})"


def _method(method: Method | str | None, grow: Any, swap: Any) -> Method | str | None:
    """The method that `grow=` and `swap=` stand for, or the one that was given."""
    if grow is None and swap is not None:
        raise ValueError("swap= goes with grow=, the criterion by which pruned weights come back")
    if grow is None:
        return method
    if method is not None:
        raise ValueError("grow= is short for method=sc.methods.drop_and_grow(grow, swap); give one of the two")
    return drop_and_grow(grow, swap)


def _check_ste(recipe: Recipe, ste: bool, every: int) -> None:
    falling = [number for number in recipe.scheduled if number.falls]
    if falling and not (ste or recipe.method.revives):
        raise ValueError(
            f"{falling[0]} falls, and what was pruned stays pruned; use ste=True or grow= for weights that come back"
        )
    if ste and recipe.method.revives:
        raise ValueError("grow= and ste=True are two ways for pruned weights to come back; choose one")
    if ste and recipe.method.rewrites:
        raise ValueError(f"{recipe.method} changes weights, and ste=True goes on training the dense ones; choose one")
    if not isinstance(every, int) or every < 1 or (every > 1 and (not ste or recipe.scheduled)):
        raise ValueError(
            f"every={every!r} is how often soft masks are made anew: 1 or more steps, with ste=True and no schedule"
        )


def _innermost(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that is not an optimizer itself, such as Accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
