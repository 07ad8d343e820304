"""A bias takes what is lost only where it is one: added to the product as it is, by all that reads the product, and nowhere else."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from folding import check
from probes import Lam, drawn, tokens

NONE = "has no bias to take it"


def product(forward, **shapes):
    """A model whose `forward` gets a product without a bias, of units that give constants."""
    return Lam(lambda s, x: forward(s, F.linear(F.softplus(s.a(x)), s.w)), a=nn.Linear(12, 16), **drawn(w=(6, 16), **shapes))


# ---------------------------------------------------------------- vectors that are added


def test_a_vector_that_is_added_right_after_is_a_bias():
    check(product(lambda s, y: torch.tanh(y + s.b), b=(6,)), tokens())
    check(product(lambda s, y: torch.tanh(y.view(10, 6) + s.b), b=(6,)), tokens())


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, y: (y + s.b) * torch.sigmoid(y),
        lambda s, y: torch.sigmoid(y) * (y + s.b),
        lambda s, y: (y + s.b) * (y + s.d),
        lambda s, y: torch.cat([y + s.b, y]),
        lambda s, y: (y.view(10, 6) + s.b) * torch.sigmoid(y.view(10, 6)),
    ],
)
def test_a_product_that_is_read_without_the_vector_too_loses_its_constant(forward):
    check(product(forward, b=(6,), d=(6,)), tokens(), report=NONE)


def test_a_product_that_is_returned_without_the_vector_loses_its_constant():
    check(product(lambda s, y: (y + s.b, y), b=(6,)), tokens(), report=NONE)
    check(product(lambda s, y: (y.view(10, 6) + s.b, y.view(10, 6)), b=(6,)), tokens(), report=NONE)
