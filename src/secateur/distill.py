"""`distill_`: a short training of a pruned model towards the outputs of the dense one, with its zeros kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from ._hints import hints
from ._tree import as_module, check_unpacked, slots
from .arguments import plain_arguments
from .display import Reported, Table
from .edit import IN_TRAINING, forget_, preserve_rng, record_
from .masks import Masks
from .progress import Progress
from .pruner import Pruner
from .stats import as_it_was, check_evidence, check_values, split_batch
from .targeting import Globs, all_match, globs_of, under
from .teaching import Distance, backward, can_write, held_out, write

_LOOKS = (0.5, 0.75, 1.0)  # parts of the steps after which the held-out batches are looked at
_NOISE = 1.1  # where they are up to so many times worse, that is the noise of the rate, which fades as the rate falls
_MANY, _FEW = 0.1, 0.01  # the fraction of zeros from which on a weight counts as pruned, and below which it does not
_COSINE = 0.5  # the least cosine between weights of which one was made from the other
_PATIENCE = 2  # training stops after so many looks in a row that are each worse than the one before


@dataclass
class Distilled(Reported):
    """What `distill_` did: `before` and `after` are the mean distances from the teacher on the held-out batches.

    `looks` lists (step, distance on the held-out batches), and `training` the distance on the batch of each step. `kept_step`
    is the step whose weights the model has now: 0 if no step improved, and then the model is unchanged. `written` is the number
    of training batches that the teacher wrote, and `written_held` that of the held-out batches.
    """

    recipe: str
    before: float
    after: float
    kept_step: int
    looks: list[tuple[int, float]]
    training: list[float]
    tensors: int
    written: int = 0
    written_held: int = 0
    dense: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def improved(self) -> bool:
        return self.kept_step > 0

    @property
    def getting_worse(self) -> bool:
        """Whether the last looks were each worse than the one before. One may be: a high rate adds noise that fades with it."""
        distances = [self.before, *(distance for _, distance in self.looks)][-_PATIENCE - 1 :]
        return len(distances) > _PATIENCE and distances == sorted(set(distances))

    def undo_(self, model: nn.Module) -> None:
        """Puts back, bit for bit, the values that `distill_(keep_dense=True)` replaced."""
        if not self.improved:
            return
        if not self.dense:
            raise ValueError("the values before were not kept, or were put back already; call distill_(..., keep_dense=True)")
        found = {slot.name: slot.tensor for slot in slots(as_module(model))}
        for name, value in self.dense.items():
            if name not in found or found[name].shape != value.shape:
                raise ValueError(f"the model has no {name!r} of shape {tuple(value.shape)}; this result is of another model")
        with torch.no_grad():
            for name, value in self.dense.items():
                found[name].copy_(value)
        self.dense = {}
        forget_(as_module(model), ("distill", self.recipe))

    def metrics(self) -> dict[str, Any]:
        """The distances before and after, and the numbers of steps, as plain numbers."""
        return {
            "before": self.before,
            "after": self.after,
            "improved": self.improved,
            "kept_step": self.kept_step,
            "steps": len(self.training),
            "tensors": self.tensors,
            "written": self.written,
            "written_held": self.written_held,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tensors, as plain values that JSON can hold."""
        return {
            "recipe": self.recipe,
            **self.metrics(),
            "looks": [list(look) for look in self.looks],
            "training": self.training,
        }

    def _table(self) -> Table:
        def mean(first: int, last: int) -> str:
            part = self.training[first:last]
            return f"{sum(part) / len(part):.4f}" if part else ""

        steps = [0, *(step for step, _ in self.looks)]
        rows = [("0", "", f"{self.before:.4f}", "kept" if not self.kept_step else "")]
        rows += [
            (f"{step}", mean(last, step), f"{distance:.4f}", "kept" if step == self.kept_step else "")
            for last, (step, distance) in zip(steps, self.looks, strict=False)
        ]
        worse = "no step was better on the held-out batches, so the model is unchanged (try a lower lr=)"
        note = [] if self.improved else [worse]
        wrote = {"training": self.written, "held-out": self.written_held}
        counts = " and ".join(f"{count} of the {kind} batches" for kind, count in wrote.items() if count)
        note += [f"the teacher wrote {counts}"] if counts else []
        return Table(("step", "in training", "held out", ""), rows, right=range(3), title=f"distill, {self.recipe}", notes=note)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html()


