"""Networks drawn at random from the supported operators: cut against zeroed, across norms."""

import random

import pytest
import torch
import torch.nn.functional as F
from cutting import check
from test_probes import tokens
from torch import nn

WIDTHS = (6, 8, 12)


class Net(nn.Module):
    """A random graph of layers over (batch, tokens, width) tensors; the recipe is drawn once, when it is built."""

    def __init__(self, seed, steps=7):
        super().__init__()
        draw = random.Random(seed)
        self.layers, self.plan = nn.ModuleList(), []
        self.heads = 2
        widths = [12]
        for _ in range(steps):
            kind = draw.choice(["linear", "linear", "add", "cat", "gate", "heads", "norm", "conv", "mix", "scale"])
            i = draw.randrange(len(widths))
            j = draw.choice([k for k, w in enumerate(widths) if w == widths[i]])
            self.plan.append((kind, i, j, len(self.layers)))
            widths.append(self.build(kind, widths[i], draw))
        self.last = nn.Linear(sum(widths[-3:]), 5)

    def build(self, kind, width, draw):
        if kind == "linear":
            out = draw.choice(WIDTHS)
            self.layers.append(nn.Linear(width, out))
            return out
        if kind == "norm":
            self.layers.append(draw.choice([nn.LayerNorm, nn.RMSNorm])(width))
        elif kind == "conv":
            self.layers.append(nn.Conv1d(width, width, 3, padding=1, groups=draw.choice([1, 2, width])))
        elif kind == "heads":
            self.layers.append(nn.Linear(width, 3 * width))
        elif kind == "scale":
            self.layers.append(nn.ParameterList([nn.Parameter(torch.randn(width))]))
        return 2 * width if kind == "cat" else width // 2 if kind == "gate" else width

    def step(self, kind, x, y, at):
        layer = self.layers[at] if at < len(self.layers) else None
        match kind:
            case "linear" | "norm":
                return layer(x)
            case "add":
                return F.gelu(x) + y
            case "cat":
                return torch.cat([x, torch.tanh(y)], -1)
            case "gate":
                a, b = x.chunk(2, -1)
                return a * torch.sigmoid(b)
            case "conv":
                return layer(x.transpose(1, 2)).transpose(1, 2)
            case "heads":
                b, n, _ = x.shape
                q, k, v = layer(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                return F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).reshape(b, n, -1)
            case "mix":
                return x * y.mean(1, keepdim=True)
            case "scale":
                return x * layer[0]

    def forward(self, x):
        made = [x]
        for kind, i, j, at in self.plan:
            made.append(self.step(kind, made[i], made[j], at))
        return self.last(torch.cat(made[-3:], -1))


@pytest.mark.parametrize("seed", range(40))
def test_random_network_is_cut_exactly(seed):
    torch.manual_seed(seed)
    check(Net(seed), tokens(), across=True, moves=False, least=0)
