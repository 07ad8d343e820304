"""Each format against the dense product in float64, over shapes, patterns, batch sizes, dtypes and strides."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from secateur.execute.formats import FORMATS, Window, as_matrix, as_weight

from .patterns import pruned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PATTERNS = ("1x1", "4x1", "16x1", "1x8", "1x16", "16x16", "2:4", "4:8")
# Formats of rounded weights alone; test_values.py has their laws.
ROUNDED = {"cusparselt8", "expand", "quads", "quads8", "windows"}
LAWS = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def options_of(name: str, rows: int) -> list[tuple[int, ...]]:
    if name == "padded_rows":
        return [(), (16,)]
    heights = {"tiled": (1, 4), "panels": (16, 8)}.get(name)
    return [()] if heights is None else [(height,) for height in heights if rows % height == 0]


def near(got: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """True if `got` is close to the product in float64, relative to the sum of the absolute terms."""
    exact = F.linear(x.double(), matrix.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), matrix.double().abs(), None if bias is None else bias.double().abs())
    return bool(((got.double() - exact).abs() <= {torch.float32: 1e-6}.get(dtype, 1e-2) * size + 1e-30).all())


@pytest.mark.parametrize("name", sorted(set(FORMATS) - ROUNDED - {"pairs", "sparse24_mma", "cusparselt", "dense_blocks"}))
@LAWS
@given(
    rows=st.sampled_from([1, 7, 16, 64, 100, 144, 272]),
    columns=st.sampled_from([1, 5, 16, 100, 128, 200, 264, 520]),
    batch=st.sampled_from([0, 1, 2, 3, 8, 13, 16, 31, 33, 64, 70, 130]),
    pattern=st.sampled_from(PATTERNS),
    sparsity=st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.95, 1.0]),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from([None, torch.bfloat16]),
    with_bias=st.booleans(),
    strides=st.sampled_from(["plain", "columns", "every other row", "transposed"]),
    seed=st.integers(0, 9),
)
def test_every_format_computes_what_dense_does(
    name, rows, columns, batch, pattern, sparsity, dtype, stored, with_bias, strides, seed
):
    form = FORMATS[name]
    matrix = pruned(rows, columns, pattern, sparsity, stored or dtype, seed)
    x = torch.randn(2 * batch, 2 * columns).to(dtype)
    x = {
        "plain": x[:batch, :columns].contiguous(),
        "columns": x[:batch, columns:],
        "every other row": x[::2, :columns],
        "transposed": x[:batch, :columns].t().contiguous().t(),
    }[strides]
    bias = torch.randn(rows).to(dtype) if with_bias else None
    for options in options_of(name, rows):
        packed = form.pack(matrix, options)
        assert torch.equal(form.unpack(packed, rows, columns, options), matrix)
        y = torch.ops.secateur.linear(x, list(packed), bias, name, rows, columns, options)
        assert y.shape == (batch, rows)
        assert y.dtype == dtype
        assert near(y, x, matrix, bias, dtype)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - ROUNDED - {"sparse24_mma", "cusparselt"}))
def test_every_format_stores_the_smallest_weights(name):
    dtype = torch.bfloat16 if name in ("pairs", "amx_tiles") else torch.float32
    matrix = pruned(64, 128, "2:4", 0.5, dtype)
    for size in (1e-7, 1e-30, torch.finfo(dtype).smallest_normal):
        small = torch.where(matrix == 0, 0, matrix.sign() * torch.linspace(size, 3 * size, 128).to(dtype))
        options = {"pairs": (1, 0), "tiled": (4,), "panels": (16,), "dense_blocks": (16,)}.get(name, ())
        assert torch.equal(FORMATS[name].unpack(FORMATS[name].pack(small, options), 64, 128, options), small)


@LAWS
@given(
    rows=st.sampled_from([1, 8, 100, 144]), columns=st.sampled_from([4, 12, 128, 300]), batch=st.sampled_from([0, 8, 33, 70]),
    pattern=st.sampled_from(["1x1", "1x2", "4x2", "16x16", "2:4"]), sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 9), strided=st.booleans(),
)  # fmt: skip
def test_pairs_compute_what_dense_does(rows, columns, batch, pattern, sparsity, seed, strided):
    """Uses the CPU's instruction for pairs (avx512bf16) if it has one, and otherwise two multiplications."""
    matrix = pruned(rows, columns, pattern, sparsity, torch.bfloat16, seed)
    x = torch.randn(batch, 2 * columns).bfloat16()
    x = x[:, ::2] if strided else x[:, :columns]
    for options in [(1, 0), *([(4, 0)] if rows % 4 == 0 else []), *([(1, 1)] if pattern == "2:4" else [])]:
        packed = FORMATS["pairs"].pack(matrix, options)
        assert torch.equal(FORMATS["pairs"].unpack(packed, rows, columns, options), matrix)
        y = torch.ops.secateur.linear(x, list(packed), None, "pairs", rows, columns, options)
        assert near(y, x, matrix, None, torch.bfloat16)


