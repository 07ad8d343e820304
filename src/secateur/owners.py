"""Criteria and spreads that need a whole tensor, for sharded tensors.

One process, the owner, receives the tensor and its evidence, computes the result, and sends each process its part. This is done
for one tensor at a time, with another owner for each, so that a process holds at most one whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._dist import Box, Comm, Share, comm_of, together
from ._layers import Layout
from .criteria import Criterion
from .evidence import TensorEvidence, input_norms, random_scores
from .scores import RANKED, Scores
from .shards import move


@dataclass
class _Whole:
    """The evidence for a whole tensor, on its owner."""

    name: str
    layout: Layout
    device: torch.device
    step: int
    table: Mapping[str, Tensor]

    def rows(self, leaf: str, first: int, last: int) -> Tensor:
        if leaf == "input_norm":
            return input_norms(self.table[leaf], self.layout, Box((first, last), (0, self.layout.cols)))
        return self.table[leaf][first:last]

    def random(self, seed: int, first: int, last: int) -> Tensor:
        return random_scores(self.name, seed, self.step, self.layout, Box((first, last), (0, self.layout.cols)), self.device)


def _owned(share: Share, number: int) -> tuple[bool, list[Box]]:
    """Whether this process is the owner of a tensor, and a layout in which the owner has all of it."""
    owner, nothing = number % len(share.ranks), Box((0, 0), (0, 0))
    return owner == share.me, [share.whole if i == owner else nothing for i in range(len(share.ranks))]


def scores_of(criterion: Criterion, evidence: TensorEvidence, number: int = 0) -> Scores:
    """The scores of this process's part of a tensor. Tensor `number` belongs to that process of its group."""
    share = evidence.target.share
    if criterion.elementwise or len(share.ranks) < 2:
        return replace(criterion.scores(evidence), share=share)
    mine, whole = _owned(share, number)
    leaves = {"weight": evidence.layout.matrix(evidence.target.weight), **evidence.table}
    table = {}
    for leaf in sorted(criterion.needs | {"weight"}):
        table[leaf] = leaves[leaf] if leaf == "input_norm" else move(share, leaves[leaf], share.boxes, whole)
    found, kind, comm = torch.empty(0, 0), 0, comm_of({evidence.name: share})
    with together(comm, f"compute {criterion} of {evidence.name!r}"):
        if mine:
            held = _Whole(evidence.name, share.layout, evidence.device, evidence.step, table)
            found = criterion.scores(held).rows(0, share.layout.rows)
            kind = RANKED.index(found.dtype)
    (kind,) = comm.sum(kind)
    found = found if mine else torch.empty(0, 0, dtype=RANKED[kind], device=evidence.device)
    return replace(Scores.of(move(share, found, whole, share.boxes), evidence.layout), share=share)


def measured(scores: Mapping[str, Scores], measure: Callable[[Scores], float], comm: Comm) -> dict[str, float]:
    """A number for each tensor, measured on all of its scores."""
    found = []
    for number, one in enumerate(scores.values()):
        share = one.share
        if share is None or len(share.ranks) < 2:
            found.append(measure(one) if comm.counted(share) else 0.0)
            continue
        mine, whole = _owned(share, number)
        matrix = move(share, one.rows(0, one.layout.rows), share.boxes, whole)
        found.append(measure(Scores.of(matrix, share.layout)) if mine and comm.counted(share) else 0.0)
    bits = torch.tensor(found, dtype=torch.float64).view(torch.int64)
    return dict(zip(scores, comm.within.add_(bits).view(torch.float64).tolist(), strict=True))
