"""Deployment: a pruned model in ONNX Runtime, as a torch.export file, and as a folder of this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnxruntime
import torch
from torch import nn

import secateur as sc

LOADS = """
import sys, torch, secateur  # secateur registers the operators of compressed layers
program = torch.export.load(sys.argv[1])
inputs, expected = torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(inputs), expected)
"""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def main(out: str = "out/deploy") -> dict[str, int]:
    """Returns the bytes of each file."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    inputs = torch.randn(1, 256, generator=torch.Generator().manual_seed(1))
    small, _ = sc.shrink(build().eval(), inputs, flops=0.5)
    sc.prune_(small, sc.magnitude, sparsity=0.8)
    sc.compress_(small, inputs)
    with torch.inference_mode():
        expected = small(inputs).clone()

    # ONNX has no sparse operators: compressed layers are written as dense ones. What shrink removed stays removed.
    path = sc.to_onnx(small, inputs, folder / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)

    # torch.export keeps the sparse formats. A new process needs `import secateur` before it loads the file.
    with torch.no_grad():
        torch.export.save(torch.export.export(small, (inputs,)), folder / "model.pt2")
    torch.save((inputs, expected), folder / "check.pt")
    subprocess.run([sys.executable, "-c", LOADS, str(folder / "model.pt2"), str(folder / "check.pt")], check=True)

    # A folder of this package keeps formats and pruned sizes, with a digest of every tensor.
    sc.save(small, folder / "secateur", packed=True)
    again = sc.load(folder / "secateur", into=build).eval()
    with torch.inference_mode():
        assert torch.equal(again(inputs), expected)

    sizes = {
        "dense weights": sum(p.nbytes for p in build().parameters()),
        "model.onnx": sum(file.stat().st_size for file in folder.glob("model.onnx*")),
        "model.pt2": (folder / "model.pt2").stat().st_size,
        "secateur/": sum(file.stat().st_size for file in (folder / "secateur").iterdir()),
    }
    for name, size in sizes.items():
        print(f"{name:<13}  {size / 1000:>6,.0f} kB")
    return sizes


@click.command(help=__doc__)
@click.option("--out", default="out/deploy", show_default=True)
def command(out: str) -> None:
    main(out)


if __name__ == "__main__":
    command()
