"""`Compressed`: a layer whose weight is stored in a sparse format, as plain buffers. It can restore its dense layer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import kernels
from .._tree import Packed
from ..masks import unpack_bits
from ..values import Values
from .find import negative_zeros
from .formats import FORMATS, Format, as_matrix, as_weight, conv, linear

KINDS: dict[type[nn.Module], str] = {nn.Linear: "linear", nn.Conv1d: "conv", nn.Conv2d: "conv", nn.Embedding: "embedding"}
HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
         "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook")  # fmt: skip
TENSORS = ("_parameters", "_buffers", "_modules")
WIDE = 1 << 24  # largest block-diagonal matrix of a grouped convolution, which is built during packing with all its zeros


class Compressed(Packed):
    """Replaces a Linear, Conv1d, Conv2d or Embedding for inference; `decompress_` puts the dense layer back.

    The packed weight is stored in plain buffers, which are moved, copied and saved like other buffers. `load_state_dict` also
    accepts the dense weight and packs it. Reading `.weight` unpacks it each time.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: Any, form: Format, options: tuple[int, ...], tied: tuple[str, ...] = (), store: Any = None):
        super().__init__()
        weight: Tensor = layer.weight.detach()
        self.kind, self.stood, self.arguments = KINDS[type(layer)], type(layer), arguments_of(layer)
        self.form, self.options, self.shape, self.tied = form.name, options, tuple(weight.shape), tied
        for name in self.arguments.keys() - {"bias"}:  # models may read in_features and similar attributes
            setattr(self, name, self.arguments[name])
        self.groups: int = self.arguments.get("groups", 1)
        self.window = window_of(layer) if self.kind == "conv" else []
        self.dtype: torch.dtype = weight.dtype
        self.trainable: bool = layer.weight.requires_grad
        matrix = as_matrix(weight, self.groups)
        self.rows, self.columns = matrix.shape
        self._hold(weight, store)
        bias = getattr(layer, "bias", None)
        self.register_parameter("bias", bias)
        self.names = form.buffers
        for hooks in HOOKS:  # the same dictionaries, so that gates stay active and hook handles can still remove them
            setattr(self, hooks, getattr(layer, hooks))
        # Other attributes of the layer (set by users, or hooks of its state dict) are kept for the restored layer.
        own = {*HOOKS, *TENSORS, "training", "_compiled_call_impl"}
        self.carried = {name: value for name, value in vars(layer).items() if name not in own}
        self.train(layer.training)

    @torch.inference_mode(mode=False)  # inference tensors could not be used in calls with gradients later
    @torch.no_grad()
    def _hold(self, weight: Tensor, store: Any = None) -> None:
        form = FORMATS[self.form]
        packed = form.pack(as_matrix(weight if store is None else weight.to(store), self.groups).contiguous(), self.options)
        for name, buffer in zip(form.buffers, packed):
            self.register_buffer(name, kernels.in_huge_pages(buffer))
        self.register_buffer("minus", negative_zeros(weight) if form.values is None else None)

    def buffers_in_order(self) -> list[Tensor]:
        """Returns the format's buffers in the order that the format declares."""
        return [self.get_buffer(name) for name in self.names]

    def forward(self, input: Tensor) -> Tensor:  # the name that the dense layers have
        if self.training:
            raise RuntimeError(
                "a compressed layer was called in train mode, but it supports inference only; call model.eval(), or "
                "secateur.decompress_(model) to train the model again"
            )
        if _AUTOCAST() and self.kind != "embedding":
            input = autocast(input)
        held: Any = list(map(self._buffers.__getitem__, self.names))
        bias = self._parameters["bias"]
        shape = self.form, self.rows, self.columns, self.options
        # Fast path: the function itself, because torch's dispatcher takes as long as a small layer.
        direct = can_skip_dispatcher(input)
        if direct and self.kind == "linear":
            return linear(input, held, bias, *shape)
        if not torch.compiler.is_compiling() and (transformed() or input.is_nested):
            return self._dense(input)
        if exports_to_onnx():
            raise RuntimeError(
                "this layer is compressed, and ONNX has no operator for its format; call secateur.decompress_(model) and "
                "export the dense model, whose zeros stay zeros, or export with secateur.to_onnx, which does both"
            )
        # torch.jit.trace checks a trace made with gradients by running it again without, so it needs the same operator.
        ops, grad = torch.ops.secateur, torch.is_grad_enabled() or _TRACER() is not None
        if self.kind == "linear":
            return (ops.linear_grad if grad else ops.linear)(input, held, bias, *shape)
        if self.kind == "embedding":
            return ops.embedding(input, held, *shape).to(self.dtype)
        return self._convolve(conv if direct else ops.conv_grad if grad else ops.conv, input, held, bias, shape)

    def _convolve(self, run: Any, input: Tensor, held: Any, bias: Tensor | None, shape: tuple[Any, ...]) -> Tensor:
        """Runs a 2d convolution on an input with or without a batch dimension, of one or two spatial dimensions."""
        flat = self.stood is nn.Conv1d
        dims = 2 if flat else 3
        batched = input.unsqueeze(0) if input.dim() == dims else input
        y = run(batched.unsqueeze(2) if flat else batched, held, bias, *shape, self.window)
        y = y.squeeze(2) if flat else y
        return y.squeeze(0) if input.dim() == dims else y

    def _dense(self, input: Tensor) -> Tensor:
        """Unpacks the weight and uses torch's own operators, which support vmap, torch.func and nested tensors."""
        weight, bias = self.weight.to(self.dtype if self.kind == "embedding" else input.dtype), self._parameters["bias"]
        bias = bias if bias is None else bias.to(input.dtype)
        if self.kind == "embedding":
            return F.embedding(input, weight)
        if self.kind == "linear":
            return F.linear(input, weight, bias)
        run = F.conv1d if self.stood is nn.Conv1d else F.conv2d
        moves = (self.arguments[name] for name in ("stride", "padding", "dilation", "groups"))
        return run(input, weight, bias, *moves)

    @property
    def weight(self) -> Tensor:
        """The dense weight, unpacked at each access. Exact, unless values are stored in fewer bits (`store=`, `values=`)."""
        matrix = FORMATS[self.form].unpack(self.buffers_in_order(), self.rows, self.columns, self.options)
        weight = as_weight(matrix, self.shape, self.groups)
        if self.minus is not None:
            where = unpack_bits(self.minus, weight.numel()).view(weight.shape)  # type: ignore[arg-type]
            weight = torch.where(where & (weight == 0), -torch.zeros((), dtype=weight.dtype, device=weight.device), weight)
        return weight

    def rounded(self) -> tuple[Values, Tensor, Tensor] | None:
        """The weight as the small numbers that are stored and their scales (see `Values`); None if it is not rounded."""
        form, (first, *rest) = FORMATS[self.form], self.buffers_in_order()
        if form.values is None or form.base is None:
            return None
        packed = [form.values.widen(first), *rest[:-1]]
        return form.values, form.base.unpack(packed, self.rows, self.columns, self.options), rest[-1]

    def restored(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Returns the dense layer, with this weight if given (a tied one)."""
        layer = self.stood(**self.arguments, device="meta")
        if weight is None:
            with torch.inference_mode(mode=False):
                weight = nn.Parameter(self.weight.to(self.dtype), requires_grad=self.trainable)
        layer.register_parameter("weight", weight)
        if "bias" in layer._parameters:
            layer.register_parameter("bias", self.bias)
        vars(layer).update(self.carried)
        for hooks in HOOKS:
            setattr(layer, hooks, getattr(self, hooks))
        return layer.train(self.training)

    def _apply(self, fn: Any, recurse: bool = True) -> Compressed:
        """Applies `.to(dtype)` and similar calls, and updates the dtype that the dense layer would have."""
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.get_buffer(self.names[0]).device)).dtype
        return self

    def bytes(self) -> int:
        """Returns the bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # type: ignore[override]
        weight = state_dict.pop(f"{prefix}weight", None)
        if weight is not None:
            self._hold_dense(weight, f"{prefix}weight")
            state_dict.update({f"{prefix}{name}": buffer for name, buffer in self._buffers.items() if buffer is not None})
        else:
            self._check(state_dict, prefix)
        for name in (*self.names, "minus"):  # buffers of another sparsity have other sizes
            new, now = state_dict.get(f"{prefix}{name}"), self._buffers.get(name)
            if new is not None and (now is None or new.shape != now.shape):
                device = self.get_buffer(self.names[0]).device
                self.register_buffer(name, torch.empty(new.shape, dtype=new.dtype if now is None else now.dtype, device=device))
            elif name == "minus" and new is None and f"{prefix}{self.names[0]}" in state_dict:
                self.register_buffer(name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _hold_dense(self, weight: Tensor, name: str) -> None:
        """Packs a dense weight from a state dict, in the dtype in which this layer stores its values."""
        if tuple(weight.shape) != self.shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)} in the state dict and {self.shape} in the model")
        old = self.get_buffer(self.names[0])
        half = old.is_floating_point() and old.dtype != self.dtype  # values in fewer bits are integers
        device = weight.device if old.is_meta else old.device  # packing needs values, which meta tensors lack
        try:
            self._hold(weight.detach().to(device, self.dtype), old.dtype if half else None)
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be stored in the format {self.form}: {error}; call decompress_ on the model first"
            ) from None

    def _check(self, state_dict: Any, prefix: str) -> None:
        """Raises ValueError for damaged buffers or those of another format, because kernels use their contents as addresses.

        Buffers that the state dict does not contain are taken from the layer.
        """
        keys = {name: f"{prefix}{name}" for name in (*self.names, "minus") if f"{prefix}{name}" in state_dict}
        own = self.buffers_in_order()
        try:
            for key in keys.values():  # assign=True would keep their strides
                state_dict[key] = state_dict[key].contiguous()
            given = [state_dict[keys[name]] if name in keys else now for name, now in zip(self.names, own)]
            if not all(each.is_meta for each in given) and not self._fit(given, own):
                raise TypeError
            if "minus" in keys and state_dict[keys["minus"]].numel() != -(-math.prod(self.shape) // 8):
                raise TypeError
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            options = "x".join(map(str, self.options))
            raise ValueError(
                f"the buffers of {prefix[:-1] or 'this layer'} in the state dict do not match the model, where it is in the "
                + f"format {self.form} {options}".rstrip()
                + f" with {self.rows}x{self.columns} weights; load the dense weight, or compress both models the same way"
            ) from None

    def _fit(self, given: list[Tensor], own: list[Tensor]) -> bool:
        """Returns True if packing a matrix that is nonzero at the places these buffers name gives the same buffers.

        The values do not matter, since some may have become zero.
        """
        if any(a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()) for a, b in zip(given, own)):
            return False
        (values, *rest), form, size = given, FORMATS[self.form], (self.rows, self.columns)
        device = values.device if own[0].is_meta else own[0].device
        rest = [each.to(device) for each in rest]
        numbers = {*form.numbers, *(["scales"] if form.values is not None else [])}  # these hold no addresses
        if not own[0].is_meta and [values.shape, *(each.shape for each in rest)] == [each.shape for each in own]:
            known = zip(self.names[1:], rest, own[1:])
            if all(name in numbers or torch.equal(new, old) for name, new, old in known):
                return True
        if self.names[0] != "values":  # a library's own packed form, of which only the sizes can be checked
            alike = [each.shape for each in given] == [each.shape for each in own]  # they do not depend on the zeros
            return alike and form.unpack([values.to(device), *rest], *size, self.options).shape == size
        return self._repacks(values, rest, device)

    def _repacks(self, values: Tensor, rest: list[Tensor], device: torch.device) -> bool:
        """Returns True if unpacking these buffers with ones as values, and packing the result, gives the same buffers."""
        form, size = FORMATS[self.form], (self.rows, self.columns)
        if form.values is not None:
            *rest, scales = rest
            form.values.dequantize(torch.zeros(size, dtype=torch.uint8, device=device), scales)  # raises for other shapes
            form, values = form.base or form, form.values.widen(values)
            ones = torch.ones_like(values, device=device)
        elif values.is_floating_point():
            ones = torch.ones(values.shape, dtype=torch.uint8, device=device)
        else:  # pairs of bfloat16
            ones = torch.ones(values.numel() * 2, dtype=torch.bfloat16, device=device).view(values.dtype)
        places = form.unpack([ones, *rest], *size, self.options)
        again, *others = form.pack(places, self.options)
        same = all(
            new.shape == old.shape if name in form.numbers else torch.equal(new, old)
            for name, new, old in zip(form.buffers[1:], others, rest, strict=True)
        )
        return places.shape == size and again.shape == values.shape and same

    def extra_repr(self) -> str:
        return f"{self.stood.__name__} {tuple(self.shape)}, {self.form}{list(self.options)}, {self.bytes():,} bytes"


