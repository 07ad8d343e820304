"""Weights in fewer bits: the error that theory allows, exact sums, every format against float64, and compressed layers."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from secateur.execute import Compressed, compress_, decompress_
from secateur.execute.choose import RecordedInputs, _agrees
from secateur.execute.formats import FORMATS, find_format, with_values
from secateur.execute.native import build
from secateur.values import GROUPS, KINDS, Values, parse

from .patterns import pruned

LAWS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
OPTIONS = {
    "panels": [(8,)], "quads": [(1,), (4,)], "quads8": [(1,), (4,)], "windows": [(16,), (64,), (128,)],
    "sparse24_mma": [()],  # depends on the values
    "padded_rows": [(8,)],
}  # fmt: skip
TAKEN = [(form.name, text) for form in FORMATS.values() for text in form.takes if text and form.name != "cusparselt8"]
EVERY = [(name, text, options) for name, text in TAKEN for options in OPTIONS.get(name, [()])]
ON_CPU = [case for case in EVERY if case[0] != "sparse24_mma"]
kernels = pytest.mark.skipif(not build.has("avx2"), reason="no kernels here")


def half_a_step(values: Values, matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The largest error of each rounded weight: half the distance to the next number that can be stored, times the scale."""
    each = scales.view(torch.bfloat16).double().repeat_interleave(values.group or matrix.shape[1], 1)[:, : matrix.shape[1]]
    if values.kind.startswith("int"):
        return each / 2
    # float8_e4m3fn has three bits after the leading one, and steps of 2**-9 below 2**-6 (OCP 8-bit floating point, 2023).
    exponent = (matrix.double().abs() / each).clamp(min=2.0**-6).log2().floor()
    return each * 2.0 ** (exponent - 4)


