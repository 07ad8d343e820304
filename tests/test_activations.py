"""Gates: the smallest inputs of a layer become zero, as many as asked, and everything else about the model stays."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.activations import Gates, gate_
from secateur.blocks import repeated_blocks
from secateur.drop_in.ao_pruning import WeightNormSparsifier
from secateur.edit import record_of
from secateur.methods import allocate
from secateur.methods.gates import Gate
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import keep_largest, select

METHODS = ("threshold", "topk", "static")


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder block that takes keyword arguments, gives a tuple, and writes keys into a cache, as real ones do."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.q_proj, self.k_proj = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.o_proj, self.mlp = nn.Linear(width, width), Mlp(width, 2 * width)

    def forward(self, hidden, *, scale, cache=None):
        x = self.norm(hidden)
        keys = self.k_proj(x)
        if cache is not None:
            cache.seen.append(keys)
            keys = torch.cat(cache.seen[-1:], 1)
            assert len(cache.seen) <= cache.layers, "a cache was written to twice"
        mixed = nn.functional.scaled_dot_product_attention(self.q_proj(x), keys, keys, is_causal=True)
        hidden = hidden + self.o_proj(mixed) * scale
        return (hidden + self.mlp(hidden), None)


class Cache:
    def __init__(self, layers: int):
        self.layers, self.seen = layers, []


class Decoder(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, vocabulary: int = 40):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, use_cache=True):
        x, cache = self.embed(ids), Cache(len(self.layers)) if use_cache else None
        for layer in self.layers:
            x, _ = layer(x, scale=torch.tensor(0.5), cache=cache)
        return {"logits": self.head(x), "cache": cache}


class Conv1D(nn.Module):
    """Hugging Face's: a linear layer whose weight is (in, out)."""

    def __init__(self, out: int, inputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


def batches(*shape: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(*shape) for _ in range(count)]


def ids(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(40, (2, 12)) for _ in range(count)]


def hooks(model: nn.Module) -> dict:
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_state_dict_hooks", "_buffers")
    return {(path, name): dict(getattr(module, name)) for path, module in model.named_modules() for name in names}


def inputs_of(module: nn.Module, model: nn.Module, batch) -> torch.Tensor:
    """What the layer really multiplies, seen by the last hook."""
    found = []
    handle = module.register_forward_pre_hook(lambda _, args: found.append(args[0].detach().clone()))
    model(batch)
    handle.remove()
    return torch.cat(found)


# --- which elements go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.83])
def test_threshold_of_bfloat16_is_the_exact_quantile(sparsity):
    model, data = nn.Sequential(nn.Linear(64, 8)).bfloat16(), [x.bfloat16() for x in batches(50, 64)]
    gates = gate_(model, sparsity=sparsity, data=data)
    magnitudes = torch.cat(data).float().abs().flatten()
    values, counts = magnitudes.unique(return_counts=True)
    below = (counts.cumsum(0) - counts) / counts.sum()
    best = int((below - sparsity).abs().argmin())
    assert gates.gates["0"].threshold == float(values[best])
    assert gates.gates["0"].calibrated == pytest.approx(float(below[best]), abs=1e-7)
    assert gates.measured(data).sparsity == pytest.approx(gates.gates["0"].calibrated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_threshold_is_within_its_bin_of_the_exact_quantile_and_its_count_is_exact(dtype, scale):
    model, data = nn.Sequential(nn.Linear(64, 8)).to(dtype), [(x * scale).to(dtype) for x in batches(100, 64)]
    gates = gate_(model, sparsity=0.4, data=data)
    gate, magnitudes = gates.gates["0"], torch.cat(data).abs().flatten().double()
    assert gate.threshold == pytest.approx(float(magnitudes.quantile(0.4)), rel=1 / 400)
    assert gate.calibrated == float((magnitudes.to(dtype) < gate.threshold).double().mean())
    assert gates.measured(data).sparsity == pytest.approx(gate.calibrated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(7, 1), (5, 2), (6, 33), (2, 3, 64), (40,)])
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("tied", [False, True])
def test_topk_keeps_what_select_would_keep_in_each_row(dtype, shape, sparsity, tied):
    x = torch.randn(shape).to(dtype)
    x = (x * 2).round() if tied else x
    rows = x.reshape(-1, shape[-1])
    drop = shape[-1] - max(round((1 - sparsity) * shape[-1]), 1)
    kept = select({"x": Scores.magnitude(rows)}, Pattern(), scope="row", count=drop)["x"]
    closed = Gate("x", "topk", sparsity).close(x)
    assert torch.equal(closed.reshape(rows.shape), rows.masked_fill(~kept, 0))


def test_topk_of_equal_values_gates_the_lowest_index_first():
    closed = Gate("x", "topk", 0.5).close(torch.tensor([[1.0, -1.0, 1.0, 1.0], [2.0, 1.0, -1.0, 1.0]]))
    assert closed.tolist() == [[0, 0, 1, 1], [2, 0, 0, 1]]


def test_static_gates_the_features_that_are_least_on_average():
    model, data = small(), batches(20, 32)
    gates = gate_(model, sparsity=0.25, at="0", data=data, method="static")
    assert torch.equal(gates.gates["0"].mask, keep_largest(torch.cat(data).abs().double().sum(0), 8))
    assert inputs_of(model[0], model, data[0]).eq(0).all(0).sum() == 8


LAYERS = {
    "linear": (nn.Linear(12, 8), (5, 12), -1),
    "linear over tokens": (nn.Linear(12, 8), (2, 5, 12), -1),
    "conv1d": (nn.Conv1d(12, 8, 3), (4, 12, 9), 1),
    "conv2d": (nn.Conv2d(12, 8, 3), (2, 12, 6, 6), 1),
    "conv2d without a batch": (nn.Conv2d(12, 8, 3), (12, 6, 6), 0),
    "grouped conv2d": (nn.Conv2d(12, 8, 3, groups=4), (2, 12, 6, 6), 1),
    "conv3d": (nn.Conv3d(12, 8, 2), (2, 12, 3, 4, 4), 1),
    "transposed conv2d": (nn.ConvTranspose2d(12, 8, 3), (2, 12, 4, 4), 1),
    "(in, out) linear": (Conv1D(8, 12), (3, 4, 12), -1),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", LAYERS)
def test_gates_fit_every_kind_of_layer(kind, method):
    layer, shape, axis = LAYERS[kind]
    model, data = nn.Sequential(copy.deepcopy(layer)), batches(*shape)
    gates = gate_(model, sparsity=0.5, data=data, method=method)
    x = inputs_of(model[0], model, data[0])
    kept = x.ne(0).movedim(axis, 0).flatten(1)
    if method == "topk":
        assert kept.sum(0).eq(6).all()
    if method == "static":
        assert kept.all(1).sum() == 6
        assert kept.any(1).sum() == 6
    assert gates.measured(data).sparsity == pytest.approx(0.5, abs=0.02)
    assert torch.equal(model(data[0]), layer.forward(x))


def test_sparsity_zero_changes_nothing():
    model, data = small(), batches(8, 32)
    before = model(data[0])
    for method in METHODS:
        gates = gate_(model, sparsity=0, data=data, method=method)
        assert torch.equal(model(data[0]), before)
        assert gates.measured(data).error == 0
        gates.undo_()


def test_inputs_that_are_all_alike_are_not_gated_away():
    model = nn.Sequential(nn.Linear(16, 4))
    gates = gate_(model, sparsity=0.9, data=[torch.randn(8, 16).sign()])
    assert gates.gates["0"].calibrated == 0


@pytest.mark.parametrize("method", METHODS)
def test_nan_is_not_hidden_by_a_gate(method):
    model = nn.Sequential(nn.Linear(16, 4))
    gate_(model, sparsity=0.5, data=batches(4, 16), method=method)
    x = torch.randn(2, 16)
    x[0] = torch.nan
    assert model(x)[0].isnan().all()
    assert not model(x)[1].isnan().any()


def test_an_input_by_keyword_is_gated_too():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(input=x)

    model, x = Named(), torch.randn(3, 8)
    gates = gate_(model, sparsity=0.5, method="topk")
    assert gates.measured(x).sparsity == 0.5
    assert torch.equal(model(x), model.layer.forward(Gate("", "topk", 0.5).close(x)))


def test_gates_do_not_write_to_the_input():
    model, x = small(), torch.randn(4, 32)
    before = x.clone()
    for method in METHODS:
        gates = gate_(model, data=[x], method=method)
        model(x)
        gates.undo_()
    assert torch.equal(x, before)


# --- which layers ---------------------------------------------------------------------------------------------------


def test_default_is_every_layer_inside_the_repeated_blocks():
    gates = gate_(Decoder(), method="topk")
    assert len(gates.gates) == 3 * 6
    assert all(name.startswith("layers.") for name in gates.gates)


def test_default_without_blocks_is_every_layer():
    assert list(gate_(small(), method="topk").gates) == ["0", "2", "4"]


def test_globs_name_layers_and_skip_tables_containers_and_norms():
    assert list(gate_(Decoder(), at="*.mlp.down_proj", method="topk").gates) == [f"layers.{i}.mlp.down_proj" for i in range(3)]
    several = gate_(Decoder(), at=("*.1.*_proj", "head"), method="topk")
    assert len(several.gates) == 7
    everything = gate_(Decoder(), at="*", method="topk")
    assert "embed" not in everything.gates
    assert len(everything.gates) == 19


def test_a_plain_name_gates_a_module_of_any_kind():
    model = Decoder()
    gates = gate_(model, at="layers.1.mlp", data=ids())
    assert list(gates.gates) == ["layers.1.mlp"]
    assert gates.measured(ids()).layers[0].sparsity == pytest.approx(0.5, abs=0.05)


def test_a_module_with_two_names_has_one_gate_and_may_be_called_often():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    x = torch.randn(6, 8)
    gates = gate_(model, data=[x])
    assert list(gates.gates) == ["0"]
    assert gates.measured(x).sparsity == pytest.approx(0.5, abs=0.05)
    gates.undo_()
    assert list(gate_(model, at="2", data=[x]).gates) == ["0"]  # the other name means the same module


# --- leaving the model as it was ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spread", ["uniform", "greedy"])
def test_remove_restores_the_model_exactly(method, spread):
    model, data = Decoder(depth=2).train(), ids(1)
    model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: None)
    before, state, output = hooks(model), copy.deepcopy(model.state_dict()), model(data[0])["logits"]
    gates = gate_(model, data=data, method=method, spread=spread)
    assert model.training
    assert not torch.equal(model(data[0])["logits"], output)
    gates.measured(data)
    assert list(model.state_dict()) == list(state)
    gates.undo_()
    gates.undo_()
    assert hooks(model) == before
    assert torch.equal(model(data[0])["logits"], output)
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)


