"""Weights in fewer bits on a GPU: every column of the weight exactly, products against float64, and compressed models.

The last part is about float8 weights with float8 inputs.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.execute import Compressed, compress_, decompress_
from secateur.execute.find import zeros_of
from secateur.execute.formats import FORMATS, Use
from secateur.execute.gpu.cusparselt import why_not_float8
from secateur.values import Values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SCALED = ("int8", "int8/128", "int8/64", "int4/128", "int4/64")
BF16 = torch.bfloat16


def two_of_four(rows: int, columns: int) -> Tensor:
    keep = (torch.rand(rows, columns // 4, 4, device="cuda").argsort(-1) < 2).view(rows, columns)
    return torch.randn(rows, columns, device="cuda").masked_fill(~keep, 0).to(BF16)


def packed(text: str, matrix: Tensor):
    """The format, its options, its buffers, and the weight that they stand for in float32."""
    form = FORMATS[f"sparse24_mma {text}" if text else "sparse24_mma"]
    options = (form.values.bits,) if form.values is not None else (16,)
    buffers = form.pack(matrix, options)
    return form, options, buffers, form.unpack(buffers, *matrix.shape, options).float()


@pytest.mark.parametrize("text", ["", *SCALED])
@pytest.mark.parametrize(("rows", "columns"), [(32, 256), (96, 1280), (192, 2048)])
def test_unit_vectors_give_every_column_exactly(text, rows, columns):
    torch.manual_seed(0)
    form, options, buffers, weight = packed(text, two_of_four(rows, columns))
    ones = torch.eye(columns, device="cuda", dtype=BF16)
    for many in (1, 3, 8, 16, 40):
        for first in range(0, columns, 16 * many):
            y = form.linear(ones[first : first + many], buffers, None, rows, options)
            assert torch.equal(y, weight[:, first : first + many].t().to(BF16))


@pytest.mark.parametrize("text", ["", *SCALED])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_those_in_float64_up_to_the_rounding_of_the_result(text, tokens, with_bias):
    torch.manual_seed(tokens)
    rows, columns = 320, 1280
    form, options, buffers, weight = packed(text, two_of_four(rows, columns))
    x = torch.randn(tokens, 2 * columns, device="cuda", dtype=BF16)[:, columns:]  # rows with a stride
    bias = torch.randn(rows, device="cuda", dtype=BF16) if with_bias else None
    y = form.linear(x, buffers, bias, rows, options)
    extra = 0 if bias is None else bias.double()
    exact, size = F.linear(x.double(), weight.double()) + extra, F.linear(x.double().abs(), weight.double().abs())
    assert bool(((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size).all())


def test_plain_values_may_have_any_size():
    torch.manual_seed(0)
    matrix = two_of_four(100, 520)
    form, options, buffers, weight = packed("", matrix)
    x = torch.randn(7, 520, device="cuda", dtype=BF16)
    y, exact = form.linear(x, buffers, None, 100, options), F.linear(x.double(), weight.double())
    assert bool(((y.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("text", ["", "int8"])
def test_a_layer_on_another_device_than_the_current_one(text):
    form, options, buffers, _ = packed(text, two_of_four(64, 512))
    x = torch.randn(3, 512, device="cuda", dtype=BF16)
    there = [each.to("cuda:1") for each in buffers]
    for _ in range(2):  # the second call launches the kernel that the first one compiled
        y = form.linear(x.to("cuda:1"), there, None, 64, options)
        assert y.device == torch.device("cuda:1")
        assert torch.equal(y.cpu(), form.linear(x, buffers, None, 64, options).cpu())


@pytest.mark.parametrize("text", ["", *SCALED])
def test_repeated_calls_follow_the_stream_and_the_addresses(text):
    torch.manual_seed(0)
    form, options, buffers, weight = packed(text, two_of_four(64, 512))
    x, stream = torch.randn(5, 1024, device="cuda", dtype=BF16), torch.cuda.Stream()
    for first, tokens in ((0, 5), (1, 5), (8, 3), (0, 1), (0, 5)):
        part = x[:tokens, first : first + 512]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            aside = form.linear(part * 1, buffers, None, 64, options)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(aside, form.linear(part, buffers, None, 64, options))
        exact = F.linear(part.double(), weight.double())
        assert bool(((aside.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-3).all())


def in_rows(text: str, rows: int, columns: int, sparsity: float, dtype: torch.dtype = BF16):
    """The same for `padded_rows` in runs, and a random matrix with a row of zeros and large gaps in the last row."""
    form, kept = FORMATS[f"padded_rows {text}".rstrip()], torch.rand(rows, columns, device="cuda") >= sparsity
    kept[rows // 2] = False
    kept[-1] = torch.arange(columns, device="cuda") % 700 == 0
    matrix = torch.randn(rows, columns, device="cuda").masked_fill(~kept, 0).to(dtype)
    options = (8,) if text else (16,)
    buffers = form.pack(matrix, options)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(buffers, form.pack(matrix.cpu(), options)))
    return form, options, buffers, form.unpack(buffers, rows, columns, options).float()


@pytest.mark.parametrize("text", ["", "int8"])
@pytest.mark.parametrize(
    ("rows", "columns", "sparsity"), [(300, 1100, 0.3), (5000, 4096, 0.8), (70, 8192, 0.8), (9, 16384, 0.9)]
)
def test_unit_vectors_give_every_column_of_padded_rows_exactly(text, rows, columns, sparsity):
    torch.manual_seed(0)
    form, options, buffers, weight = in_rows(text, rows, columns, sparsity)
    ones = torch.eye(columns, device="cuda", dtype=BF16)
    for first in range(0, columns, 4 * (1 + columns // 1100)):
        y = form.linear(ones[first : first + 4], buffers, None, rows, options)
        assert torch.equal(y, weight[:, first : first + 4].t().to(BF16))


@pytest.mark.parametrize("text", ["", "int8"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "columns", "sparsity"),
    [
        (1, 8, 0.0),
        (37, 1101, 0.6),
        (14336, 4096, 0.8),
        (4096, 4096, 0.9),
        (2048, 8192, 0.8),
        (100, 14336, 0.7),
        (50, 9000, 0.0),
    ],
)
def test_products_of_padded_rows(text, dtype, tokens, rows, columns, sparsity):
    torch.manual_seed(tokens)
    form, options, buffers, weight = in_rows(text, rows, columns, sparsity, dtype)
    x = torch.randn(tokens, 2 * columns, device="cuda").to(dtype)[:, columns:]  # rows with a stride
    bias = torch.randn(rows, device="cuda").to(dtype) if tokens % 2 else None
    for _ in range(2):
        y = form.linear(x, buffers, bias, rows, options)
        if y is None:
            assert not buffers[0].numel()
            return
        extra = 0 if bias is None else bias.double()
        exact, size = F.linear(x.double(), weight.double()) + extra, F.linear(x.double().abs(), weight.double().abs())
        assert bool(((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5 * size + 1e-7).all())


def per_row(rows: int, columns: int) -> Tensor:
    keep = torch.rand(rows, columns, device="cuda").argsort(1) < columns // 5
    return torch.randn(rows, columns, device="cuda").masked_fill(~keep, 0).to(BF16)


@pytest.mark.parametrize(
    ("values", "form"),
    [(("int8", None), "sparse24_mma"), (("int8", 64), "sparse24_mma"), (("int4", 64), "sparse24_mma"),
     (("int4", 128), "sparse24_mma"), (("int8", None), "padded_rows")],
)  # fmt: skip
def test_models_are_compressed_saved_and_replayed_in_graphs(values, form, tmp_path):
    torch.manual_seed(0)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512, bias=False)).to("cuda", BF16).eval()

    model = build()
    for i in (0, 2):
        model[i].weight.data.copy_((two_of_four if form == "sparse24_mma" else per_row)(*model[i].weight.shape))
    x, dense = torch.randn(4, 512, device="cuda", dtype=BF16), copy.deepcopy(model)
    result = compress_(model, x, values=values[0], group=values[1], objective="size")
    assert all(row.format.startswith(f"{form} int") and row.error < 0.2 for row in result.rows)
    assert isinstance(model[0], Compressed)
    sc.save(model, tmp_path)
    again = sc.load(tmp_path, build)
    with torch.no_grad():
        y = model(x)
        assert torch.equal(again(x), y)
        assert float((y - dense(x)).norm() / dense(x).norm()) < 0.2
        assert torch.equal(torch.compile(model, fullgraph=True)(x), y)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            held = model(x)
        for _ in range(3):  # kernels that start early must not read inputs that are not written yet
            x.normal_()
            graph.replay()
            assert torch.equal(held, model(x))


# ---------------------------------------------------------------- float8 weights and inputs

FLOAT8 = "float8_e4m3fn"
old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
float8 = pytest.mark.skipif(old, reason="this GPU does not multiply float8 numbers")
ASKED = {"values": FLOAT8, "inputs": FLOAT8}


def in_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float8, and the smallest power of two for each row with which its largest finite input is at most 448."""
    largest = x.double().nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # 448 is 0.875 * 2**9
    power = torch.where(largest > 0, exponent - 9 + (mantissa > 0.875).int(), -103).clamp_min(-103)
    scales = torch.ldexp(torch.ones_like(largest), power).float()
    return (x.float() / scales).nan_to_num(math.nan, math.nan, math.nan).to(torch.float8_e4m3fn), scales


