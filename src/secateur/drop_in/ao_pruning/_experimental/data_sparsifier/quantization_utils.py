"""Sparsifies and quantizes embeddings."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...sparsifier.utils import module_to_fqn
from .base_data_sparsifier import EMBEDDING_TYPES, BaseDataSparsifier, flat_names

SUPPORTED_MODULES = EMBEDDING_TYPES


def _fetch_all_embeddings(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns every descendant Embedding and EmbeddingBag of the model with its dotted name."""
    found: dict[str, nn.Module] = {}
    stack = [model]
    while stack:
        for child in stack.pop().children():
            if type(child) in SUPPORTED_MODULES:
                found[module_to_fqn(model, child) or ""] = child
            else:
                stack.append(child)
    return list(found.items())


def post_training_sparse_quantize(
    model: nn.Module,
    data_sparsifier_class: type[BaseDataSparsifier],
    sparsify_first: bool = True,
    select_embeddings: list[nn.Module] | None = None,
    **sparse_config: Any,
) -> None:
    """Sparsifies and quantizes the embeddings of a model, in place. Nothing else in the model changes.

    Args:
        model: the model whose `nn.Embedding` and `nn.EmbeddingBag` modules are replaced with quantized ones.
        data_sparsifier_class: the class of the data sparsifier; `sparse_config` are its arguments.
        sparsify_first: True prunes the float weights and quantizes the result. False quantizes, prunes the quantized values
            and quantizes the result with the same scales and zero points.
        select_embeddings: the modules to replace; by default all.
    """
    data_sparsifier = data_sparsifier_class(**sparse_config)
    chosen = _fetch_all_embeddings(model) if select_embeddings is None else _checked(model, select_embeddings)
    names = flat_names(name for name, _ in chosen)
    if sparsify_first:
        _sparsify(data_sparsifier, {names[name]: embedding for name, embedding in chosen})
        quantized = {embedding: _quantized(embedding) for _, embedding in chosen}
    else:
        quantized = {embedding: _quantized(embedding) for _, embedding in chosen}
        integers = {names[name]: cast(Any, quantized[embedding]).weight() for name, embedding in chosen}
        floats = {name: weight.dequantize() for name, weight in integers.items()}
        _sparsify(data_sparsifier, floats)
        for name, embedding in chosen:
            cast(Any, quantized[embedding]).set_weight(_requantized(floats[names[name]], integers[names[name]]))
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in quantized:
                parent._modules[key] = quantized[child]


def _checked(model: nn.Module, embeddings: list[nn.Module]) -> list[tuple[str, nn.Module]]:
    if not isinstance(embeddings, list):
        raise AssertionError(f"select_embeddings is a {type(embeddings).__name__}; give a list of embedding modules")
    chosen: list[tuple[str, nn.Module]] = []
    for embedding in embeddings:
        if type(embedding) not in SUPPORTED_MODULES:
            raise AssertionError(f"{embedding} in select_embeddings is not an nn.Embedding or nn.EmbeddingBag")
        name = module_to_fqn(model, embedding)
        if not name:  # None: not in the model; "": the model itself, which cannot be replaced in place
            raise AssertionError(f"{embedding} in select_embeddings is not inside the model")
        chosen.append((name, embedding))
    return chosen


def _sparsify(data_sparsifier: BaseDataSparsifier, data: dict[str, Any]) -> None:
    for name, one in data.items():
        data_sparsifier.add_data(name=name, data=one)
    data_sparsifier.step()
    data_sparsifier.squash_mask()


def _quantized(embedding: nn.Module) -> nn.Module:
    """Returns a quantized copy of an embedding, with its hooks and on its device."""
    from torch.ao.quantization import float_qparams_weight_only_qconfig, get_default_static_quant_module_mappings
    from torch.ao.quantization.quantize import swap_module

    before = vars(embedding).get("qconfig", embedding)
    embedding.qconfig = float_qparams_weight_only_qconfig  # type: ignore[assignment]
    try:
        return swap_module(embedding, get_default_static_quant_module_mappings(), {})
    finally:
        if before is embedding:
            del embedding.qconfig
        else:
            embedding.qconfig = before


def _requantized(values: Tensor, like: Tensor) -> Tensor:
    """Quantizes the values with the scales and zero points of `like`."""
    return torch.quantize_per_channel(
        values,
        scales=like.q_per_channel_scales(),
        zero_points=like.q_per_channel_zero_points(),
        axis=like.q_per_channel_axis(),
        dtype=like.dtype,
    )
