"""What cannot be exact on several processes is refused, on all of them alike, and the next collective still fits."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import secateur as sc

pytestmark = pytest.mark.dist


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def refusal(call, kind: type[Exception]) -> str:
    """What the call said when it raised. The ranks then do a collective of their own, which must fit."""
    try:
        call()
    except kind as error:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        return str(error)
    raise AssertionError("was not refused")


def square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


# --- FSDP1 and ZeRO-3 -----------------------------------------------------------------------------------------------


def flat(rank: int, original: bool, arguments: dict) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(build(), use_orig_params=original, device_id=torch.device("cpu"))
    return refusal(lambda: sc.prune_(model, sparsity=0.5, **arguments), NotImplementedError)


@pytest.mark.parametrize("arguments", [{}, {"include": "_fsdp_wrapped_module._flat_param"}], ids=["default", "named"])
@pytest.mark.parametrize("original", [False, True])
def test_flat_parameters_of_fsdp1_are_refused(pair, original, arguments):
    for text in pair.both(flat, original, {} if original else arguments):
        assert "fully_shard" in text


def test_placeholders_of_zero_3_are_refused():
    model = build()
    model[0].weight.ds_id = 0
    with pytest.raises(NotImplementedError, match=r"'0\.weight'.*ZeRO-3.*fully_shard"):
        sc.prune_(model, sparsity=0.5)


# --- stages of a pipeline -------------------------------------------------------------------------------------------


def stage_of_a_pipeline(rank: int) -> str:
    from torch.distributed.pipelining import PipelineStage

    model = build()[0] if rank == 0 else build()[2]
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    sc.plan(stage.submod, sparsity=0.5)  # a pool for each tensor is exact
    return refusal(lambda: sc.prune_(stage.submod, sparsity=0.5, scope="global"), NotImplementedError)


def test_a_global_pool_on_one_stage_is_refused(pair):
    for text in pair.both(stage_of_a_pipeline):
        assert "stage" in text


# --- data that differs by rank --------------------------------------------------------------------------------------


def own_data(rank: int, criterion: sc.Criterion, inner: bool) -> str:
    model = DistributedDataParallel(build())
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))]
    given = model.module if inner else model
    before = [parameter.clone() for parameter in model.parameters()]
    text = refusal(lambda: sc.prune_(given, criterion, sparsity=0.5, data=data, loss=square), ValueError)
    assert all(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
    return text


@pytest.mark.parametrize("inner", [True, False], ids=["the model inside", "the wrapper"])
@pytest.mark.parametrize("criterion", [sc.wanda, sc.taylor], ids=str)
def test_data_that_differs_by_rank_is_refused_under_ddp(pair, criterion, inner):
    for text in pair.both(own_data, criterion, inner):
        assert "different masks" in text