def rounded_to(values: Values, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, scales = values.quantize(matrix)
    return values.dequantize(q, scales), scales


@pytest.mark.parametrize("kind", KINDS)
@LAWS
@given(
    rows=st.sampled_from([1, 3, 16]), columns=st.sampled_from([1, 8, 64, 100, 200]), group=st.sampled_from([0, *GROUPS]),
    sparsity=st.sampled_from([0.0, 0.5, 1.0]), size=st.sampled_from([1e-38, 1e-20, 1.0, 3e4, 1e38]), seed=st.integers(0, 99),
)  # fmt: skip
def test_no_weight_moves_by_more_than_half_a_step(kind, rows, columns, group, sparsity, size, seed):
    values, matrix = Values(kind, group), pruned(rows, columns, "1x1", sparsity, seed=seed).clamp(-3, 3) * size
    rounded, scales = rounded_to(values, matrix)
    assert bool(((rounded.double() - matrix.double()).abs() <= half_a_step(values, matrix, scales)).all())
    assert bool((rounded[matrix == 0] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
@LAWS
@given(rows=st.sampled_from([1, 5]), columns=st.sampled_from([1, 64, 100, 200]), group=st.sampled_from([0, *GROUPS]),
       size=st.sampled_from([1e-38, 1e-3, 1.0, 1e30]), seed=st.integers(0, 99))  # fmt: skip
def test_rounding_rounded_weights_changes_nothing(kind, rows, columns, group, size, seed):
    values = Values(kind, group)
    q, scales = values.quantize(pruned(rows, columns, "1x1", 0.5, seed=seed) * size)
    again, scales_again = values.quantize(values.dequantize(q, scales))
    assert torch.equal(q, again)
    assert torch.equal(scales, scales_again)


@pytest.mark.parametrize(("name", "text", "options"), EVERY)
@LAWS
@given(rows=st.sampled_from([16, 32, 64]), columns=st.sampled_from([256, 512]), pattern=st.sampled_from(["2:4", "1x8"]),
       seed=st.integers(0, 9))  # fmt: skip
def test_every_format_stores_what_was_rounded(name, text, options, rows, columns, pattern, seed):
    form = FORMATS[f"{name} {text}"]
    matrix = pruned(rows, columns, "2:4" if name == "sparse24_mma" else pattern, 0.5, seed=seed)
    options = (form.values.bits,) if name == "sparse24_mma" else options
    packed = form.pack(matrix, options)
    assert torch.equal(form.unpack(packed, rows, columns, options), rounded_to(form.values, matrix)[0])
    assert not any(each.is_floating_point() for each in packed)  # .to(dtype) would change them


@kernels
@pytest.mark.parametrize(("name", "text", "options"), ON_CPU)
@LAWS
@given(
    rows=st.sampled_from([8, 24, 72]), columns=st.sampled_from([1, 8, 64, 100, 128, 200, 520]),
    batch=st.sampled_from([0, 1, 3, 40, 70]), pattern=st.sampled_from(["1x1", "8x1", "1x8", "2:4"]),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    with_bias=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_products_stay_within_the_bound(name, text, options, rows, columns, batch, pattern, sparsity, dtype, with_bias, seed):
    """|y - y'| <= sum |x| * half a step, and with the rounded weights y' is what float64 gives."""
    form = FORMATS[f"{name} {text}"]
    matrix = pruned(rows, columns, pattern, sparsity, seed=seed)
    x, bias = torch.randn(batch, columns).to(dtype), torch.randn(rows).to(dtype) if with_bias else None
    packed = form.pack(matrix, options)
    got = torch.ops.secateur.linear(x, list(packed), bias, form.name, rows, columns, options)
    assert got.dtype == dtype
    rounded, scales = rounded_to(form.values, matrix)
    extra = 0 if bias is None else bias.double()
    exact, dense = (F.linear(x.double(), each.double()) + extra for each in (rounded, matrix))
    size = F.linear(x.double().abs(), rounded.double().abs()) + (0 if bias is None else bias.double().abs())
    # Inputs become integers of 8 to 23 bits, relative to the largest, where CPUs multiply bytes.
    parts = {"quads8": 1 / 254, "quads": 2.0**-15, "windows": 2.0**-13, "expand": 2.0**-23}
    steps = parts.get(name, 0.0) * x.double().abs().amax(1, keepdim=True)
    arithmetic = (1e-6 if dtype == torch.float32 else 1e-2) * size + steps * rounded.double().abs().sum(1) + 1e-30
    assert bool(((got.double() - exact).abs() <= arithmetic).all())
    bound = x.double().abs() @ half_a_step(form.values, matrix, scales).t()
    assert bool(((got.double() - dense).abs() <= bound + arithmetic).all())


@kernels
@pytest.mark.parametrize(("name", "text", "options"), ON_CPU)
def test_sums_of_integers_are_exact(name, text, options):
    """With scales of 1 and small integers as inputs, every product and every sum is an integer below 2**24."""
    form = FORMATS[f"{name} {text}"]
    top = KINDS[form.values.kind]
    steps = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.0, -6.0, 7.0, 0.0])
    matrix = steps[torch.randint(0, 8, (24, 200))]
    matrix[:, ::64] = top  # so that every scale is 1
    x = torch.randint(-8, 9, (3, 200)).float()
    x[:, 5] = 127.0  # so that inputs in 8 bits are exact
    y = torch.ops.secateur.linear(x, list(form.pack(matrix, options)), None, form.name, 24, 200, options)
    assert torch.equal(y, x @ matrix.t())


@kernels
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bitmask int8", ()),
        ("expand int8", ()),
        ("expand int4/64", ()),
        ("quads int8", (4,)),
        ("quads8 int8", (4,)),
        ("windows int8", (16,)),
    ],
)
@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0, 1e-35, 1e36])
def test_inputs_that_no_integer_can_hold_are_multiplied_as_floats(name, options, odd):
    form, matrix = FORMATS[name], pruned(8, 128, "1x1", 0.5)
    x = torch.full((1, 128), odd) if odd == 0 or odd < 1e-30 else torch.randn(1, 128)
    x[0, 5] = odd
    y = torch.ops.secateur.linear(x, list(form.pack(matrix, options)), None, name, 8, 128, options)
    kept = rounded_to(form.values, matrix)[0]
    atol = 1e-5 * float(x.abs().nan_to_num(0, 0, 0).max())
    torch.testing.assert_close(y[0].double(), (x.double() * kept).sum(1), rtol=1e-5, atol=atol, equal_nan=True)


