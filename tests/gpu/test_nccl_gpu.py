"""NCCL on one GPU: the cut by digits, and weights on the host. With SECATEUR_TEST_DIST=nccl, tests/dist has the rest."""

from __future__ import annotations

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


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("pattern", ["unstructured", "4x4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cut_by_digits_is_that_of_select(scope, pattern, dtype):
    scores = {name: Scores.magnitude(p.detach()) for name, p in build(dtype).named_parameters() if p.ndim == 2}
    comm = Comm([dist.group.WORLD], 0)
    got = shards.select_shared(scores, Pattern.parse(pattern), comm=comm, scope=scope, sparsity=0.5)
    want = select(scores, Pattern.parse(pattern), scope=scope, sparsity=0.5)
    assert all(torch.equal(got[name], want[name]) for name in want)


OFFLOADED = {"global": {"scope": "global"}, "row": {"scope": "row"}, "16x16": {"pattern": "16x16"}}


@pytest.mark.parametrize("name", OFFLOADED)
def test_weights_that_fsdp2_offloads_are_pruned_on_the_host(name):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    want = sc.plan(build().cpu(), sparsity=0.5, **OFFLOADED[name]).masks
    model = fully_shard(build().cpu(), offload_policy=CPUOffloadPolicy())
    got = sc.prune_(model, sparsity=0.5, **OFFLOADED[name]).masks
    assert all(torch.equal(got[n].to_local(), want[n]) for n in want)
    assert all(int((p.to_local() == 0).sum()) >= int((~want[n]).sum()) for n, p in model.named_parameters() if n in want)