def test_calibration_leaves_statistics_and_modes_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 8, 3)).train()
    before = copy.deepcopy(model.state_dict())
    gates = gate_(model, data=batches(2, 3, 8, 8), spread="greedy")
    gates.measured(batches(2, 3, 8, 8))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


class Breaks(nn.Module):
    def __init__(self, value: float):
        super().__init__()
        self.first, self.second, self.value = nn.Linear(8, 8), nn.Linear(8, 8), value

    def forward(self, x):
        return self.second(self.first(x) * self.value)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"sparsity": 1.0}, ValueError, "sparsity=1.0"),
        ({"sparsity": -0.1}, ValueError, "sparsity=-0.1"),
        ({"sparsity": True}, ValueError, "sparsity=True"),
        ({"sparsity": "half"}, ValueError, "sparsity='half'"),
        ({"method": "treshold"}, ValueError, "Did you mean 'threshold'"),
        ({"spread": "greed"}, ValueError, "Did you mean 'greedy'"),
        ({"data": None}, ValueError, "method='threshold' is calibrated, so pass data="),
        ({"data": None, "method": "topk", "spread": "greedy"}, ValueError, "spread='greedy' is calibrated"),
        ({"data": torch.randn(2, 8)}, TypeError, r"pass \[batch\]"),
        ({"data": []}, ValueError, "no batch"),
        ({"data": [torch.randn(2, 9)]}, ValueError, "does not run on a batch .* shapes cannot be multiplied"),
        ({"data": [torch.randn(2, 8), "text"]}, TypeError, "a batch is"),
        ({"at": "secnd"}, ValueError, "Did you mean 'second'"),
        ({"at": "*.second"}, ValueError, "matches no layer"),
        ({"at": ("first", "thrd*")}, ValueError, "thrd"),
        ({"at": 3}, TypeError, "at=3"),
    ],
)
def test_bad_arguments_raise_and_leave_the_model_as_it_was(given, error, words):
    model = Breaks(1.0)
    before = hooks(model)
    with pytest.raises(error, match=words):
        gate_(model, **{"data": [torch.randn(2, 8)], **given})
    assert hooks(model) == before
    assert model.training


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["threshold", "static"])
def test_inputs_that_are_not_finite_name_the_layer(value, method):
    model = Breaks(value)
    before = hooks(model)
    with pytest.raises(ValueError, match="'second' is NaN or infinite"):
        gate_(model, data=[torch.randn(2, 8)], method=method)
    assert hooks(model) == before


