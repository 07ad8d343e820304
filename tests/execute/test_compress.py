"""`compress_`, `decompress_` and `bench` on whole models: what is compressed, what stays dense, and that undoing is exact."""

import copy
import json
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from secateur import gate_, prune_
from secateur.display import format_seconds
from secateur.execute import Compressed, Compression, bench, choose, compress_, decompress_
from secateur.execute.formats import FORMATS, FORMER_NAMES
from secateur.execute.native import build
from secateur.execute.result import LayerResult

from .patterns import pruned


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def net(sparsity: float = 0.95, width: int = 512) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    if sparsity:
        prune_(model, sparsity=sparsity)
    return model.eval()


def test_pruned_layers_are_compressed_and_compute_the_same():
    model, x = net(), torch.randn(64, 512)
    dense = copy.deepcopy(model)
    result = compress_(model, x)
    assert result.compressed == ["0", "2"]
    assert all(isinstance(model[i], Compressed) for i in (0, 2))
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)
    for row in result.rows:
        assert row.pattern == "unstructured"
        assert row.sparse_seconds < row.dense_seconds
        assert row.after < row.before / 5
    assert result.speedup > 1
    assert "tiled 1" in str(result)
    assert "2 of 2 layers compressed for speed, 1 thread:" in str(result)


def test_the_summary_says_where_no_layer_was_timed():
    result = compress_(nn.Sequential(nn.Linear(8, 4)), torch.randn(2, 8))
    assert str(result).endswith("bytes of weights are now 128; no layer was timed")


def test_decompress_restores_bit_for_bit():
    model, x = net(), torch.randn(64, 512)
    with torch.no_grad():
        model[0].weight.view(-1)[:1000] = -0.0
        model[2].weight[0, 0] = float("nan")
    model[2].weight.requires_grad_(False)
    dense, bias = copy.deepcopy(model), model[0].bias
    compress_(model, torch.randn(64, 512), objective="size")
    assert isinstance(model[0], Compressed)
    assert isinstance(model[2], Compressed)
    assert decompress_(model) is model
    assert [type(layer) for layer in model] == [type(layer) for layer in dense]
    assert same_bits(model, dense)
    assert model[0].bias is bias
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in dense.parameters()]
    assert torch.equal(model[0](x), dense[0](x))


@pytest.fixture
def no_kernels(monkeypatch):
    """Without kernels, only torch's own sparse product (`csr`) remains."""
    monkeypatch.setenv("SECATEUR_CPU", "none")
    build.target.cache_clear()
    yield
    build.target.cache_clear()


@pytest.mark.usefixtures("no_kernels")
def test_layer_on_which_every_format_loses_stays_dense():
    only = nn.ModuleDict({"a": nn.Linear(256, 256, bias=False), "b": nn.Linear(256, 192)})
    with torch.no_grad():  # with too few zeros for a sparse format to be faster
        for layer in only.values():
            layer.weight.copy_(pruned(*layer.weight.shape, "1x1", 0.55))
    only.forward = lambda x: (only["a"](x), only["b"](x))  # type: ignore[method-assign]
    before = copy.deepcopy(only.state_dict())
    result = compress_(only, torch.randn(64, 256))
    assert result.compressed == []
    assert type(only["a"]) is type(only["b"]) is nn.Linear
    for row in result.rows:
        slower = row.sparse_seconds >= row.dense_seconds
        assert row.reason.startswith("dense is faster here" if slower else "no format is 5% faster here")
        assert row.after == row.before
        assert row.sparse_seconds > choose.MARGIN * row.dense_seconds
    assert all(torch.equal(value, before[name]) for name, value in only.state_dict().items())


@pytest.mark.skipif(not build.has(), reason="no kernels here")
def test_layer_on_which_every_kernel_loses_stays_dense():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    with torch.no_grad():  # so small that the overhead of a call is longer than the product
        for layer, sparsity in zip(model, (0.5, 0.9)):
            layer.weight.copy_(pruned(*layer.weight.shape, "1x1", sparsity))
    before = copy.deepcopy(model)
    result = compress_(model, torch.randn(8, 32))
    for row, layer in zip(result.rows, model):
        assert re.match(r"(dense is|no format is 5%) faster here \(tiled 1", row.reason)
        assert row.sparse_seconds > choose.MARGIN * row.dense_seconds
        assert type(layer) is nn.Linear
    assert same_bits(model, before)


def test_layers_of_derived_kinds_are_in_the_table():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(16, 16), torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)))
    result = compress_(model.eval(), torch.randn(2, 16))
    assert result["0"].reason == "Own is not a layer type that can be compressed"
    assert result["1"].reason == "its weight is computed by a parametrization; remove that first"
    with pytest.raises(KeyError, match=r"no layer '00' in this table. Did you mean '0'"):
        result["00"]


