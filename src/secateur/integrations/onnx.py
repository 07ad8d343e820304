"""Export to ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._hints import hints
from .._tree import packed_layers
from ..edit import check_inputs, copied, eval_mode, split_inputs
from ..execute import decompress_
from ..methods import without_soft_masks


@hints
def to_onnx(model: nn.Module, example_inputs: Any, path: str | Path, **options: Any) -> Path:
    """Writes a model as an ONNX file, and returns its path. The model is unchanged.

    `example_inputs`: a tensor, a tuple of positional arguments, or a mapping of keyword arguments. `options` go to
    `torch.onnx.export`, such as `dynamic_shapes=` and `input_names=`.

    ONNX has no operators for our sparse formats, so compressed layers are written as dense ones, whose zeros stay zeros. The
    file runs in ONNX Runtime at the speed of a dense model: export a model that `shrink` made smaller, to be faster there.
    Needs the packages onnx and onnxscript.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"to_onnx takes the model, its example inputs and the path of the file; path={path!r} is not a path")
    args, kwargs = split_inputs(example_inputs)
    path = Path(path)
    check_inputs(model, args, kwargs)
    plain = without_soft_masks(model)
    dense = decompress_(copied(plain)) if packed_layers(plain) else plain
    with eval_mode(dense), torch.no_grad():
        program = torch.onnx.export(dense, args, kwargs=kwargs, dynamo=True, verbose=False, **options)
    assert program is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(path)
    return path
