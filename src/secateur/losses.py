"""Losses: checks `loss=`, calls it, and finds the loss that a model returns itself."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .edit import why_failed

Loss = Callable[[Any, Any], Tensor]
PASS_LOSS = (
    "loss= (a function of the model's output and the target, such as torch.nn.functional.cross_entropy). Models that return "
    "their own loss, as those of transformers do, need none where the batches hold labels"
)


def may_give_a_loss(data: Iterable[Any]) -> bool:
    """Whether a model may compute its own loss on this data: a list must hold mappings; other iterables are not checked."""
    return not isinstance(data, list | tuple) or any(isinstance(batch, Mapping) for batch in data)


def check_loss(loss: Any) -> None:
    """Raises unless loss= can be called with the model's output and the target."""
    if isinstance(loss, type):
        raise TypeError(f"loss={loss.__name__} is a class; pass an instance of it: loss={loss.__name__}()")
    if not callable(loss):
        raise TypeError(f"loss={loss!r} must be a function of the model's output and the target")
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None, None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"loss={name} is called with two arguments, the model's output and the target (or the batch itself if it has "
            f"no target), but does not accept them: {error}"
        ) from None
    except ValueError:  # some functions written in C have no signature
        pass


def loss_of(model: nn.Module, output: Any, batch: Any, target: Any, loss: Loss | None) -> Tensor:
    """The loss of an output: the value of `loss(output, target)`, or without `loss` the loss that the output contains."""
    if loss is None:
        return _differentiable(_own_loss(output))
    with _on_loss(model, output, batch, target):
        value = loss(output, target)
    return _differentiable(value)


def _own_loss(output: Any) -> Tensor:
    """The loss that a model returns with its output, in the attribute or under the key "loss"."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    raise ValueError(f"the model's output ({_described(output)}) holds no loss, so pass {PASS_LOSS}. The model is unchanged.")


@contextlib.contextmanager
def _on_loss(model: nn.Module, output: Any, batch: Any, target: Any) -> Iterator[None]:
    """Wraps errors of loss= with a description of its arguments."""
    try:
        yield
    except Exception as error:
        if target is batch or (isinstance(batch, list | tuple) and len(batch) == 1):
            second = f"the batch itself ({_described(target)}), because this batch of data= has no target"
            hint = "; if the loss needs a target, let data= give pairs (inputs, target)"
        else:
            second, hint = f"the target ({_described(target)})", ""
        why = why_failed(error, model, [target] if isinstance(target, Tensor) else [])
        raise ValueError(
            f"loss= fails when it is called with the model's output ({_described(output)}) and {second}: {why}{hint}. The "
            "model is unchanged."
        ) from error


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _differentiable(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        given = _described(value) if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"loss= must return one number that depends on the weights; it returned {given}")
    return value
