"""Sharded models on one GPU, with NCCL: the masks of a plain model, checkpoints, and what is refused."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import secateur as sc
from secateur import shards
from secateur._dist import Comm
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import select

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PRUNINGS = {
    "tensor": {"sparsity": 0.5},
    "global": {"sparsity": 0.6, "scope": "global"},
    "row": {"sparsity": 0.5, "scope": "row"},
    "2:4": {"pattern": "2:4"},
    "16x16": {"pattern": "16x16", "sparsity": 0.5},
    "out": {"pattern": "out", "sparsity": 0.3},
    "in": {"pattern": "in", "sparsity": 0.3},
    "erk": {"sparsity": 0.5, "spread": sc.erk},
}


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    # Without a device, barriers (as in torch.distributed.checkpoint) warn that they guess it.
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def build(dtype=torch.float32):
    """A network whose weights have many ties."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda().to(dtype)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_((tensor * 512).round() / 512)
    return model


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def whole(mask):
    return mask.full_tensor() if hasattr(mask, "full_tensor") else mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRUNINGS)
def test_fsdp2_masks_are_those_of_a_plain_model(name, dtype):
    want = sc.plan(build(dtype), **PRUNINGS[name]).masks
    got = sc.plan(fully_sharded(build(dtype)), **PRUNINGS[name]).masks
    assert all(torch.equal(whole(got[n]), want[n]) for n in want)


@pytest.mark.parametrize("axis", [0, 1])
def test_masks_of_tensor_parallel_weights(axis):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model, mesh = build(), init_device_mesh("cuda", (1,))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(axis)]))
    want, got = (sc.plan(each, **PRUNINGS["global"]).masks for each in (build(), model))
    assert all(torch.equal(whole(got[n]), want[n]) for n in want)


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("pattern", ["unstructured", "4x4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cut_by_digits_is_that_of_select(scope, pattern, dtype):
    scores = {name: Scores.magnitude(p.detach()) for name, p in build(dtype).named_parameters() if p.ndim == 2}
    comm = Comm([dist.group.WORLD], 0)
    got = shards.select_shared(scores, Pattern.parse(pattern), comm=comm, scope=scope, sparsity=0.5)
    want = select(scores, Pattern.parse(pattern), scope=scope, sparsity=0.5)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("name", ["global", "row", "16x16"])
def test_weights_that_fsdp2_offloads_are_pruned_on_the_host(name):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    want = sc.plan(build().cpu(), **PRUNINGS[name]).masks
    model = fully_shard(build().cpu(), offload_policy=CPUOffloadPolicy())
    got = sc.prune_(model, **PRUNINGS[name]).masks
    assert all(torch.equal(got[n].to_local(), want[n]) for n in want)
    assert all(int((p.to_local() == 0).sum()) >= int((~want[n]).sum()) for n, p in model.named_parameters() if n in want)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner = sc.Pruner(model, sparsity=sc.cubic(0.8, end=4), scope="global")
    pruner.attach(optimizer)
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 512, device="cuda")).square().mean().backward()
        optimizer.step()
    return pruner


def test_a_checkpoint_of_a_sharded_run_loads_into_a_plain_model(tmp_path):
    import torch.distributed.checkpoint as dcp

    sharded = trained(fully_sharded(build()))
    dcp.save({"pruner": sharded}, checkpoint_id=tmp_path / "checkpoint")
    fresh = sc.Pruner(build(), sparsity=sc.cubic(0.8, end=4), scope="global")
    dcp.load({"pruner": fresh}, checkpoint_id=tmp_path / "checkpoint")
    assert fresh.masks
    assert all(torch.equal(whole(sharded.masks[name]), fresh.masks[name]) for name in fresh.masks)


@pytest.mark.parametrize(("criterion", "scope"), [("wanda", "row"), ("taylor", "global"), ("fisher", "tensor")])
def test_evidence_of_a_sharded_model_gives_the_same_masks(criterion, scope):
    torch.manual_seed(3)
    data = [torch.randn(8, 512, device="cuda") for _ in range(3)]
    how = {"sparsity": 0.5, "scope": scope, "data": data, "loss": lambda output, target: output.square().mean()}
    got, want = (sc.plan(model, criterion, **how).masks for model in (fully_sharded(build()), build()))
    apart = sum(int((whole(got[name]) != want[name]).sum()) for name in want)
    assert apart <= 2, apart  # sums of another order may exchange weights of nearly the same score


def test_fsdp1_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process has nothing to shard
        wrapped = FullyShardedDataParallel(nn.Sequential(nn.Linear(64, 64)).cuda(), use_orig_params=True)
    with pytest.raises(NotImplementedError, match=r"FSDP1|FullyShardedDataParallel"):
        sc.Pruner(wrapped, sparsity=0.5)
