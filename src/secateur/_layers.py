"""Layer types: which parameters are weights, how each is read as a matrix (outputs, inputs x kernel), which attributes hold
its sizes.

Ranking, folding and evidence work on that matrix. A layer type of another library is given by its full name, so that the
library is not imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

Kind = type[nn.Module] | str

CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's linear layer: x @ weight + bias, with the weight as (in, out)

_LLAMA4_EXPERTS = "transformers.models.llama4.modeling_llama4.Llama4TextExperts"

# The layer types that are pruned by default.
DEFAULT_TYPES: tuple[Kind, ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    CONV1D,
    nn.MultiheadAttention,
)

# Layer types with several weights: the attribute of each, and the number of equal parts whose rows read different inputs.
_WEIGHTS: dict[Kind, dict[str, int]] = {
    nn.MultiheadAttention: {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1},
}

# Layer types whose weight does not have its outputs on axis 0 and its inputs on axis 1.
_INPUT_FIRST: set[Kind] = {nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, CONV1D}


def is_kind(layer: nn.Module | type[nn.Module], kinds: Iterable[Kind]) -> bool:
    """Whether a layer, or a class of layers, is one of these types or of a type derived from them."""
    cls = layer if isinstance(layer, type) else type(layer)
    return any(
        kind in _names(cls)
        if isinstance(kind, str)
        else issubclass(cls, kind) or (cls is not layer and isinstance(layer, kind))
        for kind in kinds
    )


@functools.lru_cache(1024)
def _names(cls: type) -> frozenset[str]:
    """The full names of a class and of those it is derived from."""
    return frozenset(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


def adapter_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters of adapters (LoRA and others of PEFT), whose layers list them in `adapter_layer_names`."""
    found: set[int] = set()
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            adapter = getattr(module, name, None)
            found |= {id(parameter) for parameter in adapter.parameters()} if isinstance(adapter, nn.Module) else set()
    return found


def input_first(*types: type[nn.Module]) -> None:
    """Declares that these layer types store their weight as (in, out, ...), like `nn.ConvTranspose2d`.

    A type with a matrix (in, out) is expected to compute x @ weight, with or without a bias.
    """
    _INPUT_FIRST.update(types)