@pytest.mark.parametrize("options", [(1, 0), (4, 0), (1, 1)])
def test_pairs_of_minus_zeros_are_not_stored(options):
    """Multiplying a weight with a mask gives -0.0, whose bits are not zero and must not be stored as a weight."""
    matrix = pruned(16, 64, "4x4", 0.8, torch.bfloat16) * (torch.arange(64) % 4 < 2)
    minus = torch.where(matrix == 0, -0.0, matrix)
    for with_minus, without in zip(*(FORMATS["pairs"].pack(each, options) for each in (minus, matrix.abs() * matrix.sign()))):
        assert torch.equal(with_minus, without)


def test_groups_of_three_are_no_pairs():
    with pytest.raises(ValueError, match="more than two weights"):
        FORMATS["pairs"].pack(torch.ones(4, 8, dtype=torch.bfloat16), (1, 1))


@LAWS
@given(
    channels=st.sampled_from([1, 3, 8, 16]),
    filters=st.sampled_from([4, 8, 20, 136]),
    size=st.sampled_from([(5, 5), (7, 9), (14, 14), (1, 33), (20, 4)]),
    kernel=st.sampled_from([(1, 1), (3, 3), (1, 5), (2, 3)]),
    stride=st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1)]),
    padding=st.sampled_from([(0, 0), (1, 1), (2, 1)]),
    dilation=st.sampled_from([(1, 1), (2, 2), (1, 2)]),
    groups=st.sampled_from([1, 2]),
    images=st.sampled_from([1, 2, 3]),
    pattern=st.sampled_from(["1x1", "4x1"]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2]),
    last=st.booleans(),
)
def test_tiled_convolutions_are_those_of_torch(
    channels, filters, size, kernel, stride, padding, dilation, groups, images, pattern, dtype, threads, last
):
    move = Window(kernel, stride, padding, dilation)
    if min(move.out(*size)) < 1 or channels % groups or filters % groups:
        return
    weight = pruned(filters, channels // groups * kernel[0] * kernel[1], pattern, 0.7, dtype).reshape(filters, -1, *kernel)
    x, bias = torch.randn(images, channels, *size).to(dtype), torch.randn(filters).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    exact = F.conv2d(x.double(), weight.double(), bias.double(), stride, padding, dilation, groups)
    torch.set_num_threads(threads)
    matrix = as_matrix(weight, groups)
    for options in options_of("tiled", filters):
        packed = FORMATS["tiled"].pack(matrix, options)
        window = [*kernel, *stride, *padding, *dilation]
        y = torch.ops.secateur.conv(x, list(packed), bias, "tiled", *matrix.shape, options, window)
        assert y.shape == exact.shape
        assert y.dtype == dtype
        assert float((y.double() - exact).abs().max()) <= (1e-5 if dtype == torch.float32 else 5e-2) * float(
            exact.abs().max() + 1
        )
    assert torch.equal(as_weight(matrix, weight.shape, groups), weight)


def test_kernel_larger_than_its_images_is_refused_as_torch_does():
    packed = list(FORMATS["tiled"].pack(pruned(4, 27, "1x1", 0.5), (1,)))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        torch.ops.secateur.conv(torch.randn(1, 3, 2, 2), packed, None, "tiled", 4, 27, (1,), [3, 3, 1, 1, 0, 0, 1, 1])


@LAWS
@given(
    rows=st.sampled_from([1, 3, 4, 30]), columns=st.sampled_from([1, 8, 13, 64]), sparsity=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from(DTYPES), shape=st.sampled_from([(0,), (1,), (5,), (2, 3)]),
)  # fmt: skip
def test_embedding_rows_come_out_as_they_went_in(rows, columns, sparsity, dtype, shape):
    matrix = pruned(rows, columns, "1x1", sparsity, dtype)
    ids = torch.randint(rows, shape)
    for name in ("bitmask", "csr"):
        packed = FORMATS[name].pack(matrix, ())
        y = torch.ops.secateur.embedding(ids, list(packed), name, rows, columns, ())
        assert torch.equal(y, F.embedding(ids, matrix))


def test_threads_share_the_work_and_agree():
    matrix, x = pruned(600, 500, "1x1", 0.8), torch.randn(300, 500)
    packed = list(FORMATS["tiled"].pack(matrix, (1,)))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(torch.ops.secateur.linear(x, packed, None, "tiled", 600, 500, (1,)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_wrong_width_is_refused_in_words():
    packed = list(FORMATS["tiled"].pack(pruned(8, 16, "1x1", 0.5), (1,)))
    with pytest.raises(ValueError, match="16 features in the last dimension"):
        torch.ops.secateur.linear(torch.randn(3, 17), packed, None, "tiled", 8, 16, (1,))
