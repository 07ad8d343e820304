"""The Triton kernels of compressed layers, compiled for an H200 and run by an emulator of PTX. They need Triton, and no GPU."""

from __future__ import annotations

import contextlib
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

triton = pytest.importorskip("triton")

from offline import Driver  # noqa: E402
from ptx_memory import Fault  # noqa: E402

from secateur.execute.formats import FORMATS, linear  # noqa: E402
from secateur.execute.gpu import (  # noqa: E402
    float8_kernels,
    input_sparse,
    launch,
    padded_rows,
    row_kernels,
    sparse24_mma,
    staged_kernels,
    triton_kernels,
)

BF16, HALVES = torch.bfloat16, (torch.bfloat16, torch.float16)
DRIVER = Driver()  # one for all tests, since compiled kernels keep it
KINDS = ("", "int8", "int8/128", "int8/64", "int4/128", "int4/64")


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns that it assumes this
        yield


@pytest.fixture
def driver(monkeypatch):
    """A driver that emulates launches. The formats take CPU tensors for those of a GPU."""
    driver, real = DRIVER, launch.launch
    driver.launches, driver.change = 0, str

    def told(kernel, grid, tensors, *rest, **options):
        driver.tensors = tensors
        real(kernel, grid, tensors, *rest, **options)

    for module in (sparse24_mma, padded_rows, input_sparse):
        monkeypatch.setattr(module, "runs", lambda x, values: x.dtype == values.dtype)
    monkeypatch.setattr(sparse24_mma, "_runs_scaled", lambda x, values, rows: x.dtype == BF16)
    monkeypatch.setattr(padded_rows, "_runs_scaled", lambda x, values: True)
    for module in (float8_kernels, row_kernels, staged_kernels, triton_kernels):
        monkeypatch.setattr(module, "_early", lambda device: True)
        monkeypatch.setattr(module, "launch", told)
    for module in (row_kernels, triton_kernels):
        monkeypatch.setattr(module, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "_READY", {})
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    torch.manual_seed(0)
    return driver


