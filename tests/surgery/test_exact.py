"""A cut model says what the masked one says, on every kind of layer and wiring: three random choices of units, in float64.

The wirings are those of the graph's own tests; here they go the whole way through `shrink` and `plan.verify`.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "trace"))
import cutting
import test_probes as probes

import secateur as sc
from secateur.axes.groups import HARMLESS
from secateur.surgery import shrink
from secateur.surgery.names import names_of
from secateur.trace.run import trace

for _name, _test in list(vars(probes).items()):
    if _name.startswith("test_"):
        globals()[_name] = _test


def shrunk(model, inputs, seed, exact_only=False):
    """Random units; the first share of them that whole units can meet, or None where no exact group may lose any."""
    for share in (0.5, 0.6, 0.7, *(k / n for n in (40, 28, 24, 18, 13) for k in range(n // 3, n))):  # whole units meet few
        try:
            return shrink(model, inputs, sc.random(seed), channels=share, scope="tensor", exact_only=exact_only)
        except ValueError as error:
            if "exact_only" in str(error) and "is left to cut" in str(error):
                return None
            if "cannot be met" not in str(error):
                raise
    assert exact_only, "no share of the units can be met"
    return None


def without_constants(model):
    """The same model without biases and shifts, so that nothing but sums over the cut axis can be inexact."""
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        if "bias" in name.rpartition(".")[2] or name in ("b1", "b2"):
            torch.nn.init.zeros_(p)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.zero_()
    return model


def check_exact(model, inputs, seed, moved):
    """With `exact_only`, biases and all: equal to the masked model, where any group is left."""
    done = shrunk(model, inputs, seed, exact_only=True)
    if done is not None:
        small, plan = done
        found = plan.verify()
        assert found.dtype == "float64"
        assert found.max_error < 1e-9, (str(found), str(plan))
        assert sum(p.numel() for p in small.parameters()) == plan.metrics()["params_after"]
        moved.append(found.moved)


def check_all(model, inputs, seed, moved):
    """Without constants: every group is exact, together and (once) alone, but those that something collective runs over."""
    t = trace(model, inputs)
    collective = {name for g, name in names_of(t).items() if g.flags - HARMLESS}
    _, plan = shrunk(model, inputs, seed)
    found = plan.verify(groups=seed == 0)
    for row in plan.groups:
        excused = row.name in collective or any(w in (row.why or "") for w in ("is cut together with", "enters a formula"))
        if row.why is None or not excused:
            assert found.groups.get(row.name, 0.0) < 1e-9, (row, found)
    if all(row.why is None for row in plan.groups):
        assert found.max_error < 1e-9, (str(found), str(plan))
    moved.append(found.moved)
    return t


def whole_way(model, *inputs, moves=True, **_):
    model = cutting.seeded(model)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    bare, moved = without_constants(model), []
    with cutting.unchanged(model), cutting.unchanged(bare):
        for seed in range(3):
            check_exact(model, inputs, seed, moved)
            t = check_all(bare, inputs, seed, moved)
    assert any(moved) or not moves
    return t


@pytest.fixture(autouse=True)
def _through_shrink(monkeypatch):
    monkeypatch.setattr(probes, "check", whole_way)
