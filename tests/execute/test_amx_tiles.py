"""The format `amx_tiles`. On a CPU without AMX, its kernel runs with the tile instructions emulated in Python."""

import ctypes
from pathlib import Path

import pytest
import torch
from llvmlite import ir

from secateur.execute import amx_tiles
from secateur.execute.native import amx_tiles as kernels
from secateur.execute.native import build
from secateur.execute.native.emit import I64, Value

from .patterns import pruned
from .test_formats import near

AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi2"})


class Registers:
    """Emulates the tile registers: eight tiles of 16 lines with 64 bytes, and their instructions."""

    def __init__(self) -> None:
        self.tiles = torch.zeros(8, 16, 64, dtype=torch.uint8)
        self.used: set[str] = set()

    def ldtilecfg(self, place: int) -> None:
        told = torch.frombuffer((ctypes.c_uint8 * 64).from_address(place), dtype=torch.uint8)
        assert told[0] == 1
        assert told[16:32].view(torch.int16).tolist() == [64] * 8
        assert told[48:56].tolist() == [16] * 8

    def tilerelease(self) -> None:
        self.tiles.zero_()

    def tilezero(self, tile: int) -> None:
        self.tiles[tile] = 0

    def tileloadd64(self, tile: int, place: int, stride: int) -> None:
        for i in range(16):
            ctypes.memmove(self.tiles[tile, i].data_ptr(), place + i * stride, 64)

    def tilestored64(self, tile: int, place: int, stride: int) -> None:
        for i in range(16):
            ctypes.memmove(place + i * stride, self.tiles[tile, i].data_ptr(), 64)

    def tdpbf16ps(self, total: int, left: int, right: int) -> None:
        """Adds the products of bfloat16 pairs to the sums: [row][column] += pairs of the row times pairs of the column."""
        rows = self.tiles[left].view(torch.bfloat16).float()
        columns = self.tiles[right].view(torch.bfloat16).view(16, 16, 2).transpose(0, 1).reshape(16, 32).float()
        self.tiles[total].view(torch.float32).add_(rows @ columns.t())


@pytest.fixture
def registers(monkeypatch, tmp_path):
    if not build.has("avx2"):
        pytest.skip("not an x86 with AVX2")
    done, kept = Registers(), {}

    def in_python(code, name, *arguments):
        def call(*numbers):
            done.used.add(name)
            getattr(done, name)(*numbers)

        kept[name] = kept.get(name) or ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(call)
        raw = [each.raw if isinstance(each, Value) else ir.Constant(I64, each) for each in arguments]
        raw = [code.builder.ptrtoint(each, I64) if isinstance(each.type, ir.PointerType) else each for each in raw]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(raw)).as_pointer()
        address = ir.Constant(I64, ctypes.cast(kept[name], ctypes.c_void_p).value)
        code.builder.call(code.builder.inttoptr(address, kind), raw)

    cpu, features = build.target()
    build._target_machine()  # cached, so that code is still compiled for this CPU
    monkeypatch.setattr(kernels, "_tile", in_python)
    monkeypatch.setattr(build, "target", lambda: (cpu, features | AVX512))
    monkeypatch.setattr(build, "has_tiles", lambda: True)
    monkeypatch.setenv("SECATEUR_CACHE", str(tmp_path))
    build.kernel.cache_clear()
    yield done
    build.kernel.cache_clear()


