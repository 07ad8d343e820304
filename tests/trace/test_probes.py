"""Cuts are exact for every kind of layer and wiring: removing random units equals zeroing them, in float64."""

from pathlib import Path

import probes
import pytest
import torch
from cutting import check, group_of, sizes
from probes import PROBES, Attention, Lam, conv, image, tokens  # noqa: F401  (other tests take them from here)
from torch import nn

torch.manual_seed(0)

# The sizes of the prunable groups, for probes without a test of their own below.
SIZES = {
    "concatenation": [6, 8], "split": [8, 12], "glu": [10], "fused_gate_up": [10], "squeeze_excite": [4, 16],
    "module_used_twice": [16], "flatten": [6, 8], "slice_write": [16], "heads_first": [4, 6, 6],
    "one_key_head_behind_the_queries": [4, 6], "depthwise_with_multiplier": [3, 4], "channel_shuffle_written_out": [3, 4],
    "channel_shuffle": [3, 4], "pixel_shuffle": [4, 5], "unfold_and_fold": [8], "bare_parameters": [10, 16],
    "expert_list": [8, 8, 8], "bilinear": [6, 7, 8],
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_every_axis_that_may_lose_units_is_found(name):
    assert sizes(check(*PROBES[name]())) == SIZES[name]


def test_every_probe_is_checked():
    """Each probe is in the table above or in one of the tests below."""
    source = Path(__file__).read_text(encoding="utf-8")
    for name, build in PROBES.items():
        assert name in SIZES or f"probes.{build.func.__name__}(" in source, name


# ---------------------------------------------------------------- wiring


def test_residual_couples_its_branches():
    t = check(*probes.residual())
    assert sizes(t) == [16, 24]
    roles = {m.tensor: m.role for m in group_of(t, "a.weight", 0)[0].members if "weight" in m.tensor}
    assert roles == {"a.weight": "produce", "b.weight": "consume", "c.weight": "produce", "o.weight": "consume"}


def test_chunk_ties_counts_and_not_units():
    t = check(*probes.chunk())
    assert sizes(t) == [10, 10]
    assert len(t.constraints) == 1


def test_a_weight_used_both_ways_makes_and_reads_its_units():
    t = check(*probes.weight_used_twice())
    assert sizes(t) == [16]
    assert {m.role for m in group_of(t, "w", 0)[0].members} == {"produce", "consume"}


def test_outputs_and_inputs_keep_their_shape():
    t = check(*probes.chain())
    assert t.skipped["0.weight[1]"] == "given by the inputs"
    assert t.skipped["2.weight[0]"] == t.skipped["2.bias[0]"] == "the model returns it"


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("sdpa", [True, False], ids=["sdpa", "eager"])
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("kv", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_attention_loses_heads_kv_groups_and_head_dims(kv, rotary, sdpa):
    t = check(*probes.attention(kv, rotary, sdpa))
    heads, dims = group_of(t, "v.weight", 0) if kv > 1 else (None, group_of(t, "v.weight", 0)[0])
    assert dims.size == 6
    if heads:
        assert heads.size == kv
        assert {m.tensor for m in heads.members} >= {"q.weight", "k.weight", "v.weight", "o.weight"}
    if kv < 4:  # the query heads of each key head are units too
        assert 4 // kv in sizes(t)
    pairs = group_of(t, "q.weight", 0)[-1]
    assert pairs.size == (3 if rotary else 6)
    assert ("freq" in {m.tensor for m in pairs.members}) == rotary


@pytest.mark.parametrize("sdpa", [True, False])
def test_fused_qkv_shares_heads_and_only_counts_of_value_dims(sdpa):
    t = check(*probes.fused_qkv(sdpa))
    assert sizes(t) == [4, 6, 6]
    qk, v = (g for g in t.prunable if g.size == 6)
    assert {m.tensor for m in v.members} == {"qkv.weight", "qkv.bias", "o.weight"}
    assert {m.tensor for m in qk.members} == {"qkv.weight", "qkv.bias"}
    assert any(set(c.variables) == {qk.atom, v.atom} for c in t.constraints)


def test_size_in_a_formula_is_recorded():
    t = check(*probes.head_size_in_the_scale(True))
    assert [u.how for u in t.formula_uses] == ["float"]
    t = check(*probes.head_size_in_the_scale(False))
    flagged = [g for g in t.groups if "scale" in g.flags]
    assert [{m.tensor for m in g.members} for g in flagged] == [{"q.weight", "q.bias", "k.weight", "k.bias"}]
    assert {u.how for u in t.formula_uses} == {"scaled_dot_product_attention(scale=None)"}


@pytest.mark.parametrize("kind", ["plain", "other_widths", "no_bias", "bias_kv"])
def test_multihead_attention_module(kind):
    t = check(*probes.multihead(kind))
    assert any("att.out_proj.weight" in {m.tensor for m in g.members} for g in t.prunable)


def test_transformer_encoder_across_its_norms():
    t = check(*probes.transformer_encoder(), across=True)
    assert sizes(t).count(20) == 2
    assert [g.size for g in t.prunable if "norm" in g.flags] == [24]


# ---------------------------------------------------------------- convolutions


@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize("groups", [1, 4, 8], ids=["dense", "grouped", "depthwise"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolution(rank, groups, transposed):
    t = check(*probes.convolution(rank, groups, transposed))
    assert sizes(t) == ([8, 8] if groups == 1 else [2, 2, 4] if groups == 4 else [8])
    if groups == 1:
        roles = {m.role: m.dim for g in t.prunable for m in g.members if m.tensor == "2.weight"}
        assert roles == ({"produce": 1, "consume": 0} if transposed else {"produce": 0, "consume": 1})


def test_padded_shortcut():
    assert 8 in sizes(check(*probes.padded_shortcut()))


# ---------------------------------------------------------------- normalisation


@pytest.mark.parametrize("kind", probes.CHANNEL_NORMS)
def test_channel_norms(kind):
    t = check(*probes.channel_norm(kind), across=True)
    assert all(g.exact for g in t.prunable) or kind == "groups"
    if kind == "batch":
        assert {(m.tensor, m.role) for m in t.prunable[0].members if m.tensor.startswith("1.")} == {
            ("1.weight", "elementwise"), ("1.bias", "elementwise"), ("1.running_mean", "buffer"), ("1.running_var", "buffer"),
        }  # fmt: skip


@pytest.mark.parametrize("kind", probes.LAYER_NORMS)
def test_layer_norms_are_flagged_and_right_on_the_kept_units(kind):
    t = check(*probes.layer_norm(kind), across=True)
    assert [g.flags for g in t.prunable] == [{"mean" if kind == "rms" else "norm"}]
    assert not t.prunable[0].exact


def test_softmax_and_mean_over_the_cut_axis_are_flagged():
    t = check(*probes.softmax_and_mean_over_units(), across=True)
    assert {g.size: set(g.flags) for g in t.prunable} == {8: {"softmax"}, 6: {"mean"}}


# ---------------------------------------------------------------- tables, recurrence, bare parameters


def test_tied_embedding():
    t = check(*probes.tied_embedding())
    (rows,) = group_of(t, "e.weight", 0)
    assert "addressed by value" in rows.frozen
    assert {m.role for g in group_of(t, "e.weight", 1) for m in g.members if m.tensor == "e.weight"} == {"produce", "consume"}


def test_embedding_bag():
    assert sizes(check(*probes.embedding_bag(), across=True)) == [12]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("length", [5, 1])
def test_layers_and_directions_of_a_recurrent_layer_choose_their_own_units(kind, layers, both, length):
    t = check(*probes.recurrent(kind, layers, both, length))
    assert sizes(t) == [6, *[8] * (layers * (1 + both))]
    for seed in range(3):  # equal counts, because one attribute gives all of them
        assert len({t.by_atom[g.atom].size - n for g, n in _counts(t, seed).items() if g.size == 8}) == 1


def _counts(t, seed):
    from secateur.trace import plan_counts

    draw = torch.Generator().manual_seed(seed)
    return plan_counts(t, {g: int(torch.randint(1, g.size + 1, (), generator=draw)) for g in t.prunable}).counts


@pytest.mark.parametrize(("layers", "length", "expected"), [(1, 5, [4, 6, 8]), (2, 1, [4, 4, 6, 8, 8])])
def test_lstm_with_projection_and_last_state(layers, length, expected):
    assert sizes(check(*probes.lstm_with_projection(layers, length))) == expected


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("length", [1, 3])
def test_recurrent_cells_in_a_loop(kind, length):
    assert sizes(check(*probes.recurrent_cell(kind, length))) == [6, 8]


def test_weights_stored_as_in_by_out():
    t = check(*probes.weights_stored_as_in_by_out())
    assert {(m.tensor, m.dim, m.role) for m in t.prunable[0].members} == {
        ("w1", 1, "produce"),
        ("b1", 0, "elementwise"),
        ("w2", 0, "consume"),
    }


def test_einsum_with_parameters():
    t = check(*probes.einsum())
    assert sizes(t) == [4, 6]
    assert {m.role for m in group_of(t, "w", 1)[0].members if m.tensor == "w"} == {"produce"}


def test_experts_as_three_dimensional_tensors():
    assert 8 in sizes(check(*probes.expert_tensors()))


def test_experts_chosen_by_data():
    t = check(*probes.experts_chosen_by_data())
    assert sizes(t) == [8, 8]
    assert "addressed by value" in t.skipped["gate.weight[0]"]
    assert not t.record.errors


def test_low_rank_weights_multiplied():
    t = check(*probes.low_rank_update())
    assert sizes(t) == [4, 16]
    assert {(m.tensor, m.role) for m in group_of(t, "up", 1)[0].members} == {("up", "consume"), ("down", "produce")}
