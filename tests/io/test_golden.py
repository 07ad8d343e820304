"""Files that earlier versions wrote still load."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from secateur.execute import Compressed
from secateur.execute.formats import FORMER_NAMES
from secateur.io import dense_state_dict, load

GOLDEN = Path(__file__).parents[1] / "golden"
SAVED = sorted(path.parent for path in GOLDEN.glob("*/*/secateur.json"))
spec = importlib.util.spec_from_file_location("golden_write", GOLDEN / "write.py")
assert spec is not None
assert spec.loader is not None
write = importlib.util.module_from_spec(spec)
spec.loader.exec_module(write)


def test_there_are_golden_files():
    assert {path.name for path in SAVED} >= {"dense", "pruned", "packed", "narrow", "shallow", "twice", "compressed", "formats"}
    for name, word in {
        "packed": "bitmask",
        "shallow": '"drop": {"blocks": [',
        "narrow": '"kept": ["',
        "compressed": "csr",
        "formats": '"format": "mosaic"',
    }.items():
        assert all(word in (path / "secateur.json").read_text() for path in SAVED if path.name == name)


@pytest.mark.parametrize("folder", SAVED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_golden_files_load_and_answer_as_they_did(folder):
    expected = torch.tensor(json.loads((folder.parent / "expected.json").read_text())[folder.name], dtype=torch.float64)
    build = write.BUILD.get(folder.name, write.build)
    for as_ in (None, "dense"):
        model = load(folder, build, as_=as_)
        near = 1e-12 if model.scale.dtype == torch.float64 else 1e-5  # sums of float32 in another order
        torch.testing.assert_close(model(write.inputs().to(model.scale)).double(), expected, rtol=near, atol=near)
    assert dense_state_dict(folder).keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in dense_state_dict(folder).items())


def test_golden_compressed_layers_are_compressed_again():
    for folder in (path for path in SAVED if path.name == "compressed"):
        model = load(folder, write.build_float)
        forms = {name: (m.form, m.options) for name, m in model.named_modules() if isinstance(m, Compressed)}
        assert forms == {"first": ("tiled", (1,)), "blocks.0.up": ("bitmask", ()), "last": ("csr", ())}
        assert model.last.values.dtype == torch.bfloat16


def test_former_names_of_formats_in_files_are_read_as_the_current_ones():
    folder = GOLDEN / "v1" / "formats"
    model = load(folder, write.build_five)
    forms = {name: (m.form, m.options) for name, m in model.named_modules() if isinstance(m, Compressed)}
    assert forms == write.FIVE
    written = json.loads((folder / "secateur.json").read_text())["layers"]
    assert {layer["format"] for layer in written.values()} == set(FORMER_NAMES)
