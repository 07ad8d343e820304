"""Compiling kernels: the disk cache, loading by another process, and machines where kernels cannot be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from secateur.execute import Compressed
from secateur.execute import tiled as tiled_formats
from secateur.execute.formats import FORMATS
from secateur.execute.native import build
from secateur.execute.tiled import _MINE

SAME = """
import torch, sys
from torch import nn
from secateur.execute import compress_, decompress_
from secateur.execute.formats import FORMATS
from secateur.execute.native import build
torch.manual_seed(0); torch.set_num_threads(1)
x, matrix = torch.randn(24, 200), torch.randn(64, 200) * (torch.rand(64, 200) < 0.2)
forms = {"tiled": [(1,), (4,)], "panels": [(16,), (8,)]} | {name: [()] for name in ("gather", "bitmask", "runs", "csr")}
for name, options in ((name, options) for name, each in forms.items() for options in each):
    packed = list(FORMATS[name].pack(matrix, options))
    for rows in (1, 24):
        y = torch.ops.secateur.linear(x[:rows], packed, None, name, 64, 200, options)
        torch.testing.assert_close(y, x[:rows] @ matrix.t(), rtol=1e-4, atol=1e-4)
for name, options, rows in (("tiled", (1,), 24), ("tiled", (4,), 24), ("bitmask", (), 1), ("gather", (), 1)):
    half = matrix[: 64 if options == (4,) else 63].bfloat16()
    y = torch.ops.secateur.linear(x[:rows], list(FORMATS[name].pack(half, options)), None, name, len(half), 200, options)
    torch.testing.assert_close(y, x[:rows] @ half.float().t(), rtol=1e-4, atol=1e-4)
model = nn.Sequential(nn.Linear(200, 64)); model[0].weight.data.copy_(matrix)
before = model[0].weight.detach().clone()
print(compress_(model, x)); decompress_(model)
assert torch.equal(model[0].weight, before)
print("target", build.target() and build.target()[0])
"""


def run(code: str, **environment: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def built_for(monkeypatch, tmp_path):
    """Compiles for another CPU inside the test, and clears the caches of this one."""
    plans = tiled_formats._rows_plan, tiled_formats._planes_plan, tiled_formats._dtypes_work
    caches = (build.target, build.kernel, build._target_machine, *plans)

    def pretend(cpu: str) -> None:
        monkeypatch.setenv("SECATEUR_CPU", cpu)
        monkeypatch.setenv("SECATEUR_CACHE", str(tmp_path))
        for each in caches:
            each.cache_clear()

    yield pretend
    for each in caches:
        each.cache_clear()


def test_without_kernels_everything_is_still_correct(built_for):
    built_for("none")
    exec(SAME, {})
    assert build.target() is None


def test_without_llvmlite_everything_is_still_correct():
    assert "target None" in run("import sys; sys.modules['llvmlite'] = None; sys.modules['numba'] = None\n" + SAME)


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64"])
def test_older_cpus_get_kernels_of_their_own(cpu, built_for):
    if not build.has("avx2"):
        pytest.skip("not an x86 with AVX2")
    built_for(cpu)
    exec(SAME, {})
    assert build.target()[0] == cpu


@pytest.mark.skipif(not build.has(), reason="no kernels here")
def test_second_process_loads_what_the_first_built(tmp_path):
    code = """
import sys, time, torch
from secateur.execute.native import build
begin = time.process_time()
for height, tile in ((4, 16), (1, 32)):
    build.kernel("tiled.multiply_rows", height, tile, "float32", "float32")
print(time.process_time() - begin, "secateur.execute.native.tiled" in sys.modules)
"""
    first, wrote = run(code, SECATEUR_CACHE=str(tmp_path)).split()
    files = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    second, wrote_again = run(code, SECATEUR_CACHE=str(tmp_path)).split()
    assert len(files) == 2
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == files
    assert float(second) < min(0.3, float(first))
    assert (wrote, wrote_again) == ("True", "False")


@pytest.mark.skipif(not build.has(), reason="no kernels here")
def test_spoiled_file_is_built_again(tmp_path, monkeypatch):

    monkeypatch.setenv("SECATEUR_CACHE", str(tmp_path))
    build.kernel.__wrapped__("tiled.multiply_rows", 1, 8, "float32", "float32")
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    build.kernel.__wrapped__("tiled.multiply_rows", 1, 8, "float32", "float32")
    assert file.read_bytes() == good


@pytest.mark.skipif(not build.has(), reason="no kernels here")
def test_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SECATEUR_CACHE", str(tmp_path / "file"))
    assert callable(build.kernel.__wrapped__("tiled.multiply_rows", 1, 8, "float32", "float32"))


def some_of_every_kernel():
    from secateur.execute.native import quads, single, tiled, windows
    from secateur.execute.native.bitmask import bitmask
    from secateur.execute.native.expand import expand

    rows, planes = tiled.multiply_rows, tiled.multiply_planes
    yield from ((rows, 1, 64, "float32", "float32"), (rows, 1, 16, "bfloat16", "float16"), (rows, 4, 32, "float16", "bfloat16"))
    yield from ((rows, 1, 8, "float32", "pair"), (planes, 1, 64, "float32", 1), (planes, 4, 16, "float16", 0))
    plain = single.PLAIN
    yield from ((single.gather, "float16", plain), (single.runs, "float16", plain), (single.columns, "float16"))
    yield from (
        (single.panels, 16, "float16", plain),
        (bitmask, "bfloat16", plain),
        (bitmask, "int8", 0),
        (bitmask, "int8", 64),
    )
    if build.has("avx512vnni"):
        yield from ((expand, "int8", 0), (expand, "int4", 64), (windows.windows, 16, 8), (windows.windows, 128, 8))
    yield from ((quads.prepare, 7, 2), (quads.prepare, 8, 1), (quads.finish, 1), (quads.finish, 2))
    yield from ((windows.windows, 16, 7), (windows.windows, 64, 7))
    yield from ((single.gather, "int4", 0), (single.runs, "float8_e4m3fn", 64), (single.dense, "int4", 128))


@pytest.mark.parametrize("cpu", ["skylake-avx512", "sapphirerapids"])
def test_every_kernel_translates_for_cpus_with_wide_vectors(cpu, built_for):
    """The kernels are not run, which would need such a CPU, but they compile and call no external function."""
    if not build.has("avx2"):
        pytest.skip("not an x86")
    built_for(cpu)
    for write, *options in some_of_every_kernel():
        text = build.assembly(write("k", build.target()[1], *options))
        calls = [line.split()[1] for line in text.splitlines() if line.strip().startswith("call")]
        assert all(callee.startswith("*") for callee in calls), (write.__name__, options, calls)


def test_texts_for_wide_vectors_compute_the_same_where_they_run_in_halves(monkeypatch, tmp_path):
    """LLVM splits vectors of sixteen floats into those of this CPU, so the generated code can be run."""
    if not build.has("avx2") or build.has("avx512f"):
        pytest.skip("an x86 with AVX2 and without AVX-512")
    cpu, features = build.target()
    build._target_machine()  # cached, so that code is still compiled for this CPU
    monkeypatch.setenv("SECATEUR_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "target", lambda: (cpu, features | {"avx512f", "avx512bw", "avx512vbmi2", "bmi2"}))
    build.kernel.cache_clear()
    tiled_formats._rows_plan.cache_clear()
    exec(SAME, {})
    assert len(list(tmp_path.iterdir())) > 5
    build.kernel.cache_clear()
    tiled_formats._rows_plan.cache_clear()


def test_halves_are_not_read_by_cpus_that_cannot(built_for):
    """LLVM would call a missing library function, which ends the process."""
    torch = build.torch
    if not build.has("avx2"):
        pytest.skip("not an x86")
    built_for("x86-64")
    packed = Compressed(torch.nn.Linear(24, 16).half(), FORMATS["tiled"], (1,)).eval()
    with torch.no_grad():
        x = torch.randn(8, 24).half()
        torch.testing.assert_close(packed(x), packed._dense(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cpu", ["znver4", "sapphirerapids"])
def test_wide_vectors_are_used_where_the_cpu_has_them(cpu, built_for):
    from secateur.execute.native import quads, single, tiled, windows
    from secateur.execute.native.bitmask import bitmask
    from secateur.execute.native.expand import expand

    if not build.has("avx2"):
        pytest.skip("not an x86")
    built_for(cpu)
    features = build.target()[1]
    assert "vpexpandw" in build.assembly(bitmask("k", features, "bfloat16", single.PLAIN))
    for text in (build.assembly(expand("k", features, "int8", 0)), build.assembly(windows.windows("k", features, 128, 8))):
        assert "vpexpandb" in text or "vpermi2b" in text or "vpermt2b" in text
        assert "vpdpbusd" in text
    assert "vpdpbusd" in build.assembly(tiled.multiply_rows("k", features, 4, 64, "float32", "quad"))
    for count in (1, 2):
        assert "call" not in build.assembly(quads.prepare("k", features, 8, count))
        assert "call" not in build.assembly(quads.finish("k", features, count))
    assert "zmm" in build.assembly(tiled.multiply_rows("k", features, 1, 64, "float32", "float32"))
    assert "vdpbf16ps" in build.assembly(tiled.multiply_rows("k", features, 1, 64, "float32", "pair"))


def test_threads_are_those_of_torch():
    if not sys.platform.startswith("linux") or not list((Path(build.torch.__file__).parent / "lib").glob("libgomp*")):
        pytest.skip("torch has no libgomp here")
    assert build._pool() is not None


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_wait_for_each_other_between_the_steps(threads):
    """One thread repacks inputs that another one multiplies, so a missing barrier would give wrong results."""
    torch = build.torch
    line, image = torch.nn.Linear(700, 600), torch.nn.Conv2d(12, 300, 3, padding=1)
    for layer, x in ((line, torch.randn(130, 700)), (image, torch.randn(3, 12, 9, 9))):
        packed = Compressed(layer, FORMATS["tiled"], (1,)).eval()
        with torch.no_grad():
            alone = packed(x)
            torch.set_num_threads(threads)
            for _ in range(20):
                _MINE.memory.fill_(float("nan"))
                assert torch.equal(packed(x), alone)
            torch.set_num_threads(1)