@hints
def distill_(
    model: nn.Module,
    teacher: nn.Module,
    data: Iterable[Any],
    *,
    steps: int = 32,
    lr: float = 5e-5,
    warmup: int = 5,
    generate: bool = True,
    holdout: float | Iterable[Any] = 0.125,
    seed: int = 0,
    loss: Distance | None = None,
    pruner: Pruner | None = None,
    include: Globs = (),
    exclude: Globs = (),
    keep_dense: bool = False,
) -> Distilled:
    """Trains the remaining weights in place, so that the model's outputs come closer to those of the dense teacher.

    Every step is one batch, in an order drawn with `seed`: all of `data=`, and for further steps text that the teacher
    writes, if it has the method `generate` of Hugging Face models. Zeros stay zero: those of the masks of `pruner=`, or
    else all that weights have. The mean distance on held-out batches is measured a few times. If it grows much,
    training returns to the best weights and continues at half the rate. The model gets the best weights that were found; if
    none are better than those it had, it is unchanged, bit for bit. Large models run in bfloat16 where the processor
    is faster at it; their weights stay in their own precision.

    Args:
        model: the pruned model.
        teacher: a copy of it from before pruning.
        data: batches as for `prune_`; targets are not used.
        steps: how many batches to train on.
        lr: the rate of Adam after `warmup` steps; it then falls to 0 along a cosine. Weights that came out of `admm` or
            `sparsegpt` are at a minimum, which a high rate leaves.
        warmup: the number of steps over which the rate rises.
        generate: whether the teacher writes text for the steps after the first pass over `data=`, from the first tokens of its
            sequences on. Without it these steps use the same batches again, which fits the model to them too closely.
        holdout: the fraction of the batches that is held out, at least one; or other batches to hold out. Pruning has usually
            been fitted to `data`, so with a fraction the teacher writes as many new batches, which are held out as well.
        loss: a function of the two models' outputs. By default it is the Kullback-Leibler divergence of their logits.
        pruner: takes the masks of a `Pruner`.
        include, exclude: globs over the parameters to train. By default all are trained except embeddings and a head of the
            same shape, and those that do not require a gradient.
        keep_dense: keeps the old values, so that `result.undo_(model)` restores them.
    """
    include, exclude = globs_of("include", include), globs_of("exclude", exclude)
    arguments = IN_TRAINING if pruner is not None else plain_arguments(distill_, locals(), loss_at_run=False)
    model = as_module(model)
    training, held, draw = _split(data, holdout, seed)
    _check(model, teacher, steps, lr, warmup, loss)
    if pruner is None:
        _check_order(model, teacher)
    trained = _trained(model, include, exclude)
    student = _Student(trained, _masks(trained, pruner), lr, warmup, steps)
    recipe = f"{steps} steps, lr {lr:g}"
    result = Distilled(recipe, 0.0, 0.0, 0, [], [], len(trained))
    with _only(model, trained), preserve_rng(), as_it_was(model), as_it_was(teacher):
        old = best = student.values()
        looks = {math.ceil(part * steps) for part in _LOOKS}
        try:
            if generate and can_write(teacher, training):
                torch.manual_seed(seed)
                more = list(_order(training, max(steps - len(training), 0), draw))
                unseen = held if isinstance(holdout, Real) else []
                training, held = _written(teacher, training, held, more, unseen)
                result.written, result.written_held = len(more), len(unseen)
            result.before = result.after = held_out(model, teacher, held, loss)
            with Progress("distill", steps) as progress:
                for step, batch in enumerate(_order(training, steps, draw), 1):
                    progress(f"step {step}")
                    result.training.append(student.step(lambda batch=batch: backward(model, teacher, batch, loss)))
                    if step not in looks:
                        continue
                    result.looks.append((step, held_out(model, teacher, held, loss)))
                    if result.looks[-1][1] < result.after:
                        result.after, result.kept_step, best = result.looks[-1][1], step, student.values()
                    elif result.getting_worse:
                        break
                    elif result.looks[-1][1] > _NOISE * result.after:
                        student.back_off(best)
        except BaseException:
            best = old
            raise
        finally:
            student.put(best)
    if keep_dense and result.improved:
        result.dense = old
    if result.improved:
        record_(model, ("distill", recipe), arguments)
    return result