def test_each_left_layer_has_its_reason():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.full, self.never = nn.Linear(16, 16), nn.Linear(16, 16)
            self.circular = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
            self.long = nn.Linear(16, 16).double()
            self.norm = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

        def forward(self, x):
            y = self.norm(self.full(x)) + self.long(x.double()).float()
            return y, self.circular(torch.zeros(1, 4, 8, 8))

    result = compress_(Net(), torch.randn(2, 16))
    reasons = {row.layer: row.reason for row in result.rows}
    assert reasons["full"] == "no weight is zero"
    assert reasons["circular"] == "it pads with 'circular'; only padding with zeros is supported"
    assert "float64" in reasons["long"]
    assert reasons["never"] == "the model does not call it with these example inputs"
    assert "norm" not in result.compressed


def test_twin_that_the_format_cannot_hold_stays_dense(monkeypatch):
    monkeypatch.setattr(choose, "FORMATS", {"sparse24_mma": replace(FORMATS["sparse24_mma"], fits=lambda *_: [()])})
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval()
    some = torch.rand(256, 64, 4).argsort(-1) < 2
    some &= torch.rand(256, 64, 1) < 0.5  # at most two of four, but too sparse to be recognized as 2:4
    with torch.no_grad():
        model[0].weight.mul_(some.flatten(1))
        some[0, 0, :3] = True
        model[1].weight.mul_(some.flatten(1))
    result = compress_(model, torch.randn(8, 256), objective="size")
    assert result.compressed == ["0"], str(result)
    assert "cannot hold its values" in result["1"].reason


def test_convolution_of_very_many_groups_is_left_alone():
    model = nn.Sequential(nn.Conv1d(5000, 5000, 3, groups=5000)).eval()
    with torch.no_grad():
        model[0].weight[:4000] = 0
    result = compress_(model, torch.randn(1, 5000, 8))
    assert result["0"].reason == "its 5000 groups as one block-diagonal matrix would have 75,000,000 elements"


def test_size_asks_for_the_fewest_bytes():
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(pruned(500, 64, "1x1", 0.9))
        model[1].weight.copy_(pruned(64, 64, "1x1", 0.9))
    dense, ids = copy.deepcopy(model).eval(), torch.randint(500, (2, 7))
    result = compress_(model, ids, objective="size")
    assert result["0"].format == "bitmask"
    assert all(row.after < 0.25 * row.before for row in result.rows)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), dense(ids), rtol=1e-4, atol=1e-5)
    assert same_bits(decompress_(model), dense.train())


def test_tied_weights_are_tied_again():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(600, 512), nn.Linear(512, 600, bias=False)
            self.head.weight = self.embed.weight
            self.one = self.two = nn.Linear(512, 512)

        def forward(self, ids):
            return self.head(self.two(self.one(self.embed(ids))))

    model = Tied().eval()
    with torch.no_grad():
        model.head.weight.copy_(pruned(600, 512, "1x1", 0.97))
        model.one.weight.copy_(pruned(512, 512, "1x1", 0.97))
    dense = copy.deepcopy(model)
    compress_(model, torch.randint(600, (128,)))
    assert isinstance(model.head, Compressed)
    assert isinstance(model.one, Compressed)
    assert model.one is model.two
    model.embed = Compressed(
        model.embed, FORMATS["bitmask"], (), choose.ties(model)[id(model.embed.weight)]
    )  # as a later call may
    decompress_(model)
    assert model.head.weight is model.embed.weight
    assert model.one is model.two
    assert same_bits(model, dense)


def test_shared_weight_is_counted_once_and_layers_compressed_before_are_in_the_table():
    model = nn.Sequential(nn.Embedding(600, 512), nn.Linear(512, 600, bias=False)).eval()
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[1].weight.copy_(pruned(600, 512, "1x1", 0.97))
    first, second = (compress_(model, torch.randint(600, (128,))) for _ in range(2))
    packed, whole = model[1].bytes(), model[0].weight.nbytes  # the embedding stays dense and keeps the shared weight in memory
    assert (first.before, first.after) == (whole, whole + packed)
    assert (second.before, second.after) == (whole + packed, whole + packed)
    assert first.compressed == second.compressed == ["1"]
    assert second["1"].reason == "compressed before"
    assert second["1"].after == first["1"].after == packed


