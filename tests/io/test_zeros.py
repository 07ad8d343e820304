"""The pattern in the manifest is the one that was pruned by."""

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.io.zeros import pattern_of


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1:4", "4:8", "out", "in", "16x1", "4x1", "1x4", "16x16", "64x64"])
@pytest.mark.parametrize("rows", [128, 512])
def test_the_pattern_of_the_zeros_is_found(pattern, rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, rows))
    budget = {} if ":" in pattern else {"sparsity": 0.5}
    sc.prune_(model, pattern=pattern, **budget)
    zeros = int((model[0].weight == 0).sum())
    assert pattern_of(model, "0.weight", model[0].weight, zeros) == pattern


def test_no_pattern_where_there_are_no_zeros_or_nothing_else():
    model = nn.Sequential(nn.Linear(8, 8))
    assert pattern_of(model, "0.weight", model[0].weight, 0) is None
    assert pattern_of(model, "0.bias", torch.zeros(8), 8) is None
    assert pattern_of(model, "0.weight", torch.zeros(8, 8), 64) is None
