"""`examples/report.py` runs, on a small network with random weights and images."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from secateur.reports import Report

EXAMPLE = Path(__file__).parents[2] / "examples" / "report.py"


@pytest.mark.slow
def test_example_writes_a_report_with_every_section(tmp_path):
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        from report import ResNet  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    torch.manual_seed(0)
    save_file(ResNet(1).state_dict(), tmp_path / "weights.safetensors")
    draw = numpy.random.default_rng(0)
    pixels = draw.integers(0, 256, (40, 32, 32, 3), dtype=numpy.uint8)
    numpy.savez(tmp_path / "cifar10.npz", x_train=pixels, x_test=pixels, y_test=draw.integers(0, 10, 40))
    options = ["--blocks", "1", "--calibration", "40", "--images", "20", "--seconds", "0.05", "--out", "report.html"]
    options += ["--pictures", "pictures"] if shutil.which("chromium") else []
    command = [sys.executable, str(EXAMPLE), "weights.safetensors", "cifar10.npz", *options]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    document = Report.load(tmp_path / "report.html").document
    assert document.model.name == "ResNet-8"
    assert [stage.name for stage in document.stages] == ["dense", "shrunk", "pruned", "compressed"]
    assert [line.label for line in document.sweep.lines] == ["unstructured", "Wanda", "4x1 blocks", "2:4"]
    assert [mask.label for mask in document.masks] == ["unstructured", "Blocks, 4x1", "2:4"]
    assert str(Report(document)) in done.stdout
    if shutil.which("chromium"):
        pictures = {file.name: file.read_bytes()[:4] for file in (tmp_path / "pictures").iterdir()}
        assert pictures == {f"report-{view}.png": b"\x89PNG" for view in ("light", "dark", "tablet", "phone")}
