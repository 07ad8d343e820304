"""What structured pruning costs, and what it buys.

    python benchmarks/shrink_speed.py [cost | first | memory | growth | latency] ... [--device cuda]

cost: build, score and cut, one thread, next to Torch-Pruning where that is installed (same criterion, half of the channels,
both on a copy of the model); first: the same for the first call in a fresh process; memory: the peak on top of the model, in a
fresh process; growth: with depth and width; latency: eager inference of the dense model and of the one cut to half of its
FLOPs, taken in turn.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _bench import PeakMemory, duration, in_fresh_process, interleaved, machine, median, seconds, show, verdict
from torch import Tensor, nn

import secateur as sc
from secateur.surgery import shrink


class Bottleneck(nn.Module):
    """A residual block of ResNet-50 (He et al., 2016)."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(width_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if stride > 1 or width_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(width_in, 64 << stage, 2 if stage and not block else 1))
            width_in = 256 << stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 1000))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as after training: shifts that removed channels leave behind
            nn.init.normal_(module.bias, std=0.1)
            module.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021); as it stands, ViT-B/16."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 16, 16)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 197, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


def llama(layers: int = 24, hidden: int = 1024) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=32000 * hidden // 1024, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def image(batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, 224, 224)


def tokens() -> Tensor:
    return torch.randint(0, 1000, (1, 16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet-50": (resnet50, image),
    "ViT-B/16": (ViT, image),
    "Llama, 24 layers": (llama, tokens),
}


def ours(model: nn.Module, x: Tensor) -> nn.Module:
    return shrink(model, x, sc.magnitude, channels=0.5, scope="tensor")[0]


def peers(model: nn.Module, x: Tensor) -> nn.Module:
    """Torch-Pruning: it has to be told of heads, and which layer makes the output."""
    import torch_pruning as tp  # type: ignore[import-not-found]

    model = copy.deepcopy(model)
    heads: dict[nn.Module, int] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            heads[module.qkv] = module.num_heads
        elif hasattr(module, "q_proj"):
            heads |= dict.fromkeys((module.q_proj, module.k_proj, module.v_proj), module.config.num_attention_heads)  # type: ignore
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    told: dict[str, Any] = {"output_transform": lambda out: out.logits.sum()} if hasattr(model, "config") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tp.pruner.BasePruner(
            model, x, importance=tp.importance.MagnitudeImportance(p=1), pruning_ratio=0.5, num_heads=heads,
            prune_head_dims=True, ignored_layers=[last], **told,
        ).step()  # fmt: skip
    return model


def has_peer() -> bool:
    return importlib.util.find_spec("torch_pruning") is not None


def compared(name: str, size: float, times: list[float]) -> list[str]:
    """A row: the times of this package and of Torch-Pruning, where that is installed."""
    row = [name, f"{size / 1e6:.0f} M", duration(times[0])]
    if len(times) == 1:
        return [*row, "-", "-", "-"]
    return [*row, duration(times[1]), f"{times[1] / times[0]:.1f}x", verdict(times[1] >= 3 * times[0])]


def show_compared(title: str, rows: list[list[str]]) -> None:
    title += "" if has_peer() else "; torch-pruning is not installed"
    show(title, ("model", "parameters", "secateur", "torch-pruning", "ratio", "at least 3x"), rows)


def cost(rounds: int = 9) -> None:
    rows = []
    for name, (build, example) in MODELS.items():
        model, x = build().eval(), example()
        runs = [lambda: ours(model, x), lambda: peers(model, x)][: 1 + has_peer()]  # noqa: B023
        for run in runs:
            run()
        times = [min(t) for t in interleaved(*runs, rounds=rounds)]
        rows.append(compared(name, sum(p.numel() for p in model.parameters()), times))
    show_compared("Build, score and cut, one thread, best of interleaved rounds", rows)


def first(rounds: int = 3) -> None:
    rows = []
    for name in MODELS:
        found = [in_fresh_process(__file__, "--first", name) for _ in range(rounds)]
        times = [min(t) for t in zip(*(each["seconds"] for each in found))]
        rows.append(compared(name, found[0]["size"], times))
    show_compared("The first call in a fresh process, one thread, best of three processes", rows)


def first_call(name: str) -> None:
    """In a fresh process: one call of each library, with both imported before."""
    if has_peer():
        import torch_pruning  # type: ignore[import-not-found]  # noqa: F401
    build, example = MODELS[name]
    model, x = build().eval(), example()
    times = [seconds(lambda: run(model, x)) for run in (ours, peers)[: 1 + has_peer()]]  # noqa: B023
    print(json.dumps({"seconds": times, "size": sum(p.numel() for p in model.parameters())}))


def memory() -> None:
    rows = []
    for name in MODELS:
        found = in_fresh_process(__file__, "--peak", name)
        share = found["extra"] / found["model"]
        rows.append(
            [
                name,
                f"{found['model'] / 2**20:.0f} MiB",
                f"{found['extra'] / 2**20:.0f} MiB",
                f"{share:.2f}",
                verdict(share <= 1.3),
            ]
        )
    show("Peak memory on top of the model, fresh process", ("model", "weights", "extra", "over weights", "at most 1.3"), rows)


def peak(name: str) -> None:
    """In a fresh process: what shrink takes beyond what is there when it begins (a small model was shrunk before)."""
    build, example = MODELS[name]
    ours(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8))
    model, x = build().eval(), example()
    with torch.no_grad():
        model(x)
    with PeakMemory() as used:
        ours(model, x)
    print(json.dumps({"extra": used.extra, "model": sum(p.nbytes for p in model.parameters())}))


