"""`import secateur` imports no torch, and still registers the operators of compressed layers once torch is there."""

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


def test_every_public_name_is_imported_from_a_module():
    assert set(sc._HOME) | {"methods"} == set(sc.__all__)
    assert all(getattr(sc, name) is not None for name in sc.__all__)
    assert len(sc.__all__) <= 60
