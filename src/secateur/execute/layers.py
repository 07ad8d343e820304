"""A layer whose weight is held in a sparse format: plain buffers and one operator. And the way back to the dense layer."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .._tree import Packed
from ..masks import unpack_bits
from .find import negative_zeros
from .formats import FORMATS, Format, as_matrix, as_weight, conv, linear

KINDS: dict[type[nn.Module], str] = {nn.Linear: "linear", nn.Conv1d: "conv", nn.Conv2d: "conv", nn.Embedding: "embedding"}
HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
         "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook")  # fmt: skip
TENSORS = ("_parameters", "_buffers", "_modules")
WIDE = 1 << 24  # numbers in the matrix of a grouped convolution, which is made for a moment with all the zeros between groups


class Compressed(Packed):
    """Stands where a Linear, Conv1d, Conv2d or Embedding stood. For inference; `decompress_` puts the dense layer back.

    The packed weight is in plain buffers, which move, copy and save as buffers do. `load_state_dict` also takes the dense
    weight (and packs it). Reading `.weight` unpacks it, each time.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: Any, form: Format, options: tuple[int, ...], tied: tuple[str, ...] = (), store: Any = None):
        super().__init__()
        weight: Tensor = layer.weight.detach()
        self.kind, self.stood, self.arguments = KINDS[type(layer)], type(layer), arguments_of(layer)
        self.form, self.options, self.shape, self.tied = form.name, options, tuple(weight.shape), tied
        for name in self.arguments.keys() - {"bias"}:  # models ask their layers for in_features and the like
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
        for hooks in HOOKS:  # the same tables, so that gates stay and handles still remove what they registered
            setattr(self, hooks, getattr(layer, hooks))
        # What else the layer carries (names that users gave it, hooks of its state dict) waits here for its return.
        own = {*HOOKS, *TENSORS, "training", "_compiled_call_impl"}
        self.carried = {name: value for name, value in vars(layer).items() if name not in own}
        self.train(layer.training)

    @torch.inference_mode(mode=False)  # buffers that are made for inference alone could never be called with gradients
    @torch.no_grad()
    def _hold(self, weight: Tensor, store: Any = None) -> None:
        form = FORMATS[self.form]
        packed = form.pack(as_matrix(weight if store is None else weight.to(store), self.groups).contiguous(), self.options)
        for name, buffer in zip(form.buffers, packed):
            self.register_buffer(name, buffer)
        self.register_buffer("minus", negative_zeros(weight))

    def buffers_in_order(self) -> list[Tensor]:
        return [self.get_buffer(name) for name in self.names]

    def forward(self, input: Tensor) -> Tensor:  # the name that the dense layers have
        if self.training:
            raise RuntimeError(
                "a compressed layer is for inference and was called in train mode: call model.eval(), or "
                "secateur.decompress_(model) to train it again"
            )
        if _AUTOCAST() and self.kind != "embedding":
            input = autocast(input)
        held: Any = list(map(self._buffers.__getitem__, self.names))
        bias = self._parameters["bias"]
        shape = self.form, self.rows, self.columns, self.options
        # Nobody watches: the function itself, since the way through the dispatcher takes as long as a small layer.
        plain = alone(input)
        if plain and self.kind == "linear":
            return linear(input, held, bias, *shape)
        if not torch.compiler.is_compiling() and (transformed() or input.is_nested):
            return self._dense(input)
        # torch.jit.trace looks again without gradients at what it has seen with them.
        ops, grad = torch.ops.secateur, torch.is_grad_enabled() or _TRACER() is not None
        if self.kind == "linear":
            return (ops.linear_grad if grad else ops.linear)(input, held, bias, *shape)
        if self.kind == "embedding":
            return ops.embedding(input, held, *shape).to(self.dtype)
        flat = self.stood is nn.Conv1d
        dims = 2 if flat else 3
        batched = input.unsqueeze(0) if input.dim() == dims else input
        run = conv if plain else ops.conv_grad if grad else ops.conv
        y = run(batched.unsqueeze(2) if flat else batched, held, bias, *shape, self.window)
        y = y.squeeze(2) if flat else y
        return y.squeeze(0) if input.dim() == dims else y

    def _dense(self, input: Tensor) -> Tensor:
        """With the weight unpacked, by operators for which torch knows all that vmap, derivatives and nested tensors ask."""
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
        """The dense weight, unpacked now: exact where the values are stored in their own dtype."""
        matrix = FORMATS[self.form].unpack(self.buffers_in_order(), self.rows, self.columns, self.options)
        weight = as_weight(matrix, self.shape, self.groups)
        if self.minus is not None:
            where = unpack_bits(self.minus, weight.numel()).view(weight.shape)  # type: ignore[arg-type]
            weight = torch.where(where & (weight == 0), -torch.zeros((), dtype=weight.dtype, device=weight.device), weight)
        return weight

    def restored(self, weight: nn.Parameter | None = None) -> nn.Module:
        """The dense layer again, with this weight if it is given (a tied one)."""
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
        """`.to(dtype)` and its like: the dense layer would have that dtype now, whatever the values are stored in."""
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.get_buffer(self.names[0]).device)).dtype
        return self

    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # type: ignore[override]
        weight = state_dict.pop(f"{prefix}weight", None)
        if weight is not None:
            if tuple(weight.shape) != self.shape:
                raise ValueError(f"{prefix}weight is {tuple(weight.shape)} in the state dict and {self.shape} in the model")
            old = self.get_buffer(self.names[0])
            half = old.is_floating_point() and old.dtype != self.dtype
            try:
                device = weight.device if old.is_meta else old.device  # nothing can be packed where there are no numbers
                self._hold(weight.detach().to(device, self.dtype), old.dtype if half else None)
            except ValueError as error:
                raise ValueError(
                    f"{prefix}weight cannot be held as {self.form}: {error}; decompress_ the model first"
                ) from None
            state_dict.update({f"{prefix}{name}": buffer for name, buffer in self._buffers.items() if buffer is not None})
        else:
            self._check(state_dict, prefix)
        for name in (*self.names, "minus"):  # other zeros, other sizes
            new, now = state_dict.get(f"{prefix}{name}"), self._buffers.get(name)
            if new is not None and (now is None or new.shape != now.shape):
                device = self.get_buffer(self.names[0]).device
                self.register_buffer(name, torch.empty(new.shape, dtype=new.dtype if now is None else now.dtype, device=device))
            elif name == "minus" and new is None and f"{prefix}{self.names[0]}" in state_dict:
                self.register_buffer(name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _check(self, state_dict: Any, prefix: str) -> None:
        """Refuse buffers of another format or damaged ones: kernels believe the numbers in them. The same if only some are
        given, which are to go with those that are here."""
        keys = {name: f"{prefix}{name}" for name in (*self.names, "minus") if f"{prefix}{name}" in state_dict}
        own = self.buffers_in_order()
        try:
            for key in keys.values():  # with assign=True they are taken as they lie
                state_dict[key] = state_dict[key].contiguous()
            given = [state_dict[keys[name]] if name in keys else now for name, now in zip(self.names, own)]
            if not all(each.is_meta for each in given) and not self._fit(given, own):
                raise TypeError
            if "minus" in keys and state_dict[keys["minus"]].numel() != -(-math.prod(self.shape) // 8):
                raise TypeError
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError):
            options = "x".join(map(str, self.options))
            raise ValueError(
                f"{prefix[:-1] or 'this layer'} is {self.form} {options}".rstrip()
                + f" of {self.rows}x{self.columns} in the model, and its "
                "buffers in the state dict are not: load the dense weight, or compress both models the same way"
            ) from None

    def _fit(self, given: list[Tensor], own: list[Tensor]) -> bool:
        """Whether these are the buffers that packing makes of the places which they name. The values there do not matter, and
        some may have become zero since."""
        if any(a.dtype != b.dtype and not (a.is_floating_point() and b.is_floating_point()) for a, b in zip(given, own)):
            return False
        (values, *rest), form, size = given, FORMATS[self.form], (self.rows, self.columns)
        device = values.device if own[0].is_meta else own[0].device
        rest = [each.to(device) for each in rest]
        if not own[0].is_meta and values.shape == own[0].shape and all(map(torch.equal, rest, own[1:])):
            return True
        if self.names[0] != "values":  # a library's own form, of which only the sizes are known
            return form.unpack([values.to(device), *rest], *size, self.options).shape == size
        pairs = not values.is_floating_point()
        ones = torch.ones(values.numel() * (2 if pairs else 1), dtype=torch.bfloat16 if pairs else torch.uint8, device=device)
        places = form.unpack([ones.view(values.dtype) if pairs else ones.view(values.shape), *rest], *size, self.options)
        again, *others = form.pack(places, self.options)
        return places.shape == size and again.shape == values.shape and all(map(torch.equal, others, rest))

    def extra_repr(self) -> str:
        return f"{self.stood.__name__} {tuple(self.shape)}, {self.form}{list(self.options)}, {self.bytes():,} bytes"


_MODES, _TRACER = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_AUTOCAST, _GRAD = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
_LEVEL = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


def alone(x: Tensor) -> bool:
    """Whether nothing looks at operators as they run (a compiler, a dispatch mode, a tracer) or changes what they mean
    (gradients, torch.func), so that the plain function does. All in one place: a call that other layers have driven out of
    the cache takes its time from how much code it touches."""
    if is_dynamo_compiling() or _GRAD() or _MODES() or _LEVEL() is not None or forward_ad._current_level >= 0:
        return False
    return type(x) is Tensor and _TRACER() is None and not x.is_neg() and not x.is_nested


def autocast(x: Tensor) -> Tensor:
    """In the dtype that torch's own layers compute with here."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device)) if x.is_floating_point() and x.dtype != torch.float64 else x


def transformed() -> bool:
    """Whether the call is inside vmap or torch.func's derivatives, or carries tangents along."""
    return _LEVEL() is not None or forward_ad._current_level >= 0


def arguments_of(layer: nn.Module) -> dict[str, Any]:
    """What the layer's constructor needs to build its like."""
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
    """Kernel, stride, padding and dilation as pairs; a Conv1d is a Conv2d over one line."""
    padding = layer.padding
    if isinstance(padding, str):
        around = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size)]
        padding = tuple(a // 2 for a in around) if padding == "same" else tuple(0 for _ in around)
    pairs = [layer.kernel_size, layer.stride, padding, layer.dilation]
    if len(layer.kernel_size) == 1:
        pairs = [(neutral, *pair) for neutral, pair in zip((1, 1, 0, 1), pairs)]
    return [int(number) for pair in pairs for number in pair]


def why_not(layer: nn.Module) -> str | None:
    """Why this layer cannot be compressed whatever its zeros are; None if it can."""
    if "weight" not in layer._parameters:
        return "its weight is computed (a parametrization); remove that first"
    if type(layer) not in KINDS:
        return f"{type(layer).__name__} is not a layer that can be compressed"
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
        if layer.groups > 1 and weight.numel() * layer.groups > WIDE:
            return f"its {layer.groups} groups side by side make a matrix of {weight.numel() * layer.groups:,} numbers"
        if layer.padding_mode != "zeros":
            return f"it pads with {layer.padding_mode!r}; only zeros can be compressed"
        if layer.padding == "same" and any(d * (k - 1) % 2 for d, k in zip(layer.dilation, layer.kernel_size)):
            return "its padding is not the same on both sides"
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "it rescales its rows (max_norm)"
    return None
