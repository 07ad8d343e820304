"""`Values`: weights in fewer bits, as small numbers and a scale for each row or group of columns.

A weight w is stored as q, with w close to q * scale. Scales are bfloat16, so the product q * scale is exact in float32. The
largest weight of a group always becomes the largest q (127, 7 or 448). The scale of rounded weights is therefore the scale that
they were rounded with, and rounding twice gives the same q and the same scales as rounding once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._tree import nearest

KINDS = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}  # the largest q of each
GROUPS = (64, 128)  # columns that may share a scale; without a group, a row shares one
SMALLEST = 2.0**-120  # the smallest scale; in groups of smaller weights, the largest q is not reached


@dataclass(frozen=True)
class Values:
    """How weights are rounded: to which numbers, and how many columns share a scale (0: the whole row).

    `quantize` returns q as int8, or as uint8 with the bits of float8, so that formats find zeros by comparing with 0. Scales
    are the bits of bfloat16 in int16. Both are integers because `.to(dtype)` converts floating-point buffers of a model.
    """

    kind: str
    group: int = 0

    def __str__(self) -> str:
        return self.kind + (f"/{self.group}" if self.group else "")

    @property
    def bits(self) -> int:
        return 4 if self.kind == "int4" else 8

    def quantize(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns q [rows, columns] and the scales [rows, groups]. Raises ValueError for weights that are not finite."""
        rows, columns = matrix.shape
        cut = self.split(matrix.float())
        if not bool(cut.isfinite().all()):
            raise ValueError("weights that are not finite cannot be scaled")
        scales = self.scales(cut.abs().amax(-1) if cut.numel() else cut.new_zeros(cut.shape[:2]))
        q = self.nearest(cut / scales.float().unsqueeze(-1)).view(rows, -1)[:, :columns]
        if self.kind.startswith("int"):
            return q.to(torch.int8), scales.view(torch.int16)
        bits = q.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(bits == 0x80, 0, bits), scales.view(torch.int16)  # -0.0 is stored as 0.0

    def split(self, matrix: Tensor) -> Tensor:
        """Returns the matrix as [rows, groups, columns of a group], with zeros where the last group is not full."""
        width = self.group or max(matrix.shape[1], 1)
        return F.pad(matrix, (0, -matrix.shape[1] % width)).view(len(matrix), -1, width)

    def scales(self, largest: Tensor) -> Tensor:
        """Returns the scales, in bfloat16, that turn these largest weights into the largest q."""
        return (largest / KINDS[self.kind]).clamp(min=SMALLEST).to(torch.bfloat16)

    def nearest(self, numbers: Tensor) -> Tensor:
        """Returns the nearest q as floats: whole numbers, or those of float8."""
        q = numbers.clamp(-KINDS[self.kind], KINDS[self.kind])
        return q.round() if self.kind.startswith("int") else q.to(torch.float8_e4m3fn).to(q.dtype)

    def dequantize(self, q: Tensor, scales: Tensor) -> Tensor:
        """Returns q * scale in float32, exactly."""
        rows, columns = q.shape
        number = q.float() if self.kind.startswith("int") else q.view(torch.float8_e4m3fn).float()
        each = scales.view(torch.bfloat16).float()
        if each.shape != (rows, -(-columns // (self.group or max(columns, 1)))):
            raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit {rows}x{columns} values in {self}")
        return number * each.repeat_interleave(self.group or max(columns, 1), 1)[:, :columns]

    def shrink(self, q: Tensor) -> Tensor:
        """Returns stored values in the bytes that they need: two int4 in a byte, the first in the lower bits."""
        if self.kind != "int4":
            return q
        low, high = q[..., 0::2], q[..., 1::2]
        return (low & 15 | high << 4).view(torch.uint8)

    def widen(self, stored: Tensor) -> Tensor:
        """Undoes `shrink`."""
        if self.kind != "int4":
            return stored
        both = torch.stack([stored << 4, stored], -1).view(torch.int8) >> 4
        return both.flatten(-2)


@cache
def parse(text: str) -> Values | None:
    """Reads the text that `str` makes of a `Values`; None for other text."""
    kind, _, group = text.partition("/")
    found = next((Values(kind, each) for each in (0, *GROUPS) if group == (str(each) if each else "")), None)
    return found if kind in KINDS and found is not None and str(found) == text else None


def requested(values: Any, group: Any, store: torch.dtype | None = None) -> Values | None:
    """Returns the arguments `values` and `group` as one value, or None if weights are not to be rounded."""
    if values not in (None, *KINDS):
        kinds = ", ".join(map(repr, KINDS))
        hint = nearest(str(values), KINDS)
        raise ValueError(f"values must be one of {kinds}, or None to keep the weights, not {values!r}.{hint}")
    if group not in (None, *GROUPS) or isinstance(group, bool):
        raise ValueError(f"group must be 64 or 128 columns, or None for one scale for each row, not {group!r}")
    if values is None and group is not None:
        raise ValueError(f"group={group} is the number of columns that share a scale; say which values= to store")
    if values is not None and store is not None:
        raise ValueError(f"store={store} and values={values!r} both say how weights are stored; give one of them")
    return None if values is None else Values(values, group or 0)
