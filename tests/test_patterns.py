"""The grammar of patterns, and what a pattern does to a layer."""

import pytest
import torch
from torch import nn

import secateur as sc
from secateur import Pattern
from secateur.scores import Scores
from secateur.select import fold


@pytest.mark.parametrize(
    ("text", "unit", "keep"),
    [
        ("unstructured", (1, 1), None),
        ("2:4", (1, 1), (2, 4)),
        ("1x1/2:4", (1, 1), (2, 4)),
        ("16x1", (16, 1), None),
        ("32x32", (32, 32), None),
        ("16x1/2:4", (16, 1), (2, 4)),
        ("out", "out", None),
        ("in", "in", None),
        ("in/1:2", "in", (1, 2)),
        ("4:4", (1, 1), (4, 4)),
    ],
)
def test_the_grammar(text, unit, keep):
    assert Pattern.parse(text) == Pattern(unit, keep)


def test_a_block_that_loses_some_is_written_with_a_minus():
    assert Pattern.parse("1x4-2") == Pattern((1, 4), lose=2)
    assert str(Pattern((1, 4), lose=2)) == "1x4-2"
    assert Pattern.parse("1x4") != Pattern.parse("1x4-2")


@pytest.mark.parametrize("made", [{"unit": "out"}, {"unit": (1, 1)}, {"unit": (1, 4), "keep": (2, 4)}])
def test_only_blocks_of_several_elements_can_lose_some(made):
    with pytest.raises(ValueError, match="loses Z elements"):
        Pattern(**made, lose=1)


def test_the_sparsity_of_blocks_that_lose_some_counts_elements():
    model = nn.Sequential(nn.Linear(16, 8))
    plan = sc.prune_(model, pattern="1x4-2", sparsity=0.25)
    assert plan.metrics()["pruned"] == 32
    lost = (~plan.masks["0.weight"]).view(32, 4).sum(1)
    assert sorted(lost.tolist()) == [0] * 16 + [2] * 16


def test_blocks_that_lose_half_cannot_be_more_than_half_sparse():
    model = nn.Sequential(nn.Linear(16, 8))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"sparsity=0\.6.*1x4-2.*at most 0\.5 of '0\.weight'"):
        sc.prune_(model, pattern="1x4-2", sparsity=0.6)
    with pytest.raises(ValueError, match=r"cannot make each row"):
        sc.prune_(model, pattern="1x4-2", sparsity=0.6, scope="row")
    assert torch.equal(model[0].weight, before)


def test_at_its_limit_a_block_pattern_is_n_of_m():
    model = nn.Sequential(nn.Linear(16, 8))
    blocks = sc.plan(model, pattern="1x4-2", sparsity=0.5)
    assert torch.equal(blocks.masks["0.weight"], sc.plan(model, pattern="2:4").masks["0.weight"])


def test_blocks_that_lose_some_compete_by_row_and_over_all_tensors_too():
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 12))
    rows = sc.plan(model, pattern="1x4-1", sparsity=0.125, scope="row")
    assert set((~rows.masks["0.weight"]).sum(1).tolist()) == {2}
    assert set((~rows.masks["1.weight"]).sum(1).tolist()) == {1}
    assert sc.plan(model, pattern="1x4-1", sparsity=0.125, scope="global").metrics()["pruned"] == 28


