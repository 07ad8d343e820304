"""Every example runs, with fewer steps than by default, and shows what it promises."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
TESTED = {"vision", "huggingface", "lightning_callback", "rigl", "gating", "deploy"}
ELSEWHERE = {"demo", "report", "several_gpus"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def example(request):
    spec = importlib.util.spec_from_file_location(f"example_{request.param}", EXAMPLES / f"{request.param}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    state = torch.get_rng_state()
    spec.loader.exec_module(module)
    yield module
    torch.set_rng_state(state)
    del sys.modules[spec.name]


def example_of(name):
    return pytest.mark.parametrize("example", [name], indirect=True)


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} <= TESTED | ELSEWHERE


@example_of("vision")
def test_vision(example, tmp_path, capsys):
    found = example.main(epochs=2, folder=str(tmp_path))
    assert list(found) == ["dense", "shrunk", "pruned", "compressed"]
    assert found["compressed"][0] > 0.9
    sizes = [size for _, size in found.values()]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.5 * sizes[1]
    assert "of 6 layers compressed for speed" in capsys.readouterr().out


@example_of("vision")
def test_vision_on_images_from_a_file(example, tmp_path):
    import numpy as np

    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 255, (128, 12, 12, 3), dtype=np.uint8), draw.integers(0, 10, 128, dtype=np.uint8)
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:32], y_test=y[:32])
    found = example.main(str(tmp_path / "images.npz"), epochs=1, folder=str(tmp_path / "out"))
    assert found["compressed"][1] < found["dense"][1]


@example_of("huggingface")
def test_huggingface(example, tmp_path, capsys):
    found = example.main(steps=60, out=str(tmp_path))
    assert found["dense"] < found["flow"] < found["SparseGPT"] < min(found["Wanda"], found["magnitude"])
    assert found["shrunk"] < found["magnitude"]
    printed = capsys.readouterr().out
    assert "21 of 23 layers compressed for size" in printed
    assert "compressed, it writes the same text" in printed
    assert f"{tmp_path}/pruned writes: " in printed


@example_of("lightning_callback")
@pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:.*treespec", "ignore:Checkpoint directory")
def test_lightning(example, tmp_path, capsys):
    assert example.main(epochs=4, out=str(tmp_path)) > 0.6
    assert "90.00%" in capsys.readouterr().out


@example_of("rigl")
def test_rigl(example):
    found = example.main(epochs=6)
    assert list(found) == ["dense", "fixed at random", "SET", "RigL"]
    assert found["RigL"] > 0.7


@example_of("gating")
def test_gating(example, capsys):
    found = example.main(epochs=2, width=256)
    assert found[0.3] > 0.8
    assert "gated and compressed" in capsys.readouterr().out


@example_of("deploy")
def test_deploy(example, tmp_path):
    sizes = example.main(out=str(tmp_path))
    assert sizes["secateur/"] < sizes["model.onnx"] < 0.6 * sizes["dense weights"]