def test_nan_in_the_output_stops_greedy_and_leaves_the_model_as_it_was():
    model = Breaks(1.0)
    with torch.no_grad():
        model.second.bias.fill_(torch.nan)
    before = hooks(model)
    with pytest.raises(ValueError, match="NaN"):
        gate_(model, data=[torch.randn(2, 8)], spread="greedy")
    assert hooks(model) == before


def test_a_layer_that_sees_nothing_is_named():
    model = Breaks(1.0)
    model.spare = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="'spare' saw no input"):
        gate_(model, at="*", data=[torch.randn(2, 8)])
    assert not model.spare._forward_pre_hooks
    gates = gate_(model, data=[torch.randn(2, 8)])
    assert list(gates.skipped) == ["spare"]
    assert "skipped: spare, which saw no input" in str(gates)


def test_an_input_that_is_no_float_names_the_layer():
    model = Decoder()
    with pytest.raises(TypeError, match=r"first input of 'embed' is torch\.int64"):
        gate_(model, at="embed", data=ids())
    assert not model.embed._forward_pre_hooks


def test_a_second_gate_is_refused_and_the_first_stays():
    model, x = small(), torch.randn(4, 32)
    gates = gate_(model, at="2", method="topk")
    before, output = hooks(model), model(x)
    with pytest.raises(ValueError, match=r"'2' has a gate already; remove it first"):
        gate_(model, method="topk")
    with pytest.raises(ValueError, match="'2' has a gate already"):
        Gates.load(model, gates.state_dict())
    assert hooks(model) == before
    assert torch.equal(model(x), output)


