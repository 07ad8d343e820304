"""Networks drawn at random from the supported operators: cut as they are said to be, and wired right across norms."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "trace"))
import cutting
from probes import image, tokens

import secateur as sc
from secateur.surgery import shrink

WIDTHS = (6, 8, 12)
TOKEN_STEPS = ("linear", "add", "cat", "split", "glu", "heads", "layer_norm", "rms_norm", "conv1d", "mix", "scale")
IMAGE_STEPS = ("conv", "depthwise", "grouped", "batch_norm", "group_norm", "add", "cat", "split", "pool", "excite", "scale")


class Net(nn.Module):
    """A graph of layers by a recipe of (operator, first input, second input, option) for each step, all taken modulo.

    Tensors are (batch, tokens, width) or (batch, width, height, width); `at` is the dim of the units.
    """

    def __init__(self, recipe, pictures):
        super().__init__()
        self.at, self.heads, self.plan, self.layers = 1 if pictures else -1, 2, [], nn.ModuleList()
        kinds, widths = IMAGE_STEPS if pictures else TOKEN_STEPS, [8]
        self.first = nn.Conv2d(3, 8, 3, padding=1) if pictures else nn.Linear(12, 8)
        for kind, i, j, option in recipe:
            kind, i = kinds[kind % len(kinds)], i % len(widths)
            alike = [k for k, w in enumerate(widths) if w == widths[i]]
            layer, out = build(kind, widths[i], option)
            self.layers.append(layer)
            self.plan.append((kind, i, alike[j % len(alike)]))
            widths.append(out)
        last = sum(widths[-3:])
        self.last = (
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * last, 5)) if pictures else nn.Linear(last, 5)
        )

    def step(self, kind, layer, x, y):
        match kind:
            case "add":
                return F.gelu(x) + y
            case "cat":
                return torch.cat([x, torch.tanh(y)], self.at)
            case "split":
                a, b = x.chunk(2, self.at)
                return torch.tanh(a) * torch.sigmoid(b)
            case "glu":
                return F.glu(layer(x), -1)
            case "conv1d":
                return layer(x.transpose(1, 2)).transpose(1, 2)
            case "heads":
                b, n, _ = x.shape
                q, k, v = layer(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                return F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).reshape(b, n, -1)
            case "mix":
                return x * y.mean(1, keepdim=True)
            case "excite":
                return x * torch.sigmoid(layer(x.mean((2, 3), keepdim=True)))
            case "scale":
                return x * (layer[0] if self.at == -1 else layer[0][:, None, None])
        return F.relu(layer(x)) if kind in ("linear", "conv") else layer(x)

    def forward(self, x):
        made = [self.first(x)]
        for (kind, i, j), layer in zip(self.plan, self.layers):
            made.append(self.step(kind, layer, made[i], made[j]))
        return self.last(torch.cat(made[-3:], self.at))


def build(kind, width, option):
    """The layer of a step, and the width of its result."""
    out, groups = WIDTHS[option % 3], (1, 2, width)[option % 3]
    match kind:
        case "linear":
            return nn.Linear(width, out), out
        case "glu":
            return nn.Linear(width, 2 * out), out
        case "heads":
            return nn.Linear(width, 3 * width), width
        case "conv1d":
            return nn.Conv1d(width, width, 3, padding=1, groups=groups), width
        case "conv":
            return nn.Conv2d(width, out, 3 if option % 2 else 1, padding=option % 2), out
        case "depthwise":
            return nn.Conv2d(width, width, 3, padding=1, groups=width), width
        case "grouped":
            return nn.Conv2d(width, width, 1, groups=2), width
        case "layer_norm" | "rms_norm":
            return (nn.LayerNorm if kind == "layer_norm" else nn.RMSNorm)(width), width
        case "batch_norm":
            return nn.BatchNorm2d(width), width
        case "group_norm":
            return nn.GroupNorm(2, width), width
        case "pool":
            return (nn.MaxPool2d if option % 2 else nn.AvgPool2d)(3, 1, 1), width
        case "excite":
            return nn.Conv2d(width, width, 1), width
        case "scale":
            return nn.ParameterList([nn.Parameter(torch.randn(width))]), width
    return nn.Identity(), 2 * width if kind == "cat" else width // 2 if kind == "split" else width


def steps():
    number = st.integers(0, 11)
    return st.lists(st.tuples(number, number, number, number), min_size=3, max_size=7)


def cut(model, x, seed, **options):
    """Cut random units, by the first share that whole units can give; None where nothing may go."""
    for share in (0.6, 0.5, 0.7, 0.8, 0.4, 0.9, 0.3):
        try:
            return shrink(model, x, sc.random(seed), channels=share, **options)
        except ValueError as error:
            if "is left to cut" in str(error):
                return None
            if "cannot be met" not in str(error):
                raise
    return None


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(recipe=steps(), pictures=st.booleans(), seed=st.integers(0, 9))
def test_claims_about_random_networks_are_true(recipe, pictures, seed):
    torch.manual_seed(seed)
    model = cutting.seeded(Net(recipe, pictures), seed)
    x = (image() if pictures else tokens()).double()
    done = cut(model, x, seed)
    if done is not None:
        small, plan = done
        found = plan.verify()
        assert found.max_error < 1e-9 or not plan.metrics()["exact"], (str(found), str(plan))
        assert small(x).shape == model(x).shape
    exact = cut(model, x, seed, exact_only=True)
    if exact is not None:
        found = exact[1].verify()
        assert found.max_error < 1e-9, (str(found), str(exact[1]))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(recipe=steps(), pictures=st.booleans(), seed=st.integers(0, 9))
def test_wiring_of_random_network_is_right_across_its_norms(recipe, pictures, seed):
    torch.manual_seed(seed)
    model = cutting.seeded(Net(recipe, pictures), seed)
    assert cutting.wiring_error(model, ((image() if pictures else tokens()).double(),), draws=2) < 1e-9
