"""A pool that is bracketed by a sample has the masks of `select`, whatever the sample finds."""

from __future__ import annotations

import pytest
import torch

from secateur import brackets
from secateur._dist import Comm
from secateur.brackets import find_cut
from secateur.digits import Part, Pool, bits_for, find_cuts, keep
from secateur.kernels import arrays
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import select

SHAPE = 600, 1001


def weights(kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = {}
    for seed in range(2):
        weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
        weight = {"any": weight, "ties": (weight * 300).round() / 300, "zeros": weight.where(weight.abs() > 0.6, 0)}[kind]
        weight[0, :3] = torch.tensor([torch.inf, -torch.inf, -0.0])
        made[str(seed)] = weight.to(dtype)
    return made


def pool_of(tensors: dict[str, torch.Tensor], drop: int) -> Pool:
    size = SHAPE[0] * SHAPE[1]
    return Pool([Part(Scores.magnitude(w), i, size, SHAPE[1]) for i, w in enumerate(tensors.values())], drop, 2 * size)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("listed", [0, brackets.LISTED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["any", "ties", "zeros"])
def test_masks_are_those_of_select(monkeypatch, kind, dtype, listed, compiled):
    monkeypatch.setattr(brackets, "LISTED", listed)
    monkeypatch.setattr(arrays, "ENOUGH", 0)
    monkeypatch.setattr(arrays, "LARGE", 0 if compiled else float("inf"))
    tensors, found, whole = weights(kind, dtype), 0, 0
    for drop in (1, 300_000, 500_000, 1_100_000, 1_201_199):
        pool = pool_of(tensors, drop)
        bits = bits_for({dtype})
        sizes = {"longest": SHAPE[0] * SHAPE[1], "tensors": len(pool.parts)}
        assert not find_cut(pool, bits, Comm(), **sizes)
        found, whole = found + (pool.known >= 16), whole + (pool.known == bits)
        assert not find_cuts([pool], bits, Comm(), **sizes)
        masks = [keep(pool, part, bits) for part in pool.parts]
        scores = {name: Scores.magnitude(weight) for name, weight in tensors.items()}
        for mine, other in zip(masks, select(scores, Pattern(), scope="global", count=drop).values(), strict=True):
            assert torch.equal(mine, other)
    assert found >= 2  # most cuts are bracketed; those at the ends are counted
    assert whole >= 1


def test_nan_is_found_wherever_it_lies():
    tensors = weights("any", torch.float32)
    tensors["1"][-1, -1] = torch.nan
    assert find_cut(pool_of(tensors, 500_000), 32, Comm(), longest=SHAPE[0] * SHAPE[1], tensors=2)


@pytest.mark.parametrize("tensors", [2, 1 << 30], ids=["many inside", "many tensors"])
def test_the_leading_bits_are_found_where_the_rest_is_not(tensors):
    """Either too many keys lie in the bracket to be kept, or keys and places do not fit into one integer."""
    made = weights("any", torch.float32)
    if tensors == 2:
        made["1"][:] = made["0"].view(-1)[: SHAPE[1]].abs().median()
    pool, sizes = pool_of(made, 700_000), {"longest": SHAPE[0] * SHAPE[1], "tensors": tensors}
    assert not find_cut(pool, 32, Comm(), **sizes)
    assert pool.known == 16
    assert not find_cuts([pool], 32, Comm(), **{**sizes, "tensors": 2})
    scores = {name: Scores.magnitude(weight) for name, weight in made.items()}
    for part, other in zip(pool.parts, select(scores, Pattern(), scope="global", count=700_000).values(), strict=True):
        assert torch.equal(keep(pool, part, 32), other)
