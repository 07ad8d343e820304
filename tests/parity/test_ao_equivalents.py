"""Runs both columns of the table in docs/from-torch-ao.md and compares their masks."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.drop_in.ao_pruning import WeightNormSparsifier
from secateur.drop_in.ao_pruning._experimental.data_sparsifier import DataNormSparsifier

PAGE = (Path(__file__).parents[2] / "docs" / "from-torch-ao.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(WeightNormSparsifier\([^`]*\))` \| `(sc\.prune_\([^`]*\))` \|$", PAGE, re.MULTILINE)
DATA = re.findall(r"^\| `(DataNormSparsifier\(\[[^`]*\))` \| `(sc\.prune_\([^`]*\))` \|$", PAGE, re.MULTILINE)


def test_the_table_was_found():
    assert len(ROWS) >= 8
    assert len(DATA) == 1


@pytest.mark.parametrize(("theirs", "ours"), ROWS, ids=[row[0] for row in ROWS])
def test_both_columns_give_the_same_masks(theirs, ours):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    twin = copy.deepcopy(model)
    sparsifier = eval(theirs, {"WeightNormSparsifier": WeightNormSparsifier})
    sparsifier.prepare(twin, None)
    sparsifier.step()
    plan = eval(ours, {"sc": sc, "model": model})
    for name in ("0.weight", "2.weight"):
        mask = sparsifier.state[name]["mask"]
        assert torch.equal(plan.masks[name], mask.bool())
        assert 0 < int((mask == 0).sum()) < mask.numel()


@pytest.mark.parametrize(("theirs", "ours"), DATA)
def test_data_too(theirs, ours):
    tensor = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    sparsifier = eval(theirs, {"DataNormSparsifier": DataNormSparsifier, "tensor": tensor.clone()})
    sparsifier.step()
    plan = eval(ours, {"sc": sc, "tensor": tensor})
    assert torch.equal(plan.masks["table"], sparsifier.get_mask("table").bool())


@pytest.mark.parametrize(("block", "zeros"), [((1, 4), None), ((4, 4), None), ((1, 4), 2), ((2, 8), 5)], ids=str)
def test_where_blocks_do_not_divide_the_shape_the_same_share_gives_the_same_mask(block, zeros):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 29))
    sparsifier = WeightNormSparsifier(0.3, block, zeros)
    sparsifier.prepare(twin := copy.deepcopy(model), None)
    sparsifier.step()
    pattern = "x".join(map(str, block)) + (f"-{zeros}" if zeros else "")
    share = float((twin[0].weight == 0).double().mean())
    plan = sc.prune_(model, sc.magnitude**2, pattern=pattern, sparsity=share)
    assert torch.equal(plan.masks["0.weight"], sparsifier.state["0.weight"]["mask"].bool())
