"""How the cost of one-shot pruning from a folder grows with the depth of a model and with the calibration tokens.

    python benchmarks/oneshot_growth.py [--method flow] [--blocks 2 4 8] [--sequences 8 16 32]

A Llama with random weights (512 wide, 3.2 M parameters in each block) is written to a folder, and
`sc.prune_folder` prunes it 2:4 into another one, each time in a process of its own. Cost is linear in the depth where "per
block" stays the same. A block costs a fixed time for the solver and a time for each token. "memory" is the peak of that process
over what it had before the call: the streams of all tokens, and one block with its matrices. It needs transformers and runs on
the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _bench import PeakMemory, in_fresh_process, machine, show

import secateur as sc

WIDTH, LENGTH = 512, 128


def llama(blocks: int) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=1408,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=256,
        )
    )


def prune(method: str, blocks: int, sequences: int, folder: Path) -> dict[str, float]:
    """Prunes a model of so many blocks with so many sequences of 128 tokens. Returns seconds and bytes."""
    torch.manual_seed(0)
    llama(blocks).save_pretrained(folder / "dense", max_shard_size="30MB")
    data = [torch.randint(0, 256, (4, LENGTH)) for _ in range(sequences // 4)]
    llama(2).save_pretrained(folder / "first")
    how: dict[str, Any] = {"method": method, "pattern": "2:4", "exclude": ["lm_head", "*embed*"]}
    sc.prune_folder(folder / "first", folder / "out", into=lambda: llama(2), data=data[:1], **how)  # imports, compiled loops
    begin = time.process_time()
    with PeakMemory() as memory:
        sc.prune_folder(folder / "dense", folder / "pruned", into=lambda: llama(blocks), data=data, **how)
    return {"seconds": time.process_time() - begin, "bytes": memory.extra}


def main(method: str, blocks: list[int], sequences: list[int]) -> None:
    print(machine())
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "SECATEUR_PROGRESS": "0"}  # freed memory is given back at once
    cases = [*((depth, sequences[0]) for depth in blocks), *((blocks[0], number) for number in sequences[1:])]
    table = []
    for depth, number in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = in_fresh_process(__file__, "--method", method, "--child", str(depth), str(number), folder)
        tokens, each = number * LENGTH, found["seconds"] / depth
        times = f"{found['seconds']:.1f} s", f"{each:.2f} s", f"{each / tokens * 1e6:.0f} us"
        table.append((str(depth), f"{tokens:,}", *times, f"{found['bytes'] / 1e6:.0f} MB"))
    columns = ("blocks", "tokens", "CPU time", "per block", "per block and token", "memory")
    show(f"{method}, 2:4, from a folder", columns, table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="flow")
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 64, 128], help="of 128 tokens")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(prune(args.method, int(args.child[0]), int(args.child[1]), Path(args.child[2]))))
    else:
        main(args.method, args.blocks, args.sequences)