@dataclass(frozen=True)
class Layout:
    """How one tensor maps to its matrix, and back.

    Each input channel has `span` columns (the kernel size). The rows form `groups` equal parts that read different inputs
    (grouped convolution; queries, keys and values of an attention layer). A vector is one row.
    A tensor (experts, outputs, inputs), or (experts, inputs, outputs) with `flip`, is `stacked`: one matrix below the other,
    and each is a group.
    """

    shape: tuple[int, ...]
    flip: bool = False
    groups: int = 1
    stacked: bool = False

    @property
    def span(self) -> int:
        return 1 if self.stacked else math.prod(self.shape[2:])

    @property
    def rows(self) -> int:
        if self.stacked:
            return self.shape[0] * self.shape[2 if self.flip else 1]
        if not self.flip:
            return self.shape[0] if len(self.shape) > 1 else 1
        return self.shape[1] * self.groups

    @property
    def cols(self) -> int:
        if self.stacked:
            return self.shape[1 if self.flip else 2]
        if not self.flip:
            return math.prod(self.shape[1:] if self.rows != 1 else self.shape)  # also of a shard without rows
        return math.prod(self.shape) // self.rows if self.rows else 0

    def matrix(self, tensor: Tensor) -> Tensor:
        """The tensor as (rows, cols): a view where memory allows, a copy otherwise."""
        if not self.flip:
            return tensor.reshape(self.rows, self.cols)
        if self.stacked:
            return tensor.mT.reshape(self.rows, self.cols)
        per_group = tensor.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], self.span)
        return per_group.transpose(1, 2).reshape(self.rows, self.cols)

    def restore(self, matrix: Tensor) -> Tensor:
        """A matrix (rows, cols) back in the tensor's own shape."""
        if not self.flip:
            return matrix.reshape(self.shape)
        if self.stacked:
            return matrix.reshape(self.groups, -1, self.cols).mT.contiguous()
        per_group = matrix.reshape(self.groups, self.shape[1], self.shape[0] // self.groups, self.span)
        return per_group.transpose(1, 2).reshape(self.shape)

    @property
    def product(self) -> bool:
        """Whether the layer computes x @ W (+ bias), as all types do that store a matrix as (in, out)."""
        return self.flip and len(self.shape) == 2

    def probe(self, tensor: Tensor) -> Tensor:
        """The tensor with one output per group, which is enough to read every input once."""
        return tensor[:, :1] if self.flip else tensor[: self.groups]


_GROUPS = ("groups", "n_groups", "num_groups")  # attributes of linear layers whose groups of rows read different inputs


def layout_of(module: nn.Module, shape: tuple[int, ...], attribute: str = "weight") -> Layout:
    """The layout of a parameter of this shape in this module."""
    if is_experts(module, shape):
        return Layout(tuple(shape), bool(getattr(module, "is_transposed", True)), groups=shape[0], stacked=True)
    flip = len(shape) > 1 and is_kind(module, _INPUT_FIRST)
    if len(shape) == 2 and _multiplies_otherwise(module):
        sizes = (vars(module).get(name) for name in _GROUPS)
        groups = next((size for size in sizes if isinstance(size, int) and size > 0 and not shape[0] % size), 1)
    else:
        groups = vars(module).get("groups", 1) if len(shape) > 2 else _several(module).get(attribute, 1)
    return Layout(tuple(shape), flip, groups if isinstance(groups, int) else 1)


def _several(module: nn.Module) -> dict[str, int]:
    return next((weights for kind, weights in _WEIGHTS.items() if is_kind(module, (kind,))), {})


def is_experts(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a tensor holds a matrix for each of several experts, as modules of transformers 5 do.

    Such modules have an attribute for the number of experts, and most have one that tells whether their matrices are
    transposed. Llama 4 does not have it; its matrices are transposed.
    """
    own = vars(module)
    said = isinstance(own.get("is_transposed"), bool) or is_kind(module, (_LLAMA4_EXPERTS,))
    return len(shape) == 3 and own.get("num_experts") == shape[0] and said


def is_weight(module: nn.Module, attribute: str) -> bool:
    """Whether the layer multiplies its inputs with this parameter, as far as the type of the layer tells."""
    return attribute in (_several(module) or (attribute,))


def bare_layer(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """A copy of a layer with these parameters, without bias, hooks and parametrizations. The layer itself is unchanged."""
    twin = object.__new__(parametrize.type_before_parametrizations(module))
    twin.__dict__.update(module.__dict__)
    twin._parameters = {**module._parameters, **parameters} | ({"bias": None} if "bias" in module._parameters else {})
    twin._modules = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    return twin


def passes_its_weights(module: nn.Module) -> bool:
    """Whether the layer passes its weights to a function, so that its own call is not linear in any of them."""
    return (
        bool(_several(module))
        or any(is_experts(module, tuple(p.shape)) for p in module._parameters.values() if p is not None)
        or _multiplies_otherwise(module)
    )


def _multiplies_otherwise(module: nn.Module) -> bool:
    """Whether a type derived from `nn.Linear` does not map a vector of inputs to a vector of outputs.

    Grouped linear layers take a vector for each group, and routers of experts return more than their product.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return False
    weight = module.weight
    with _disable_current_modes(), torch.no_grad():
        twin = bare_layer(module, {name: p.to("meta") for name, p in module._parameters.items() if p is not None})
        twin._buffers = {name: None if b is None else b.to("meta") for name, b in module._buffers.items()}
        try:
            output = twin.forward(torch.empty(1, weight.shape[-1], dtype=weight.dtype, device="meta"))
        except Exception:
            return True
    return not isinstance(output, Tensor) or output.shape != (1, weight.shape[0])


def is_product(module: nn.Module, layout: Layout) -> bool:
    """Whether a layer multiplies its whole input with a matrix, as `nn.Linear` does, and not patches of the input."""
    return layout.product or (len(layout.shape) == 2 and isinstance(module, nn.Linear))


def features_axis(module: nn.Module) -> int:
    """The axis of a layer's input that holds the features: the last, or the one before the axes of a convolution's kernel."""
    weight = getattr(module, "weight", None)
    return 1 - max(weight.ndim, 2) if isinstance(weight, Tensor) else -1


def input_size(module: nn.Module) -> int | None:
    """The number of input features, where the layer has an attribute for it."""
    names = ("nx",) if is_kind(module, (CONV1D,)) else ("in_features", "in_channels")
    return next((size for name in names if isinstance(size := getattr(module, name, None), int)), None)


Sizes = dict[str, Callable[[Any], Any]]


_GATES = {"LSTM": 4, "GRU": 3}


def _channels(m: Any) -> Any:
    found = m.weight if m.weight is not None else m.running_mean
    return None if found is None else found.shape[0]


def _reads(m: Any, kind: str) -> Any:
    separate = getattr(m, f"{kind}_proj_weight", None)
    return (m.in_proj_weight if separate is None else separate).shape[1]


_RECURRENT: Sizes = {
    "input_size": lambda m: m.weight_ih_l0.shape[1],
    "hidden_size": lambda m: m.weight_ih_l0.shape[0] // _GATES.get(m.mode, 1),
    "proj_size": lambda m: m.weight_hr_l0.shape[0] if hasattr(m, "weight_hr_l0") else 0,
}


_CELL: Sizes = {"input_size": lambda m: m.weight_ih.shape[1], "hidden_size": lambda m: m.weight_hh.shape[1]}


_CONV: Sizes = {"in_channels": lambda m: m.weight.shape[1] * m.groups, "out_channels": lambda m: m.weight.shape[0]}


_TURNED: Sizes = {"in_channels": lambda m: m.weight.shape[0], "out_channels": lambda m: m.weight.shape[1] * m.groups}


_TABLE: Sizes = {"num_embeddings": lambda m: m.weight.shape[0], "embedding_dim": lambda m: m.weight.shape[1]}


_NORMED: Sizes = {"normalized_shape": lambda m: None if m.weight is None else tuple(m.weight.shape)}


# Layer type -> attribute -> the value it has for the weights that the layer holds.
SIZES: dict[Kind, Sizes] = {
    CONV1D: {"nx": lambda m: m.weight.shape[0], "nf": lambda m: m.weight.shape[1]},
    nn.Linear: {"in_features": lambda m: m.weight.shape[1], "out_features": lambda m: m.weight.shape[0]},
    nn.Bilinear: {
        "in1_features": lambda m: m.weight.shape[1],
        "in2_features": lambda m: m.weight.shape[2],
        "out_features": lambda m: m.weight.shape[0],
    },
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _TURNED),
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), _TABLE),
    nn.modules.batchnorm._NormBase: {"num_features": _channels},
    nn.GroupNorm: {"num_channels": lambda m: None if m.weight is None else m.weight.shape[0]},
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), _NORMED),
    nn.PReLU: {"num_parameters": lambda m: m.weight.shape[0]},
    nn.RNNBase: _RECURRENT,
    nn.RNNCellBase: _CELL,
    nn.MultiheadAttention: {
        "kdim": lambda m: _reads(m, "k"),
        "vdim": lambda m: _reads(m, "v"),
        "head_dim": lambda m: m.embed_dim // m.num_heads,
    },
}


def right_sizes(module: nn.Module) -> list[tuple[str, Callable[[Any], Any]]]:
    """The size attributes that match the layer's weights and must be recomputed after a cut, and how to read them."""
    readers = _size_readers(type(module), module.__class__)
    return [(name, read) for name, read in readers if (size := read(module)) is not None and vars(module).get(name) == size]


@functools.lru_cache(1024)
def _size_readers(*classes: type[nn.Module]) -> list[tuple[str, Callable[[Any], Any]]]:
    """The size attributes of layers of a type: `type(layer)` and `layer.__class__`, which may differ."""
    kinds = [kind for kind in SIZES if any(is_kind(cls, (kind,)) for cls in classes)]
    return [item for kind in kinds for item in SIZES[kind].items()]
