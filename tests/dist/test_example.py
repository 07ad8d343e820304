"""The example of the page "Several GPUs" runs: with two processes, and on with four."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from where import SINGLE

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def torchrun(processes: int, folder: Path, until: int) -> str:
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=0", "--standalone"]
    script = [str(ROOT / "examples" / "several_gpus.py"), str(folder), "--until", str(until)]
    done = subprocess.run([sys.executable, *command, *script], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    first, then = (1, 1) if SINGLE else (2, 4)
    assert f"step 5, {first} processes" in torchrun(first, tmp_path / "checkpoint", 5)
    assert f"step 11, {then} processes, 0.9000 sparse" in torchrun(then, tmp_path / "checkpoint", 11)


def test_the_page_shows_the_example():
    page = (ROOT / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "several_gpus.py").read_text(encoding="utf-8") in page
