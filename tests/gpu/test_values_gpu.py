"""Weights in fewer bits on a GPU: every column of the weight exactly, products against float64, and compressed models."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur as sc
from secateur.execute import Compressed, compress_
from secateur.execute.formats import FORMATS

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
