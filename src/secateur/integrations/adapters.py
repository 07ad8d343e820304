"""Adapters of PEFT, such as LoRA."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..progress import track


@torch.no_grad()
def merge_lora_(model: Any) -> nn.Module:
    """Merges the adapters of a PEFT model into its weights, keeps the zeros of the weights, and returns the plain model.

    `merge_and_unload` of PEFT adds the product of the adapter's matrices to every element, and so fills the zeros of a pruned
    weight. Here elements that were zero before are zero afterwards. The outputs therefore differ from those of the unmerged
    model by what the adapters add at these elements.
    """
    named = model.named_modules() if hasattr(model, "named_modules") else ()
    layers = {name: layer for name, layer in named if hasattr(layer, "get_base_layer")}
    if not layers or not hasattr(model, "merge_and_unload"):
        raise TypeError(f"merge_lora_ takes a model of PEFT (get_peft_model), and {type(model).__name__} has no adapters")
    if merged := [name for name, layer in layers.items() if getattr(layer, "merged", False)]:
        raise ValueError(
            f"the adapter of {merged[0]!r} is merged already, so the zeros of its weight are lost; load the model and its "
            "adapter again, and merge with merge_lora_ alone"
        )
    zeros = [
        (parameter, parameter == 0)
        for layer in layers.values()
        for parameter in layer.get_base_layer().parameters()
        if parameter.ndim > 1
    ]
    plain = model.merge_and_unload()
    for parameter, zero in track(zeros, "merge_lora_", lambda pair: "x".join(map(str, pair[0].shape))):
        parameter.data.masked_fill_(zero, 0)
    return plain
