"""The sizes that torch's own layers keep as attributes, read off their weights, so that a cut layer prints as what it is.

What has to be the size of an axis is mended from the trace; this is for the rest: `in_features` is read by people, and by
formulas and comparisons of the model, for which it is the size of the weight (`sizes_for_attributes_`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .axes import Expr
from .equations import bindings, place
from .provenance import Attr, Dim, Journal, Op, Source, Tagged
from .slots import owned_tensors
from .tracer import Site

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
SIZES: dict[type[nn.Module], Sizes] = {
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
    """The attributes of this layer that say now what its weights say, and how to read them again after a cut."""
    found: list[tuple[str, Callable[[Any], Any]]] = []
    for kind, sizes in SIZES.items():
        if isinstance(module, kind):
            found += [(name, read) for name, read in sizes.items() if vars(module).get(name) == read(module)]
    return [(name, read) for name, read in found if read(module) is not None]


def sizes_for_attributes_(model: nn.Module, dims: Mapping[str, list[Expr]], sites: list[Site], journal: Journal) -> None:
    """In formulas and comparisons, sizes of weights for attributes that follow them and that nothing else sets."""
    names = {key: name for key, (name, _) in owned_tensors(model).items()}
    bound = bindings(sites, journal.guards)
    known: dict[Any, Source] = {}

    def size_of(attr: Attr) -> Source:
        owner, (name, index) = attr.owner, attr.key
        read = None
        if isinstance(owner, nn.Module) and index is None and place(attr, "") not in bound:
            read = dict(right_sizes(owner)).get(name)
        found = None if read is None else read(_Tagged(owner, names, dims, journal))
        return found.source if isinstance(found, Tagged) else attr

    def replaced(source: Source) -> Source:
        if isinstance(source, Op):
            return Op(source.function, replaced(source.left), replaced(source.right))
        if isinstance(source, Attr):
            return known.setdefault(source.id, size_of(source))
        return source

    journal.uses[:] = [replace(use, source=replaced(use.source)) for use in journal.uses]
    journal.guards[:] = [replace(g, left=replaced(g.left), right=replaced(g.right)) for g in journal.guards]


class _Tagged:
    """A layer whose tensors have tagged sizes."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], dims: Mapping[str, list[Expr]], journal: Journal) -> None:
        self._given = module, names, dims, journal

    def __getattr__(self, name: str) -> Any:
        module, names, dims, journal = self._given
        value = getattr(module, name)
        if isinstance(value, Tensor) and id(value) in names:
            return SimpleNamespace(shape=tuple(Tagged(e.size, Dim(e), journal) for e in dims[names[id(value)]]))
        return Tagged(value, Attr(module, (name, None), value), journal) if type(value) is int and value > 1 else value
