"""A cut model is run before it is returned."""

import copy

import pytest
import torch
from torch import nn

from secateur.surgery import shrink
from secateur.surgery.runs import check_runs
from secateur.trace.run import trace


class Partial(nn.Module):
    """A convolution over the first quarter of the channels; how many that are is computed in floats."""

    def __init__(self):
        super().__init__()
        self.a, self.part, self.out = nn.Conv2d(3, 16, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        h = self.a(x).relu()
        k = int(h.shape[1] * 0.25)
        return self.out(torch.cat([self.part(h[:, :k]), h[:, k:]], 1))


def test_a_size_in_a_formula_that_a_cut_would_break_is_left_whole_and_the_failing_layer_named():
    torch.manual_seed(0)
    small, plan = shrink(Partial().eval(), torch.randn(2, 3, 6, 6), channels=0.5)
    assert small.part.weight.shape == (2, 4, 3, 3)
    assert small.a.out_channels == 16
    assert "part fails on the example inputs" in plan.skipped["a.weight[0]#2"]
    assert plan.verify().max_error < 1e-6


def test_a_cut_model_that_does_not_run_names_the_layer():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))).eval(), torch.randn(2, 4)
    traced, small = trace(model, x), copy.deepcopy(model)
    small[1][1] = nn.Linear(7, 3)
    with pytest.raises(RuntimeError, match=r"in the cut model, 1\.1 fails on the example inputs .*exclude 1\.1"):
        check_runs(traced, small, ((x,), {}), 0, {})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in small.modules())