def test_result_gives_its_numbers_as_a_flat_dictionary_as_json_and_as_html():
    model, x = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).eval(), torch.randn(64, 512)
    prune_(model, sparsity=0.95, include=["0.weight"])
    result = compress_(model, x, objective="size", threads=1)
    assert result.metrics() == {
        "layers": 2,
        "compressed": 1,
        "bytes_before": 2 * 512 * 512 * 4,
        "bytes_after": model[0].bytes() + 512 * 512 * 4,
        "speedup": result.speedup,
        "threads": 1,
    }
    told = json.loads(json.dumps(result.to_dict()))
    assert told["objective"] == "size"
    assert told.items() >= result.metrics().items()
    assert [row["reason"] for row in told["rows"]] == ["", "no weight is zero"]
    assert told["rows"][0]["format"] == result["0"].format
    page = result._repr_html_()
    assert page.count("<tr>") == 3
    assert "no weight is zero" in page


def test_html_of_a_result_escapes_names():
    page = Compression([LayerResult("<b>", "Linear")], "speed", 1, 0, 0)._repr_html_()
    assert "<td>&lt;b&gt;</td>" in page


def test_undo_restores_the_layers_of_one_call_bit_for_bit():
    model, x = net(0), torch.randn(64, 512)
    prune_(model, sparsity=0.95, include=["0.weight"])
    first = compress_(model, x)
    with torch.no_grad():
        model[2].weight.copy_(pruned(512, 512, "1x1", 0.95))
    dense = decompress_(copy.deepcopy(model))
    second = compress_(model, x)
    assert (first.replaced, second.replaced) == (("0",), ("2",))
    assert second.undo_(model) is model
    assert isinstance(model[0], Compressed)
    assert isinstance(model[2], nn.Linear)
    with pytest.raises(ValueError, match=r"'2' of this result are not compressed in the model"):
        second.undo_(model)
    first.undo_(model)
    assert same_bits(model, dense)


def test_former_names_of_formats_still_run():
    """Exported programs and pickled models contain the names that formats had when they were saved."""
    matrix, x = pruned(64, 128, "1x1", 0.9), torch.randn(3, 128)
    for former, name in FORMER_NAMES.items():
        options = [64] if name == "dense_blocks" else []
        given = pruned(64, 128, "2:4", 0.5) if name == "sparse24_mma" else matrix
        layer = nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            layer.weight.copy_(given)
        compressed = Compressed(layer, FORMATS[name], tuple(options)).eval()
        compressed.form = former
        with torch.no_grad():
            y = torch.ops.secateur.linear(x, compressed.buffers_in_order(), None, former, 64, 128, options)
            torch.testing.assert_close(y, x @ given.t())
            assert torch.equal(compressed(x), y)
    assert not FORMER_NAMES.keys() & set(FORMATS)
    with pytest.raises(KeyError, match="tilde"):
        FORMATS["tilde"]


def test_twin_has_its_own_bytes_and_is_checked_itself():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512)).eval()
    with torch.no_grad():
        for layer, sparsity, size in zip(model, (0.95, 0.954, 0.95), (1, 1, 1e6)):  # a million is too large for float16
            layer.weight.copy_(pruned(512, 512, "1x1", sparsity) * size)
    result = compress_(model, torch.randn(64, 512), store=torch.float16)
    assert result.compressed == ["0", "1"]
    assert [result[name].after for name in ("0", "1")] == [model[0].bytes(), model[1].bytes()]
    assert "cannot hold its values" in result["2"].reason
    assert torch.isfinite(model(torch.randn(64, 512))).all()


def test_failure_leaves_the_model_as_it_was():
    class Refuses(nn.Sequential):
        def forward(self, x):
            if any(isinstance(layer, Compressed) for layer in self):
                raise OSError("gone")
            return super().forward(x)

    model, x = Refuses(*net()), torch.randn(64, 512)
    before, layers = copy.deepcopy(model), list(model)
    with pytest.raises(ValueError, match="gone"):
        compress_(model, x)
    assert all(now is then for now, then in zip(model, layers))
    assert same_bits(model, before)
    assert not any(layer._forward_pre_hooks for layer in model)


def test_container_that_reads_weights_keeps_its_layers():
    layer = nn.TransformerEncoderLayer(512, 4, 512, batch_first=True).eval()
    model = nn.Sequential(layer)
    prune_(model, sparsity=0.97)
    x = torch.randn(2, 64, 512)
    with torch.no_grad():
        expected = model(x)
        result = compress_(model, x)
        assert torch.equal(model(x), expected)
    assert result["0.linear1"].reason.startswith("the model reads its weight without calling the layer")
    assert type(layer.linear1) is nn.Linear