def test_more_of_the_same_blocks_go_when_the_sparsity_rises():
    model = nn.Sequential(nn.Linear(16, 8))
    pruner = sc.Pruner(model, pattern="2x2-3", sparsity=sc.linear(0.6, end=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner.attach(optimizer)
    before = pruner.masks["0.weight"]
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        after = pruner.masks["0.weight"]
        assert not bool((after & ~before).any())
        before = after
    assert int((~before).sum()) == round(0.6 * 128 / 3) * 3


def test_swapping_units_needs_units_that_go_whole():
    model = nn.Sequential(nn.Linear(16, 8))
    with pytest.raises(ValueError, match="goes with scope"):
        sc.Pruner(model, sparsity=0.2, pattern="1x4-2", grow=sc.random(), swap=sc.cosine(0.0, initial=0.3, end=10))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "2:4 ",
        "/2:4",
        "16x",
        "x16",
        "16x1/",
        "2:4/16x1",
        "4:2",
        "0:4",
        "0x4",
        "4x0",
        "out/2:4",
        "-1x1",
        "2:",
        "2:4:8",
        "unstructured/2:4",
        "OUT",
        "outx1",
        "2;4",
        "1.5x2",
        "in2:4",
        "16x12:4",
        "2:4\n",
        "1x4-0",
        "1x4-4",
        "1x4-5",
        "1x4--1",
        "1x4-2/2:4",
        "out-2",
        "-2",
        "1x1-1",
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="pattern"):
        Pattern.parse(text)


@pytest.mark.parametrize("given", [None, 5, ("2", "4"), b"2:4", 2.4])
def test_what_is_no_text_is_refused(given):
    with pytest.raises((TypeError, ValueError), match="pattern"):
        Pattern.parse(given)


@pytest.mark.parametrize(
    ("unit", "keep"),
    [("foo", None), ((1.5, 2), None), ((2,), None), ((1, 1), (2.5, 4)), ((1, 1), (2,)), (3, None), ((1, 1, 1), None)],
)
def test_a_pattern_made_by_hand_is_checked_too(unit, keep):
    with pytest.raises((TypeError, ValueError), match="pattern"):
        Pattern(unit, keep)


LAYERS = [
    nn.Linear(10, 6),
    nn.Conv1d(3, 6, 5),
    nn.Conv2d(3, 6, 3),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.Conv3d(2, 3, 3),
    nn.ConvTranspose2d(6, 4, 3, groups=2),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("text", ["2:4", "1:3", "3:7", "1:1000"])
def test_n_of_m_keeps_n_of_every_m_along_the_inputs_of_an_output(layer, text):
    n, m = map(int, text.split(":"))
    (mask,) = sc.plan(layer, pattern=text).masks.values()
    if isinstance(layer, nn.ConvTranspose2d):  # stored inputs first, in two groups of three
        mask = mask.view(2, 3, 2, 9).transpose(1, 2).reshape(4, 27)
    for row in mask.reshape(mask.shape[0], -1):
        for group in row.split(m):
            assert int(group.sum()) == min(n, len(group))


def test_blocks_with_n_of_m_keep_n_of_every_m_blocks():
    (mask,) = sc.plan(nn.Linear(10, 8), pattern="4x1/2:4").masks.values()
    for rows in mask.split(4):
        assert (rows == rows[0]).all()
        assert [int(group.sum()) for group in rows[0].split(4)] == [2, 2, 2]


def test_out_removes_whole_outputs_of_a_transposed_convolution():
    layer = nn.ConvTranspose2d(4, 6, 3)
    (mask,) = sc.plan(layer, pattern="out", count=2).masks.values()
    weakest = layer.weight.detach().abs().mean((0, 2, 3)).argsort()[:2]
    assert sorted((~mask[0, :, 0, 0]).nonzero().reshape(-1).tolist()) == sorted(weakest.tolist())
    assert (mask == mask[:1, :, :1, :1]).all()


def test_in_removes_an_input_of_one_group_only():
    layer = nn.Conv2d(6, 4, 3, groups=2)
    norms = layer.weight.detach().abs().view(2, 2, 3, 9).mean((1, 3)).reshape(-1)  # (group, input of it)
    (mask,) = sc.plan(layer, pattern="in", count=2).masks.values()
    kept = mask.view(2, 2, 3, 9)
    assert (kept == kept[:, :1, :, :1]).all()
    assert sorted((~kept[:, 0, :, 0]).reshape(-1).nonzero().reshape(-1).tolist()) == sorted(norms.argsort()[:2].tolist())


def test_a_block_larger_than_the_tensor_is_the_tensor():
    with pytest.warns(UserWarning, match="nothing is left of 'weight'"):
        assert sc.plan(nn.Linear(3, 2), pattern="64x64", count=1).metrics()["kept"] == 0


def test_folding_sums_in_double_precision():
    scores = torch.full((1, 1 << 16), 0.1)
    assert float(fold(Scores.of(scores), Pattern((1, 1 << 16))).rows(0, 1)) == float(torch.tensor(0.1))