def test_names_are_read_as_they_are_written():
    for kind in KINDS:
        for group in (0, *GROUPS):
            assert parse(str(Values(kind, group))) == Values(kind, group)
    assert [parse(text) for text in ("int8/0", "int8/32", "int8/", "int3", "", "int8/64/64")] == [None] * 6
    assert find_format("gather int8/64") is None  # no kernel takes it
    assert find_format("gather int8") is with_values(FORMATS["gather"], Values("int8"))


def test_weights_that_are_not_finite_are_refused():
    matrix = torch.ones(8, 64)
    matrix[3, 3] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        FORMATS["dense int8"].pack(matrix, ())


# ---------------------------------------------------------------- models


def model_of(dtype: torch.dtype = torch.float32, sparsity: float = 0.8) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128, bias=False)).to(dtype).eval()
    for layer in (model[0], model[2]):
        layer.weight.data.copy_(pruned(*layer.weight.shape, "1x1", sparsity))
    return model


X = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small():
    """A model whose two layers are stored in int8, and the model before."""
    dense = model_of()
    model = copy.deepcopy(dense)
    result = compress_(model, X, values="int8", objective="size")
    assert all(row.format in ("bitmask int8", "expand int8") for row in result.rows)
    return model, dense, result


@kernels
def test_table_shows_bytes_and_the_error_of_each_layer(small):
    model, dense, result = small
    with torch.no_grad():
        y, exact = model[0](X), dense[0](X)
        inner = torch.relu(exact)
        second = float((model[2](inner) - dense[2](inner)).norm() / dense[2](inner).norm())
    assert result["0"].error == pytest.approx(float((y - exact).norm() / exact.norm()), rel=1e-3)
    assert result["2"].error == pytest.approx(second, rel=1e-3)
    assert 1e-4 < result["0"].error < 2e-2
    assert result["0"].after == model[0].bytes() < 0.1 * result["0"].before
    assert " error" in str(result).splitlines()[0]
    assert f"{result['0'].error:.1e}" in str(result)
    assert f"{result['0'].error:.1e}" in result._repr_html_()


@kernels
def test_nothing_is_rounded_unless_asked_for():
    model = model_of()
    result = compress_(model, X, objective="size")
    assert all(row.error is None for row in result.rows)
    assert " error" not in str(result).splitlines()[0]
    assert all(FORMATS[layer.form].values is None for layer in model.modules() if isinstance(layer, Compressed))


@kernels
def test_decompress_gives_the_rounded_weights(small):
    model, dense, _ = small
    decompress_(model)
    for mine, other in ((model[0], dense[0]), (model[2], dense[2])):
        assert type(mine) is nn.Linear
        assert torch.equal(mine.weight, rounded_to(Values("int8"), other.weight.detach())[0])


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("values", "group"), [("int8", None), ("int8", 64), ("int4", 128), ("float8_e4m3fn", None)])
def test_files_keep_the_small_numbers(dtype, values, group, tmp_path):
    model = model_of(dtype)
    compress_(model, X.to(dtype), values=values, group=group, objective="size")
    assert all(FORMATS[model[i].form].values == Values(values, group or 0) for i in (0, 2))
    sc.save(model, tmp_path / "small")
    weights = sum(model[i].weight.numel() for i in (0, 2))
    size = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert size < weights * (1 / 8 + 0.25 + 0.06) + 4096  # a bit for each weight, at most a byte for each fifth, scales, bias
    again = sc.load(tmp_path / "small", lambda: model_of(dtype))
    for i in (0, 2):
        assert (again[i].form, again[i].options, again[i].dtype) == (model[i].form, model[i].options, dtype)
        assert all(map(torch.equal, again[i].buffers_in_order(), model[i].buffers_in_order()))
    with torch.no_grad():
        assert torch.equal(again(X.to(dtype)), model(X.to(dtype)))
    plain = sc.load(tmp_path / "small", lambda: model_of(dtype), as_="dense")
    state = sc.dense_state_dict(tmp_path / "small")
    from safetensors.torch import load_file

    alone = sc.dense_state_dict(load_file(tmp_path / "small" / "model.safetensors"))
    for i in (0, 2):
        expected = model[i].weight.to(dtype)
        assert torch.equal(plain[i].weight, expected)
        assert torch.equal(state[f"{i}.weight"], expected)
        assert torch.equal(alone[f"{i}.weight"].to(dtype), expected)


