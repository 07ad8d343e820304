"""`import secateur` imports no torch, and still registers the operators of compressed layers once torch is there.

The first `shrink` imports no large package either.
"""

import subprocess
import sys

import pytest

import secateur as sc


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_no_torch():
    assert run("import secateur, sys; print('torch' in sys.modules)") == "False\n"


@pytest.mark.parametrize(
    "code", ["import secateur, torch", "import torch, secateur", "import secateur\nsecateur.prune_\nimport torch"]
)
def test_operators_are_registered_in_every_order_of_imports(code):
    check = "import sys\nprint(torch.ops.secateur.linear, 'secateur.execute' in sys.modules, vars(torch.__loader__).keys())"
    assert run(f"{code}\n{check}") == "secateur.linear False dict_keys(['name', 'path'])\n"


@pytest.mark.parametrize("cold", ["sympy", "torch._dynamo"])
def test_the_first_shrink_imports_no_large_package(cold):
    """Importing either of them takes longer than cutting a ResNet-50."""
    code = f"""import sys, torch, secateur.surgery as surgery
from torch import nn
known = {cold!r} in sys.modules  # torch may import it itself
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Flatten(), nn.Linear(8, 4))
small, _ = surgery.shrink(model.eval(), torch.randn(2, 3, 3, 3), channels=0.5)
print(known or {cold!r} not in sys.modules, small[4].in_features)"""
    assert run(code) == "True 4\n"


def test_every_public_name_is_imported_from_a_module():
    assert set(sc._HOME) | {"methods"} == set(sc.__all__)
    assert all(getattr(sc, name) is not None for name in sc.__all__)
    assert len(sc.__all__) <= 60
