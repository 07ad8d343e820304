"""The compiled loops give what numpy gives: the same masks, to the last tie."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.kernels import arrays, spread_
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import fold, select

PATTERNS = ["unstructured", "2:4", "1:4", "3:4", "1x4", "4x1", "16x16", "3x5", "1x4-2", "2x4-3", "out"]


@pytest.fixture
def compiled(monkeypatch):
    """Says from which size on loops are compiled: 0 is always, infinity never."""
    monkeypatch.setattr(arrays, "ENOUGH", 0)
    return lambda size: monkeypatch.setattr(arrays, "LARGE", size)


def tensors(seed: int, rows: int, cols: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = {"any": weight, "ties": (weight * 2).round() / 2, "zeros": weight.where(weight.abs() > 0.6, 0)}[kind]
    return weight.to(dtype)


def both(compiled, make):
    compiled(0)
    ours = make()
    compiled(float("inf"))
    return ours, make()


@pytest.mark.parametrize("under", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_compiled_and_numpy_masks_are_equal(compiled, pattern, under):
    @settings(max_examples=15, deadline=None)
    @given(
        st.integers(0, 99), st.integers(1, 40), st.integers(1, 70), st.sampled_from([torch.float32, torch.float64]),
        st.sampled_from(["any", "ties", "zeros"]), st.floats(0, 1),
    )  # fmt: skip
    def check(seed, rows, cols, dtype, kind, sparsity):
        weight = tensors(seed, rows, cols, dtype, kind)
        mask = (tensors(seed + 1, rows, cols, dtype, "any") > -0.5).to(dtype) if under else None
        parsed = Pattern.parse(pattern)
        budget = {} if parsed.keep else {"count": int(sparsity * torch.Size(parsed.grid(Scores.of(weight).layout)).numel())}
        ours, theirs = both(
            compiled, lambda: select({"w": Scores.magnitude(weight, under=mask, power=1 + seed % 2)}, parsed, **budget)
        )
        assert torch.equal(ours["w"], theirs["w"])

    check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_of_a_tensor_that_is_read_in_several_parts_are_equal(compiled, dtype):
    weight = tensors(0, 1100, 2000, dtype, "ties")

    def masks() -> list[torch.Tensor]:
        budgets = {"unstructured": 0.4, "2:4": None, "1x4": 0.4, "16x16": 0.4, "1x4-2": 0.4}
        scores = {"w": Scores.magnitude(weight)}
        return [select(scores, Pattern.parse(pattern), sparsity=share)["w"] for pattern, share in budgets.items()]

    for ours, theirs in zip(*both(compiled, masks), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("steps", [20, 300])  # how many scores are equal: more than the bracket holds, and fewer
def test_ties_of_large_pools_go_in_order(compiled, dtype, steps):
    weights = {str(seed): (tensors(seed, 300, 1001, torch.float64, "any") * steps).round() / steps for seed in (0, 1)}
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    order = torch.cat([weight.abs().view(-1) for weight in weights.values()]).sort(stable=True).indices
    for drop in (1, 100_000, 333_333, 600_599):
        expected = torch.ones(600_600, dtype=torch.bool)
        expected[order[:drop]] = False
        for masks in both(
            compiled,
            lambda drop=drop: select(
                {name: Scores.magnitude(weight) for name, weight in weights.items()}, Pattern(), scope="global", count=drop
            ),
        ):
            assert torch.equal(torch.cat([mask.view(-1) for mask in masks.values()]), expected)


def test_block_means_agree_to_the_last_digit_of_float32(compiled):
    weight = tensors(3, 130, 210, torch.float32, "any")

    def means() -> list[torch.Tensor]:
        scores = Scores.magnitude(weight, power=2)
        return [fold(scores, Pattern.parse(block)).rows(0, 999).clone() for block in ("1x4", "7x1", "16x16", "3x5")]

    for ours, theirs in zip(*both(compiled, means), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8])
def test_units_are_written_into_a_matrix_of_any_dtype(compiled, dtype):
    for height, width, shape in (
        (1, 4, (9, 16)),
        (1, 4, (9, 15)),
        (3, 5, (10, 13)),
        (16, 16, (40, 40)),
        (1, 1, (4, 4)),
        (2, 8, (0, 8)),
    ):
        grid = (-(-shape[0] // height), -(-shape[1] // width))
        kept = torch.rand(grid, generator=torch.Generator().manual_seed(1)) > 0.5
        expected = kept.repeat_interleave(height, 0).repeat_interleave(width, 1)[: shape[0], : shape[1]].to(dtype)
        for size in (0, float("inf")):
            compiled(size)
            out = torch.full(shape, 7).to(dtype)
            spread_(out, kept, height, width)
            assert torch.equal(out, expected), (height, width, shape, size)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "1x4", "1x4-2"])
def test_compiled_loops_find_nan(compiled, pattern):
    weight = torch.randn(64, 64)
    weight[13, 5] = torch.nan
    for size in (0, float("inf")):
        compiled(size)
        with pytest.raises(ValueError, match="'w' contain NaN"):
            select({"w": Scores.magnitude(weight)}, Pattern.parse(pattern), **({} if pattern == "2:4" else {"sparsity": 0.5}))


def test_large_tensors_are_pruned_without_numba_too():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import importlib.util as u; real = u.find_spec; u.find_spec = lambda n, *a: None if n == 'numba' else real(n, *a)\n"
        "import torch, secateur as sc\n"
        "from secateur.kernels import compile_now; compile_now()\n"
        "layer = torch.nn.Linear(2048, 1024)\n"
        "sc.prune_(layer, sc.magnitude, sparsity=0.75)\n"
        "assert int((layer.weight == 0).sum()) == 3 * 2**19\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_loops_are_loaded_by_a_process_that_has_much_to_do_and_no_other():
    code = (
        "import sys, torch, secateur as sc\n"
        "from secateur.kernels import arrays\n"
        "layer = torch.nn.Linear(1200, 1000)\n"
        "sc.prune_(layer, sc.magnitude, sparsity=0.5)\n"
        "assert 'numba' not in sys.modules\n"
        "arrays.ENOUGH = 20 << 20\n"
        "for _ in range(20):\n"
        "    sc.prune_(layer, sc.magnitude, sparsity=0.5)\n"
        "assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