_MODES, _TRACER = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_AUTOCAST, _GRAD = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
_LEVEL = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


def can_skip_dispatcher(x: Tensor) -> bool:
    """Returns True if no compiler, dispatch mode, tracer, autograd or torch.func transform is active.

    The Python function then gives the same result as the operator, and is faster. All checks are in one function, because
    the time of a call with cold caches depends on how much code it touches.
    """
    if is_dynamo_compiling() or _GRAD() or _MODES() or _LEVEL() is not None or forward_ad._current_level >= 0:
        return False
    return type(x) is Tensor and _TRACER() is None and not x.is_neg() and not x.is_nested


def autocast(x: Tensor) -> Tensor:
    """Casts the input to the dtype that torch's own layers would use under autocast."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x


def transformed() -> bool:
    """Returns True inside vmap, a torch.func transform or forward-mode differentiation."""
    return _LEVEL() is not None or forward_ad._current_level >= 0


def exports_to_onnx() -> bool:
    """Returns True if torch.onnx.export runs this call."""
    return (_TRACER() is not None or torch.compiler.is_exporting()) and _in_onnx_export()


def _in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]  # else a strict export takes it to be False


def arguments_of(layer: nn.Module) -> dict[str, Any]:
    """Returns the arguments with which the layer's class builds an equal layer."""
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
    if isinstance(layer, nn.Embedding):
        return {
            name: getattr(layer, name)
            for name in ("num_embeddings", "embedding_dim", "padding_idx", "scale_grad_by_freq", "sparse")
        }
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