@kernels
def test_damaged_scales_in_a_file_are_refused(small, tmp_path):
    from safetensors.torch import load_file, save_file

    model, _, _ = small
    sc.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["0.weight#scales"] = tensors["0.weight#scales"][:5].clone()
    with pytest.raises(sc.io.BadFile, match="scales"):
        sc.dense_state_dict(tensors)
    save_file(tensors, file)
    with pytest.raises(sc.io.BadFile):
        sc.load(tmp_path, model_of)


@kernels
def test_compiles_exports_copies_and_pickles(small):
    model, _, _ = small
    with torch.no_grad():
        expected = model(X)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(X), expected)
        assert torch.equal(torch.export.export(model, (X,)).module()(X), expected)
        assert torch.equal(copy.deepcopy(model)(X), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(X), expected)
        moved = copy.deepcopy(model).to(torch.bfloat16)
        assert torch.equal(moved[0].get_buffer("scales"), model[0].get_buffer("scales"))
        assert moved(X.bfloat16()).dtype == torch.bfloat16


@kernels
def test_gradients_of_inputs_use_the_rounded_weights(small):
    model, _, _ = small
    x = X.clone().requires_grad_()
    model[0](x).sum().backward()
    torch.testing.assert_close(x.grad, model[0].weight.sum(0, keepdim=True))


@kernels
def test_state_dict_loads_into_another_model(small):
    model, dense, _ = small
    other = copy.deepcopy(model)
    for layer in (other[0], other[2]):
        layer.get_buffer("values").zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))
    other.load_state_dict(decompress_(copy.deepcopy(model)).state_dict())  # rounding rounded weights changes nothing
    assert all(map(torch.equal, other[0].buffers_in_order(), model[0].buffers_in_order()))
    other.load_state_dict(dense.state_dict())
    assert all(map(torch.equal, other[0].buffers_in_order(), model[0].buffers_in_order()))
    wrong = model.state_dict()
    wrong["0.scales"] = wrong["0.scales"][:7]
    with pytest.raises(ValueError, match=r"buffers of 0 in the state dict do not match"):
        other.load_state_dict(wrong)
    wrong = model.state_dict()
    wrong["0.masks"] = wrong["0.masks"] ^ 1
    with pytest.raises(ValueError, match=r"buffers of 0 in the state dict do not match"):
        other.load_state_dict(wrong)