def test_gates_stay_and_make_a_dense_layer_faster():
    model = nn.Sequential(nn.Linear(2048, 2048))
    batches = [torch.randn(1, 2048) for _ in range(4)]
    gates = gate_(model, sparsity=0.6, data=batches)
    model.eval()
    with torch.no_grad():
        expected = model(batches[0])
        result = compress_(model, batches[0])
        assert result["0"].format == "columns"
        torch.testing.assert_close(model(batches[0]), expected, rtol=1e-4, atol=1e-4)
        gates.undo_()
        free = model(batches[0])
        decompress_(model)
        torch.testing.assert_close(free, model(batches[0]), rtol=1e-4, atol=1e-4)


def test_storing_halves_is_asked_for_and_rounds():
    model, x = net(0.9), torch.randn(64, 512)
    dense = copy.deepcopy(model)
    result = compress_(model, x, store=torch.bfloat16)
    assert result.compressed == ["0", "2"]
    assert model[0].values.dtype == torch.bfloat16
    decompress_(model)
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, dense[0].weight.bfloat16().float())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"objective": "sped"}, ValueError, "objective='sped' must be 'speed' or 'size'. Did you mean 'speed'"),
        ({"threads": 0}, ValueError, "threads=0 must be a whole number of CPU threads, 1 or more"),
        ({"store": torch.int8}, ValueError, "bfloat16 or torch.float16"),
        ({"example_inputs": 3}, TypeError, "must be a tensor, a tuple"),
        ({"model": nn.Linear(4, 4)}, ValueError, "wrap it in nn.Sequential"),
        ({"model": 3}, TypeError, "takes a torch.nn.Module, not int"),
    ],
)
def test_wrong_arguments_are_refused_in_words(arguments, error, words):
    with pytest.raises(error, match=words.replace(".", r"\.")):
        compress_(**{"model": net(0, 16), "example_inputs": torch.randn(2, 16)} | arguments)


def test_threads_and_modes_are_put_back():
    model = net(0.5, 64).train()
    model[2].eval()
    compress_(model, torch.randn(8, 64), threads=2)
    assert torch.get_num_threads() == 1
    assert [layer.training for layer in model] == [True, True, False]


def test_bench_times_models_in_turns():
    small, x = net(0, 64), torch.randn(32, 64)
    timed = bench({"small": small, "twice": nn.Sequential(small, small, small)}, x, seconds=0.1)
    assert timed.ratio("twice", "small") > 1.2
    low, high = timed["small"].spread
    assert timed["small"].best <= low <= timed["small"].median <= high
    assert "rounds" in str(timed)
    assert bench(small, (x,), seconds=0.01)["model"].best > 0
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module, or a mapping"):
        bench({}, x)


def test_times_are_spelled_with_three_digits():
    assert [format_seconds(t) for t in (2.5, 0.0123, 0.9e-3, 12.34e-6)] == ["2.50 s", "12.3 ms", "900 µs", "12.3 µs"]


def test_pruned_experts_are_listed_as_dense():
    """Their matrices are one tensor of three axes, and the total looked like that of the whole model."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_local_experts": 2}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.MixtralForCausalLM(config).eval()
    prune_(model, pattern="2:4", exclude="lm_head")
    table = compress_(model, torch.randint(32, (1, 4)), objective="size")
    row = table["model.layers.0.mlp.experts.down_proj"]
    assert (row.pattern, row.format, row.before, row.after) == ("2:4", None, 2 * 16 * 16 * 4, 2 * 16 * 16 * 4)
    assert "MixtralExperts is not a layer type" in row.reason
    assert table.before == sum(row.before for row in table.rows)


@pytest.mark.parametrize(("now", "hint"), [(0.5e-3, False), (0.96e-3, True), (1.1e-3, True)])
def test_the_result_says_what_a_call_outside_of_a_graph_takes(now, hint):
    row = LayerResult("0", "Linear", format="padded_rows", dense_seconds=2e-5, sparse_seconds=1e-5)
    text = str(Compression([row], "speed", 1, 8, 4, calls=(1e-3, now)))
    assert "one call of the model without a CUDA graph: 1.00 ms dense, " in text
    assert ("a CUDA graph saves" in text) == hint


def test_the_number_of_calls_that_are_timed_does_not_depend_on_their_time():
    """Processes whose models wait for each other must call them equally often."""
    calls = []

    class Waiting(nn.Linear):
        def forward(self, x):
            calls.append(self.wait)
            time.sleep(self.wait)
            return super().forward(x)

    for wait in (0.0, 0.05):
        model = Waiting(4, 4)
        model.wait = wait
        choose._call_seconds(model, torch.randn(1, 4))
    assert calls.count(0.0) == calls.count(0.05)