def held8(matrix: Tensor):
    form = FORMATS[f"cusparselt8 {FLOAT8}"]
    buffers = form.pack(matrix, ())
    return form, buffers, form.unpack(buffers, *matrix.shape, ())


@float8
@pytest.mark.parametrize(
    ("tokens", "columns", "padded"), [(1, 256, 16), (5, 320, 16), (100, 576, 112), (9, 16448, 16), (3000, 1024, 3008)]
)
def test_input_rows_are_rounded_to_float8_by_powers_of_two(tokens, columns, padded):
    from secateur.execute.gpu.float8_kernels import rounded

    torch.manual_seed(tokens)
    sizes = torch.tensor([0.0, 1e-38, 1e-20, 1.0, 447.0, 449.0, 1e30, 3e38], device="cuda").roll(-3).repeat(375)[:tokens]
    wide = (torch.randn(tokens, 2 * columns, device="cuda").clamp(-1, 1) * sizes.unsqueeze(1)).to(BF16)
    for x in (wide[:, columns:], wide[:, ::2]):
        for odd in (False, True):
            if odd:
                x[0, 3], x[-1, 7], x[tokens // 2, 9] = math.inf, -math.inf, math.nan
            small, scales = rounded(x, padded)
            expected, own = in_float8(x)
            assert small.shape == (padded, columns)
            assert torch.equal(scales, own.flatten())
            torch.testing.assert_close(small[:tokens].float(), expected.float(), rtol=0, atol=0, equal_nan=True)
            assert not small[tokens:].float().any()


@float8
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 256), (33, 576), (3000, 1088)])
def test_products_are_multiplied_by_both_scales(tokens, rows, with_bias):
    from secateur.execute.gpu.float8_kernels import scaled_

    torch.manual_seed(tokens)
    y, scales = torch.randn(tokens, rows, device="cuda").to(BF16), torch.rand(rows, 1, device="cuda").to(BF16)
    own = torch.ldexp(torch.ones(tokens, device="cuda"), torch.randint(-30, 30, (tokens,), device="cuda"))
    bias = torch.randn(rows, device="cuda", dtype=BF16) if with_bias else None
    exact = y.double() * scales.double().t() * own.double().unsqueeze(1) + (0 if bias is None else bias.double())
    assert torch.equal(scaled_(y, own, scales.view(torch.int16), bias), exact.float().to(BF16))


