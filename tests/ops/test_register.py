"""One call teaches the package an operator: axes, constants, scaling, FLOPs."""

import math

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.ops import Contraction, register
from secateur.ops.record import OPERATORS, _found


@pytest.fixture
def library():
    made = torch.library.Library("recordtest", "DEF")
    made.define("linear(Tensor x, Tensor w, Tensor b) -> Tensor")
    made.impl("linear", lambda x, w, b: x @ w.mT + b, "CompositeExplicitAutograd")
    made.define("square(Tensor x) -> Tensor")
    made.impl("square", lambda x: (x + 1) ** 2, "CompositeExplicitAutograd")
    yield
    for name in ("recordtest::linear", "recordtest::square"):
        OPERATORS.pop(name, None)
    _found.clear()
    made._destroy()


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))
        self.v, self.c = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        linear, square = torch.ops.recordtest.linear, torch.ops.recordtest.square
        return linear(square(linear(x, self.w, self.b)), self.v, self.c)


@pytest.mark.usefixtures("library")
def test_a_custom_linear_operator_is_cut_exactly_and_its_flops_are_counted():
    register(
        "recordtest::linear",
        values=Contraction("x", "w", "b", inner=(-1, -1)),
        flops=lambda x, w, b, out_shape: 2 * math.prod(x) * w[0],
    )
    register("recordtest::square", values="elementwise")
    model, x = Custom().double(), torch.randn(2, 8, dtype=torch.float64)
    small, plan = sc.shrink(model, x, channels=0.5)
    assert small.w.shape == (8, 8)
    assert plan.metrics()["exact"]
    assert plan.verify().max_error < 1e-12
    assert plan.totals["flops"] == (2 * 2 * 16 * (8 + 4), 2 * 2 * 8 * (8 + 4))


@pytest.mark.usefixtures("library")
def test_an_operator_without_a_record_is_left_whole():
    with pytest.raises(ValueError, match="recordtest::linear has no record"):
        sc.shrink(Custom(), torch.randn(2, 8), channels=0.5)


def test_facts_that_no_operator_has_are_refused():
    with pytest.raises(TypeError, match="flopz"):
        register("recordtest::linear", flopz=1)
    with pytest.raises(ValueError, match="values='element-wise' is not known; use one of"):
        register("recordtest::linear", values="element-wise")
    assert "recordtest::linear" not in OPERATORS