def test_gates_that_were_removed_do_not_take_away_later_ones():
    model, x = small(), torch.randn(4, 32)
    first = gate_(model, method="topk")
    first.undo_()
    gate_(model, sparsity=0.8, method="topk")
    output = model(x)
    first.undo_()
    assert torch.equal(model(x), output)


def test_undoing_one_of_two_calls_takes_that_call_from_the_record():
    model = small()
    first, second = gate_(model, at="0", method="topk"), gate_(model, at="2", method="topk")
    assert [arguments["at"] for _, arguments in record_of(model)] == [["0"], ["2"]]
    first.undo_()
    first.undo_()
    assert [arguments["at"] for _, arguments in record_of(model)] == [["2"]]
    again = gate_(model, at="0", method="topk")
    first.undo_()  # its gates are gone, and the new ones have the same arguments
    assert [arguments["at"] for _, arguments in record_of(model)] == [["2"], ["0"]]
    second.undo_()
    again.undo_()
    assert record_of(model) == []


# --- what is measured -----------------------------------------------------------------------------------------------


def test_measured_counts_zeros_that_were_there_and_those_the_gate_adds():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.randn(50, 32)
    hidden = model[1](model[0](x))
    already = float(hidden.eq(0).double().mean())
    gates = gate_(model, sparsity=0.8, at="2", data=[x])
    (layer,) = gates.measured(x).layers
    assert layer.before == pytest.approx(already)
    assert layer.sparsity == pytest.approx(0.8, abs=0.01)
    gates.undo_()
    lower = gate_(model, sparsity=0.2, at="2", data=[x])  # more is zero already than was asked
    assert lower.measured(x).sparsity == pytest.approx(already)
    assert lower.measured(x).error == 0
    assert lower.gates["2"].calibrated == pytest.approx(already)


def test_measured_errors_are_relative_distances_of_outputs():
    model, x = small(), torch.randn(20, 32)
    model.requires_grad_(False)
    dense = model(x)
    gates = gate_(model, sparsity=0.5, data=[x])
    measured, gated = gates.measured(x), model(x)
    assert measured.error == pytest.approx(float((gated - dense).norm() / dense.norm()), rel=1e-5)
    first = model[0].forward(x)
    own = float((model[0].forward(gates.gates["0"].close(x)) - first).norm() / first.norm())
    assert measured.layers[0].error == pytest.approx(own, rel=1e-5)
    weights = [32 * 64, 64 * 48, 48 * 10]
    assert measured.sparsity == pytest.approx(sum(w * one.sparsity for w, one in zip(weights, measured.layers)) / sum(weights))


@pytest.mark.parametrize("form", ["tensor", "pair", "mapping", "list", "generator"])
def test_measured_takes_a_batch_or_batches(form):
    model, x = small(), torch.randn(6, 32)
    gates = gate_(model, method="topk", at="0")
    if form == "mapping":
        model.forward = lambda inputs: nn.Sequential.forward(model, inputs)
    given = {
        "tensor": x,
        "pair": (x, torch.zeros(6)),
        "mapping": {"inputs": x},
        "list": [x, (x, 0)],
        "generator": (x for _ in "ab"),
    }
    assert gates.measured(given[form]).sparsity == 0.5


