"""The claims of the operator records, checked by brute force on torch's own sample inputs (`op_db`)."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from operators import op_db

from secateur.ops import arguments_of, lookup
from secateur.ops.record import OPERATORS

SAMPLES = 2
MOST = 2000  # elements of a tensor


class Calls(TorchDispatchMode):
    """Keeps the calls that reach the dispatcher, with copies of their tensors."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves, spec = tree_flatten((args, kwargs or {}))
        kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        out = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") == "aten" and all(t.numel() <= MOST for t in kept if isinstance(t, Tensor)):
            self.made.append((func, kept, spec))
        return out


def calls_of(op):
    """The operator calls that torch's samples for an operator make, in double precision."""
    found = []
    try:
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    except Exception:
        return found
    for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
        calls = Calls()
        try:
            with torch.no_grad(), calls:
                op.op(sample.input, *sample.args, **sample.kwargs)
        except Exception:
            continue
        found += calls.made
    return found


def run(func, leaves, spec):
    args, kwargs = tree_unflatten([x.clone() if isinstance(x, Tensor) else x for x in leaves], spec)
    torch.manual_seed(0)
    out = func(*args, **kwargs)
    return [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, Tensor)]


def floats(leaves):
    return [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def stays_zero(func, leaves, spec, record):
    """Zeros in the first argument give zeros, whatever the others are, or zeros in all arguments do."""
    args, kwargs = tree_unflatten(leaves, spec)
    names = arguments_of(func)
    given = {**names, **dict(zip(names, args)), **kwargs}
    if callable(record.zero) and not record.zero(given):
        return True
    for zeroed in (floats(leaves)[:1], floats(leaves)):
        changed = [torch.zeros_like(x) if i in zeroed else x for i, x in enumerate(leaves)]
        outs = run(func, changed, spec)
        if all(not bool(o.any()) for i, o in enumerate(outs) if i not in record.positions):
            return True
    return False


def is_elementwise(func, leaves, spec):
    """Changing one element of one input changes the output at that index alone."""
    before = run(func, leaves, spec)
    for i in floats(leaves):
        x = leaves[i]
        for d in range(x.dim()):
            if x.shape[d] < 2:
                continue
            changed = x.clone()
            changed.select(d, 0).add_(1.7)
            after = run(func, [changed if j == i else y for j, y in enumerate(leaves)], spec)
            for one, two in zip(before, after):
                at = d + one.dim() - x.dim()
                if at < 0 or one.shape[at] != x.shape[d]:
                    continue
                rest = [t.narrow(at, 1, t.shape[at] - 1) for t in (one, two)]
                if not torch.equal(rest[0].nan_to_num(), rest[1].nan_to_num()):
                    return False
    return True


def only_moves(func, leaves, spec):
    """Every entry of the output is an entry of an input, or the number that is padded with."""
    entries = torch.cat([x.flatten().double() for x in leaves if isinstance(x, Tensor) and not x.is_complex()])
    numbers = [float(x) for x in leaves if isinstance(x, int | float) and not isinstance(x, bool)]
    known = torch.cat([entries, torch.tensor([0.0, *numbers], dtype=torch.float64)])
    outs = [o for o in run(func, leaves, spec) if not o.is_complex()]
    return all(bool(torch.isin(o.flatten().double(), known).all()) for o in outs)


def faults_of(func, leaves, spec):
    record = lookup(func)
    if record.axes is None or record.undefined or torch.Tag.nondeterministic_seeded in func.tags or not floats(leaves):
        return
    if record.values in ("computes", "moves", "max pooling") and record.zero and not stays_zero(func, leaves, spec, record):
        yield "zeros do not stay zeros"
    if record.values == "elementwise" and not is_elementwise(func, leaves, spec):
        yield "not element-wise"
    real = not any(x.is_complex() for x in leaves if isinstance(x, Tensor))
    if record.values == "moves" and real and not only_moves(func, leaves, spec):
        yield "computes entries that are in no input"
    integers = {i for i, o in enumerate(run(func, leaves, spec)) if o.dtype == torch.int64 and o.numel()}
    missing = integers - set(record.positions) - _INTEGER_DATA.get(func.overloadpacket.__name__, set())
    if record.values in ("computes", "moves", "max pooling") and missing:
        yield f"outputs {sorted(missing)} hold integers and are not said to hold positions"


_INTEGER_DATA = {  # integers that are counted, not positions that are chosen: the operator is run on the values
    name: {0} for name in ("count_nonzero", "bucketize", "one_hot", "sum", "arange")
}


@pytest.mark.parametrize("part", range(4))
def test_the_claims_of_every_record_hold_on_the_samples_of_torch(part):
    faults = {}
    seen = set()
    for op in list(op_db)[part::4]:
        for func, leaves, spec in calls_of(op):
            key = (func, tuple(tuple(x.shape) if isinstance(x, Tensor) else repr(x) for x in leaves))
            if key in seen:
                continue
            seen.add(key)
            try:
                found = list(faults_of(func, leaves, spec))
            except Exception:  # changed inputs that the operator refuses say nothing
                continue
            for fault in found:
                faults.setdefault(f"{func}: {fault}", [tuple(x.shape) for x in leaves if isinstance(x, Tensor)])
    assert not faults
    assert len(seen) > 200


@pytest.mark.parametrize(
    ("name", "facts", "fault"),
    [
        ("logsumexp", {"zero": True}, "zeros do not stay zeros"),
        ("cumsum", {"values": "elementwise"}, "not element-wise"),
        ("cumsum", {"values": "moves"}, "computes entries that are in no input"),
        ("sort", {"positions": ()}, "are not said to hold positions"),
    ],
)
def test_a_false_claim_is_found(monkeypatch, name, facts, fault):
    """The check above is no witness unless it can fail."""
    (op,) = (op for op in op_db if op.name == name and not op.variant_test_name)
    calls = [c for c in calls_of(op) if c[0].overloadpacket.__name__ == name]
    monkeypatch.setitem(OPERATORS, f"aten::{name}", dataclasses.replace(OPERATORS[f"aten::{name}"], **facts))
    monkeypatch.setattr("secateur.ops.record._found", {})
    assert any(fault in found for call in calls for found in faults_of(*call))