def window_of(layer: Any) -> list[int]:
    """Returns kernel size, stride, padding and dilation as pairs; a Conv1d is a Conv2d with height 1."""
    padding = layer.padding
    if isinstance(padding, str):
        around = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size)]
        padding = tuple(a // 2 for a in around) if padding == "same" else tuple(0 for _ in around)
    pairs = [layer.kernel_size, layer.stride, padding, layer.dilation]
    if len(layer.kernel_size) == 1:
        pairs = [(neutral, *pair) for neutral, pair in zip((1, 1, 0, 1), pairs)]
    return [int(number) for pair in pairs for number in pair]


def why_not(layer: nn.Module) -> str | None:
    """Returns why this layer cannot be compressed, whatever its zeros are, or None if it can."""
    if "weight" not in layer._parameters:
        return "its weight is computed by a parametrization; remove that first"
    if type(layer) not in KINDS:
        return f"{type(layer).__name__} is not a layer type that can be compressed"
    weight: Any = layer._parameters["weight"]
    if weight is None or weight.layout != torch.strided or type(weight.data) is not Tensor:
        return "its weight is not a plain dense tensor"
    if "forward" in vars(layer):
        return "its forward was replaced by another function"
    if more := [name for kind in TENSORS for name in vars(layer)[kind] if name not in ("weight", "bias")]:
        return f"it holds more than weight and bias: {', '.join(more)}"
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}; float32, float16 and bfloat16 can be compressed"
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return _why_not_conv(layer)
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "it rescales its rows (max_norm)"
    return None


def _why_not_conv(layer: nn.Conv1d | nn.Conv2d) -> str | None:
    size = layer.weight.numel() * layer.groups
    if layer.groups > 1 and size > WIDE:
        return f"its {layer.groups} groups as one block-diagonal matrix would have {size:,} elements"
    if layer.padding_mode != "zeros":
        return f"it pads with {layer.padding_mode!r}; only padding with zeros is supported"
    if layer.padding == "same" and any(d * (k - 1) % 2 for d, k in zip(layer.dilation, layer.kernel_size)):
        return "its padding differs between the two sides"
    return None