def test_measured_says_what_it_cannot_measure():
    model = small()
    gates = gate_(model, method="topk")
    with pytest.raises(ValueError, match="no batch"):
        gates.measured([])
    with pytest.raises(TypeError, match="iterable of batches"):
        gates.measured(3)
    gates.undo_()
    with pytest.raises(ValueError, match="removed"):
        gates.measured(torch.randn(2, 32))


def test_a_batch_that_fails_leaves_the_gates_on():
    model = small()
    gates = gate_(model, method="topk")
    before = hooks(model)
    with pytest.raises(ValueError, match=r"does not run on a batch .*\(2, 33\)"):
        gates.measured(torch.randn(2, 33))
    assert hooks(model) == before


def test_tables_name_every_layer_and_the_whole():
    model, data = Decoder(), ids()
    gates = gate_(model, sparsity=0.5, at="*.mlp.*", data=data)
    for text in (str(gates), str(gates.measured(data))):
        assert all(name in text for name in gates.gates)
        assert "\nin all, by weights" in text
    assert "|x| >= " in str(gates)
    unknown = nn.Sequential(Conv1D(4, 6))
    assert "the largest ?" in str(gate_(unknown, method="topk"))


# --- what users do with models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_state_puts_gates_back_without_data(method):
    model, data = Decoder(), ids()
    gates = gate_(model, at="*.mlp.*", data=data, method=method, spread="greedy")
    output = model(data[0])["logits"]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "gates": gates.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = Decoder()
    fresh.load_state_dict(saved["model"])
    again = Gates.load(fresh, saved["gates"])
    assert torch.equal(fresh(data[0])["logits"], output)
    assert str(again) == str(gates)
    assert again.measured(data) == gates.measured(data)


def test_state_of_another_model_is_refused_before_anything_changes():
    state = gate_(small(), method="topk").state_dict()
    model = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="'4', which the model does not have"):
        Gates.load(model, {"0": state["0"], "4": state["4"]})
    with pytest.raises(ValueError, match="'2' takes 8 features, but its gate was made for 64"):
        Gates.load(model, {"2": state["2"]})
    with pytest.raises(ValueError, match=r"entry of '0' is not one that Gates\.state_dict"):
        Gates.load(model, {"0": {"method": "topk"}})
    model[2] = model[0]
    with pytest.raises(ValueError, match="'0' and '2' are one layer"):
        Gates.load(model, {"0": state["0"], "2": state["0"]})
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", METHODS)
def test_a_deepcopy_is_gated_too_and_on_its_own(method):
    model, data = small(), batches(8, 32)
    dense = model(data[0])
    gates = gate_(model, data=data, method=method)
    gated, other = model(data[0]), copy.deepcopy(model)
    assert torch.equal(other(data[0]), gated)
    Gates.of(other).undo_()
    assert torch.equal(other(data[0]), dense)
    assert torch.equal(model(data[0]), gated)
    with pytest.raises(ValueError, match="no gates"):
        Gates.of(other)
    gates.undo_()
    assert torch.equal(model(data[0]), dense)


@pytest.mark.parametrize("method", METHODS)
def test_a_gated_model_is_saved_whole(method):
    model, data = small(), batches(8, 32)
    gate_(model, data=data, method=method)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(data[0]), model(data[0]))
    assert len(Gates.of(loaded).gates) == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("method", METHODS)
def test_a_gated_model_compiles_in_one_graph(method, backend):
    torch._dynamo.reset()
    model, data = Decoder(depth=1), ids()
    gate_(model, data=data, method=method)
    run = torch.compile(lambda x: model(x, use_cache=False)["logits"], fullgraph=True, backend=backend)
    torch.testing.assert_close(run(data[0]), model(data[0])["logits"])


@pytest.mark.slow
def test_a_gated_model_compiles_with_inductor():
    torch._dynamo.reset()
    model, data = small(), batches(8, 32)
    for method in METHODS:
        gates = gate_(model, data=data, method=method)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(data[0]), model(data[0]))
        gates.undo_()


