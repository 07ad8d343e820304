"""Context managers around running or editing a model: the model, its mode, the RNG state and torch's switches are restored."""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .tensors import StandIns, owned_tensors, put_, tensors_inside

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; on exit every module has the mode it had."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def no_mha_fastpath() -> Iterator[None]:
    """Disables torch's fused kernels of attention and encoder layers, which read weights without calling their layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Lets transformers run its experts one after the other, each by a product with its own matrix, and not in one kernel."""
    configs: dict[int, Any] = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [(c, c._experts_implementation) for c in configs.values() if hasattr(c, "_experts_implementation")]
    try:
        for config, _ in before:
            config._experts_implementation = "eager"
        yield
    finally:
        for config, own in before:
            config._experts_implementation = own


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Disables fused kernels of whole layers (LSTM, encoder layers), so that torch runs the operators they consist of."""
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        with no_mha_fastpath(), fresh_casts():
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Disables the cache of autocast, which would use low-precision copies of weights made before a cut."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_LARGE = 1 << 20  # parameters; in smaller models, converting numbers takes longer than products in fewer bits save


@contextmanager
def half_products(model: nn.Module) -> Iterator[None]:
    """Runs matrix products of large models in bfloat16, on devices that have instructions for it and are faster that way.

    It is autocast, so it changes nothing in models of half or double precision. Weights are converted again in each context.
    """
    first = next(model.parameters(), None)
    kind = "cpu" if first is None else first.device.type
    large = sum(parameter.numel() for parameter in model.parameters()) >= _LARGE
    if not large or not has_bfloat16(kind) or torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, torch.bfloat16):
        yield


def has_bfloat16(kind: str) -> bool:
    """Whether devices of this kind multiply bfloat16 numbers in hardware."""
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return kind == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class RngGuard:
    """The state of the random number generators of torch, Python, and numpy where its module `random` is loaded."""

    def __init__(self) -> None:
        self.keep_draws()

    def keep_draws(self) -> None:
        """Takes the present state as the one to restore: what was drawn so far is not drawn again."""
        numpy: Any = sys.modules.get("numpy.random")
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy = None if numpy is None else numpy.get_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def preserve_rng() -> Iterator[RngGuard]:
    """Restores the RNG state on exit.

    A function inside that should advance it, such as a random criterion, takes the guard and calls `keep_draws()`.
    """
    guard = RngGuard()
    try:
        yield guard
    finally:
        guard.restore()


class Snapshot:
    """The attributes of a model's modules, and the contents and gradients of its tensors, at the time it is made.

    It holds references and copies nothing, so it is valid while contents are replaced (`put_`), not overwritten in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [(t, t.data, t.grad if t.is_leaf else None) for _, t in owned_tensors(model).values()]
        self._spaces = [
            (m, dict(vars(m)), {k: dict(vars(m)[k]) for k in ("_parameters", "_buffers", "_modules")}) for m in model.modules()
        ]

    def restore_(self) -> None:
        """Gives everything back. Modules keep the mode that they are in now."""
        for module, space, held in self._spaces:
            training = module.training
            vars(module).clear()
            vars(module).update(space, training=training)
            for kind, content in held.items():
                vars(module)[kind].clear()
                vars(module)[kind].update(content)
        self.restore_tensors_()

    def restore_tensors_(self) -> None:
        """Gives the tensors their contents and gradients back."""
        for tensor, data, grad in self._tensors:
            if tensor.is_leaf:
                tensor.grad = None
            put_(tensor, data)
            if grad is not None:
                tensor.grad = grad


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[Snapshot]:
    """When the block raises, gives the modules their attributes back, and the tensors their contents and gradients."""
    before = Snapshot(model)
    try:
        yield before
    except BaseException:
        before.restore_()
        raise


def split_inputs(inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Inputs:
    """Splits example inputs into positional and keyword arguments.

    A tuple or list holds the positional arguments, a mapping the keyword arguments; anything else is the one argument.
    `kwargs` are added to the keyword arguments.
    """
    named = dict(kwargs or {})
    if isinstance(inputs, Mapping):
        return (), {**inputs, **named}
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), named


def run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], under: Any = None) -> Any:
    """Runs the model in evaluation mode without gradients and undoes whatever the run changes in it.

    `under` is a context manager around the call alone, such as a dispatch mode.
    """

    def stand_in(_: str, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

    with torch.no_grad(), preserve_rng(), fresh_casts(), StandIns(model, stand_in), under or nullcontext():
        return model(*args, **kwargs)


def check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Runs the model, and raises ValueError with the shapes of these inputs if that fails."""
    try:
        with eval_mode(model):
            run(model, args, kwargs)
    except Exception as error:
        raise inputs_error(error, model, args, kwargs) from error


def inputs_error(error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ValueError:
    """The error for a model that does not run on example inputs, with their shapes."""
    tensors = tensors_inside((args, kwargs))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    more = f" and {len(shapes) - 8} more" if len(shapes) > 8 else ""
    loader = " Of a loader, pass one batch: next(iter(loader))." if any(isinstance(one, DataLoader) for one in args) else ""
    return ValueError(
        f"{type(model).__name__} does not run on the example inputs (tensors of shape {shapes[:8]}{more}): "
        f"{why_failed(error, model, tensors)}. Example inputs are a tensor, a tuple of positional arguments, or a mapping of "
        f"keyword arguments; a target is not among them.{loader} The model is unchanged."
    )


def batch_error(error: Exception, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ValueError:
    """The error for a model that does not run on a batch of data=, with the shapes of the batch."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    others = [repr(name) for name, value in kwargs.items() if _is_array(value)]
    held = f"{', '.join(others)} must be tensors; tokenizers return them with return_tensors='pt'. " if others else ""
    flat = "The batch axis may be missing: the first axis counts samples. " if max(map(len, shapes), default=2) < 2 else ""
    keys = f"The keys of this one are {', '.join(map(repr, kwargs))}. " if kwargs else ""
    return ValueError(
        f"{type(model).__name__} does not run on a batch of data= (tensors of shape {shapes}): "
        f"{why_failed(error, model, tensors)}. data= is an iterable of batches. A batch is a tensor, a mapping of keyword "
        f"arguments, or a pair (inputs, target). {keys}{held}{flat}The model is unchanged."
    )


def _is_array(value: Any) -> bool:
    """Whether a value is numbers, but not in a tensor."""
    return isinstance(value, list) or (hasattr(value, "__array__") and not isinstance(value, Tensor))


def raised_outside(error: Exception) -> bool:
    """Whether code that is not of this package raised the error, called by the model and not by a hook of this package."""
    package = __name__.partition(".")[0]
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [name.partition(".")[0] == package for name in frames]
    return not own[-1] and own == sorted(own, reverse=True)


def why_failed(error: Exception, model: nn.Module, tensors: Iterable[Tensor]) -> str:
    """The error of a run on these tensors. Where the model is on another device, says that instead."""
    own = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    given = {str(tensor.device) for tensor in tensors}
    if not own or given <= own:
        return f"{type(error).__name__}: {error}"
    return f"the inputs are on {' and '.join(sorted(given))} and the model on {' and '.join(sorted(own))}; move one of them"