def _check(model: nn.Module, teacher: Any, steps: Any, lr: Any, warmup: Any, loss: Any) -> None:
    if not isinstance(teacher, nn.Module) or teacher is model:
        raise ValueError("teacher= is the dense model: pass a copy that was made before pruning (copy.deepcopy(model))")
    if name := next((type(m).__name__ for m in (model, teacher) if isinstance(m, nn.parallel.DistributedDataParallel)), None):
        raise ValueError(f"distill_ trains in one process, without {name}; pass the module under it (.module)")
    check_unpacked(model, "distill_ trains its weights")
    check_training_values(steps, lr, warmup)
    if loss is not None and not callable(loss):
        raise TypeError(f"loss={loss!r} must be a function of the model's output and the teacher's output")


def _check_order(model: nn.Module, teacher: nn.Module) -> None:
    """Raises ValueError where the two were given in the wrong order: only the teacher has weights with many zeros.

    Its other weights have to be about those of the model. A teacher with zeros of its own, such as an embedding with unused
    rows, may teach a model that was made in another way.
    """
    found = dict(teacher.named_parameters())
    sparse: list[str] = []
    for name, own in model.named_parameters():
        other = found.get(name)
        if other is None or own.ndim < 2 or own.shape != other.shape:
            continue
        ours, theirs = (int((tensor.detach() == 0).sum()) / max(own.numel(), 1) for tensor in (own, other))
        if ours >= _MANY > _FEW > theirs:
            return
        if theirs >= _MANY > _FEW > ours and _alike(own.detach(), other.detach()):
            sparse.append(name)
    if sparse:
        raise ValueError(
            f"teacher= has weights with many zeros where model has none ({sparse[0]!r}, {len(sparse)} in all), so the pruned "
            "model seems to be given as the teacher; call distill_(pruned, dense, data). Neither model was changed"
        )


def _alike(dense: Tensor, pruned: Tensor) -> bool:
    """Whether the weights that are not zero could be those of the dense weight, changed by pruning or training."""
    pruned = pruned.to(dense.device, torch.float32)
    dense = dense.float() * (pruned != 0)
    return float((dense * pruned).sum()) > _COSINE * float(dense.norm()) * float(pruned.norm())


def check_training_values(steps: Any, lr: Any, warmup: Any) -> None:
    """Raises ValueError for numbers that no training could take."""
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of steps, {least} or more")
    if not isinstance(lr, Real) or not 0 < float(lr) < math.inf:
        raise ValueError(f"lr={lr!r} must be a number above 0")


def _split(data: Iterable[Any], holdout: Any, seed: int) -> tuple[list[Any], list[Any], torch.Generator]:
    """The batches to train on, those that are held out, and the generator that draws the order."""
    check_evidence(frozenset({"batches"}), data, None, of="distill_")
    batches, draw = list(data), torch.Generator().manual_seed(seed)
    for number, batch in enumerate(batches, 1):
        check_values(split_batch(batch), number)
    if not isinstance(holdout, Real):
        check_evidence(frozenset({"held-out batches"}), holdout, None, of="distill_")
        training, held = batches, list(holdout)
    elif 0 < float(holdout) < 1:
        count = max(round(float(holdout) * len(batches)), 1)
        order = torch.randperm(len(batches), generator=draw).tolist()
        training, held = [batches[i] for i in order[count:]], [batches[i] for i in order[:count]]
    else:
        raise ValueError(f"holdout={holdout!r} must be a fraction of the batches between 0 and 1, or batches")
    if not training or not held:
        raise ValueError(
            f"data= gave {len(batches)} batches, of which {len(held)} are held out; distill_ needs at least one to train on, "
            "and one that is held out (pass more, smaller batches)"
        )
    return training, held, draw