def two_of_four(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    keep = (torch.rand(rows, columns // 4, 4).argsort(-1) < 2).view(rows, columns)
    return torch.randn(rows, columns).masked_fill(~keep, 0).to(dtype)


def packed(kind: str, matrix: Tensor):
    """The format's name, its options, its buffers, and the weight that they stand for."""
    form = FORMATS[f"sparse24_mma {kind}".rstrip()]
    options = (16,) if form.values is None else (form.values.bits,)
    buffers = form.pack(matrix, options)
    return form.name, options, buffers, form.unpack(buffers, *matrix.shape, options)


def near(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """True if y is the product in float64 up to the rounding of its dtype."""
    extra = 0 if bias is None else bias.double()
    exact, size = F.linear(x.double(), weight.double()) + extra, F.linear(x.double().abs(), weight.double().abs())
    return bool(((y.double() - exact).abs() <= torch.finfo(y.dtype).eps * exact.abs() + 1e-5 * size).all())


def multiply(form: str, x: Tensor, buffers, rows: int, options=(), bias: Tensor | None = None) -> Tensor:
    return linear(x, buffers, bias, form, rows, x.shape[1], options)


@pytest.mark.parametrize("kind", KINDS)
def test_unit_vectors_give_every_column_exactly(driver, kind):
    for columns, many, last in ((1280, 320, 1280), (256, 8, 8), (256, 3, 3)):
        form, options, buffers, weight = packed(kind, two_of_four(32, columns))
        ones = torch.eye(columns, dtype=BF16)
        for first in range(0, last, many):
            y = multiply(form, ones[first : first + many], buffers, 32, options)
            assert torch.equal(y, weight[:, first : first + many].t().to(BF16))
    assert driver.launches == 6


@pytest.mark.parametrize("kind", KINDS)
def test_products_with_strides_and_a_bias(driver, kind):
    rows, columns = 64, 768
    form, options, buffers, weight = packed(kind, two_of_four(rows, columns))
    for tokens in (1, 5, 9, 17):
        x, bias = (
            torch.randn(tokens, 2 * columns, dtype=BF16)[:, columns + 1 - tokens % 2 :][:, :columns],
            torch.randn(rows, 2)[:, 0],
        )
        assert near(multiply(form, x, buffers, rows, options, bias.to(BF16)), x, weight, bias.to(BF16))
        assert near(multiply(form, x, buffers, rows, options, bias[:1].to(BF16)), x, weight, bias[:1].to(BF16))
    assert driver.launches == 8


@pytest.mark.parametrize("sides", [1, 2])
@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("kind", ["", "int8", "int4/64"])
def test_every_number_of_tiles_and_sides_gives_the_same_product(driver, monkeypatch, kind, tiles, sides):
    monkeypatch.setattr(staged_kernels, "choice", lambda *given: (tiles, sides, 255))
    form, options, buffers, weight = packed(kind, two_of_four(128, 1280))
    for tokens in (3, 8, 9, 16, 17):
        x = torch.randn(tokens, 1280, dtype=BF16)
        assert near(multiply(form, x, buffers, 128, options), x, weight)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_other_kernels(driver, dtype):
    matrix, x = two_of_four(40, 1100, dtype), torch.randn(11, 1100).to(dtype)
    buffers = FORMATS["sparse24_mma"].pack(matrix, ())
    assert near(multiply("sparse24_mma", x[:3], buffers, 40), x[:3], matrix)
    assert near(multiply("sparse24_mma", x, buffers, 40), x, matrix)
    sparse = torch.where(torch.rand(40, 1100) < 0.2, torch.randn(40, 1100), 0).to(dtype)
    assert near(multiply("padded_rows", x[:2], FORMATS["padded_rows"].pack(sparse, ()), 40), x[:2], sparse)
    gated = x[:1] * (torch.rand(1, 1100) < 0.5)
    assert near(multiply("input_sparse", gated, FORMATS["input_sparse"].pack(matrix, ()), 40), gated, matrix)
    assert driver.launches == 6


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float8, and the smallest power of two for each row with which its largest finite input is at most 448."""
    largest = x.double().nan_to_num(0, 0, 0).abs().amax(1)
    mantissa, exponent = torch.frexp(largest)  # 448 is 0.875 * 2**9
    power = torch.where(largest > 0, exponent - 9 + (mantissa > 0.875).int(), -103).clamp_min(-103)
    scales = torch.ldexp(torch.ones(len(x)), power)
    divided = (x.float() / scales.unsqueeze(1)).nan_to_num(math.nan, math.nan, math.nan)
    return divided.to(torch.float8_e4m3fn), scales


@pytest.mark.parametrize(("columns", "padded"), [(256, 16), (576, 16), (4096, 9), (16448, 10)])
def test_input_rows_are_rounded_to_float8_with_scales_of_their_own(driver, columns, padded):
    sizes = [0.0, 1e-39, 1e-38, 1e-20, 1.0, 447.0, 449.0, 1e30, 3e38]
    wide = (torch.randn(len(sizes), 2 * columns).clamp(-1, 1) * torch.tensor(sizes).unsqueeze(1)).to(BF16)
    for x in (wide[:, columns:], wide[:, ::2]):
        x[4, 3], x[6, 7], x[6, columns - 1] = math.nan, math.inf, -math.inf
        small, scales = float8_kernels.rounded(x, padded)
        expected, own = rounded_rows(x)
        assert torch.equal(scales, own)
        torch.testing.assert_close(small[: len(x)].float(), expected.float(), rtol=0, atol=0, equal_nan=True)
        assert int(small.float().isnan().sum()) == 3
        assert small.shape == (padded, columns)
        assert not small[len(x) :].view(torch.uint8).any()
    assert driver.launches == 2


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "rows"), [(5, 256), (32, 320), (33, 576)])
def test_products_are_multiplied_by_both_scales_and_rounded_once(driver, tokens, rows, with_bias):
    y, scales = torch.randn(tokens, rows).to(BF16), torch.rand(rows, 1).to(BF16)
    own = torch.ldexp(torch.ones(tokens), torch.randint(-30, 30, (tokens,)))
    y[0, 1], y[1, 2], y[2, 3], own[3] = math.inf, math.nan, 0, 2.0**120
    bias = torch.randn(rows).to(BF16) if with_bias else None
    exact = y.double() * scales.double().t() * own.double().unsqueeze(1) + (0 if bias is None else bias.double())
    got = float8_kernels.scaled_(y, own, scales.view(torch.int16), bias)
    assert got is y
    assert driver.launches == 1
    # In float32 first: the sum with the bias is rounded to float32, then to bfloat16.
    torch.testing.assert_close(got, exact.float().to(BF16), rtol=0, atol=0, equal_nan=True)


FLOAT8_BREAKS = {
    "no barriers around the largest inputs of the warps": (r"bar\.sync\s+0;", ""),
    "inputs are read before they are written": (r"griddepcontrol\.wait\s*;", ""),
    "another power of two": ("2097151", "1048575"),
}


@pytest.mark.parametrize("name", FLOAT8_BREAKS)
def test_a_broken_rounding_is_found(driver, name):
    x, places = torch.rand(9, 4096).to(BF16), 0
    x[:, 0] = 1.8  # 460.8 with half the right scale

    def broken(text: str) -> str:
        nonlocal places
        text, number = re.subn(*FLOAT8_BREAKS[name], text)
        places += number
        return text

    expected, own = rounded_rows(x)
    for change, right in ((broken, False), (str, True)):
        driver.change = change
        with contextlib.suppress(*([] if right else [Fault])):
            small, scales = float8_kernels.rounded(x, 9)
            assert right == (torch.equal(scales, own) and torch.equal(small.float(), expected.float()))
    assert places


BREAKS = {
    "the copies are not waited for": (r"cp\.async\.wait_all;", ""),
    "no barrier after the copies": (r"(cp\.async\.wait_all;) bar\.warp\.sync 0xffffffff;", r"\1"),
    "no barrier before the sums are written": (r"(\.reg \.f32 f;) bar\.sync 0;", r"\1"),
    "no barrier before the sums are read": (r"(st\.shared\.f32[^;]*;) bar\.sync 0;", r"\1"),
    "inputs of a tile that is not there": (r"(cp\.async\.ca\.shared\.global [^;]*), %r\d+;", r"\1, 16;"),
    "one token too many": (r"setp\.gt\.s32 p,", "setp.ge.s32 p,"),
    "inputs are read before they are written": (r"griddepcontrol\.wait\s*;", ""),
    "misaligned weights": (r"(ld\.global\.L1::no_allocate[^;]*\+ )512\]", r"\g<1>520]"),
    "no places for a tile that is not there": (str(0x44444444), "0"),
    "the other half of the places": (r"(mma\.sp[^;]*), 1;", r"\1, 0;"),
    "another order in shared memory": (r"xor\.b32 t, (%r\d+), 16;", r"xor.b32 t, \1, 32;"),
    "another mask of bits": ("0x007f007f", "0x003f003f"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_is_found(driver, name):
    form, options, buffers, weight = packed("int8/64", two_of_four(32, 1280))
    x = torch.randn(9, 1280, dtype=BF16)
    places = 0

    def broken(text: str) -> str:
        nonlocal places
        text, number = re.subn(*BREAKS[name], text)
        places += number
        return text

    driver.change = broken
    with contextlib.suppress(Fault):
        assert not near(multiply(form, x, buffers, 32, options), x, weight)
    assert places
    driver.change = str
    assert near(multiply(form, x, buffers, 32, options), x, weight)


def in_runs(kind: str, matrix: Tensor):
    """The format's name, its options, its buffers, and the weight that they stand for."""
    form = FORMATS[f"padded_rows {kind}".rstrip()]
    options = (16,) if form.values is None else (8,)
    buffers = form.pack(matrix, options)
    return form.name, options, buffers, form.unpack(buffers, *matrix.shape, options)


def sparse(rows: int, columns: int, sparsity: float, dtype: torch.dtype = BF16) -> Tensor:
    """Random places, a row of zeros, and a last row with twice the zeros."""
    kept = torch.rand(rows, columns) >= sparsity
    kept[-1] &= (torch.rand(columns) < 0.5) | (rows == 1)
    kept[rows // 2] &= rows == 1
    return torch.randn(rows, columns).masked_fill(~kept, 0).to(dtype)


@pytest.mark.parametrize("kind", ["", "int8"])
def test_unit_vectors_give_every_column_of_padded_rows_exactly(driver, kind):
    matrix = sparse(19, 1090, 0.3)  # three turns
    form, options, buffers, weight = in_runs(kind, matrix)
    ones = torch.eye(1090, dtype=BF16)
    for first in (0, 1, 2, 3, *range(4, 1090, 36), 1086):
        y = multiply(form, ones[first : first + 4], buffers, 19, options)
        assert torch.equal(y, weight[:, first : first + 4].t().to(BF16))
    assert driver.launches == 36


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["", "int8"])
@pytest.mark.parametrize("setting", [None, (2, 2, 2, 1, 96, False)], ids=str)
def test_products_of_padded_rows(driver, monkeypatch, kind, dtype, setting):
    """One to nine turns, inputs kept in float32 and in half precision, several rounds of a program, strides and a bias."""
    if setting is not None:
        monkeypatch.setattr(row_kernels, "choice", lambda *_: setting)
        monkeypatch.setattr(row_kernels, "_multiprocessors", lambda device: 2)
    sizes = [(1, 1, 0.0), (1, 40, 0.0), (3, 17, 0.5), (41, 1100, 0.8), (9, 1536, 0.0), (5, 4096, 0.95), (3, 9000, 0.5)]
    for i, (rows, columns, sparsity) in enumerate(sizes):
        form, options, buffers, weight = in_runs(kind, sparse(rows, columns, sparsity, dtype))
        x = torch.randn(i % 4 + 1, 2 * columns + 1).to(dtype)[:, i % 2 :: 1 + i % 2][:, :columns]
        bias = torch.randn(rows, 2)[:, 0].to(dtype) if i % 3 else None
        assert near(multiply(form, x, buffers, rows, options, bias), x, weight, bias)
    assert driver.launches == len(sizes)


@pytest.mark.parametrize("kind", ["", "int8"])
def test_gaps_of_any_size(driver, kind):
    matrix = torch.zeros(9, 16384, dtype=BF16)
    for row, columns in enumerate(
        ([0, 255], [0, 256], [3, 258, 513], [0, 510, 511], [0, 511, 1021], [16383], [0, 16383], [5, 9000])
    ):
        matrix[row, columns] = torch.randn(len(columns)).to(BF16)
    form, options, buffers, weight = in_runs(kind, matrix)
    x = torch.randn(2, 16384, dtype=BF16)
    assert near(multiply(form, x, buffers, 9, options), x, weight)
    assert torch.equal(multiply(form, torch.ones_like(x), buffers, 9, options)[0], weight.double().sum(1).to(BF16))
    wide = F.pad(matrix, (0, 8))  # inputs that the shared memory cannot hold
    assert FORMATS[form].linear(F.pad(x, (0, 8)), FORMATS[form].pack(wide, options), None, 9, options) is None


@pytest.mark.parametrize(("kind", "options"), [("int8", (16,)), ("int8", ()), ("", (8,))])
def test_padded_rows_with_the_option_of_another_kind_are_unpacked(driver, kind, options):
    form, matrix = FORMATS[f"padded_rows {kind}".rstrip()], sparse(19, 300, 0.5)
    buffers, x = form.pack(matrix, options), torch.randn(2, 300, dtype=BF16)
    weight = form.unpack(buffers, 19, 300, options)
    assert near(multiply(form.name, x, buffers, 19, options), x, weight.to(BF16))
    assert driver.launches == 0


BREAKS_OF_ROWS = {
    "no barrier after the inputs are stored": (r"(st\.shared[^;]*;(?s:.)*?)bar(rier)?\.(cta\.)?sync[^;]*;", r"\1"),
    "inputs are read before they are written": (r"griddepcontrol\.wait\s*;", ""),
    "runs that are not there count": (r"setp\.lt\.u32 p, (%r\d+), (%r\d+); mov\.f32", r"setp.le.u32 p, 0, \2; mov.f32"),
    "another byte of the differences": ("0x808080,", "0x800080,"),
    "unsigned values": (r"cvt\.rn\.f32\.s(8|32) (%?w)", r"cvt.rn.f32.u\1 \2"),
    "another place of the inputs": (r"(st\.shared\.f32 \[[^]]*\+) ?384\]", r"\1 512]"),
    "one lane too few": (r"(shfl\.sync\.bfly\.b32[^,]*,[^,]*,) 16,", r"\1 8,"),
}


@pytest.mark.parametrize("name", BREAKS_OF_ROWS)
def test_a_broken_kernel_of_padded_rows_is_found(driver, name):
    form, options, buffers, weight = in_runs("int8", sparse(19, 1100, 0.5))
    x = torch.randn(2, 1100, dtype=BF16)
    places = 0

    def broken(text: str) -> str:
        nonlocal places
        text, number = re.subn(*BREAKS_OF_ROWS[name], text)
        places += number
        return text

    driver.change = broken
    with contextlib.suppress(Fault):
        assert not near(multiply(form, x, buffers, 19, options), x, weight)
    assert places
    driver.change = str
    assert near(multiply(form, x, buffers, 19, options), x, weight)


def test_a_kernel_is_launched_by_triton_once(driver, monkeypatch):
    calls, run = [], triton.JITFunction.run
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda self, *args, **options: calls.append(self) or run(self, *args, **options)
    )
    form, options, buffers, weight = packed("int4/64", two_of_four(32, 512))
    x = torch.randn(3, 512, dtype=BF16)
    for tokens in (3, 2, 3):
        assert near(multiply(form, x[:tokens], buffers, 32, options), x[:tokens], weight)
    assert len(calls) == 1
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(print)  # as a profiler would
    try:
        multiply(form, x, buffers, 32, options)
    finally:
        hooks.remove(print)
    assert len(calls) == 2
    for hook, more in ((None, 0), (lambda *_: None, 1)):  # Triton allows these in the place of the list, too
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
            multiply(form, x, buffers, 32, options)
        assert len(calls) == 2 + more
    values, *rest = buffers
    moved = torch.empty(values.numel() + 8, dtype=values.dtype)[8:].view(values.shape).copy_(values)  # 8 bytes off
    with pytest.raises(Fault, match="misaligned"):
        multiply(form, x, (moved, *rest), 32, options)
    assert len(calls) == 4
