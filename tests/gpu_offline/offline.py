"""A stand-in for Triton's driver: kernels are compiled for an H200 and run by the emulator, on CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from ptx import Launch
from ptx_program import Program
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

DEVICE = "offline"  # the key under which Triton keeps compiled kernels
LATE = ("x", "y", "out", "parts", "token_scales")  # parameters that the preceding kernel may still write or read


@cache
def parsed(text: str) -> Program:
    return Program.parse(text)


class Utils:
    def get_device_properties(self, device: Any) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: Any) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024


class Driver(DriverBase):
    """`change` is applied to the text of every kernel before it runs.

    Kernels may access `tensors`. If that is None, they may access all tensors that any kernel was given.
    """

    def __init__(self) -> None:
        self.utils, self.launches, self.change, self.ran = Utils(), 0, str, []
        self.tensors: Sequence[torch.Tensor] | None = ()
        self.seen: list[torch.Tensor] = []

        class Launcher:
            def __init__(launcher, src: Any, metadata: Any) -> None:
                launcher.src, launcher.metadata = src, metadata

            def __call__(launcher, *args: Any) -> None:
                x, y, z, _, _, _, _, _, _, *arguments = args
                self.run(launcher.src, launcher.metadata, (x, y, z), arguments)

        self.launcher_cls = Launcher

    def run(self, src: Any, metadata: Any, grid: tuple[int, int, int], arguments: list[Any]) -> None:
        kernels = src.fn.device_caches[DEVICE][0].values()
        text = next(kernel.asm["ptx"] for kernel in kernels if kernel.metadata is metadata)
        names = src.fn.arg_names
        given = [a for name, a in zip(names, arguments) if src.signature[name] != "constexpr"]
        self.seen += [a for a in given if isinstance(a, torch.Tensor)] if self.tensors is None else []
        tensors = self.seen if self.tensors is None else self.tensors
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in given]
        early = [t for name, t in zip(names, tensors) if name not in LATE] if metadata.launch_pdl else None
        threads = 32 * metadata.num_warps
        Launch(parsed(self.change(text)), grid, threads, metadata.shared, [*numbers, 0, 0], tensors, early).run()
        self.launches += 1
        self.ran.append(src.fn.__name__)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return DEVICE

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty
