"""`sc.prune_folder` next to plain reading: bandwidth of its passes, and memory.

    python benchmarks/folder.py [--gigabytes 1] [--folder DIR]

Half precision takes two passes: one counts, one reads, cuts and writes. Before each run the files leave the page cache, as far
as the system lets a program ask for that (Linux).
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

FILES, CHUNK, TWO = 4, 1 << 22, "prune_folder, two passes"
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
    """Reads everything, and writes it to the disk."""
    shutil.rmtree(target, ignore_errors=True)
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
    asked = parser.parse_args()
    print(machine())
    sc.prune_({"warm": torch.randn(64, 64)}, sparsity=0.5)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        measure(Path(folder) / "dense", Path(folder) / "sparse", asked.gigabytes)


def measure(dense: Path, sparse: Path, gigabytes: float) -> None:
    made(dense, gigabytes)
    size = sum(path.stat().st_size for path in dense.glob("*.safetensors"))
    results = []

    def prune() -> None:
        shutil.rmtree(sparse)
        results.append(sc.prune_folder(dense, sparse, **CUT))

    runs = {"reading": lambda: read(dense), "reading and writing": lambda: copy(dense, sparse), TWO: prune}
    rows, rates = [], {}
    with PeakMemory() as memory:
        for name, run in runs.items():
            cold(dense)
            begin = time.process_time()
            took, cpu = seconds(run), time.process_time() - begin
            rates[name] = (2 if name == TWO else 1) * size / took
            ratio = f"{rates[name] / rates['reading']:.2f}x"
            rows.append((name, duration(took), duration(cpu), f"{rates[name] / 1e9:.2f} GB/s", ratio))
    header = ("", "time", "CPU time", "read", "of plain reading")
    show(f"{size / 1e9:.2f} GB of bfloat16 in {FILES} files, 50 % global", header, rows)
    found = results[0].metrics()
    print(f"{found['pruned']:,} of {found['total']:,} weights pruned, with {memory.extra / 1e6:.0f} MB more memory than before")
    print(f"two passes at half of the bandwidth of reading or more: {verdict(rates[TWO] >= 0.5 * rates['reading'])}")


if __name__ == "__main__":
    main()
