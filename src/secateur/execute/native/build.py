"""Compiles LLVM IR to machine code for this CPU, caches it on disk, and runs kernels on several threads.

It needs only llvmlite: no C compiler, and not numba, whose import alone takes longer than compiling a kernel. A second process
loads the machine code that the first one cached. Kernels run on torch's own OpenMP threads, so that two thread pools never
compete for the cores. The environment variable `SECATEUR_CPU` selects another CPU to compile for ("x86-64-v3", "znver4",
"generic"), or "none" to turn kernels off.
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

Kernel = Callable[[int], None]  # called with the address of the arguments


@cache
def target() -> tuple[str, frozenset[str]] | None:
    """Returns the name and the features of the CPU that kernels are compiled for, or None if kernels cannot be used."""
    wish = os.environ.get("SECATEUR_CPU", "")
    if wish == "none":
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    with suppress(RuntimeError):  # older releases of llvmlite require this call, newer ones raise
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if wish:
        return wish, _features_of(wish)
    return llvm.get_host_cpu_name(), frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def _features_of(cpu: str) -> frozenset[str]:
    """Returns the features of a CPU given by name, as far as kernels depend on them; none for an unknown name."""
    avx2 = frozenset({"avx2", "fma", "f16c", "popcnt", "bmi2"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
    known = {"x86-64-v3": avx2, "haswell": avx2, "znver3": avx2, "x86-64-v4": avx512, "skylake-avx512": avx512}
    known["cascadelake"] = avx512 | {"avx512vnni"}
    newer = avx512 | {"avx512vbmi", "avx512vbmi2", "avx512vnni", "avx512bf16"}
    known |= {"znver4": newer, "sapphirerapids": newer | {"amx-tile", "amx-bf16"}}
    return known.get(cpu, frozenset())


def has(*features: str) -> bool:
    """Returns True if kernels can be used and the CPU has all of these features."""
    found = target()
    return found is not None and found[1].issuperset(features)


@cache
def has_tiles() -> bool:
    """Returns True if kernels may use AMX tile registers with bfloat16. Linux grants them to a process on request."""
    if sys.platform != "linux" or not has("amx-tile", "amx-bf16", "avx512bw", "avx512vbmi2", "avx512bf16"):
        return False
    arch_prctl, ask, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data) == 0


def reads_halves() -> bool:
    """Returns True if the CPU converts float16 to float32. Without it, LLVM would call a library function that is missing."""
    return any(has(feature) for feature in ("f16c", "fp-armv8", "neon"))


def machine_code(text: str) -> bytes:
    """Optimizes LLVM IR and compiles it to an object file for the target CPU."""
    return _target_machine().emit_object(_optimised(text))


def assembly(text: str) -> str:
    """Does the same as `machine_code` and returns assembly text."""
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
    options.loop_vectorization = options.slp_vectorization = False  # the kernels are written with vectors already
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def cache_folder() -> Path:
    base = os.environ.get("SECATEUR_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "secateur")
    return Path(base).expanduser()


@lru_cache(maxsize=1)
def _source_stamp() -> str:
    """Returns a digest of this folder's files and of the llvmlite version, which changes whenever a kernel may have changed."""
    import llvmlite

    digest = hashlib.sha256(llvmlite.__version__.encode() + sys.platform.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@cache
def kernel(writer: str, *options: Any) -> Kernel:
    """Returns the kernel that a function of this folder generates, such as "tiled.multiply_rows", ready to run.

    A kernel from the disk cache is loaded without importing the module that generates it.
    """
    found = target()
    assert found is not None, "a kernel was requested although kernels cannot be used"
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
    """Returns the machine code in a cache file, or None if the file is missing or its digest does not match."""
    try:
        whole = file.read_bytes()
    except OSError:
        return None
    return whole[32:] if hashlib.sha256(whole[32:]).digest() == whole[:32] else None


def _write(file: Path, code: bytes) -> None:
    """Writes a cache file under a temporary name and renames it, so that no process reads half a file.

    If the folder cannot be written, nothing is cached.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(code).digest() + code)
        os.replace(beside, file)
    except OSError:
        return


_ENGINES: list[Any] = []  # machine code is freed together with the engine that loaded it


def _loaded(code: bytes, name: str) -> Kernel:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _host_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address(name))


def _host_machine() -> Any:
    """Returns a new target machine, because an engine takes ownership of the one it is given."""
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault")


# ---------------------------------------------------------------- running


@cache
def _pool() -> tuple[Any, int] | None:
    """Returns the function of torch's OpenMP library that starts threads and the address of its barrier.

    Returns None if torch does not use GNU OpenMP.
    """
    for file in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        library = ctypes.CDLL(str(file))
        start, barrier = getattr(library, "GOMP_parallel", None), getattr(library, "GOMP_barrier", None)
        if start is not None and barrier is not None:
            start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
            return start, ctypes.cast(barrier, ctypes.c_void_p).value or 0
    return None


COUNTERS = (0, 0)  # the first two arguments of a kernel: counters of pieces of work and of threads


def run(body: Kernel, arguments: Iterable[int], threads: int) -> None:
    """Runs a kernel on several threads."""
    start(body, array("q", (*COUNTERS, *arguments)), threads)


def run_in_steps(body: Kernel, arguments: Iterable[int], threads: int) -> None:
    """Runs a kernel of two steps with a barrier between them.

    Its first four arguments are counters of threads and of the pieces of each step, and the address of the barrier.
    """
    pool = _pool() if threads > 1 else None
    run(body, (0, pool[1] if pool else 0, *arguments), threads)


def start(body: Kernel, block: array[int], threads: int) -> None:
    """Runs a kernel whose arguments, counters included, are in `block`. The kernel changes the counters."""
    pool, (address, _) = _pool() if threads > 1 else None, block.buffer_info()
    if pool is None:
        body(address)
    else:
        pool[0](ctypes.cast(body, ctypes.c_void_p), address, threads, 0)  # type: ignore[arg-type]
