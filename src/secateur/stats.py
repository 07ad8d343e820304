"""Evidence: what a criterion knows about each tensor, collected in one pass over the data.

Collecting restores the model's mode, gradients, buffers and hooks. Where evidence is missing, the error says what to pass.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from ._dist import local_as, sharded
from ._layers import Layout
from ._tree import Loose
from .edit import eager_experts, eval_mode, no_mha_fastpath, why_failed
from .losses import PASS_LOSS, Loss, check_loss, loss_of, may_give_a_loss
from .progress import track
from .reads import listen
from .targeting import Target

Table = dict[str, dict[str, Tensor]]


def collect(
    model: nn.Module,
    targets: Sequence[Target],
    needs: Iterable[str],
    data: Iterable[Any] | None,
    loss: Loss | None,
    *,
    unread: bool = False,
) -> Table:
    """Collects evidence as a table: target name, then kind of evidence, then a matrix.

    A target that no input is multiplied with has no input norm. That raises, or with `unread` its entry has none.

    A batch of `data` is a tensor (`model(batch)`), a mapping (`model(**batch)`) or a pair (inputs, target); `loss` is called
    with the model's output and the target, or the batch itself when it is not a pair. Without `loss`, the model's output holds
    it (`output.loss`). Gradients are averaged over batches.
    """
    needs = frozenset(needs)
    table: Table = {target.name: {} for target in targets}
    if not needs:
        return table
    if any(sharded(target.tensor) for target in targets):
        raise NotImplementedError(
            f"{_list(needs)} cannot be collected from data= on a sharded model; prune before sharding it, use a criterion "
            "without data, or let a Pruner take the gradients of the training"
        )
    check_evidence(needs, data, loss)
    assert data is not None
    if isinstance(model, Loose):
        raise TypeError(f"{_list(needs)} is collected by running a model, and these are tensors without one")
    with torch.inference_mode(False), as_it_was(model):
        if "linear_grad" in needs:
            data = iter(data)
            batch = next(data, None)
            if batch is None:
                raise ValueError("data= gave no batch; one is needed for the shape of the model's input")
            _linearised(model, targets, batch, table)
            data = itertools.chain([batch], data)
        if needs - {"linear_grad"}:
            _one_pass(model, targets, needs, data, loss, table, unread)
    return table


def check_evidence(needs: frozenset[str], data: object, loss: object, of: str = "this criterion") -> None:
    """Raises, and says what to pass, unless the evidence can be collected from this data and loss."""
    if data is None:
        raise ValueError(f"{of} needs {_list(needs)}, so pass data= (an iterable of batches)")
    if isinstance(data, Tensor | Mapping | str):
        raise TypeError(f"data= is an iterable of batches, not one {type(data).__name__}; pass [batch]")
    if not isinstance(data, Iterable):
        raise TypeError(f"data= is an iterable of batches, not {type(data).__name__}")
    if isinstance(data, tuple | list) and _is_one_pair(data):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in data)
        raise TypeError(
            f"data= is an iterable of batches, and these two tensors of shapes {shapes} would be two batches of inputs; pass "
            "inputs and target as one batch: data=[(inputs, target)]"
        )
    if needs & {"grad", "grad_square"} and loss is None and not may_give_a_loss(data):
        raise ValueError(f"{of} needs {_list(needs)}, so pass {PASS_LOSS}")
    if loss is not None:
        check_loss(loss)


def _is_one_pair(data: Sequence[Any]) -> bool:
    """Whether data= is a pair (inputs, target): two tensors that cannot both be inputs of one model."""
    if len(data) != 2 or not all(isinstance(each, Tensor) for each in data):
        return False
    return data[0].ndim != data[1].ndim or data[0].dtype != data[1].dtype


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """A batch as (positional inputs, keyword inputs, target)."""
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return (), dict(inputs), target
        return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, target
    if isinstance(batch, tuple | list) and len(batch) == 1:  # a DataLoader over inputs alone yields these
        batch = batch[0]
    if isinstance(batch, Tensor):
        return (batch,), {}, batch
    raise TypeError(f"a batch is a tensor, a mapping or a pair (inputs, target), not {type(batch).__name__}")


def warn_of_unused_input(model: nn.Module, batch: Any) -> None:
    """Warns where the second element of a pair may be an input that is taken for a target, and no loss uses targets."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(each, Tensor) for each in batch):
        return
    first, second = batch
    taken = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if second.ndim >= 2 and first.shape[:2] == second.shape[:2] and len(taken) >= 2:
        warnings.warn(
            f"a batch of data= is a pair, so its second element is taken for a target and is not passed to the model, and "
            f"{type(model).__name__} also takes {taken[1]!r}. If it is an input, pass mappings "
            f"({{{taken[0]!r}: ..., {taken[1]!r}: ...}}); if it is a target, leave it out, because nothing uses it here",
            stacklevel=frames_inside(),
        )