@pytest.mark.parametrize(
    ("rows", "columns", "batch", "pattern", "sparsity"),
    [
        (1, 1, 1, "1x1", 0.0),
        (16, 32, 16, "1x1", 0.5),
        (17, 33, 5, "1x1", 0.5),
        (64, 64, 64, "1x1", 1.0),  # every tile is zero
        (272, 300, 33, "16x16", 0.8),  # two pieces, the last with few panels; zero tiles
        (40, 520, 130, "2:4", 0.5),  # three blocks of columns; groups of 4, 2 and 1 input tiles
        (20, 64, 600, "1x1", 0.8),  # two strips of inputs
    ],
)
def test_kernel_computes_what_dense_does(registers, rows, columns, batch, pattern, sparsity):
    matrix = pruned(rows, columns, pattern, sparsity, torch.bfloat16, 0)
    packed = amx_tiles.AMX_TILES.pack(matrix, ())
    wide = torch.randn(batch, columns + 3).bfloat16()
    for x in (wide[:, :columns], wide[:, 3:].contiguous(), wide.t().contiguous().t()[:, :columns]):
        for bias in (None, torch.randn(rows).bfloat16(), torch.randn(rows)):
            y = amx_tiles.AMX_TILES.linear(x, packed, bias, rows, ())
            assert y.shape == (batch, rows)
            assert y.dtype == torch.bfloat16
            assert near(y, x, matrix, bias, torch.bfloat16)
    assert {"ldtilecfg", "tilezero", "tilestored64", "tilerelease"} <= registers.used
    assert ("tdpbf16ps" in registers.used) == (sparsity < 1)


def test_results_are_rounded_as_torch_rounds_them(registers):
    """With an identity matrix the result is the input plus a bias, chosen so that the sum lies between two bfloat16."""
    x = torch.randn(16, 32).bfloat16()
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    bias = torch.randn(32) * 1e-2
    y = amx_tiles.AMX_TILES.linear(x[1:], amx_tiles.AMX_TILES.pack(torch.eye(32).bfloat16(), ()), bias, 32, ())
    assert torch.equal(y, (x[1:].float() + bias).bfloat16())
    y = amx_tiles.AMX_TILES.linear(x[:1], amx_tiles.AMX_TILES.pack(torch.eye(1, 32).bfloat16(), ()), None, 1, ())
    assert y.isnan().all()


def test_tiles_that_are_empty_are_not_stored():
    matrix = torch.zeros(64, 128, dtype=torch.bfloat16)
    matrix[16:32, 32:64] = 1
    values, masks, index, counts, starts = amx_tiles.AMX_TILES.pack(matrix, ())
    assert values.numel() == 16 * 32
    assert masks.numel() == (1 + amx_tiles.LEAD) * 64
    assert index.tolist() == [1]
    assert counts.tolist() == [0, 1] + [0] * 14
    assert starts.tolist() == [0, 0]


def test_kernel_is_made_of_tile_instructions(monkeypatch):
    if not build.has("avx2"):
        pytest.skip("not an x86")
    monkeypatch.setenv("SECATEUR_CPU", "sapphirerapids")
    for each in (build.target, build._target_machine):
        each.cache_clear()
    try:
        text = build.assembly(kernels.multiply("k", build.target()[1], amx_tiles.RING, amx_tiles.LEAD))
    finally:
        monkeypatch.undo()
        for each in (build.target, build._target_machine):
            each.cache_clear()
    assert {"tdpbf16ps", "tileloadd", "vpexpandw"} <= {line.split()[0] for line in text.splitlines() if line.split()}


def test_process_without_tile_registers_does_without(monkeypatch):
    layer = torch.randn(32, 64).bfloat16()
    packed = amx_tiles.AMX_TILES.pack(layer, ())
    monkeypatch.setattr(build, "has_tiles", lambda: False)
    x = torch.randn(8, 64).bfloat16()
    assert amx_tiles.AMX_TILES.linear(x, packed, None, 32, ()) is None
    y = torch.ops.secateur.linear(x, list(packed), None, "amx_tiles", 32, 64, [])
    torch.testing.assert_close(y, x @ layer.t())


def test_the_system_is_asked_whatever_somebody_says_that_the_cpu_is(monkeypatch):
    """An unsupported instruction would end the process."""
    if not build.has("avx2") or not Path("/proc/cpuinfo").exists():
        pytest.skip("not an x86 with Linux")
    cpu, _ = build.target()
    monkeypatch.setattr(build, "target", lambda: (cpu, build._features_of("sapphirerapids")))
    assert build.has("amx-tile")
    assert build.has_tiles.__wrapped__() == ("amx_bf16" in Path("/proc/cpuinfo").read_text())
