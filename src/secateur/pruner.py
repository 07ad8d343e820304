"""`Pruner`: prunes a model while it trains. The zeros are in the weights, and the pruner holds the masks.

See also `following` (optimizers and cuts), `resuming` (states) and `holding` (existing zeros).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import kernels
from ._dist import Group, like, local, mesh_comm, model_comm, reshard_, sharded, together
from ._hints import hints
from ._tree import Prunable, as_module
from .budgets import Spread
from .criteria import Criterion, magnitude
from .edit import IN_TRAINING, Indices, Step, forget_, record_
from .following import Followed, after_cut, innermost, warn_of_others
from .holding import HeldZeros, zeros_there
from .masks import Masks
from .measuring import check_streamed
from .methods import STREAMED, Method, SoftMasks, write_
from .patterns import Pattern
from .plans import Plan, make_plan
from .resuming import VERSION, check_state, check_weights, described, tensors_from, tensors_of, upgraded
from .schedules import Number
from .settings import Settings, check_ste, method_of
from .stats import Loss, Table, add_gradient, check_evidence, collect
from .targeting import Globs, Target, targets


class Pruner:
    """Prunes a model while it trains.

    The arguments are those of `prune_`, and `sparsity` may be a schedule::

        pruner = Pruner(model, magnitude, sparsity=cubic(0.9, start=1_000, end=10_000, every=100))
        pruner.attach(optimizer)      # the training loop does not change
        ...
        print(pruner.finish())

    A hook after each `optimizer.step` sets the pruned weights to zero again, and makes new masks at the steps of the schedule.
    Pruned weights stay pruned. Criteria that need gradients use those of the training, averaged since the last masks, unless
    `data` and `loss` are given. `Pruner.hold(model)` returns a pruner that only keeps the existing zeros of a model.

    `grow` and `swap` are short for `method=sc.methods.drop_and_grow(grow, swap)`, dynamic sparse training: at the steps of the
    schedule `swap`, that fraction of the kept weights is pruned, and the same number of pruned weights returns, those with the
    highest scores by `grow` (`abs(grad)`: RigL; `random()`: SET). `ste=True` trains the dense weights and masks them only in
    the forward pass, with straight-through gradients. With a constant budget, the masks are then recomputed every `every`
    steps, so that a weight can return. `keep_dense=True` keeps the values that the zeros replaced, for `undo_`.
    """

    @hints
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
        spread: Spread | Mapping[str, Number] | str | None = None,
        method: Method | str | None = None,
        floor: float = 0.0,
        grow: Criterion | Callable[..., Tensor] | str | None = None,
        swap: Callable[[int], float] | None = None,
        ste: bool = False,
        every: int = 1,
        keep_dense: bool = False,
        group: Group | None = None,
    ):
        model = as_module(model)
        with together(model_comm(model), "use its arguments"):
            recipe = Settings.of(criterion, pattern, scope, sparsity, count, spread, method_of(method, grow, swap), floor)
            needs = recipe.needs - STREAMED
            if data is not None or needs - {"grad", "grad_square"}:
                check_evidence(needs, data, loss)
            check_ste(recipe, ste, every)
            found, skipped = targets(model, include=include, exclude=exclude, types=types)
            check_streamed(recipe, found, data, loss)
            if ste and any(sharded(target.tensor) for target in found):
                raise NotImplementedError(
                    "ste=True masks the forward pass, which does not work with FSDP2; use it before the model is sharded"
                )
        self._begin(model, recipe, found, skipped, data, loss, ste, every, keep_dense, group)

    @classmethod
    def hold(
        cls, model: Prunable, *, include: Globs = (), exclude: Globs = (), types: Sequence[type[nn.Module]] | None = None
    ) -> Pruner:
        """Returns a pruner that keeps the existing zeros of a model while it is fine-tuned::

            pruner = sc.Pruner.hold(model).attach(optimizer)

        It keeps the zeros of all parameters with two or more dims. Vectors, and tensors that are all zero (perhaps not trained
        yet), are included only if `include` names them.
        """
        model = as_module(model)
        found, masks, skipped = zeros_there(model, include, exclude, types)
        held = cls.__new__(cls)
        held._begin(model, HeldZeros.make(), found, skipped)
        held._masks = masks
        return held

    def _begin(
        self,
        model: nn.Module,
        recipe: Settings,
        found: list[Target],
        skipped: dict[str, str],
        data: Iterable[Any] | None = None,
        loss: Loss | None = None,
        ste: bool = False,
        every: int = 1,
        keep_dense: bool = False,
        group: Group | None = None,
    ) -> None:
        """Initialises all attributes."""
        self.model, self.recipe, self._targets, self.skipped = model, recipe, found, skipped
        self._data, self._loss, self._ste, self._every = data, loss, ste, every
        self._needs = recipe.needs - STREAMED
        self._sharded = any(sharded(target.tensor) for target in found)
        self._gathers = bool(self._needs) and data is None  # gradients come from the training loop
        self._gathered: Table = {target.name: {} for target in self._targets}
        self._batches = 0
        self._step = 0
        self._due = self.recipe.due(0)  # masks are wanted and not made yet
        self._pruned_by_attach = False
        self._begun = False  # attached or stepped
        self._ended = ""  # the call that ended it
        self._recorded: Step | None = None  # the entry of this pruner in the record of the model
        self._masks = Masks({t.name: like(torch.ones_like(t.weight, dtype=torch.bool), t.tensor) for t in self._targets})
        self._keep_dense, self._group = keep_dense, group
        self._dense: dict[str, Tensor] = {t.name: t.weight.clone() for t in self._targets} if keep_dense and not ste else {}
        self._followed = Followed()
        self._soft = SoftMasks(self._targets, self._masks) if ste else None

    # --- training ----------------------------------------------------------------------------------------------------
    def attach(self, *optimizers: Optimizer) -> Pruner:
        """Adds hooks to these optimizers: zeros are restored after a step of any, and the schedule advances with the first.

        Masks that are due at the start are made now, so that training begins with them. To replace an optimizer, delete it or
        call `detach` with it, and attach the new one: the schedule continues.
        """
        self._check_running("attach()")
        self._check_sizes()
        optimizers = tuple(innermost(optimizer) for optimizer in optimizers)
        self._followed.check_new(optimizers, self.tensor_ids())
        warn_of_others(self, optimizers, {id(target.tensor): target.name for target in self._targets})
        if self._due and not (self._gathers and self.recipe.criterion.needs):
            self._update()
            self._pruned_by_attach = any(bool((~local(mask)).any()) for mask in self._masks.values())
        for optimizer in optimizers:
            self._followed.add(optimizer, self._after_step)
            self._begun = True
        return self

    def detach(self, *optimizers: Optimizer) -> Pruner:
        """Removes the hooks from these optimizers, or from all. `attach` continues with the same masks and step."""
        self._followed.remove([innermost(optimizer) for optimizer in optimizers] or list(self._followed))
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are pruned, by name."""
        return {target.name: target.tensor for target in self._targets}

    def tensor_ids(self) -> set[int]:
        """The ids of the pruned tensors."""
        return set(map(id, self.tensors().values()))

    def _check_running(self, call: str) -> None:
        if self._ended:
            raise RuntimeError(
                f"{call} came after {self._ended}, which ended this pruner at step {self._step}. Make a new Pruner to prune "
                "further, or sc.Pruner.hold(model) to keep the zeros in training."
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # on overflow a fused optimizer changes nothing
        if overflow is not None and bool(overflow):
            return
        if self._followed.leads(optimizer, self.tensor_ids()):
            self._advance()
        else:
            self.apply_()

    def step(self) -> None:
        """Records that a training step is done: gathers gradients, restores the zeros, and makes masks that are due.

        An attached pruner does this by itself, and raises RuntimeError here.
        """
        self._check_running("pruner.step()")
        if kinds := [type(optimizer).__name__ for optimizer in self._followed]:
            raise RuntimeError(
                f"this pruner is attached to {' and '.join(kinds)} and steps after each optimizer.step() by itself; "
                "pruner.step() would count the step twice. Leave it out, or call pruner.detach() first."
            )
        self._advance()

    def _advance(self) -> None:
        self._check_sizes()
        self._step += 1
        self._pruned_by_attach, self._begun = False, True
        if self._gathers:
            self._gather()
        self.apply_()
        soft = self._soft is not None and not self.recipe.scheduled and self._step % self._every == 0
        if self._due or soft or self.recipe.due(self._step) or self.recipe.method.due(self._step):
            self._update()

    @torch.no_grad()
    def apply_(self) -> None:
        """Sets the pruned weights to zero."""
        if self._sharded:
            reshard_(self.model)
        self._check_sizes()
        if self._soft is None:
            for target in self._targets:
                kernels.zero_(target.weight, local(self._masks[target.name]))

    def _check_sizes(self) -> None:
        for target in self._targets:
            if sharded(target.tensor) and not self._sharded:
                raise RuntimeError(f"{target.name!r} was sharded after the pruner was made; make a new pruner after sharding")
            if target.tensor.shape != self._masks[target.name].shape:
                raise RuntimeError(
                    f"{target.name!r} is {tuple(target.tensor.shape)} and its mask {tuple(self._masks[target.name].shape)}: "
                    "the model was cut after this pruner was made. Pass shrink_ the attached optimizer as optimizer=, and the "
                    "pruner follows the cut; or make a new Pruner for the small model."
                )

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
            raise RuntimeError(f"{frozen} are frozen and have no gradient, which the criterion needs; exclude them")
        for target in self._targets:
            if not self._gathered[target.name]:  # has not run since the last masks
                add_gradient(target, torch.zeros_like(target.tensor), self._needs, self._gathered[target.name])
        return {name: {kind: value / self._batches for kind, value in entry.items()} for name, entry in self._gathered.items()}

    def _update(self) -> None:
        table = self._evidence()
        held = self._masks if self._soft is None else None
        how = {"data": self._data, "loss": self._loss, "step": self._step, "previous": held, "group": self._group}
        made = make_plan(self.model, self.recipe, self._targets, self.skipped, table, **how)
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
        self._record()
        logging.getLogger(__name__).info("step %d: new masks (%s)", self._step, self.recipe.describe(self._step))

    def _record(self) -> None:
        """Updates the entry of this pruner in the record of the model, for `sc.save` and `sc.summary`."""
        if all(bool(local(mask).all()) for mask in self._masks.values()):
            return
        step = "prune", self.recipe.describe(self._step)
        record_(self.model, step, IN_TRAINING, self._recorded)
        self._recorded = step

    def check_cut(self, *, blocks: bool) -> None:
        """Raises ValueError if this pruner cannot follow a cut of its model. `blocks`: whether the cut renames tensors."""
        if self._keep_dense:
            why = "keeps dense values for undo_()"
        elif self._soft is not None:
            why = "masks the forward pass (ste=True)"
        elif blocks and isinstance(self.recipe.spread, Mapping):
            why = "has a spread= by name, and removing blocks changes names"
        else:
            return
        raise ValueError(
            f"a pruner that is attached to optimizer= {why}, so it cannot follow the cut. Call its finish() first, and make a "
            "new one for the small model. Nothing has changed."
        )

    @torch.no_grad()
    def follow_cut_(self, model: nn.Module, moved: Mapping[str, tuple[Tensor, Indices]]) -> None:
        """Continues with `model` after a cut. `moved`: for each target that is left, its parameter and the kept indices.

        Masks and gathered gradients are sliced like the weights. If the cut may have divided units of the pattern (n:m,
        blocks), masks are recomputed at the next step, and pruned weights stay pruned.
        """
        self.model = model
        self._targets, self._masks, self._gathered = after_cut(model, self._targets, self._masks, self._gathered, moved)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.skipped = {name: why for name, why in self.skipped.items() if name in names}
        structured = bool(self.recipe.pattern.keep) or not self.recipe.pattern.elementwise
        self._due |= structured and not self.recipe.method.revives
        self.apply_()

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
        """Returns a plan of everything pruned so far, to print or to apply to a copy of the model."""
        dense = {name: self._dense[name][~local(self._masks[name])] for name in self._dense}
        return Plan(self._masks, self.skipped, self.recipe.describe(self._step), dense)

    @torch.no_grad()
    def verify(self) -> None:
        """Raises unless every pruned weight is zero. A step of an optimizer that is not attached can change that."""
        if not self._begun and self._due:
            warnings.warn(self._not_begun(), stacklevel=2)
        if self._soft is not None:
            return
        if self._sharded:
            reshard_(self.model)
        self._check_sizes()
        alive = [int((t.weight[~local(self._masks[t.name])] != 0).sum()) for t in self._targets]
        everywhere = mesh_comm(target.tensor for target in self._targets).sum(*alive)  # all processes of shards raise
        if broken := {t.name: number for t, number in zip(self._targets, everywhere, strict=True) if number}:
            raise RuntimeError(
                f"pruned weights are not zero: {broken}. Something changed them after the last pruner.step(): an "
                "optimizer that is not attached, one that steps in the backward pass, or a checkpoint. Attach it, or call "
                "pruner.apply_()."
            )

    def finish(self) -> Plan:
        """Removes the hooks from the optimizers, leaves plain weights with exact zeros in the model, and returns the plan.

        Warns if the schedule has not reached its end.
        """
        end = max((schedule.end for schedule in self.recipe.scheduled), default=0)
        if not self._ended and (self._due or self._step < end):
            now = f"this is step {self._step}, and the last masks are due at {end}" if self._begun else self._not_begun()
            warnings.warn(f"pruning is not finished: {now}", stacklevel=2)
        self._release("finish()")
        self.apply_()
        return self.plan()

    def _not_begun(self) -> str:
        return (
            "this pruner has made no masks, because no optimizer was attached and step() was never called. Call "
            "pruner.attach(optimizer) before training."
        )

    def undo_(self) -> None:
        """Removes the hooks from the optimizers and restores the values that the zeros replaced. Needs `keep_dense=True`."""
        if not self._keep_dense:
            raise ValueError("this pruner kept no dense values; make it with keep_dense=True to be able to undo it")
        soft = self._soft is not None  # soft masks replace nothing
        self._release("undo_()")
        if not soft:
            self.plan().undo_(self.model)
        if self._recorded is not None:
            forget_(self.model, self._recorded)
            self._recorded = None
        self._masks = Masks({name: torch.ones_like(mask) for name, mask in self._masks.items()})

    def _release(self, call: str) -> None:
        self.detach()
        self._ended = self._ended or call
        if self._soft is not None:
            self._soft.remove()
            self._soft = None

    def state_dict(self) -> dict[str, Any]:
        """The state that is needed to resume: tensors, numbers and text, with one bit for each element of a mask.

        Of a sharded model the tensors are DTensors, so `torch.distributed.checkpoint` saves them and loads them into any other
        sharding, or into a model that is not sharded: `dcp.save({"model": ..., "pruner": pruner}, checkpoint_id=folder)`.
        """
        kinds = self._needs & {"grad", "grad_square"} if self._gathers else frozenset()
        return {
            "version": VERSION,
            "recipe": described(self.recipe, self._step, **self._options()),
            "step": self._step,
            "due": self._due,
            **tensors_of(self._targets, self._masks, self._gathered, self._dense, kinds),
            "batches": self._batches,
            "recorded": self._recorded and self._recorded[1],
        }

    def _options(self) -> dict[str, Any]:
        return {"ste": self._ste, "every": self._every}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state of a pruner with the same recipe, on a model with the same tensors, after the model's state.

        Either model may be compiled (torch.compile), wrapped in DistributedDataParallel, or sharded over other processes.
        """
        with together(model_comm(self.model), "load its state"):
            self._check_running("load_state_dict()")
            state = upgraded(state, self._targets)
            check_state(state, self.recipe, self._options())
        found = tensors_from(state, self._targets, self._masks, self._dense)
        if self._pruned_by_attach:
            check_weights(self._targets, self._masks, found[0])
        self._masks, self._gathered, self._dense = found
        self._step, self._due, self._batches = state["step"], state["due"], state["batches"]
        if self._soft is not None:
            self._soft.set(self._masks)
        self.apply_()
        if state["recorded"]:
            self._recorded = "prune", state["recorded"]
            record_(self.model, self._recorded, IN_TRAINING, self._recorded)

    def __getstate__(self) -> dict[str, Any]:
        """A copy follows no optimizer until it is attached, because copies of optimizers have no hooks."""
        return {**self.__dict__, "_followed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _followed=Followed())

    def __repr__(self) -> str:
        share = "sharded" if self._sharded else f"{self.sparsity:.2%} sparse"  # every process would have to count
        kinds = [type(optimizer).__name__ for optimizer in self._followed]
        where = f"attached to {' and '.join(kinds)}" if kinds else f"ended by {self._ended}" if self._ended else "not attached"
        now = f"step {self._step}, {len(self._targets)} tensors, {share}, {where}"
        return f"Pruner({self.recipe.describe(self._step)}; {now})"