def growth(rounds: int = 3) -> None:
    rows = []
    for what, sizes in (("layers", ((24, 256), (48, 256), (96, 256))), ("width", ((4, 512), (4, 1024), (4, 2048)))):
        first = 0.0
        for layers, hidden in sizes:
            model, x = llama(layers, hidden).eval(), tokens()
            ours(model, x)
            time = min(seconds(lambda: ours(model, x)) for _ in range(rounds))  # noqa: B023
            size = sum(p.numel() for p in model.parameters())
            at = layers if what == "layers" else size  # weights grow with the square of the width
            first = first or time / at
            rows.append([f"{layers} layers, width {hidden}", f"{size / 1e6:.0f} M", duration(time), f"{time / at / first:.2f}"])
    show("Growth: time over layers, then over weights (1 is linear)", ("Llama", "parameters", "time", "over the first"), rows)


def latency(device: str, batch: int, precision: str, depth: float | None, multiple_of: int) -> None:
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    rows = []
    for name, blocks in {"ResNet-50": depth, "ViT-B/16": None}.items():
        build, _ = MODELS[name]
        budget: dict[str, Any] = {"flops": 0.5, "multiple_of": multiple_of, "depth": blocks}
        model, x = build().eval().to(device), image(batch).to(device)
        small, plan = shrink(model, x, sc.magnitude, **budget)
        if precision == "bfloat16":
            model, small = (each.bfloat16().to(memory_format=torch.channels_last) for each in (model, small))  # type: ignore[call-overload]
            x = x.bfloat16().to(memory_format=torch.channels_last)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None

        def forward(m: nn.Module) -> Callable[[], None]:
            return lambda: (m(x), wait())[1]  # noqa: B023

        with torch.no_grad():
            for m in (model, small) * 3:
                m(x)
            dense, cut = interleaved(forward(model), forward(small), rounds=11 if device == "cpu" else 100)
        flops = plan.metrics()["flops"]
        ratio = median([d / c for d, c in zip(dense, cut)])
        rows.append(
            [
                name,
                str(batch),
                "channels" if blocks is None else f"blocks, depth={blocks:g}; channels",
                f"{flops:.3f}",
                duration(median(dense)),
                duration(median(cut)),
                f"{ratio:.2f}x",
                verdict(ratio >= 1.7),
            ]
        )
    header = ("model", "batch", "cut", "FLOPs left", "dense", "small", "faster", "at least 1.7x")
    show(f"Eager inference at flops=0.5, multiple_of={multiple_of}, in {precision}, on {device}", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["cost", "first", "memory", "growth", "latency"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--precision", choices=("tf32", "float32", "bfloat16"), default="tf32", help="of convolutions on a GPU")
    parser.add_argument("--depth", type=float, help="latency of the ResNet: this share of its blocks stays, then channels")
    parser.add_argument("--multiple-of", type=int, default=8, help="latency: what every size that is cut is a multiple of")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--first", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if given.peak:
        peak(given.peak)
        return
    if given.first:
        first_call(given.first)
        return
    print(machine())
    timed = given.device, given.batch, given.precision, given.depth, given.multiple_of
    parts = {"cost": cost, "first": first, "memory": memory, "growth": growth, "latency": lambda: latency(*timed)}
    for part in given.parts:
        if part not in parts:
            sys.exit(f"{part!r} is none of {', '.join(parts)}")
        parts[part]()


if __name__ == "__main__":
    main()