def frames_inside() -> int:
    """The `stacklevel` with which a warning of the caller points at the code that called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    return level


@contextlib.contextmanager
def on_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    unchanged: tuple[type[Exception], ...] = (ValueError,),
) -> Iterator[None]:
    """Re-raises ValueError unchanged, and wraps other errors of a run on data with the shapes of the batch."""
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(
            f"{type(model).__name__} does not run on a batch of data= (tensors of shape {shapes}): "
            f"{why_failed(error, model, tensors)}. data= is an iterable of batches. A batch is a tensor, a mapping of keyword "
            "arguments, or a pair (inputs, target). The model is unchanged."
        ) from error


def _list(needs: Iterable[str]) -> str:
    return " and ".join(sorted(needs))


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode inside, without fused kernels that hide weights, and restores mode and buffers afterwards."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with eval_mode(model), no_mha_fastpath(), eager_experts(model):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer.copy_(before)


def _one_pass(
    model: nn.Module,
    targets: Sequence[Target],
    needs: frozenset[str],
    data: Iterable[Any],
    loss: Loss | None,
    table: Table,
    unread: bool,
) -> None:
    gradients = needs & {"grad", "grad_square"}
    parameters = [target.tensor for target in targets]
    frozen = [p for p in parameters if not p.requires_grad] if gradients else []
    batches, listening = 0, Event()
    with contextlib.ExitStack() as stack:
        for parameter in frozen:
            stack.callback(parameter.requires_grad_, False)
            parameter.requires_grad_(True)
        if "input_norm" in needs:
            sums = _InputSquares(table, listening)
            stack.enter_context(listen(targets, sums.called, sums.passed))
        stack.enter_context(torch.enable_grad() if gradients else torch.no_grad())
        for batch in track(data, "scores from data"):
            batches += 1
            if batches == 1 and loss is None:
                warn_of_unused_input(model, batch)
            args, kwargs, target_value = split_batch(batch)
            listening.set()
            with on_batch(model, args, kwargs):
                output = model(*args, **kwargs)
            listening.clear()  # checkpointed layers run again in the backward pass
            if gradients:
                value = loss_of(model, output, batch, target_value, loss)
                found = torch.autograd.grad(value, parameters, allow_unused=True)
                for one, gradient in zip(targets, found, strict=True):
                    if gradient is None:
                        hint = "exclude it, or use a criterion without gradients"
                        raise ValueError(f"the loss does not depend on {one.name!r}; {hint}")
                    add_gradient(one, gradient, gradients, table[one.name])
    if not batches:
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    for target in targets:
        _finish(target, needs, batches, table[target.name], unread)


def add_gradient(target: Target, gradient: Tensor, kinds: Iterable[str], entry: dict[str, Tensor]) -> None:
    """Adds a gradient of a target to the sums from which its evidence is computed."""
    whole = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    matrix = target.layout.matrix(local_as(whole, target.tensor)).float()
    for kind, value in (("grad", matrix), ("grad_square", matrix**2 if "grad_square" in kinds else matrix)):
        if kind in kinds:
            entry[kind] = entry[kind].add_(value) if kind in entry else value.clone()


def _finish(target: Target, needs: frozenset[str], batches: int, entry: dict[str, Tensor], unread: bool) -> None:
    """Turns the sums of a target into means and norms."""
    for kind in needs & {"grad", "grad_square"}:
        entry[kind] /= batches
    if "input_norm" in entry:
        entry["input_norm"] = entry["input_norm"].sqrt_()
    elif "input_norm" in needs and not unread:
        raise ValueError(f"{target.name!r} saw no input while the data ran through; exclude it, or use another criterion")


@dataclass
class _InputSquares:
    """Adds up the squares of the inputs that each weight is multiplied with, in a table, while `listening` is set."""

    table: Table
    listening: Event

    def called(self, target: Target, attribute: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds the inputs of one call of a layer.

        For a layer that is linear in its weight, the sum is the derivative of its summed output by the weight, with squared
        inputs. One output per group is enough, so no layer type needs a branch here. Matrices (in, out) are known to be
        multiplied with the input itself.
        """
        layout = target.layout
        if not self.listening.is_set() or not any(is_float(value) for value in (*args, *kwargs.values())):
            return  # a look-up by index multiplies nothing
        if layout.product:
            self.passed(target, slice(None), _only_float(target, args, kwargs))
            return
        try:
            inputs = tuple(_squared(value) for value in args)
            named = {key: _squared(value) for key, value in kwargs.items()}
            probe = layout.probe(torch.empty(layout.shape, device="meta"))
            ones = torch.ones(probe.shape, dtype=torch.float32, device=target.weight.device, requires_grad=True)
            with torch.enable_grad(), torch.autocast(target.weight.device.type, enabled=False), _own_graph():
                output = bare_layer(module, {attribute: ones}).forward(*inputs, **named)
                (squares,) = torch.autograd.grad(output.sum(), ones)
        except Exception as error:
            kind = type(module).__name__
            raise ValueError(f"the input norm of {target.name!r} cannot be measured: {kind} is not linear in it") from error
        self._add(target, slice(None), Layout(tuple(probe.shape), layout.flip, layout.groups).matrix(squares))

    def passed(self, target: Target, groups: slice, x: Tensor) -> None:
        """Adds one input of a product with groups of the rows of a weight."""
        if self.listening.is_set():
            self._add(target, groups, _squared(x).reshape(-1, target.layout.cols).sum(0))

    def _add(self, target: Target, groups: slice, squares: Tensor) -> None:
        entry = self.table[target.name]
        if "input_norm" not in entry:
            entry["input_norm"] = squares.new_zeros(target.layout.groups, target.layout.cols)
        entry["input_norm"][groups] += squares


