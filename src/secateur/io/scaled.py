"""Weights in fewer bits (`compress_(values=...)`) in files: a bit for each weight, the small numbers, and their scales.

The dtype of the numbers tells what they are: I8 is int8, U8 holds two int4 in a byte, F8_E4M3 is float8. Scales are bfloat16
[rows, groups]; the number of groups tells how many columns share one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..execute import GROUPS, Compressed, Values
from ..masks import pack_bits, unpack_bits
from .files import BadFile, Entry
from .packed import BITMASK, PARTS, SHAPE, VALUES, count_bits

SCALES = "#scales"
ALL = (*PARTS, SCALES)
_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn}


def entries(name: str, layer: Compressed) -> dict[str, Entry]:
    """The entries to write for the weight of a layer. Each is made when it is written."""
    values, q, scales = _parts(layer)
    count = int(torch.count_nonzero(q))
    stored = -(-count // 2) if values.kind == "int4" else count
    return {
        name + BITMASK: Entry(torch.uint8, (-(-q.numel() // 8),), lambda: pack_bits((_parts(layer)[1] != 0).flatten())),
        name + VALUES: Entry(_DTYPES[values.kind], (stored,), lambda: _numbers(layer)),
        name + SHAPE: Entry(torch.int64, (2,), lambda: torch.tensor(layer.shape, dtype=torch.int64)),
        name + SCALES: Entry(torch.bfloat16, tuple(scales.shape), lambda: _parts(layer)[2].view(torch.bfloat16)),
    }


def _parts(layer: Compressed) -> tuple[Values, Tensor, Tensor]:
    found = layer.rounded()
    assert found is not None
    return found


def _numbers(layer: Compressed) -> Tensor:
    values, q, _ = _parts(layer)
    kept = q[q != 0]
    even = torch.nn.functional.pad(kept, (0, kept.numel() % 2)) if values.kind == "int4" else kept
    return values.shrink(even).view(_DTYPES[values.kind])


def read(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The weight in float32, from the tensors of its parts. Raises BadFile if they do not fit each other."""
    bits, numbers, sizes, scales = (parts[name + part] for part in ALL)
    shape = tuple(sizes.tolist()) if sizes.dtype == torch.int64 and sizes.shape == (2,) else (-1, -1)
    kind = next((kind for kind, dtype in _DTYPES.items() if dtype == numbers.dtype), None)
    if kind is None or min(shape) < 0 or numbers.dim() != 1 or scales.dtype != torch.bfloat16 or scales.dim() != 2:
        raise BadFile(f"the parts of {name!r} are not those of a matrix in fewer bits")
    groups = [g for g in (0, *GROUPS) if scales.shape == (shape[0], -(-shape[1] // (g or max(shape[1], 1))))]
    if not groups:
        raise BadFile(f"{name!r} of shape {shape} cannot have scales of shape {tuple(scales.shape)}")
    if not bool(scales.float().isfinite().all()):
        raise BadFile(f"the scales of {name!r} are not finite")
    values = Values(kind, groups[0])
    count = count_bits(name, bits, shape)
    if numbers.numel() != (-(-count // 2) if kind == "int4" else count):
        raise BadFile(f"the bitmask of {name!r} keeps {count} weights, which do not fit {numbers.numel()} stored numbers")
    q = torch.zeros(shape, dtype=torch.uint8 if kind == "float8_e4m3fn" else torch.int8)
    kept = unpack_bits(bits, q.numel()).view(shape)
    q[kept] = values.widen(numbers.view(torch.uint8 if kind != "int8" else torch.int8))[:count]
    return values.dequantize(q, scales.contiguous().view(torch.int16))
