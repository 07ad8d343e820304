"""Steps of `WeightNormSparsifier` on a GPU give the masks of the CPU, in the first step and in replayed CUDA graphs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from secateur.drop_in.ao_pruning import LambdaSL, WeightNormSparsifier
from secateur.drop_in.ao_pruning.sparsifier import weight_norm_sparsifier as module

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = [((1, 1), 1, 0.5), ((1, 4), 4, 0.5), ((1, 4), 2, 0.5), ((1, 4), 2, 1.0), ((16, 16), 256, 0.3), ((3, 5), 15, 0.4)]


def pair(shapes, dtype, block, zeros, level, norm=None, rounded=False):
    """The same layers and sparsifiers on the CPU and on the GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(cols, rows, bias=False, dtype=dtype) for rows, cols in shapes))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(layer.weight.mul(40).round() / 40 if rounded else layer.weight)
    made = []
    for one in (model, copy.deepcopy(model).cuda()):
        sparsifier = WeightNormSparsifier(level, block, zeros, norm)
        sparsifier.prepare(one, [{"tensor_fqn": f"{i}.weight"} for i in range(len(shapes))])
        made.append((one, sparsifier))
    return made


def masks(model):
    return [layer.parametrizations.weight[0].mask for layer in model]


def same(one, other):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(masks(one), masks(other), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("block", "zeros", "level"), CASES, ids=str)
@pytest.mark.parametrize("rounded", [False, True], ids=["plain", "ties"])
@pytest.mark.parametrize("shapes", [[(64, 128)], [(130, 76), (1, 8), (300, 1024)], [(2048, 2048)]], ids=str)
def test_masks_of_every_step_equal_those_of_the_cpu(dtype, block, zeros, level, rounded, shapes):
    (cpu, one), (gpu, other) = pair(shapes, dtype, block, zeros, level, rounded=rounded)
    torch.manual_seed(1)
    for turn in range(6):
        if turn == 3:  # other weights, and masks changed from outside
            for a, b, c, d in zip(masks(cpu), masks(gpu), cpu, gpu, strict=True):
                a.data.copy_(torch.rand(a.shape) > 0.2)
                c.parametrizations.weight.original.data.mul_(1 + 0.1 * torch.rand(a.shape))
                b.data.copy_(a), d.parametrizations.weight.original.data.copy_(c.parametrizations.weight.original)
        one.step(), other.step()
        assert same(cpu, gpu), turn


@pytest.mark.parametrize("norm", [1, 2, torch.abs])
def test_norms_agree_and_functions_take_the_long_way(norm):
    (cpu, one), (gpu, other) = pair([(64, 128)], torch.bfloat16, (1, 4), 4, 0.6, norm)
    for _ in range(3):
        one.step(), other.step()
        assert same(cpu, gpu)
    assert (other in module._ON_GPU) == (norm in (1, 2))


def test_a_changing_level_keeps_the_graphs():
    (cpu, one), (gpu, other) = pair([(256, 128), (128, 256)], torch.bfloat16, (1, 4), 4, 0.9)
    schedulers = [LambdaSL(s, lambda epoch: min(0.2 * epoch + 0.1, 1.0)) for s in (one, other)]
    held = None
    for _ in range(5):
        one.step(), other.step()
        assert same(cpu, gpu)
        assert held in (None, module._ON_GPU[other].steps)
        held = module._ON_GPU[other].steps
        for scheduler in schedulers:
            scheduler.step()


def test_tensors_that_moved_are_found_again():
    (cpu, one), (gpu, other) = pair([(256, 128)], torch.bfloat16, (1, 1), 1, 0.5)
    for turn in range(4):
        if turn == 2:  # new memory, as after moving the model to another device and back
            gpu[0].parametrizations.weight.original.data = gpu[0].parametrizations.weight.original.data.neg()
            held = torch.full((256, 128), 7.0, device="cuda", dtype=torch.bfloat16)
            masks(gpu)[0].data = masks(gpu)[0].data.clone()
        one.step(), other.step()
        assert same(cpu, gpu)
    assert bool((held == 7).all())


@pytest.mark.parametrize(("block", "zeros", "level"), CASES, ids=str)
@pytest.mark.parametrize("steps", [0, 3])
def test_nan_is_named_and_leaves_its_mask(block, zeros, level, steps):
    (_, _), (gpu, other) = pair([(64, 128), (64, 128), (64, 128)], torch.bfloat16, block, zeros, level)
    for _ in range(steps):
        other.step()
    before = [mask.clone() for mask in masks(gpu)]
    with torch.no_grad():
        gpu[1].parametrizations.weight.original[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"1\.weight.*NaN"):
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(masks(gpu)[1:], before[1:], strict=True))
    with torch.no_grad():
        gpu[1].parametrizations.weight.original[3, 5] = 0.5
    other.step()
    assert all(bool((mask == 0).any()) for mask in masks(gpu))


def test_graphs_are_no_part_of_copies_and_pickles():
    (_, _), (_, other) = pair([(64, 128)], torch.bfloat16, (1, 4), 2, 1.0)
    for _ in range(3):
        other.step()
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert twin not in module._ON_GPU
        twin.step()
    assert other.state_dict().keys() == {"state", "groups"}


def test_the_room_of_a_step_is_small():
    (_, _), (_, other) = pair([(2048, 2048)] * 4, torch.bfloat16, (1, 4), 2, 0.5)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        other.step()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2048 * 2048 + (8 << 20)
