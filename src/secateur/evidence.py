"""The evidence for one tensor, or for the part of it that this process holds, from which criteria compute scores."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ._dist import Box
from ._layers import Layout
from ._tree import bare_name
from .targeting import Target


@dataclass
class TensorEvidence:
    """The evidence for one target: its weight, and the evidence of `collect`, as matrices."""

    target: Target
    table: Mapping[str, Tensor]
    step: int = 0

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def layout(self) -> Layout:
        return self.target.layout

    @property
    def device(self) -> torch.device:
        return self.target.weight.device

    def rows(self, leaf: str, first: int, last: int) -> Tensor:
        if leaf == "weight":
            return self.layout.matrix(self.target.weight)[first:last]
        found = self.table[leaf]
        return (
            input_norms(found, self.target.share.layout, self._box(first, last)) if leaf == "input_norm" else found[first:last]
        )

    def random(self, seed: int, first: int, last: int) -> Tensor:
        return random_scores(self.name, seed, self.step, self.target.share.layout, self._box(first, last), self.device)

    def _box(self, first: int, last: int) -> Box:
        """Where rows of the part that this process holds lie in the whole matrix."""
        (top, _), cols = self.target.share.box
        return Box((top + first, top + last), cols)


def input_norms(norms: Tensor, layout: Layout, box: Box) -> Tensor:
    """The input norms of a part of a matrix, row by row. `norms` has one row for each group of outputs."""
    rows = torch.arange(*box.rows, device=norms.device) // (layout.rows // norms.shape[0])
    return norms[rows][:, slice(*box.cols)]


_FRACTION = 24  # bits of a float32 in [0, 1)


def random_scores(name: str, seed: int, step: int, layout: Layout, box: Box, device: torch.device) -> Tensor:
    """Uniform scores in [0, 1) of a part of a matrix, from the index of each element alone.

    The same index gives the same number for every sharding of the tensor. The indices are mixed by the finalizer of SplitMix64
    (Steele et al., 2014), keyed by name, seed and step.
    """
    plain = bare_name(name).removeprefix("module.")  # wrappers such as DistributedDataParallel change names
    text = hashlib.blake2b(f"{seed}:{step}:{plain}".encode(), digest_size=8).digest()
    rows, cols = (torch.arange(*part, device=device) for part in box)
    x = rows[:, None] * layout.cols + cols
    x.mul_(_signed(0x9E3779B97F4A7C15)).add_(int.from_bytes(text, "little", signed=True))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x.bitwise_xor_((x >> shift) & ((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    x = (x ^ ((x >> 31) & ((1 << 33) - 1))) >> (64 - _FRACTION) & ((1 << _FRACTION) - 1)
    return x.to(torch.float32).mul_(2.0**-_FRACTION)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