def _written(
    teacher: nn.Module, training: list[Any], held: list[Any], more: list[Any], unseen: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The batches to train on and those held out, each with new ones: the teacher goes on from `more` and from `unseen`."""
    new = []
    with Progress("distill, writing text", len(more) + len(unseen)) as progress:
        for batch in write(teacher, [*more, *unseen]):  # several batches are written together
            new.append(batch)
            progress(f"batch {len(new)}")
    return [*training, *new[: len(more)]], [*held, *new[len(more) :]]


def _trained(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> dict[str, nn.Parameter]:
    """The parameters to train, by name."""
    everything = list(slots(model))
    all_match(model, everything, include, "include")
    all_match(model, everything, exclude, "exclude")
    tables = {
        tuple(owner.weight.shape)
        for slot in everything
        for owner, _ in slot.owners
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag)
    }
    found = {}
    for slot in everything:
        tensor, named = slot.tensor, under(slot, include)
        if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or not tensor.requires_grad:
            continue
        if under(slot, exclude) or (include and not named) or (tuple(tensor.shape) in tables and not named):
            continue
        found[slot.name] = tensor
    if not found:
        raise ValueError("no parameter is left to train: none requires a gradient, or include= and exclude= select none")
    return found


def _masks(trained: Mapping[str, nn.Parameter], pruner: Pruner | None) -> dict[str, Tensor]:
    """Where the trained parameters are zero and must stay so."""
    if pruner is not None:
        masks: Masks = pruner.masks
        return {name: ~masks[name] for name in trained if name in masks}
    zeros = {name: tensor.detach() == 0 for name, tensor in trained.items() if tensor.ndim > 1}
    return {name: zero for name, zero in zeros.items() if bool(zero.any())}


@contextlib.contextmanager
def _only(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Only these parameters require gradients inside. Flags and gradients are restored on exit."""
    chosen = {id(parameter) for parameter in trained.values()}
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(id(parameter) in chosen)
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, flag, grad in before:
            parameter.grad = None
            parameter.requires_grad_(flag)
            parameter.grad = grad


class _Student:
    """The parameters that are trained, their optimizer, and copies in single precision of those in half precision."""

    def __init__(
        self, trained: Mapping[str, nn.Parameter], zeros: Mapping[str, Tensor], lr: float, warmup: int, steps: int
    ) -> None:
        self.trained, self.zeros = trained, zeros
        self.wide = {
            name: parameter.detach().float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter
            for name, parameter in trained.items()
        }
        self.optimizer = torch.optim.Adam(self.wide.values(), lr=lr, betas=(0.9, 0.95))
        self.rate = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: min(1.0, (n + 1) / max(warmup, 1)) * 0.5 * (1 + math.cos(math.pi * n / steps))
        )

    def step(self, backward: Callable[[], float]) -> float:
        """One step of Adam on the gradients that `backward` leaves. Returns what it returns."""
        distance = backward()
        for name, parameter in self.trained.items():
            if parameter.grad is not None:
                self.wide[name].grad = parameter.grad.to(self.wide[name].dtype)
        self.optimizer.step()
        self.rate.step()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                if self.wide[name] is not parameter:
                    parameter.copy_(self.wide[name])
                if name in self.zeros:
                    parameter.masked_fill_(self.zeros[name], 0)
                parameter.grad = self.wide[name].grad = None
        return distance

    def back_off(self, values: Mapping[str, Tensor]) -> None:
        """Goes back to these values, to go on from there at half the rate and in a new direction."""
        self.put(values)
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()
        self.rate.base_lrs = [lr / 2 for lr in self.rate.base_lrs]
        for group in self.optimizer.param_groups:
            group["lr"] /= 2  # that of the next step

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def put(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(values[name])
                self.wide[name].copy_(parameter)


def _order(batches: Sequence[Any], steps: int, draw: torch.Generator) -> Iterator[Any]:
    """The batches of the steps: all of them once, in an order that is drawn, then all again in another."""
    done = 0
    while done < steps:
        for i in torch.randperm(len(batches), generator=draw).tolist()[: steps - done]:
            done += 1
            yield batches[i]
