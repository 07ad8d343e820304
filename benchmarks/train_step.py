"""A training step with a static mask, against the same step without one and against torch.nn.utils.prune's hooks.

    python benchmarks/train_step.py [--rounds 20]

Three copies of a 6-layer transformer (d_model 512) take turns, step by step; ratios are medians over the rounds, each of them
within one round, so that what else the machine does falls on all three.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import torch
from _bench import copy_bandwidth, duration, interleaved, machine, median, seconds, show, verdict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils import prune as torch_prune

import secateur as sc

WIDTH, HEADS, LAYERS, WORDS = 512, 8, 6, 1000
SPARSITY = 0.8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS))


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def compare(batch: int, length: int, rounds: int, bandwidth: float) -> None:
    tokens = torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))
    dense = build()
    masked, hooked = copy.deepcopy(dense), copy.deepcopy(dense)
    optimizer = adamw(masked)
    pruner = sc.Pruner(masked, sc.magnitude, sparsity=SPARSITY)
    pruner.attach(optimizer)
    for layer in hooked.modules():
        if isinstance(layer, nn.Linear):
            torch_prune.l1_unstructured(layer, "weight", amount=SPARSITY)
    steps = [stepper(dense, adamw(dense), tokens), stepper(masked, optimizer, tokens), stepper(hooked, adamw(hooked), tokens)]
    for step in steps:  # the first step allocates the optimizer's state
        step()
        step()
    plain, ours, theirs = interleaved(*steps, rounds=rounds)
    pruner.verify()
    pruner.detach()  # an attached pruner refuses steps by hand
    restoring = median([seconds(pruner.step) for _ in range(21)])
    weights = pruner.masks.total
    bandwidth = max(bandwidth, copy_bandwidth())  # the better of before and after, in case the machine was busy
    floor = 9 * weights / bandwidth  # masks read, weights read and written: 1 + 4 + 4 bytes
    base = median(plain)

    def ratio(times: list[float]) -> float:
        return median([t / p for t, p in zip(times, plain, strict=True)])

    show(
        f"batch {batch} x {length} tokens, {weights:,} weights masked at {SPARSITY}, AdamW, float32, {rounds} rounds",
        ("", "time", "of the step without"),
        [
            ("without a mask", duration(base), "1.000x"),
            ("ours: Pruner attached", duration(median(ours)), f"{ratio(ours):.3f}x"),
            ("torch: nn.utils.prune hooks", duration(median(theirs)), f"{ratio(theirs):.3f}x"),
            ("ours, the hook alone", duration(restoring), f"{restoring / base:.3f}x"),
            ("floor of the hook: 9 bytes per weight", duration(floor), f"{floor / base:.3f}x"),
        ],
    )
    print(f"goal: at most 2 % longer: {verdict(ratio(ours) <= 1.02)}")


def main(rounds: int) -> None:
    print(machine())
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s (read and written bytes added up)")
    compare(8, 128, rounds, bandwidth)


if __name__ == "__main__":
    main(int(sys.argv[2]) if sys.argv[1:2] == ["--rounds"] else 20)