@kernels
def test_layers_without_zeros_can_be_rounded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Conv2d(1, 1, 3)).eval()
    model.forward = lambda x: (model[0](x), model[1](x.view(1, 1, 16, 32)))
    result = compress_(model, torch.randn(1, 512), values="int4", group=64, objective="size")
    assert result["0"].format == "dense int4/64"
    assert model[0].bytes() == 512 * 512 // 2 + 512 * 8 * 2
    assert result["1"].reason == "no weight is zero"  # only linear layers are rounded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"values": "int9"}, r"'int8', 'int4', 'float8_e4m3fn'.*not 'int9'"),
        ({"values": "int8", "group": 32}, "64 or 128"),
        ({"group": 64}, "say which values="),
        ({"values": "int8", "store": torch.bfloat16}, "give one of them"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    model = model_of()
    with pytest.raises(ValueError, match=words):
        compress_(model, X, **arguments)
    assert type(model[0]) is nn.Linear


@kernels
def test_layer_with_infinite_weights_stays_dense():
    model = model_of()
    model[0].weight.data[0, 0] = math.inf
    result = compress_(model, X, values="int8", objective="size")
    assert result["0"].error is None
    assert result["2"].format in ("bitmask int8", "expand int8")


@kernels
def test_flops_count_every_stored_value():
    from torch.utils.flop_counter import FlopCounterMode

    for name, options in (("dense int8", ()), ("dense int4", ()), ("quads int8", (1,))):
        layer = Compressed(nn.Linear(128, 64), FORMATS[name], options).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.randn(3, 128))
        assert counter.get_total_flops() == 2 * 128 * 64 * 3


@kernels
def test_rounded_inputs_are_accepted_unless_one_is_much_larger_than_the_others(monkeypatch):
    monkeypatch.setattr("secateur.execute.windows.VNNI", ("no such feature",))  # inputs then have 14 bits
    layer, x = nn.Linear(2048, 2048, bias=False), torch.randn(1, 2048)
    layer.weight.data.copy_(pruned(2048, 2048, "1x1", 0.8))
    layer.weight.data[:, 0] = 0
    candidate = Compressed(layer, FORMATS["windows int8"], (16,)).eval()
    for first, accepted in ((1.0, True), (1e4, False)):
        x[0, 0] = first
        seen = RecordedInputs()
        seen.add(x)
        with torch.no_grad():
            assert _agrees(layer, candidate, seen, None) == accepted


ONE_ROW = [
    ("windows int8", (16,)), ("windows int8", (128,)), ("expand int8/64", ()), ("expand int4/64", ()),
    ("padded_rows int8", (8,)),
]  # fmt: skip


@kernels
@pytest.mark.parametrize(("name", "options"), ONE_ROW)
def test_layers_for_one_row_are_copied_exported_saved_and_loaded(name, options, tmp_path):
    model = model_of()
    for place in ("0", "2"):
        setattr(model, place, Compressed(model.get_submodule(place), FORMATS[name], options).eval())
    other = nn.Sequential(Compressed(nn.Linear(256, 512), FORMATS[name], options), nn.ReLU(), copy.deepcopy(model[2])).eval()
    with torch.no_grad():
        expected = model(X)
        dense = model[2]._dense(torch.relu(model[0]._dense(X)))
        assert float((expected - dense).norm() / dense.norm()) < 1e-3
        for same in (
            copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.export.export(model, (X,)).module(),
            torch.compile(model, fullgraph=True, backend="aot_eager"),
        ):  # fmt: skip
            assert torch.equal(same(X), expected)
        sc.save(model, tmp_path)
        assert torch.equal(sc.load(tmp_path, model_of)(X), expected)
        other.load_state_dict(model.state_dict())  # its first layer had no zeros
        assert torch.equal(other(X), expected)


@pytest.mark.parametrize(("name", "options"), ONE_ROW)
def test_damaged_buffers_of_layers_for_one_row_are_refused(name, options):
    layer = Compressed(model_of()[0], FORMATS[name], options).eval()
    for buffer in set(layer.names) - {"scales", "sums"}:
        for damage in (lambda each: each[:-1], lambda each: each.flip(0), lambda each: each * 3 + 1):
            state = layer.state_dict()
            if buffer == "values" and damage(state[buffer]).shape == state[buffer].shape:
                continue  # any numbers are values
            state[buffer] = damage(state[buffer])
            with pytest.raises(ValueError, match="do not match the model"):
                layer.load_state_dict(state)


