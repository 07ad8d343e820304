"""Inputs in 8 bits (`inputs=`): the error that theory allows, and that nobody gets them without asking.

Float8 inputs need a GPU: tests/gpu/test_values_gpu.py has their products.
"""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import secateur as sc
from secateur.execute import Compressed, compress_, decompress_
from secateur.execute.find import zeros_of
from secateur.execute.formats import FORMATS, Use
from secateur.execute.gpu.cusparselt import why_not_float8
from secateur.execute.gpu.sparse24_mma import two_of_four
from secateur.execute.native import build
from secateur.values import Values

from .patterns import pruned

LAWS = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
vnni = pytest.mark.skipif(not build.has("avx512f", "avx512bw", "avx512vnni"), reason="no kernel for inputs in 8 bits here")


def linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None, height: int = 1) -> torch.Tensor:
    packed = FORMATS["quads8 int8"].pack(matrix, (height,))
    return torch.ops.secateur.linear(x, list(packed), bias, "quads8 int8", *matrix.shape, (height,))


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    return Values("int8").dequantize(*Values("int8").quantize(matrix)).double()


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers with other strides."""
    if how == "transposed":
        return x.t().contiguous().t()
    return torch.stack([x, x + 1], -1)[..., 0] if how == "every second" else x


@vnni
@LAWS
@given(
    rows=st.sampled_from([1, 7, 24, 300]), columns=st.sampled_from([1, 3, 64, 193, 1030]), batch=st.integers(1, 200),
    height=st.sampled_from([1, 4]), sparsity=st.sampled_from([0.0, 0.8, 1.0]), size=st.sampled_from([1e-25, 1.0, 1e30]),
    odd=st.sampled_from(["", "zeros", "huge"]), how=st.sampled_from(["", "transposed", "every second"]),
    with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_input_moves_by_at_most_half_a_step(rows, columns, batch, height, sparsity, size, odd, how, with_bias, seed):
    """|y - w x| <= sum |w| * step / 2 with w in int8, where the step of an input row is its largest input over 127."""
    rows = -(-rows // height) * height
    torch.manual_seed(seed)
    matrix, x = pruned(rows, columns, "1x1", sparsity, seed=seed), torch.randn(batch, columns) * size
    if odd:
        x[seed % batch] *= 0.0 if odd == "zeros" else 1.0
        x[seed % batch, seed % columns] *= 1.0 if odd == "zeros" else 1e4
    bias, weight = torch.randn(rows) if with_bias else None, rounded(matrix)
    got = linear(laid_out(x, how), matrix, bias, height).double()
    exact = F.linear(x.double(), weight, None if bias is None else bias.double())
    step = x.double().abs().amax(1, keepdim=True) / 127
    arithmetic = F.linear(x.double().abs() + step, weight.abs(), None if bias is None else bias.double().abs()) * 2.0**-21
    # The product of an input and one over the step is rounded to 24 bits before it is rounded to an integer of 7.
    assert bool(((got - exact).abs() <= weight.abs().sum(1) * step * (0.5 + 2.0**-15) + arithmetic).all())
    assert torch.equal(got[x.abs().amax(1) == 0], exact[x.abs().amax(1) == 0])


@vnni
def test_the_largest_input_of_every_row_is_exact():
    """With one input for each output, a step that were a power of two, or one for all rows, would move it."""
    x = torch.diag(torch.tensor([0.3, 1.7, 200.0, 1e-6]))
    torch.testing.assert_close(linear(x, torch.eye(4) * 127), x * 127, rtol=1e-6, atol=0.0)


@vnni
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e36, 1e-35])
def test_a_batch_that_no_byte_can_hold_is_multiplied_as_floats(odd):
    matrix, x = pruned(8, 64, "1x4", 0.5), torch.randn(16, 64)
    x[3] = odd
    expected = F.linear(x, rounded(matrix).float())
    assert torch.equal(linear(x, matrix).nan_to_num(7.0), expected.nan_to_num(7.0))


# ---------------------------------------------------------------- models

X = torch.randn(64, 2048, generator=torch.Generator().manual_seed(1))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 256, bias=False)).eval()
    for layer in (model[0], model[2]):
        layer.weight.data.copy_(pruned(*layer.weight.shape, "4x4", 0.8) / 32)
    return model


@pytest.fixture
def asked():
    """A model with both layers in this format. (Which one is the fastest for the second, a small one, depends on the CPU.)"""
    model = model_of()
    for place in ("0", "2"):
        setattr(model, place, Compressed(model.get_submodule(place), FORMATS["quads8 int8"], (4,)).eval())
    return model


@vnni
def test_who_asks_gets_them_and_the_table_shows_the_larger_error():
    model, dense, finer = model_of(), model_of()[0], Compressed(model_of()[0], FORMATS["quads int8"], (4,)).eval()
    result = compress_(model, X, values="int8", inputs="int8")
    assert result["0"].format.startswith("quads8 int8")
    with torch.no_grad():
        expected = dense(X)
        mine, other = (float((layer(X) - expected).norm() / expected.norm()) for layer in (model[0], finer))
    assert result["0"].error == pytest.approx(mine, rel=1e-3)
    assert 1.2 * other < mine < 2e-2
    assert f"{mine:.1e}" in str(result)


@vnni
def test_nobody_gets_them_without_asking():
    result = compress_(model_of(), X, values="int8")
    assert not any("quads8" in str(row.format) + row.reason for row in result.rows)


@vnni
def test_weights_are_those_of_int8(asked, tmp_path):
    model = asked
    sc.save(model, tmp_path)
    stored = sc.load(tmp_path, model_of, as_="dense")
    decompress_(model)
    for i in (0, 2):
        assert type(model[i]) is nn.Linear
        assert torch.equal(model[i].weight, rounded(model_of()[i].weight.detach()).float())
        assert torch.equal(stored[i].weight, model[i].weight)


@vnni
def test_copies_files_and_graphs_compute_the_same(asked, tmp_path):
    model = asked
    other = nn.Sequential(*(copy.deepcopy(layer) for layer in model)).eval()
    other[0].get_buffer("values").zero_()
    with torch.no_grad():
        expected = model(X)
        for same in (
            copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.export.export(model, (X,)).module(),
            torch.compile(model, fullgraph=True, backend="aot_eager"),
        ):  # fmt: skip
            assert torch.equal(same(X), expected)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(X), expected)
        sc.save(model, tmp_path)
        again = sc.load(tmp_path, model_of)
        assert [again[i].form for i in (0, 2)] == ["quads8 int8"] * 2
        assert torch.equal(again(X), expected)
        assert torch.equal(model(X[:1]), expected[:1])  # a row has a scale of its own, whatever else is in the batch


@vnni
def test_they_are_not_used_where_one_input_is_much_larger_than_the_others():
    model, x = model_of(), X.clone()
    x[:, 0] = 1e3
    model[0].weight.data[:, 0] = 0
    result = compress_(model, x, values="int8", inputs="int8")
    assert "quads8" not in str(result["0"].format) + result["0"].reason


@pytest.mark.parametrize(("rows", "group"), [(1, None), (64, 64)])
def test_other_formats_are_considered_where_none_takes_inputs_in_8_bits(rows, group):
    model = model_of()
    result = compress_(model, X[:rows], values="int8", group=group, inputs="int8", objective="size")
    assert all(row.format and "quads8" not in row.format for row in result.rows)


# ---------------------------------------------------------------- float8


def test_a_layer_without_a_gpu_stays_dense_and_says_that_float8_inputs_need_one():
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    result = compress_(model, X[:, :256], values="float8_e4m3fn", inputs="float8_e4m3fn")
    assert result["0"].reason == "no format fits: float8 inputs are for NVIDIA GPUs, and the layer is on the device cpu"
    plain = compress_(model, X[:, :256], values="float8_e4m3fn")
    assert plain["0"].reason == "no format fits"


@vnni
def test_other_formats_are_considered_where_float8_inputs_have_none():
    model = model_of()
    result = compress_(model, X[:1], values="float8_e4m3fn", inputs="float8_e4m3fn", objective="size")
    assert all(row.format and row.format.split()[1] == "float8_e4m3fn" for row in result.rows)


def test_what_float8_inputs_do_not_suit_is_named():
    matrix = pruned(256, 256, "2:4", 0.5, torch.bfloat16)
    assert "linear layers" in str(why_not_float8(matrix, zeros_of(matrix), Use("conv", "cuda", (64,))))
    assert "device mps" in str(why_not_float8(matrix, zeros_of(matrix), Use("linear", "mps", (64,))))
    if not torch.cuda.is_available():
        assert why_not_float8(matrix, zeros_of(matrix), Use("linear", "cuda", (64,))) == "torch sees no CUDA device"


def packed_by_the_library(matrix: torch.Tensor) -> list[torch.Tensor]:
    """The library's packed form starts with the values, row by row; what follows is not read."""
    values, places = two_of_four(matrix)
    codes = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    bits = values.flatten().view(torch.uint8 if matrix.dtype == torch.uint8 else torch.int16)
    packed = torch.cat([bits, torch.full((matrix.numel() // 8,), 77, dtype=bits.dtype)])
    return [torch.ones(1, dtype=matrix.dtype), codes[:, 0::2] | codes[:, 1::2] << 4, packed]


def test_packed_on_a_gpu_float8_weights_unpack_on_a_cpu():
    torch.manual_seed(0)
    matrix = pruned(256, 320, "2:4", 0.5)
    small, scales = Values("float8_e4m3fn").quantize(matrix)
    buffers = [*packed_by_the_library(small), scales]
    name = "cusparselt8 float8_e4m3fn"
    weight = Values("float8_e4m3fn").dequantize(small, scales)
    assert torch.equal(FORMATS[name].unpack(buffers, 256, 320, ()), weight)
    x = X[:5, :320]
    assert torch.equal(torch.ops.secateur.linear(x, buffers, None, name, 256, 320, ()), F.linear(x, weight))
    with pytest.raises(ValueError, match="packs float8 matrices on a GPU with at least 256 rows"):
        FORMATS[name].pack(matrix, ())


@pytest.mark.parametrize("name", ["cusparselt", "cusparselt8 float8_e4m3fn"])
def test_a_packed_form_that_was_cut_short_is_refused(name):
    """The library reads it to its end, also what follows the values."""
    torch.manual_seed(0)
    matrix, form = pruned(256, 320, "2:4", 0.5, torch.bfloat16), FORMATS[name]
    dense = nn.Linear(320, 256).to(torch.bfloat16)
    with torch.no_grad():
        dense.weight.copy_(matrix)
    layer = Compressed(dense, FORMATS["padded_rows"], ())
    small, scales = Values("float8_e4m3fn").quantize(matrix)
    held = packed_by_the_library(matrix) if form.values is None else [*packed_by_the_library(small), scales]
    layer.form, layer.names, layer._buffers = name, form.buffers, dict(zip(form.buffers, held, strict=True))
    whole = {key: buffer.clone() for key, buffer in layer.state_dict().items()}
    layer.load_state_dict(whole)
    with pytest.raises(ValueError, match=f"do not match the model, where it is in the format {name}"):
        layer.load_state_dict({**whole, "packed": whole["packed"][: matrix.numel() // 2]})


def test_flops_count_the_values_that_the_library_stores():
    torch.manual_seed(0)
    matrix = pruned(256, 320, "2:4", 0.5, torch.bfloat16)
    small, scales = Values("float8_e4m3fn").quantize(matrix)
    for name, buffers in (
        ("cusparselt", packed_by_the_library(matrix)),
        ("cusparselt8 float8_e4m3fn", [*packed_by_the_library(small), scales]),
    ):
        with FlopCounterMode(display=False) as counter:
            torch.ops.secateur.linear(X[:5, :320].bfloat16(), buffers, None, name, 256, 320, ())
        assert counter.get_total_flops() == 2 * 5 * 256 * 320 // 2


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": "int4", "values": "int8"}, "inputs must be 'int8' or 'float8_e4m3fn', or None .*not 'int4'"),
        ({"inputs": "float8", "values": "int8"}, "not 'float8'.*float8_e4m3fn"),
        ({"inputs": "int8"}, "give values='int8' as well"),
        ({"inputs": "int8", "values": "int4"}, "give values='int8' as well"),
        ({"inputs": "float8_e4m3fn"}, "give values='float8_e4m3fn' as well"),
        ({"inputs": "float8_e4m3fn", "values": "int8"}, "give values='float8_e4m3fn' as well"),
        ({"inputs": "int8", "values": "float8_e4m3fn"}, "give values='int8' as well"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    model = model_of()
    with pytest.raises(ValueError, match=words):
        compress_(model, X, **arguments)
    assert type(model[0]) is nn.Linear