@pytest.mark.parametrize("method", METHODS)
def test_a_gated_model_exports_and_any_batch_size_runs(method):
    model, data = small().eval(), batches(8, 32)
    gate_(model, data=data, method=method)
    program = torch.export.export(model, (data[0],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = torch.randn(5, 32)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_flow_through_what_is_kept_alone(method):
    model, data = nn.Sequential(nn.Linear(16, 4)), batches(8, 16)
    gates = gate_(model, data=data, method=method)
    x = data[0].clone().requires_grad_()
    model(x).sum().backward()
    assert torch.equal(x.grad.ne(0), gates.gates["0"].close(data[0]).ne(0))
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("method", METHODS)
def test_gates_follow_the_model_to_another_dtype(method):
    model, data = small(), batches(8, 32)
    gates = gate_(model, data=data, method=method)
    model.bfloat16()
    half = data[0].bfloat16()
    assert model(half).dtype == torch.bfloat16
    assert gates.measured(half).sparsity == pytest.approx(0.5, abs=0.05)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert gates.measured(data[0]).sparsity == pytest.approx(0.5, abs=0.05)


def test_static_masks_follow_the_model_to_another_device():
    model = small()
    gate_(model, data=batches(8, 32), method="static")
    assert model.to("meta")(torch.randn(2, 32, device="meta")).shape == (2, 10)


# --- greedy ---------------------------------------------------------------------------------------------------------


def test_blocks_are_the_longest_module_list_and_the_rest_is_one():
    model = Decoder(depth=4)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    blocks = repeated_blocks(model, names)
    assert [block.module for block in blocks] == [*model.layers, model]
    assert blocks[-1].names == ["head"]
    assert sorted(name for block in blocks for name in block.names) == sorted(names)
    (whole,) = repeated_blocks(other := small(), ["0", "2"])
    assert whole.module is other


@pytest.mark.parametrize(
    ("method", "asked"), [(m, a) for m in METHODS for a in (0.37, 0.97)] + [("topk", 0.1), ("static", 0.9)]
)
def test_greedy_meets_the_budget_by_weights(method, asked):
    model = Decoder(width=8, depth=2)
    gates = gate_(model, sparsity=asked, at="*.mlp.*", data=ids(1), method=method, spread="greedy")
    total = sum(gate.weights for gate in gates.gates.values())
    assert sum(gate.sparsity * gate.weights for gate in gates.gates.values()) / total == pytest.approx(asked)
    assert all(0 <= gate.sparsity <= max(asked, 0.95) + 1e-9 for gate in gates.gates.values())


def test_greedy_spends_where_it_costs_least_and_errs_less_than_uniform():
    model, data = Decoder(depth=3), ids(2)
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight.mul_(1e-3)  # what goes in here hardly comes out
        model.layers[2].o_proj.weight.mul_(10)
    error = {}
    for spread in ("uniform", "greedy"):
        gates = gate_(model, sparsity=0.5, data=data, spread=spread)
        error[spread] = gates.measured(ids(4)).error
        level = {name: gate.sparsity for name, gate in gates.gates.items()}
        gates.undo_()
    assert error["greedy"] < 0.8 * error["uniform"]
    assert level["layers.1.mlp.down_proj"] > 0.8
    assert level["layers.2.o_proj"] < 0.5


def test_greedy_takes_the_optimum_where_costs_add_up():
    """Two independent halves of different size: brute force over all levels finds nothing better."""

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(40, 4, bias=False), nn.Linear(40, 16, bias=False)

        def forward(self, x):
            return torch.cat([3 * self.a(x[:, :40]), self.b(x[:, 40:])], 1)

    model, x = Halves(), torch.randn(64, 80)
    gates = gate_(model, sparsity=0.4, data=[x], spread="greedy")
    found = gates.measured(x).error
    gates.undo_()

    def error(a: float, b: float) -> float:
        levels = {"a": gate_(model, sparsity=a, at="a", data=[x]), "b": gate_(model, sparsity=b, at="b", data=[x])}
        value = Gates.of(model).measured(x).error
        for one in levels.values():
            one.undo_()
        return value

    best = min(error(a / 20, (0.4 * 20 - a / 20 * 4) / 16) for a in range(20))
    assert found <= best * 1.01


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def test_greedy_returns_the_better_of_its_two_allocations(monkeypatch):
    """Blocks that compete are not always better than the same sparsity for each of them."""
    measured = []

    def measure(errors, put, levels):
        measured.append((dict(levels), original(errors, put, levels)))
        return measured[-1][1]

    original = allocate._measure
    monkeypatch.setattr(allocate, "_measure", measure)
    better = []
    for seed in (5, 7, 10, 11):
        torch.manual_seed(seed)
        gates = gate_(Chain(), data=[torch.randn(16, 8)], spread="greedy")
        (apart, error_apart), (alike, error_alike) = measured[-2:]
        levels = apart if error_apart < error_alike else alike
        assert {name: gate.sparsity for name, gate in gates.gates.items()} == levels
        better.append(error_apart < error_alike)
    assert set(better) == {False, True}


def test_a_block_that_writes_to_its_input_is_measured_right():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return x.mul_(0.5).add_(self.layer(x))

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(InPlace() for _ in range(3))

        def forward(self, x):
            x = x + 0
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Stack(), torch.randn(8, 8)
    kept = x.clone()
    gates = gate_(model, data=[x], spread="greedy")
    assert torch.equal(x, kept)
    assert max(gate.sparsity for gate in gates.gates.values()) < 0.95


def test_long_work_says_so_on_stderr(capsys, each_report_drawn):
    gate_(Decoder(depth=2), at="*.mlp.*", data=ids(1), spread="greedy")
    assert "secateur: gates: measuring block 1 of 2" in capsys.readouterr().err


def test_an_empty_budget_leaves_every_gate_open():
    gates = gate_(small(), sparsity=0.0, data=batches(2, 32), spread="greedy")
    assert {gate.threshold for gate in gates.gates.values()} == {0.0}


# --- Hugging Face ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hugging_face_decoders_are_gated_by_name(family):
    transformers = pytest.importorskip("transformers")
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        at, count = ("*.self_attn.*_proj", "*.mlp.*_proj"), 14
    else:
        config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        at, count = ("*.attn.c_*", "*.mlp.c_*"), 8
    model = transformers.AutoModelForCausalLM.from_config(config)
    data = [{"input_ids": torch.randint(64, (2, 10))} for _ in range(2)]
    dense = model.eval()(**data[0]).logits
    for method in METHODS:
        for spread in ("uniform", "greedy"):
            gates = gate_(model, sparsity=0.5, at=at, data=data, method=method, spread=spread)
            assert len(gates.gates) == count
            assert gates.measured(data).sparsity == pytest.approx(0.5, abs=0.03)
            gates.undo_()
            assert torch.equal(model(**data[0]).logits, dense)
    gate_(model, at=at, method="topk")
    torch.testing.assert_close(copy.deepcopy(model)(**data[0]).logits, model(**data[0]).logits)
    assert list(gate_(copy.deepcopy(model), at="lm_head", method="topk").gates) == ["lm_head"]
    Gates.of(model).undo_()
    assert len(gate_(model, method="topk").gates) == count


# --- outputs of every kind, and layers that are not called ------------------------------------------------------------


class Wrapped(nn.Module):
    """Gives its output in an object of its own."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.Output(self.second(self.first(x)))


def test_the_error_of_an_output_in_an_object_is_measured():
    torch.manual_seed(0)
    model, data = Wrapped(), [torch.randn(8, 16)]
    dense = model(data[0]).logits
    gates = sc.gate_(model, sparsity=0.5, data=data)
    wanted = float((model(data[0]).logits - dense).detach().norm() / dense.detach().norm())
    assert gates.measured(data).error == pytest.approx(wanted, rel=1e-5)
    gates.undo_()
    levels = [gate.sparsity for gate in sc.gate_(model, sparsity=0.5, data=data, spread="greedy").gates.values()]
    assert min(levels) > 0, "greedy looked at the output"


def test_a_cache_beside_the_logits_is_no_part_of_the_error():
    model, ids = Decoder(), torch.arange(12).view(2, 6)
    with torch.no_grad():
        dense = model(ids)["logits"]
        gates = gate_(model, at="layers.*.k_proj", sparsity=0.9, method="topk")
        distance = (model(ids)["logits"] - dense).norm() / dense.norm()
    assert gates.measured(ids).error == pytest.approx(float(distance), rel=1e-4)


def test_a_weight_that_is_computed_is_gated_and_counted_as_the_plain_one():
    plain = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    model, batches = copy.deepcopy(plain), [torch.randn(5, 8)]
    torch.nn.utils.parametrizations.spectral_norm(model[0])
    masked = WeightNormSparsifier(0.0)
    masked.prepare(model, [{"tensor_fqn": "2.weight"}])
    before = copy.deepcopy(model.state_dict())
    gates = gate_(model, data=batches)
    assert {name: gate.weights for name, gate in gates.gates.items()} == {"0": 48, "2": 24}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    masked.squash_mask()  # gives the layer its class back; the hook stays
    gates.undo_()
    assert not model[2]._forward_pre_hooks


def test_gates_that_another_tool_hung_up_without_keywords_are_measured_too():
    model, batches = nn.Sequential(nn.Linear(8, 6)), [torch.randn(5, 8)]
    gates = gate_(model, data=batches)
    expected = gates.measured(batches)
    (hook,) = model[0]._forward_pre_hooks.values()
    gates.undo_()
    model[0].register_forward_pre_hook(hook)
    assert gates.measured(batches) == expected


def test_gates_are_removed_though_layers_have_left_the_model_or_moved_in_it():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(4, 2))
    gates = gate_(model, method="topk")
    del model[1]  # what was called 2 is called 1 now
    gates.undo_()
    assert not any(layer._forward_pre_hooks for layer in model)


def test_a_compressed_layer_is_gated_as_the_dense_one_was():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    sc.prune_(model, sparsity=0.95)
    gates = gate_(model, at="*", method="topk")
    expected = str(gates).splitlines()[:-1]
    sc.compress_(model, x, objective="size")
    gates.undo_()
    assert not isinstance(model[0], nn.Linear)
    again = gate_(model, at="*", method="topk")
    assert str(again).splitlines() == [*expected, "these layers hold 8,192 weights"]


def test_a_glob_that_is_near_to_nothing_says_what_there_is():
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp\.up_proj") as raised:
        gate_(Decoder(), at="*.w?", method="topk")
    assert str(raised.value).count("mlp.up_proj") == 1


def test_an_output_without_a_float_tensor_has_no_error_to_measure():
    class Labels(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    gates = sc.gate_(nn.Sequential(Labels(8, 4)), sparsity=0.5, method="topk")
    with pytest.raises(ValueError, match="no float tensor"):
        gates.measured(torch.randn(2, 8))


def test_infinities_that_both_outputs_have_are_no_error():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).index_fill(-1, torch.tensor([0]), -torch.inf)

    gates = sc.gate_(nn.Sequential(Masked(8, 4)), sparsity=0.5, method="topk")
    assert 0 < gates.measured(torch.randn(2, 8)).error < 1


def test_a_gate_works_where_a_tool_hangs_it_up_without_keyword_arguments():
    layer = nn.Linear(8, 4)
    model = nn.Sequential(layer)
    gate = sc.gate_(model, sparsity=0.5, method="topk").gates["0"]
    plain = nn.Sequential(nn.Linear(8, 4))
    plain.load_state_dict(model.state_dict())
    plain[0].register_forward_pre_hook(gate)
    x = torch.randn(3, 8)
    assert torch.equal(plain(x), model(x))


def test_without_at_layers_that_are_never_called_are_left_out():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False)
    data = [torch.randn(2, 5, 16)]
    gates = sc.gate_(encoder, sparsity=0.5, data=data)
    assert sorted(gates.gates) == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    gates.undo_()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.out_proj.*saw no input"):
        sc.gate_(encoder, sparsity=0.5, data=data, at="layers.0.self_attn.out_proj")


def test_the_table_says_what_share_of_the_model_is_gated():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 24))
    assert "64 of the 256 weights in the model's matrices (25.0%)" in str(sc.gate_(model, at="0", method="topk"))


@pytest.mark.parametrize("broken", [{"threshold": "high"}, {"mask": torch.ones(3, dtype=torch.bool)}, {"mask": None}])
def test_gates_whose_numbers_do_not_fit_are_not_loaded(broken):
    model, data = nn.Sequential(nn.Linear(8, 4)), [torch.randn(4, 8)]
    gates = sc.gate_(model, data=data, method="static")
    state = gates.state_dict()
    gates.undo_()
    with pytest.raises(ValueError, match="'0'"):
        sc.Gates.load(model, {"0": state["0"] | broken})
    assert not model[0]._forward_pre_hooks


def test_gates_have_metrics_a_dict_and_html():
    model = nn.ModuleDict({"<b>": nn.Linear(32, 8), "rest": nn.Linear(32, 8)})
    gates = gate_(model, sparsity=0.5, at="*", data=None, method="topk")
    found = gates.metrics()
    assert (found["gates"], found["weights"], found["sparsity"], found["skipped"]) == (2, 512, 0.5, 0)
    assert found["calibrated"] is None
    made = json.loads(json.dumps(gates.to_dict()))
    assert made["layers"]["rest"]["method"] == "topk"
    assert made["sparsity"] == 0.5
    page = gates._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
