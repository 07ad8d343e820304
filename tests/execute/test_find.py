"""`zeros_of` recognizes the pattern that a matrix was pruned with."""

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.execute.find import negative_zeros, zeros_of

from .patterns import pruned


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1:4", "4:8", "out", "in", "16x1", "4x1", "1x4", "16x16", "64x64"])
@pytest.mark.parametrize("rows", [128, 512])
def test_the_pattern_that_was_pruned_by_is_found(pattern, rows):
    model = nn.Sequential(nn.Linear(512, rows))
    sc.prune_(model, pattern=pattern, sparsity=None if ":" in pattern else 0.5)
    assert zeros_of(model[0].weight).pattern == pattern
    assert zeros_of(model[0].weight.detach().t().contiguous().t()).pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "sparsity", "name"),
    [
        ("2:4", 0, "2:4"), ("1:4", 0, "1:4"), ("4:8", 0, "4:8"), ("16x1", 0.8, "16x1"), ("1x16", 0.8, "1x16"),
        ("16x16", 0.8, "16x16"), ("4x1", 0.8, "4x1"), ("1x1", 0.8, "unstructured"),
        ("1x1", 0.0, "dense"), ("1x1", 1.0, "all zero"),
    ],
)  # fmt: skip
def test_pattern_is_found(pattern, sparsity, name):
    assert zeros_of(pruned(64, 128, pattern, sparsity)).pattern == name


def test_equal_count_per_row_is_found():
    keep = torch.rand(64, 128).argsort(-1) < 13
    assert zeros_of(torch.ones(64, 128) * keep).pattern == "13 per row"


def test_minus_zeros_are_noted():
    assert negative_zeros(torch.tensor([0.0, 1.0, -1.0])) is None
    assert negative_zeros(torch.tensor([0.0, -0.0, -1.0])).tolist() == [2]


def test_one_row_or_column_has_no_whole_columns_or_rows():
    keep = torch.rand(64) < 0.5
    for matrix in (keep.view(1, 64).float(), keep.view(64, 1).float()):
        assert zeros_of(matrix).pattern == "unstructured"


def test_blocks_are_found_though_a_few_of_their_weights_are_zero_too():
    matrix = pruned(512, 512, "16x16", 0.5)
    matrix[torch.rand(512, 512) < 0.01] = 0
    assert zeros_of(matrix).pattern == "16x16"
    matrix[torch.rand(512, 512) < 0.05] = 0
    assert zeros_of(matrix).pattern == "unstructured"
    rows = torch.ones(512, 512) * (torch.arange(512) % 3 > 0)
    rows[1, 1] = 0
    assert (zeros_of(rows).pattern, zeros_of(rows.t()).pattern) == ("in", "out")