def bare_layer(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """A copy of a layer with these parameters, without bias, hooks and parametrizations. The layer itself is unchanged."""
    twin = object.__new__(parametrize.type_before_parametrizations(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {**module._parameters, **parameters} | ({"bias": None} if "bias" in module._parameters else {})
    twin._modules = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    return twin


def _own_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """Saves tensors for the backward pass also inside a checkpointed block, which would drop them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _only_float(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    found = [value for value in (*args, *kwargs.values()) if is_float(value)]
    if len(found) != 1 or found[0].shape[-1:] != (target.layout.cols,):
        shapes = [tuple(value.shape) for value in found]
        raise ValueError(f"{target.name!r} takes one input with {target.layout.cols} features, not tensors of shape {shapes}")
    return found[0]


def _squared(value: Any) -> Any:
    return value.detach().float() ** 2 if is_float(value) else value


def _linearised(model: nn.Module, targets: Sequence[Target], batch: Any, table: Table) -> None:
    """SynFlow's pass (Tanaka et al., 2020): absolute weights, an input of ones, the gradient of the summed output."""

    def positive(tensor: Tensor) -> Tensor:
        return tensor.detach().abs().double() if tensor.is_floating_point() else tensor.detach()

    def ones(value: Any) -> Any:
        return (
            torch.ones_like(value[:1], dtype=torch.float64)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
        )

    state = {name: positive(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    leaves = [state[names[id(target.tensor)]].requires_grad_() for target in targets]
    args, kwargs, _ = split_batch(batch)
    with torch.enable_grad(), on_batch(model, args, kwargs):
        output = functional_call(model, state, tuple(map(ones, args)), {key: ones(value) for key, value in kwargs.items()})
        gradients = torch.autograd.grad(_total(output), leaves, allow_unused=True)
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is None:
            raise ValueError(f"the output does not depend on {target.name!r}; exclude it")
        table[target.name]["linear_grad"] = target.layout.matrix(gradient)


def _total(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.sum()
    values = output.values() if isinstance(output, Mapping) else output
    return torch.stack([_total(v) for v in values if isinstance(v, Tensor | tuple | list | Mapping)]).sum()
