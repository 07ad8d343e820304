"""WeightNormSparsifier against a slow reference, over random shapes, blocks, levels and histories."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from secateur.drop_in.ao_pruning import CubicSL, WeightNormSparsifier

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def layer(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: int | None = None) -> nn.Module:
    """A module with one weight. With a spread, it has few distinct values, so that many are equal."""
    g = torch.Generator().manual_seed(seed)
    weight = (
        torch.randn(shape, generator=g) if spread is None else torch.randint(-spread, spread + 1, shape, generator=g).float()
    )
    module = nn.Module()
    module.weight = nn.Parameter(weight.to(dtype))
    return module


def prepared(module: nn.Module, level, block, zeros, norm=2) -> WeightNormSparsifier:
    sparsifier = WeightNormSparsifier(level, block, zeros, norm)
    sparsifier.prepare(module, [{"tensor_fqn": "weight"}])
    return sparsifier


def reference(weight: Tensor, level: float, block: tuple[int, int], zeros: int, norm: int) -> Tensor:
    """The reference, written with plain loops over blocks, stable sorts and means in float64."""
    matrix = weight.detach().double().reshape(1, -1) if weight.dim() < 2 else weight.detach().double().flatten(1)
    scores = matrix.abs() ** norm
    cells = [
        [
            (i, j)
            for i in range(top, min(top + block[0], matrix.shape[0]))
            for j in range(left, min(left + block[1], matrix.shape[1]))
        ]
        for top in range(0, matrix.shape[0], block[0])
        for left in range(0, matrix.shape[1], block[1])
    ]
    drop = len(cells) if level >= 1 else min(max(round(level * len(cells)), 0), len(cells) - 1)
    means = [torch.stack([scores[cell] for cell in one]).sum() / len(one) for one in cells]
    kept = torch.ones_like(matrix)
    for at in sorted(range(len(cells)), key=lambda i: float(means[i].float()))[:drop]:
        for cell in sorted(cells[at], key=lambda c: float(scores[c]))[:zeros]:
            kept[cell] = 0
    return kept.reshape(weight.shape)


shapes = st.one_of(
    st.tuples(st.integers(1, 9), st.integers(1, 13)),
    st.tuples(st.integers(1, 20)),
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
blocks = st.tuples(st.integers(1, 4), st.integers(1, 5))
levels = st.one_of(st.floats(0.01, 0.99), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.5]))


@given(shape=shapes, block=blocks, level=levels, norm=st.sampled_from([1, 2]), seed=st.integers(0, 99), data=st.data())
def test_masks_are_those_of_plain_loops(shape, block, level, norm, seed, data):
    zeros = data.draw(st.integers(0, math.prod(block)))
    module = layer(shape, torch.float64, seed, data.draw(st.sampled_from([None, 2])))
    sparsifier = prepared(module, level, block, zeros, norm)
    wanted = reference(module.parametrizations.weight.original, level, block, zeros, norm)
    sparsifier.step()
    assert torch.equal(module.parametrizations.weight[0].mask, wanted)


@given(shape=shapes, block=blocks, level=levels, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), data=st.data())
def test_the_number_of_zeros_is_exact_and_the_dtype_is_kept(shape, block, level, dtype, seed, data):
    zeros = data.draw(st.integers(1, math.prod(block)))
    module = layer(shape, dtype, seed)
    prepared(module, level, block, zeros).step()
    mask = module.parametrizations.weight[0].mask
    matrix = mask.reshape(1, -1) if mask.dim() < 2 else mask.flatten(1)
    pruned = [
        int((part == 0).sum()) == min(zeros, part.numel())
        for rows in matrix.split(block[0], 0)
        for part in rows.split(block[1], 1)
    ]
    whole = len(pruned)
    assert sum(pruned) == (whole if level >= 1 else min(max(round(level * whole), 0), whole - 1))
    assert mask.dtype == dtype
    assert mask.shape == module.weight.shape
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    assert module.weight.dtype == dtype


@given(shape=shapes, block=blocks, rising=st.lists(st.floats(0, 1), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_what_is_pruned_stays_pruned_while_the_level_rises(shape, block, rising, seed):
    module = layer(shape, torch.float32, seed)
    sparsifier = prepared(module, 0.0, block, math.prod(block))
    g, gone = torch.Generator().manual_seed(seed), torch.zeros(shape, dtype=torch.bool)
    for level in sorted(rising):
        sparsifier.groups[0]["sparsity_level"] = level
        sparsifier.step()
        mask = module.parametrizations.weight[0].mask == 0
        if level > 0:
            assert bool((mask | ~gone).all())
        gone = mask.clone()
        module.parametrizations.weight.original.data += torch.randn(shape, generator=g)


@given(shape=shapes, block=blocks, level=levels, seed=st.integers(0, 99))
def test_a_second_step_changes_nothing(shape, block, level, seed):
    module = layer(shape, torch.float32, seed)
    sparsifier = prepared(module, level, block, math.prod(block))
    sparsifier.step()
    before = module.parametrizations.weight[0].mask.clone()
    sparsifier.step()
    assert torch.equal(module.parametrizations.weight[0].mask, before)


@given(
    s_0=st.floats(0, 0.5),
    s_f=st.floats(0.5, 1),
    t_0=st.integers(0, 5),
    dt=st.integers(1, 4),
    n=st.integers(1, 6),
    zero=st.booleans(),
)
def test_a_cubic_schedule_rises_from_the_first_level_to_the_last(s_0, s_f, t_0, dt, n, zero):
    levels = [CubicSL.sparsity_compute_fn(s_0, s_f, t, t_0, dt, n, zero) for t in range(t_0 + dt * n + 3)]
    assert levels == sorted(levels)
    assert levels[:t_0] == [0 if zero else s_0] * t_0
    assert levels[t_0 + dt * n :] == [s_f] * 3
    assert abs(levels[t_0] - s_0) < 1e-12
