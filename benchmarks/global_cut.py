"""A global cut over gloo processes next to the cut of each process alone, and the collectives between them.

    python benchmarks/global_cut.py [--processes 4] [--millions 8] [--rounds 5]

Each process holds so many million weights. "alone" ranks them without the others, in all processes at the same time. "together"
is the same call on a sharded model (FSDP2). "collectives" repeats the all_reduce calls of one such cut, without any other work.
"CPU" is the processor time of all processes; on a machine with fewer cores than processes only that compares the work.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _bench import duration, machine, median, seconds, show, verdict
from torch import nn
from torch.distributed.fsdp import fully_shard

import secateur as sc

LIMIT = 1.3


def calls_of(run: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of every all_reduce that a call makes."""
    found, real = [], dist.all_reduce

    def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append((tuple(tensor.shape), tensor.dtype))
        return real(tensor, *args, **kwargs)

    dist.all_reduce = note
    try:
        run()
    finally:
        dist.all_reduce = real
    return found


def work(rank: int, meeting: str, asked: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=asked.processes)
    torch.manual_seed(rank)
    rows = int(asked.millions * 1e6) // 4 // 1024
    own = {f"{i}.weight": torch.randn(rows, 1024) for i in range(4)}
    model = fully_shard(nn.Sequential(*(nn.Linear(1024, rows * asked.processes, bias=False) for _ in range(4))))

    def alone() -> None:
        sc.plan(own, sparsity=0.5, scope="global")

    def together() -> None:
        sc.plan(model, sparsity=0.5, scope="global")

    together()
    calls = calls_of(together)
    tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in calls]

    def collectives() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    times: dict[str, list[float]] = {"alone": [], "together": [], "collectives": []}
    work: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(asked.rounds):
        for name, run in (("alone", alone), ("together", together), ("collectives", collectives)):
            dist.barrier()
            begin = time.process_time()
            times[name].append(seconds(lambda run=run: (run(), dist.barrier())))
            spent = torch.tensor(time.process_time() - begin, dtype=torch.float64)
            dist.all_reduce(spent)
            work[name].append(float(spent))
    if rank == 0:
        report(*({name: median(each) for name, each in found.items()} for found in (times, work)), calls, asked)
    dist.destroy_process_group()


def report(
    times: dict[str, float],
    work: dict[str, float],
    calls: list[tuple[tuple[int, ...], torch.dtype]],
    asked: argparse.Namespace,
) -> None:
    sent = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in calls)
    rows = [
        (name, *(cell for found in (times, work) for cell in (duration(found[name]), f"{found[name] / found['alone']:.2f}x")))
        for name in times
    ]
    title = f"{asked.processes} processes with {asked.millions:g} M float32 weights each, 50 % global, median of {asked.rounds}"
    show(title, ("", "time", "of alone", "CPU", "of alone"), rows)
    print(f"{len(calls)} all_reduce calls of {sent / 1024:,.0f} KiB in all")
    ratio = (work["together"] - work["collectives"]) / work["alone"]
    print(f"CPU time together without the collectives: {ratio:.2f}x of alone; at most {LIMIT}x: {verdict(ratio <= LIMIT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--millions", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, ((Path(folder) / "meeting").as_uri(), asked), nprocs=asked.processes)


if __name__ == "__main__":
    main()
