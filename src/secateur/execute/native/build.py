"""From a kernel's text to machine code for this CPU, kept on disk, and how threads run it.

Needs llvmlite and nothing else: no compiler, and not numba, whose import alone takes longer than everything here. A second
process loads the machine code of the first. Threads are those of torch's own OpenMP pool, so that two pools never fight
over the cores. `SECATEUR_CPU` names another CPU to build for ("x86-64-v3", "znver4", "generic"), or "none": no kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

Kernel = Callable[[int], None]  # takes the address of its arguments


@cache
def target() -> tuple[str, frozenset[str]] | None:
    """The CPU that kernels are built for and what it can do; None where there are no kernels."""
    wish = os.environ.get("SECATEUR_CPU", "")
    if wish == "none":
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    with suppress(RuntimeError):  # older releases ask for this, newer ones forbid it
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if wish:
        return wish, _features_of(wish)
    return llvm.get_host_cpu_name(), frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def _features_of(cpu: str) -> frozenset[str]:
    """What the kernels ask about, for a CPU given by name: its level, as the x86-64 levels count."""
    avx2 = frozenset({"avx2", "fma", "f16c", "popcnt", "bmi2"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
    known = {"x86-64-v3": avx2, "haswell": avx2, "znver3": avx2, "x86-64-v4": avx512, "skylake-avx512": avx512}
    newer = avx512 | {"avx512vbmi2", "avx512bf16"}
    known |= {"znver4": newer, "sapphirerapids": newer | {"amx-tile", "amx-bf16"}}
    return known.get(cpu, frozenset())


def has(*features: str) -> bool:
    """Kernels can be built here, for a CPU with all of these."""
    found = target()
    return found is not None and found[1].issuperset(features)


@cache
def has_tiles() -> bool:
    """Whether kernels may use tile registers of bfloat16 (AMX), which Linux gives to a process that asks."""
    if sys.platform != "linux" or not has("amx-tile", "amx-bf16", "avx512bw", "avx512vbmi2", "avx512bf16"):
        return False
    arch_prctl, ask, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data) == 0


def reads_halves() -> bool:
    """Whether the CPU turns float16 into float32. Where it cannot, LLVM would call a function that is not there."""
    return any(has(feature) for feature in ("f16c", "fp-armv8", "neon"))


def machine_code(text: str) -> bytes:
    """LLVM's text, optimised and translated for the target CPU."""
    return _target_machine().emit_object(_optimised(text))


def assembly(text: str) -> str:
    return _target_machine().emit_assembly(_optimised(text))


@cache
def _target_machine() -> Any:
    import llvmlite.binding as llvm

    found = target()
    assert found is not None
    cpu, features = found
    wish = "" if os.environ.get("SECATEUR_CPU") else ",".join(f"+{name}" for name in sorted(features))
    if "avx512f" in features:
        wish += ("," if wish else "") + "-prefer-256-bit"
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=wish, opt=3, reloc="pic", codemodel="jitdefault"
    )


def _optimised(text: str) -> Any:
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(text)
    module.verify()
    machine = _target_machine()
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False  # the vectors are written out already
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def cache_folder() -> Path:
    base = os.environ.get("SECATEUR_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "secateur")
    return Path(base).expanduser()


@lru_cache(maxsize=1)
def _source_stamp() -> str:
    """Changes when the text of any kernel may have: a digest of this folder's files, and of who translates them."""
    import llvmlite

    digest = hashlib.sha256(llvmlite.__version__.encode() + sys.platform.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def kernel(writer: str, *options: Any) -> Kernel:
    """The kernel that a function of this folder ("tiled.multiply_rows") writes, as something to run.

    From disk if it was built before: its text is then not needed, nor the file that writes it.
    """
    found = target()
    assert found is not None, "kernels were asked for where none can be built"
    cpu, features = found
    file, function = writer.split(".")
    name = "_".join(["k", function, *map(str, options)])
    stamp = hashlib.sha256(repr((_source_stamp(), cpu, sorted(features), name)).encode()).hexdigest()[:32]
    place = cache_folder() / f"{stamp}.o"
    code = _read(place)
    if code is None:
        write = getattr(import_module(f".{file}", __package__), function)
        code = machine_code(write(name, features, *options))
        _write(place, code)
    return _loaded(code, name)


def _read(file: Path) -> bytes | None:
    """The machine code in a file, if it is whole: a digest goes first."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    return whole[32:] if hashlib.sha256(whole[32:]).digest() == whole[:32] else None


def _write(file: Path, code: bytes) -> None:
    """Beside first, then renamed, so that no process reads half a file. A folder that cannot be written costs a rebuild."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(code).digest() + code)
        os.replace(beside, file)
    except OSError:
        return


_ENGINES: list[Any] = []  # machine code lives as long as the engine that holds it


def _loaded(code: bytes, name: str) -> Kernel:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _host_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address(name))


def _host_machine() -> Any:
    """A machine of its own for each engine, which takes it over."""
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")


# ---------------------------------------------------------------- running


@cache
def _pool() -> tuple[Any, int] | None:
    """How torch's own OpenMP library starts threads, and where it lets them wait; None where it is not the GNU one."""
    for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        library = ctypes.CDLL(str(file))
        start, barrier = getattr(library, "GOMP_parallel", None), getattr(library, "GOMP_barrier", None)
        if start is not None and barrier is not None:
            start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return start, ctypes.cast(barrier, ctypes.c_void_p).value or 0
    return None


COUNTERS = (0, 0)  # the first arguments of a kernel: the next piece of work, and the next thread


def run(body: Kernel, arguments: Iterable[int], threads: int) -> None:
    """Run a kernel on several threads."""
    start(body, array("q", (*COUNTERS, *arguments)), threads)


def run_in_steps(body: Kernel, arguments: Iterable[int], threads: int) -> None:
    """The same for a kernel of two steps: three counters, of threads and of the pieces of each step, and where to wait."""
    pool = _pool() if threads > 1 else None
    run(body, (0, pool[1] if pool else 0, *arguments), threads)


def start(body: Kernel, block: array[int], threads: int) -> None:
    """Run a kernel whose arguments, counters and all, stand in a block that is only for this call."""
    pool, (address, _) = _pool() if threads > 1 else None, block.buffer_info()
    if pool is None:
        body(address)
    else:
        pool[0](ctypes.cast(body, ctypes.c_void_p), address, threads, 0)  # type: ignore[arg-type]
