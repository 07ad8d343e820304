"""SparseGPT: exact masks, corrected weights, and nothing worse than plain masking."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from secateur.methods import Amount, LayerProblem
from secateur.patterns import Pattern

METHOD = sc.methods.sparsegpt()


def problem(rows=6, cols=20, tokens=200, dtype=torch.float64, seed=0, groups=1):
    """A layer whose inputs are correlated, so that corrections pay."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(groups, cols, cols, generator=draw, dtype=torch.float64)
    x = torch.randn(groups, tokens, cols, generator=draw, dtype=torch.float64) @ mix
    H = x.mT @ x
    W = torch.randn(rows, cols, generator=draw, dtype=torch.float64).to(dtype)
    return LayerProblem("layer", W, H=H if groups > 1 else H[0])


def error(one, V):
    """tr((W - V) H (W - V)'), row by row and group by group."""
    H = one.H if one.H.ndim == 3 else one.H[None]
    away = (one.W - V).double().view(len(H), -1, H.shape[-1])
    return float(((away @ H) * away).sum())


def slow(W, H, mask, damp=0.01):
    """The same with a fixed mask, one weight and one row at a time, from the inverse of the remaining Gram matrix."""
    H = H + damp * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    V = W.clone()
    for row, kept in zip(V, mask, strict=True):
        for j in range(len(row)):
            if kept[j]:
                continue
            inverse = torch.linalg.inv(H[j:, j:])
            row[j:] -= row[j] / inverse[0, 0] * inverse[0]
            row[j] = 0
    return V


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1:3", "2x1", "3x5", "out", "in", "1x4-2", "1x2/2:4"])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_the_weights_are_those_of_one_removal_after_another(pattern, width):
    one = problem()
    kept = Pattern.parse(pattern)
    amount = Amount() if kept.keep else Amount(sparsity=0.4)
    found = sc.methods.sparsegpt(width=width).solve(one, kept, amount, None)
    wanted = slow(one.W, one.H, found.mask)
    masked = one.W * found.mask
    H = one.H
    better = (((one.W - wanted) @ H) * (one.W - wanted)).sum(1) < (((one.W - masked) @ H) * (one.W - masked)).sum(1)
    torch.testing.assert_close(found.weight, torch.where(better[:, None], wanted, masked), rtol=1e-8, atol=1e-8)
    assert better.any() or pattern == "out"  # of a row that goes there is nothing to correct


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    cols=st.integers(1, 24),
    tokens=st.integers(1, 40),
    sparsity=st.floats(0, 1),
    scope=st.sampled_from(["tensor", "row"]),
    width=st.integers(1, 9),
    seed=st.integers(0, 9),
    before=st.floats(0, 0.7),
)
def test_counts_are_exact_and_the_error_is_not_above_that_of_masking(rows, cols, tokens, sparsity, scope, width, seed, before):
    one = problem(rows, cols, tokens, torch.float32, seed)
    previous = torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) >= before
    amount = Amount(scope, sparsity)
    found = sc.methods.sparsegpt(width=width).solve(one, Pattern(), amount, previous)
    pools = found.mask.view(rows, cols) if scope == "row" else found.mask.view(1, -1)
    gone = (~previous).view_as(pools).sum(1)
    assert torch.equal((~pools).sum(1), gone.clamp(min=round(sparsity * pools.shape[1])))
    assert not (found.mask & ~previous).any()
    assert found.weight.isfinite().all()
    assert not found.weight[~found.mask].any()
    assert error(one, found.weight) <= error(one, one.W * found.mask) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8", "2:7"])
def test_every_group_keeps_n_of_m_also_a_short_one_at_the_end(pattern):
    one, kept = problem(cols=22), Pattern.parse(pattern)
    n, m = kept.keep
    mask = METHOD.solve(one, kept, Amount(), None).mask
    for a in range(0, 22, m):
        group = mask[:, a : a + m]
        assert (group.sum(1) == min(n, group.shape[1])).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_at_sparsity_zero_nothing_changes(dtype):
    one = problem(dtype=dtype)
    found = METHOD.solve(one, Pattern(), Amount(sparsity=0.0), None)
    assert found.mask.all()
    assert torch.equal(found.weight.to(dtype), one.W)


def test_dead_inputs_and_a_singular_gram_matrix_give_finite_weights_and_dead_inputs_go_first():
    one = problem(tokens=3)  # rank 3 of 20
    H = one.H.clone()
    H[4], H[:, 4] = 0, 0
    found = METHOD.solve(LayerProblem("layer", one.W, H=H), Pattern(), Amount(sparsity=0.5), None)
    assert found.weight.isfinite().all()
    assert not found.mask[:, 4].any()
    none = METHOD.solve(LayerProblem("layer", one.W, H=torch.zeros_like(H)), Pattern(), Amount(sparsity=0.5), None)
    assert none.weight.isfinite().all()
    assert (~none.mask).sum() == 60


def test_without_damping_a_singular_gram_matrix_is_an_error_that_names_the_layer():
    with pytest.raises(ValueError, match="Gram matrix of the inputs of 'layer' is singular"):
        sc.methods.sparsegpt(damp=0).solve(problem(tokens=3), Pattern(), Amount(sparsity=0.5), None)


def test_the_groups_of_a_convolution_are_solved_with_their_own_inputs():
    one = problem(rows=6, groups=3)
    found = METHOD.solve(one, Pattern(), Amount("row", 0.5), None)
    for g in range(3):
        part = slice(2 * g, 2 * g + 2)
        alone = METHOD.solve(LayerProblem("layer", one.W[part], H=one.H[g]), Pattern(), Amount("row", 0.5), None)
        assert torch.equal(found.mask[part], alone.mask)
        torch.testing.assert_close(found.weight[part], alone.weight)


def test_wanted_outputs_are_aimed_at():
    """With B = T H for another weight T, the answer is that for a layer with T as its weight."""
    one, T = problem(), problem(seed=5).W
    method = sc.methods.sparsegpt(damp=1e-9)
    aimed = method.solve(LayerProblem("layer", one.W, H=one.H, B=T @ one.H), Pattern(), Amount(sparsity=0.3), None)
    plain = method.solve(LayerProblem("layer", T, H=one.H), Pattern(), Amount(sparsity=0.3), None)
    assert torch.equal(aimed.mask, plain.mask)
    changed = (plain.weight - T * plain.mask).abs().sum(1) > 0
    torch.testing.assert_close(aimed.weight[changed], plain.weight[changed], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{"damp": -1.0}, {"width": 0}, {"damp": math.nan}])
def test_odd_settings_are_refused(settings):
    with pytest.raises(ValueError, match="sparsegpt takes"):
        sc.methods.sparsegpt(**settings)


@torch.no_grad()
def test_it_beats_plain_masking_and_wanda_on_the_output_of_a_model():
    torch.manual_seed(0)
    mix = torch.randn(32, 32)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))
    data = [torch.randn(64, 32) @ mix for _ in range(8)]
    wanted = torch.cat([model(x) for x in data])
    errors = {}
    for name, how in {"magnitude": {}, "wanda": {"criterion": "wanda"}, "sparsegpt": {"method": "sparsegpt"}}.items():
        twin = copy.deepcopy(model)
        sc.prune_(twin, pattern="2:4", data=data, **how)
        errors[name] = float((torch.cat([twin(x) for x in data]) - wanted).square().sum())
    assert errors["sparsegpt"] < 0.8 * min(errors["wanda"], errors["magnitude"])
