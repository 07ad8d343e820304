"""Perplexity of stories15M with gated inputs of all seven linear layers of each block: uniform, greedy and top-k beside dense.

    python benchmarks/gate_stories.py MODEL TOKENS

MODEL is a Hugging Face folder of the model (config.json, model.safetensors: a Llama of 15 M parameters trained on TinyStories).
TOKENS is an .npz with `ids` (all stories, one after the other, each with BOS first) and `offsets` (where each begins, and the
end). Two sets of 150 stories are evaluated: the last ones, and those before them, which nobody looked at while the greedy
allocation was made. Calibration takes the first 64 stories that fill the context. The model is written out below, so that torch
is all it takes.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from _bench import machine, show
from safetensors.torch import load_file
from torch import Tensor, nn

from secateur.activations import gate_

CONTEXT, EVALUATED, CALIBRATED = 256, 150, 64
LAYERS = ("layers.*.self_attn.*_proj", "layers.*.mlp.*_proj")


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.heads, shared = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        self.each = width // self.heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared * self.each, bias=False)
        self.v_proj = nn.Linear(width, shared * self.each, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.each)).transpose(1, 2)

        def turn(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=k.shape[1] != self.heads)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The model, with the output tied to the embedding."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.each, self.theta = config["hidden_size"] // config["num_attention_heads"], config["rope_theta"]

    def forward(self, ids: Tensor) -> Tensor:
        speeds = self.theta ** (-torch.arange(0, self.each, 2, device=ids.device) / self.each)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), speeds).repeat(1, 2)
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, angles.cos(), angles.sin())
        return F.linear(self.norm(x), self.embed_tokens.weight)


def load(folder: Path) -> Llama:
    model = Llama(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
    return model.eval()


def stories(file: Path) -> list[Tensor]:
    """One story per sequence, cut at the context of the model."""
    with numpy.load(file) as found:
        ids, offsets = torch.from_numpy(found["ids"].astype("int64")), found["offsets"].tolist()
    return [ids[begin:end][:CONTEXT] for begin, end in itertools.pairwise(offsets)]


@torch.inference_mode()
def perplexity(model: nn.Module, sequences: list[Tensor]) -> float:
    losses = [F.cross_entropy(model(ids[None])[0, :-1], ids[1:], reduction="sum").item() for ids in sequences]
    return math.exp(sum(losses) / sum(len(ids) - 1 for ids in sequences))


def main(folder: Path, tokens: Path) -> None:
    print(machine())
    model, texts = load(folder), stories(tokens)
    evaluated, before = texts[-EVALUATED:], texts[-2 * EVALUATED : -EVALUATED]
    full = [text for text in texts[: -2 * EVALUATED] if len(text) == CONTEXT][:CALIBRATED]
    calibration = list(torch.stack(full).split(2))
    dense, unseen = perplexity(model, evaluated), perplexity(model, before)
    rows = [("dense", "", "", "", f"{dense:.3f}", "", f"{unseen:.3f}", "", "")]
    for sparsity in (0.25, 0.4, 0.5):
        for method, spread in (("threshold", "uniform"), ("threshold", "greedy"), ("topk", "uniform")):
            begin = time.perf_counter()
            gates = gate_(model, sparsity=sparsity, at=LAYERS, data=calibration, method=method, spread=spread)
            took = time.perf_counter() - begin
            reached = gates.measured([text[None] for text in evaluated[:10]])
            found, other = perplexity(model, evaluated), perplexity(model, before)
            gates.undo_()
            cells = (
                f"{reached.sparsity:.1%}",
                f"{reached.error:.3f}",
                f"{found:.3f}",
                f"{found / dense:.3f}x",
                f"{other:.3f}",
                f"{other / unseen:.3f}x",
                f"{took:.0f} s",
            )
            rows.append((f"{sparsity:.0%} {method}, {spread}", f"{sparsity:.0%}", *cells))
            print(".", end="", file=sys.stderr, flush=True)
    show(
        f"stories15M, inputs of {len(gates.gates)} linear layers gated; perplexity on the last {EVALUATED} stories, "
        f"calibrated on {CALIBRATED} others",
        ("gates", "asked", "zeros", "error", "perplexity", "to dense", "150 before", "to dense", "to make"),
        rows,
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    where, file = Path(sys.argv[1]), Path(sys.argv[2])
    missing = [str(path) for path in (where / "config.json", where / "model.safetensors", file) if not path.exists()]
    sys.exit(f"not there: {', '.join(missing)}\n{__doc__}") if missing else main(where, file)
