"""`sc.prune_folder` next to plain reading: bandwidth of its passes, and memory.

    python benchmarks/folder.py [--gigabytes 1] [--folder DIR] [--rounds 2]

Half precision takes two passes: one counts, one reads, cuts and writes. Before each run the files leave the page cache, as far
as the system lets a program ask for that (Linux), so the first pass reads from the disk; the second finds in the cache what
still fits there. The bound is plain reading twice and writing once, with an fsync for each file, as `prune_folder` has it. All
take turns, and the fastest run of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from _bench import PeakMemory, duration, machine, seconds, show, verdict
from safetensors.torch import save_file

import secateur as sc

FILES, CHUNK = 4, 1 << 22
ONCE, PLAIN, OURS = "reading once", "reading twice, writing once", "prune_folder, two passes"
CUT = {"sparsity": 0.5, "scope": "global", "include": "*"}


def made(folder: Path, gigabytes: float) -> None:
    """A folder of bfloat16 matrices of 4096 columns in four files."""
    folder.mkdir()
    rows = max(int(gigabytes * 1e9) // FILES // 2 // (4096 * 2), 1)
    where = {}
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        names = [f"layers.{2 * number + i}.weight" for i in range(2)]
        save_file({name: torch.randn(rows, 4096).bfloat16() for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def cold(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> None:
    room = bytearray(CHUNK)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def copy(source: Path, target: Path) -> None:
    """Reads everything twice, and writes it to the disk."""
    read(source)
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file, (target / path.name).open("wb", buffering=0) as out:
            while piece := file.read(CHUNK):
                out.write(piece)
            os.fsync(out.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", help="where the files are written; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    print(machine())
    sc.prune_({"warm": torch.randn(64, 64)}, sparsity=0.5)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        measure(Path(folder) / "dense", Path(folder) / "sparse", asked.gigabytes, asked.rounds)


def measure(dense: Path, sparse: Path, gigabytes: float, rounds: int) -> None:
    made(dense, gigabytes)
    size = sum(path.stat().st_size for path in dense.glob("*.safetensors"))
    results = []

    def prune() -> None:
        results.append(sc.prune_folder(dense, sparse, overwrite=True, **CUT))

    runs = {ONCE: lambda: read(dense), PLAIN: lambda: copy(dense, sparse), OURS: prune}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    with PeakMemory() as memory:
        for _ in range(rounds):
            for name, run in runs.items():
                shutil.rmtree(sparse, ignore_errors=True)
                cold(dense)
                begin = time.process_time()
                took = seconds(run)
                times[name].append((took, time.process_time() - begin))
    best = {name: min(found) for name, found in times.items()}
    passes = {ONCE: 1, PLAIN: 2, OURS: 2}
    rates = {name: passes[name] * size / took for name, (took, _) in best.items()}
    rows = [
        (name, duration(took), duration(cpu), f"{rates[name] / 1e9:.2f} GB/s", f"{took / best[PLAIN][0]:.2f}x")
        for name, (took, cpu) in best.items()
    ]
    header = ("", "time", "CPU time", "read", "of plain reading and writing")
    show(f"{size / 1e9:.2f} GB of bfloat16 in {FILES} files, 50 % global, the best of {rounds}", header, rows)
    found = results[0].metrics()
    print(f"{found['pruned']:,} of {found['total']:,} weights pruned, with {memory.extra / 1e6:.0f} MB more memory than before")
    share = rates[OURS] / rates[ONCE]
    print(f"two passes at {share:.2f}x of the bandwidth of reading; half or more: {verdict(share >= 0.5)}")
    print(f"extra memory of at most 300 MB: {verdict(memory.extra <= 300e6)}")


if __name__ == "__main__":
    main()