@float8
@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (320, 1280), (1024, 576)])
def test_unit_vectors_give_every_column_of_a_float8_weight_exactly(rows, columns):
    torch.manual_seed(0)
    matrix = two_of_four(rows, columns)
    matrix[torch.rand(rows, columns, device="cuda") < 0.1] = 0  # some groups hold one weight, or none
    form, buffers, weight = held8(matrix)
    assert torch.equal(weight, Values(FLOAT8).dequantize(*Values(FLOAT8).quantize(matrix)))
    assert torch.equal(form.unpack([each.cpu() for each in buffers], rows, columns, ()), weight.cpu())
    ones = torch.eye(columns, device="cuda", dtype=BF16)
    for first in range(0, columns, 100):
        y = form.linear(ones[first : first + 100], buffers, None, rows, ())
        assert torch.equal(y, weight[:, first : first + 100].t().to(BF16))


@float8
@pytest.mark.parametrize("tokens", [1, 5, 16, 64, 100, 700, 2048])
@pytest.mark.parametrize("with_bias", [False, True])
def test_float8_products_equal_those_in_float64(tokens, with_bias):
    """The sum is rounded to bfloat16, and again after the scales and the bias: each changes it by at most 2**-8 of itself.

    Tensor cores add float8 products with fewer bits than float32 has, hence the last term.
    """
    torch.manual_seed(tokens)
    rows, columns = 320, 1280
    form, buffers, weight = held8(two_of_four(rows, columns))
    wide = torch.randn(tokens, 2 * columns, device="cuda", dtype=BF16)
    bias = torch.randn(rows, device="cuda", dtype=BF16) if with_bias else None
    sizes = torch.logspace(-6, 6, tokens, device="cuda").unsqueeze(1)
    for x in (wide[:, columns:], wide[:, ::2], (wide[:, :columns] * sizes).to(BF16)):
        y = form.linear(x, buffers, bias, rows, ())
        small, scale = in_float8(x)
        seen = small.double() * scale
        sums, size = F.linear(seen, weight.double()), F.linear(seen.abs(), weight.double().abs())
        exact = sums + (0 if bias is None else bias.double())
        assert y.shape == exact.shape
        assert bool(((y.double() - exact).abs() <= 2**-8 * (exact.abs() + 1.01 * sums.abs()) + 2**-11 * size).all())


@float8
def test_a_token_that_is_not_finite_leaves_the_others_alone():
    torch.manual_seed(0)
    form, buffers, weight = held8(two_of_four(256, 512))
    x = torch.randn(64, 512, device="cuda", dtype=BF16)
    plain = form.linear(x, buffers, None, 256, ())
    x[3, 5], x[9, 0] = math.inf, math.nan
    y, rest = form.linear(x, buffers, None, 256, ()), [i for i in range(64) if i not in (3, 9)]
    assert bool(y[3, weight[:, 5] != 0].isnan().all())  # other outputs do not read that input: they store no weight for it
    assert bool(y[9, weight[:, 0] != 0].isnan().all())
    assert torch.equal(y[rest], plain[rest])


@float8
def test_a_much_larger_token_does_not_change_the_others():
    torch.manual_seed(0)
    form, buffers, _ = held8(two_of_four(256, 512))
    x = torch.randn(64, 512, device="cuda", dtype=BF16)
    plain = form.linear(x, buffers, None, 256, ())
    x[5] *= 2.0**30
    y, rest = form.linear(x, buffers, None, 256, ()), [i for i in range(64) if i != 5]
    assert torch.equal(y[rest], plain[rest])
    assert torch.equal(y[5], plain[5] * 2.0**30)


@float8
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("name", ["cusparselt", f"cusparselt8 {FLOAT8}"])
def test_the_library_multiplies_on_another_device_than_the_current_one(name):
    torch.manual_seed(0)
    form, x = FORMATS[name], torch.randn(64, 512, device="cuda", dtype=BF16)
    buffers = form.pack(two_of_four(256, 512), ())
    here = form.linear(x, buffers, None, 256, ())
    there = form.linear(x.to("cuda:1"), [each.to("cuda:1") for each in buffers], None, 256, ())
    assert there.device == torch.device("cuda:1")
    assert apart(there.cpu(), here.cpu()) < 1e-2


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024, bias=False)).to("cuda", BF16).eval()


@pytest.fixture
def small8():
    """A model with float8 weights and inputs in both layers, the dense model, inputs, and the result."""
    torch.manual_seed(0)
    model = two_layers()
    for i in (0, 2):
        model[i].weight.data.copy_(two_of_four(*model[i].weight.shape) / 32)
    x, dense = torch.randn(256, 1024, device="cuda", dtype=BF16), copy.deepcopy(model)
    return model, dense, x, compress_(model, x, objective="size", **ASKED)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@float8
