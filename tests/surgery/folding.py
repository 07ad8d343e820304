"""Helpers for the tests of folding: the cut model is compared with the masked one."""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from secateur.axes.expressions import keep_mask
from secateur.surgery.exact.fold import fold_
from secateur.surgery.masked import mask_
from secateur.trace.run import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from cutting import choose, cut_, difference, run, seeded


def conv(i, o, k=1, **options):
    return nn.Conv2d(i, o, k, **options)


def shifted_bn(channels):
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(3))
    norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(4))
    return norm


def zero_weights_(model, t, keep):
    """Zero the weights that make the removed units; all biases stay."""
    tensors = dict(model.named_parameters())
    for group in t.groups:
        for m in group.members:
            if group.atom in keep and m.role == "produce" and tensors[m.tensor].dim() > 1:
                gone = ~keep_mask(t.dims[m.tensor][m.dim], {group.atom: keep[group.atom]})
                tensors[m.tensor].data = tensors[m.tensor].data.index_fill(m.dim, gone.nonzero()[:, 0], 0)
    return model


def cut_copy(model, t, keep, inputs, fold, mask=mask_):
    """Masked output, output of the cut model, and what folding reports."""
    one = copy.deepcopy(SimpleNamespace(model=model, trace=t, keep=keep))
    mask(one.model, one.trace, one.keep)
    masked = run(one.model, inputs)
    known = set(dict(one.model.named_parameters()))
    report = fold_(one.model, one.trace, one.keep, inputs) if fold else {}
    for name, bias in one.model.named_parameters():
        if name not in known:
            dims = one.trace.dims[name.replace("bias", "weight")]
            one.trace.dims[name] = [next(e for e in (dims[0], dims[1]) if e.size == len(bias))]
    cut_(one.model, one.trace, one.keep)
    return masked, run(one.model, inputs), report


def check(model, *inputs, only=None, constants=True, least=1, report=None, mask=mask_):
    """Three selections: exact after folding, wrong without it where constants are at stake, and the cut moves the output."""
    model = seeded(model)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    dense = run(model, inputs)
    t = trace(model, inputs)
    groups = [g for g in t.prunable if only is None or only(g)]
    assert len(groups) >= least, t.groups
    moved = lost = 0
    for seed, ratio in zip(range(3), (0.4, 0.5, 0.7)):
        keep = choose(t, groups, seed, ratio)
        masked, small, said = cut_copy(model, t, keep, inputs, True, mask)
        _, unfolded, _ = cut_copy(model, t, keep, inputs, False, mask)
        if report is not None:
            assert any(report in why for why in said.values()), said
            assert difference(small, masked) > 1e-8
            continue
        assert said == {}
        assert difference(small, masked) < 1e-10, (seed, difference(small, masked), keep)
        moved += difference(masked, dense) > 1e-6
        lost += difference(unfolded, masked) > 1e-6
    assert report is not None or moved == 3
    assert report is not None or bool(lost) == constants
    return t


def split(model, *inputs):
    """Masked and cut outputs of a model with several, and what is reported."""
    model, inputs = seeded(model), tuple(x.double() for x in inputs)
    t = trace(model, inputs)
    masked, small, said = cut_copy(model, t, choose(t, t.prunable, 0), inputs, True)
    return masked.chunk(2), small.chunk(2), said
