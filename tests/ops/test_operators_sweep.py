"""A sample of the sweep over torch's operators: no plan that claims to be exact is wrong, and none crashes, aborts or hangs.

The benchmark itself (benchmarks/operators.py) takes all operators and more samples of each.
"""

import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import operators

# Operators that were cut wrongly once, each with a sample that shows it.
WRONG = """
    clamp_max:1 minimum:1 fmin:1 min.binary:1 atan2:1 ge:1 gt:1 index_fill:4 bucketize:8 logsumexp:1 logcumsumexp:0
    masked.logsumexp:48 argsort:56 sort:56 topk:0 renorm:0 quantile:32 nanquantile:32 narrow:1 _batch_norm_with_update:2
    half:2 bfloat16:2 float:2 fft.fft:0 fft.rfft:0 empty_like:4
    nn.functional.adaptive_avg_pool1d:1 nn.functional.adaptive_max_pool1d:3 nn.functional.avg_pool1d:0
    nn.functional.interpolate.linear:0 nn.functional.upsample_nearest:0 nn.functional.fractional_max_pool3d:0
    nn.functional.pad.replicate_negative:0 nn.functional.pad.constant:17 nn.functional.dropout2d:12
"""
# Operators after which the cut model did not run, or whose run ended the process.
FAILED = """
    rot90:0 view_copy:4 expand_copy:0 sum_to_size:13 diff:30 meshgrid.list_of_tensors:9 linalg.vander:2 slice_scatter:1
    split_with_sizes_copy:1 native_layer_norm:15 native_group_norm:20 native_batch_norm:0 _native_batch_norm_legit:0
    nn.functional.group_norm:20 nn.functional.instance_norm:8 nn.functional.pad.circular:2 nn.functional.embedding_bag:0
    nn.functional.fractional_max_pool2d:36
"""
NOT_IN_2_11 = {"native_group_norm:20"}  # the op_db of the oldest torch does not have these


def failures(ops, samples=1, seconds=30.0):
    found = operators.sweep(operators.find_ops(ops), samples, jobs=1, seconds=seconds)
    assert any(r.verdict != operators.SKIPPED for r in found)
    return [f"{r.verdict}: {r.case}: {r.why}" for r in found if r.verdict in operators.FAILURES]


@pytest.mark.parametrize("ops", [WRONG, FAILED], ids=["wrong", "failed"])
def test_operators_that_went_wrong_once_are_right_now(ops):
    known = {name for i, op in enumerate(operators.op_db) for name in (op.name, operators.op_name(i))}
    ops = [op for op in ops.split() if op.partition(":")[0] in known or op not in NOT_IN_2_11]
    assert failures(ops) == []


def test_a_random_sample_of_all_operators_is_right():
    drawn = random.Random(1).sample(range(len(operators.op_db)), 24)
    assert failures([operators.op_name(i) for i in drawn]) == []


def test_a_constant_of_the_code_can_be_traced_twice():
    script = """
import torch
from torch import nn
import secateur as sc
constant = torch.tensor(2.0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.a, self.o = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, x):
        return self.o(self.a(x + self.places) + constant)
torch.manual_seed(0)
model = Model().double()
nn.init.zeros_(model.a.bias)
for seed in range(3):
    plan = sc.shrink(model, torch.randn(4).double(), sc.random(seed), channels=0.5)[1]
    assert not plan.metrics()["exact"] or plan.verify().max_error < 1e-9
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ---------------------------------------------------------------- the sweep can say no


def off_by_one(small, plan):
    small.read[0].bias.data += 1
    return small, plan


def does_not_run(small, plan):
    raise RuntimeError("the cut model does not run")


def dies(small, plan):
    os.abort()


def hangs(small, plan):
    time.sleep(60)


@pytest.mark.parametrize(
    ("broken", "verdict"), [(off_by_one, "exact, WRONG"), (does_not_run, "CRASH"), (dies, "ABORT"), (hangs, "SLOW")]
)
def test_a_broken_cut_is_called_so(broken, verdict, monkeypatch):
    shrink = operators.sc.shrink
    monkeypatch.setattr(operators.sc, "shrink", lambda *args, **options: broken(*shrink(*args, **options)))
    found = failures(["nn.functional.relu:1"], seconds=2)
    assert len(found) == 4
    assert all(line.startswith(verdict) for line in found), found
