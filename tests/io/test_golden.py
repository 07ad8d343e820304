"""Files that earlier versions wrote still load."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from secateur.io import dense_state_dict, load

GOLDEN = Path(__file__).parents[1] / "golden"
SAVED = sorted(path.parent for path in GOLDEN.glob("*/*/secateur.json"))
spec = importlib.util.spec_from_file_location("golden_write", GOLDEN / "write.py")
assert spec is not None
assert spec.loader is not None
write = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write)


def test_there_are_golden_files():
    assert {path.name for path in SAVED} >= {"dense", "pruned", "packed", "narrow", "shallow", "twice"}
    for name, word in {"packed": "bitmask", "shallow": '"drop": {"blocks": [', "narrow": '"kept": ["'}.items():
        assert all(word in (path / "secateur.json").read_text() for path in SAVED if path.name == name)


@pytest.mark.parametrize("folder", SAVED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_golden_files_load_and_answer_as_they_did(folder):
    expected = torch.tensor(json.loads((folder.parent / "expected.json").read_text())[folder.name], dtype=torch.float64)
    model = load(folder, write.build)
    torch.testing.assert_close(model(write.inputs()), expected, rtol=1e-12, atol=1e-12)
    assert dense_state_dict(folder).keys() == model.state_dict().keys()
