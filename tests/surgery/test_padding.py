"""Channels next to zero padding: removed ones are zero in the masked model, biases included, so cuts are exact at any size."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from cutting import difference, run, seeded
from folding import check, conv, shifted_bn
from probes import Lam, image


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.conv1, self.bn1 = conv(width, hidden, 3, padding=1, bias=False), shifted_bn(hidden)
        self.conv2, self.bn2 = conv(hidden, width, 3, padding=1, bias=False), shifted_bn(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet():
    stem = nn.Sequential(conv(3, 8, 3, padding=1, bias=False), shifted_bn(8), nn.ReLU())
    return nn.Sequential(stem, Block(8, 10), Block(8, 12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def zeroed(model, cuts, names):
    """A copy of the model in which the removed entries of dim 0 of these tensors are zero."""
    model = copy.deepcopy(model)
    for name in names:
        tensor = model.get_parameter(name)
        gone = torch.ones(len(tensor), dtype=torch.bool)
        gone[cuts.tensors[name][0]] = False
        tensor.data[gone] = 0
    return model


def test_a_resnet_is_cut_exactly_at_any_size_and_gets_no_biases():
    model = seeded(resnet())
    small, plan = sc.shrink(model, image().double(), channels=0.5, scope="tensor")
    assert len(plan.groups) == 3
    assert not any(row.why for row in plan.groups)
    assert plan.cuts.added == {}
    for x in (image().double(), torch.randn(2, 3, 11, 6, dtype=torch.float64)):
        found = plan.verify(x)
        assert found.max_error < 1e-12
        assert found.moved
    made = [n for n, p in model.named_parameters() if n in plan.cuts.tensors and 0 in plan.cuts.tensors[n] and "5." not in n]
    assert len(made) == 5 + 2 * 5  # five convolutions, and the scale and the shift of five normalisations
    x = image().double()
    assert difference(run(small, (x,)), run(zeroed(model, plan.cuts, made), (x,))) < 1e-12


def test_channels_that_no_padded_convolution_reads_keep_their_biases():
    model = seeded(
        nn.Sequential(
            conv(3, 8), shifted_bn(8), nn.ReLU(),
            conv(8, 8, 3, padding=1), shifted_bn(8), nn.ReLU(),
            conv(8, 5),
        )
    )  # fmt: skip
    x = image().double()
    small, plan = sc.shrink(model, x, channels=0.5, scope="tensor")
    padded = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not any(row.why for row in plan.groups)
    assert difference(run(small, (x,)), run(zeroed(model, plan.cuts, [*padded, "3.weight"]), (x,))) < 1e-12
    assert difference(run(small, (x,)), run(zeroed(model, plan.cuts, [*padded, "3.weight", "4.bias"]), (x,))) > 1e-6


def padded_before(s, x):
    return s.b(F.pad(F.relu(s.a(x)), (1, 1, 1, 1)))


def activated_after_padding(s, x):
    return s.b(F.gelu(F.pad(s.a(x), (2, 1, 0, 1))))


def added_to_its_input(s, x):
    h = F.silu(s.n(s.a(x)))
    return s.o(h + s.b(h))


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(conv(3, 8), shifted_bn(8), nn.SiLU(), nn.ConvTranspose2d(8, 4, 3, stride=2)),
        lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, groups=2)),
        lambda: nn.Sequential(conv(3, 8), nn.ZeroPad2d(1), nn.AvgPool2d(2), conv(8, 4)),
        lambda: nn.Sequential(conv(3, 8), nn.ReLU(), nn.AvgPool2d(3, 1, 1), conv(8, 4)),
        lambda: Lam(padded_before, a=conv(3, 8), b=conv(8, 4, 3)),
        lambda: Lam(activated_after_padding, a=conv(3, 8), b=conv(8, 4, 3)),
        lambda: Lam(added_to_its_input, a=conv(3, 8), n=shifted_bn(8), b=conv(8, 8, 3, padding=1), o=conv(8, 4)),
    ],
    ids=["transposed", "transposed-groups", "zero-pad", "average", "pad", "pad-activation", "residual"],
)
def test_every_way_to_pad(model):
    check(model(), image(), constants=False)


def test_causal_convolution_of_a_sequence():
    m = Lam(lambda s, x: s.b(F.pad(F.gelu(s.a(x)), (2, 0))), a=nn.Conv1d(3, 8, 1), b=nn.Conv1d(8, 4, 3))
    check(m, torch.randn(2, 3, 9), constants=False)


@pytest.mark.parametrize(
    "pad", [nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, False, False)]
)
def test_constants_are_folded_where_the_border_does_not_change_them(pad):
    check(nn.Sequential(conv(3, 8), nn.ReLU(), pad, conv(8, 4, 3)), image())


def test_channels_that_are_padded_with_other_channels_keep_their_biases():
    check(Lam(lambda s, x: s.b(F.pad(s.a(x), (0, 0, 0, 0, 2, 2))), a=conv(3, 8), b=conv(12, 4)), image())


@pytest.mark.parametrize("middle", [nn.Sigmoid(), nn.BatchNorm2d(8, affine=False)], ids=["sigmoid", "no-affine"])
def test_functions_that_are_not_zero_at_zero_are_reported(middle):
    if isinstance(middle, nn.BatchNorm2d):
        middle.running_mean.fill_(0.5)
    check(nn.Sequential(conv(3, 8), middle, conv(8, 4, 3, padding=1)), image(), report="zero padding of 2")