def test_float8_models_are_saved_compiled_and_replayed_in_graphs(small8, tmp_path):
    model, dense, x, result = small8
    assert all(row.format == f"cusparselt8 {FLOAT8}" and 0.01 < row.error < 0.06 for row in result.rows), str(result)
    with torch.no_grad():
        y = model(x)
        assert apart(y, dense(x)) < 0.08
        assert torch.equal(torch.compile(model, fullgraph=True)(x), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = model(x)
        for size in (1.0, 30.0, 1e-3):  # the scales of the inputs are computed at each replay
            x.normal_().mul_(size)
            graph.replay()
            assert torch.equal(held, model(x))
        assert apart(model(x[:33]), dense(x[:33])) < 0.08  # a shape that was not measured
        sc.save(model, tmp_path)
        again = sc.load(tmp_path, two_layers)
        assert [again[i].form for i in (0, 2)] == [f"cusparselt8 {FLOAT8}"] * 2
        assert all(torch.equal(again[i].weight, model[i].weight) for i in (0, 2))
        assert apart(again(x), model(x)) < 1e-2
        other = copy.deepcopy(model)
        other.load_state_dict(model.state_dict())
        assert apart(other(x), model(x)) < 1e-2


@float8
def test_decompressed_float8_layers_have_the_rounded_weights(small8, tmp_path):
    model, dense, _, _ = small8
    sc.save(model, tmp_path)
    stored = sc.load(tmp_path, two_layers, as_="dense")
    decompress_(model)
    for i in (0, 2):
        rounded = Values(FLOAT8).dequantize(*Values(FLOAT8).quantize(dense[i].weight.detach())).to(BF16)
        assert type(model[i]) is nn.Linear
        assert torch.equal(model[i].weight, rounded)
        assert torch.equal(stored[i].weight, rounded)


@float8
def test_nobody_gets_float8_inputs_without_asking(small8):
    _, dense, x, _ = small8
    for arguments in ({}, {"values": FLOAT8}):
        result = compress_(copy.deepcopy(dense), x, **arguments)
        assert not any("cusparselt8" in str(row.format) + row.reason for row in result.rows)


@float8
def test_float8_inputs_are_chosen_where_they_are_faster():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096, bias=False)).to("cuda", BF16).eval()
    for i in (0, 2):
        model[i].weight.data.copy_(two_of_four(*model[i].weight.shape) / 64)
    result = compress_(model, torch.randn(2048, 4096, device="cuda", dtype=BF16), **ASKED)
    print(result)
    assert [row.format for row in result.rows if row.format] == [f"cusparselt8 {FLOAT8}"] * 2
    assert result.speedup > 1.5


@float8
@pytest.mark.parametrize(
    ("columns", "dtype", "tokens", "group", "words"),
    [
        (512, torch.float32, 64, 0, "for layers in bfloat16, not float32"),
        (512, BF16, 8, 0, "for 64 or more input rows, not 8"),
        (500, BF16, 64, 0, "at least 256 rows and columns, in multiples of 64"),
        (512, BF16, 64, 64, "one scale for each row, not group=64"),
        (512, BF16, 64, 0, "need 2:4 zeros"),
    ],
)
def test_what_float8_inputs_do_not_suit_is_named(columns, dtype, tokens, group, words):
    matrix = two_of_four(512, columns).to(dtype)
    if words == "need 2:4 zeros":
        matrix = matrix.roll(1, 1)
    reason = why_not_float8(matrix, zeros_of(matrix), Use("linear", "cuda", (tokens,), values=Values(FLOAT8, group)))
    assert words in str(reason)


@float8
def test_a_layer_in_float32_stays_dense_and_says_why():
    model = nn.Sequential(nn.Linear(512, 512)).cuda().eval()
    result = compress_(model, torch.randn(64, 512, device="cuda"), **ASKED)
    assert "float8 inputs are for layers in bfloat16, not float32" in result.rows[0].reason