def test_runs_of_padded_rows_take_about_two_bytes_for_each_weight():
    """The largest differences of columns, rows that need an even number of lanes, and rows without weights."""
    form = FORMATS["padded_rows int8"]
    for columns in ([0, 255], [0, 256], [7, 262, 518], [0, 510, 511], [0, 511, 1021], [2999], [0, 2999], []):
        matrix = torch.zeros(3, 3000)
        matrix[1, columns] = torch.randn(len(columns))
        assert torch.equal(form.unpack(form.pack(matrix, (8,)), 3, 3000, (8,)), rounded_to(form.values, matrix)[0])
    matrix = torch.zeros(64, 4096).scatter_(1, torch.rand(64, 4096).argsort(1)[:, :819], torch.randn(64, 819))
    values, index, scales = form.pack(matrix, (8,))
    assert values.shape == (64, 2, 1, 26, 16)
    assert values.nbytes + index.nbytes <= 2.17 * 64 * 819
    assert scales.shape == (64, 1)


def test_padded_rows_are_not_offered_on_a_cpu():
    model = model_of().bfloat16()
    result = compress_(model, X[:1].bfloat16(), values="int8", objective="size")
    assert result.compressed
    assert not any(row.format.startswith("padded_rows") for row in result.rows)


@LAWS
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 300), width=st.sampled_from([16, 64, 128]),
    sparsity=st.sampled_from([0.0, 0.5, 0.95]), uneven=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_windows_hold_each_weight_once(rows, columns, width, sparsity, uneven, seed):
    matrix = Values("int8").quantize(pruned(rows, columns, "1x1", sparsity, seed=seed))[0]
    if uneven:
        matrix[::3] = 0  # rows without weights beside full ones
    values, index, first, starts, sums = packed = FORMATS["windows"].pack(matrix, (width,))
    assert int((values != 0).sum()) == int((matrix != 0).sum())
    assert len(values) == 64 * len(first) == 64 * int(starts[-1]) == len(index) * (2 if width == 16 else 1)
    assert torch.equal(sums, matrix.sum(1, dtype=torch.int32))
    ones = torch.ones_like(values)  # places without a weight are known without the values
    assert torch.equal(FORMATS["windows"].unpack([ones, *packed[1:]], rows, columns, (width,)) != 0, matrix != 0)


def test_int4_of_two_in_four_takes_three_bits_for_each_weight():
    matrix = pruned(64, 1024, "2:4", 0.5)
    matrix[matrix != 0] = matrix[matrix != 0].sign() * (1 + torch.rand(64 * 512))  # none is rounded to zero
    layer = nn.Linear(1024, 64, bias=False)
    layer.weight.data.copy_(matrix)
    packed = Compressed(layer, FORMATS["expand int4/64"], ())
    assert packed.bytes() == 64 * 1024 * 3 // 8 + 64 * 16 * 2 + 17 * 8 + 32  # scales, starts, and zeros past the end


@pytest.mark.skipif(not build.has("avx512vnni"), reason="no kernel for many rows here")
def test_many_rows_are_multiplied_as_bytes_and_load_other_weights():
    torch.manual_seed(0)
    x, layers = torch.randn(64, 512), [nn.Linear(512, 256), nn.Linear(512, 256)]
    for layer, sparsity in zip(layers, (0.8, 0.9)):
        layer.weight.data.copy_(pruned(256, 512, "4x4", sparsity, seed=int(10 * sparsity)))
    first, second = (Compressed(layer, FORMATS["quads int8"], (4,)).eval() for layer in layers)
    with torch.no_grad():
        torch.testing.assert_close(first(x), first._dense(x), rtol=1e-3, atol=1e-2)
        first.load_state_dict(second.state_dict())  # buffers of another sparsity
        assert torch.equal(first(x), second(x))
    wrong = second.state_dict()
    wrong["index"] = wrong["index"] + 1
    with pytest.raises(ValueError, match="do not match the model"):
        first.load_state_dict(wrong)
