"""What cannot be exact on several processes is refused, on all of them alike, and the next collective still fits."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from layouts import shard_by_hand, spread, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from where import DEVICE, several

import secateur as sc

pytestmark = pytest.mark.dist


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)


def refusal(call, kind: type[Exception] | tuple[type[Exception], ...]) -> str:
    """What the call said when it raised. The ranks then do a collective of their own, which must fit."""
    try:
        call()
    except kind as error:
        total = torch.ones(1, device=DEVICE)
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        return str(error)
    raise AssertionError("was not refused")


# --- FSDP1 and ZeRO-3 -----------------------------------------------------------------------------------------------


def flat(rank: int, original: bool, arguments: dict) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(build(), use_orig_params=original, device_id=DEVICE)
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
    stage = PipelineStage(model, rank, 2, DEVICE)
    sc.plan(stage.submod, sparsity=0.5)  # a pool for each tensor is exact
    return refusal(lambda: sc.prune_(stage.submod, sparsity=0.5, scope="global"), NotImplementedError)


def test_a_global_pool_on_one_stage_is_refused(pair):
    for text in pair.both(stage_of_a_pipeline):
        assert "stage" in text


# --- sharded models -------------------------------------------------------------------------------------------------


def with_partial_sums(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    model[0].weight = nn.Parameter(DTensor.from_local(model[0].weight.detach(), mesh, [Partial()], run_check=False))
    return model


def sharded_later(rank: int, attached: bool) -> str:
    model = build()
    pruner = sc.Pruner(model, sc.taylor, sparsity=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if attached:
        pruner.attach(optimizer)
    spread(model, "fsdp")
    model(torch.ones(2, 8, device=DEVICE)).sum().backward()
    return refusal(optimizer.step if attached else lambda: pruner.attach(optimizer), RuntimeError)


@pytest.mark.parametrize("attached", [True, False])
def test_a_pruner_of_a_model_that_is_sharded_afterwards_is_refused(pair, attached):
    for text in pair.both(sharded_later, attached):
        assert "was sharded after the pruner was made" in text


SHARDED = {
    "partial sums": ("not added up yet", "", lambda model: sc.prune_(with_partial_sums(model), sparsity=0.5)),
    "partial sums, saved": ("not added up yet", "", lambda model: sc.save(with_partial_sums(model), "out")),
    "shrink": ("shard it afterwards", "fsdp", lambda model: sc.shrink(model, torch.zeros(2, 8, device=DEVICE), channels=0.5)),
    "shrink_": ("shard it afterwards", "tp", lambda model: sc.shrink_(model, torch.zeros(2, 8, device=DEVICE), channels=0.5)),
    "compress_": ("compress the whole model", "fsdp", lambda model: sc.compress_(model, torch.zeros(2, 8, device=DEVICE))),
    "compress_, tp": ("compress the whole model", "tp", lambda model: sc.compress_(model, torch.zeros(2, 8, device=DEVICE))),
    "ste": ("before the model is sharded", "fsdp", lambda model: sc.Pruner(model, sparsity=0.5, ste=True)),
    "sensitivity": ("before sharding", "fsdp", lambda model: sc.sensitivity(model, lambda _: 0.0)),
    "search": (
        "before sharding",
        "fsdp",
        lambda model: sc.search(model, lambda _: 0.0, [{"prune": {"sparsity": 0.5}}]),
    ),
    "bench": ("before sharding", "tp", lambda model: sc.bench(model, torch.zeros(2, 8, device=DEVICE))),
    "sparsegpt": (
        "before sharding",
        "fsdp",
        lambda model: sc.prune_(model, sparsity=0.5, method="sparsegpt", data=[torch.ones(2, 8, device=DEVICE)]),
    ),
}


def of_shards(rank: int, what: str) -> str:
    _, layout, call = SHARDED[what]
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(DEVICE) if layout == "tp" else build()
    return refusal(lambda: call(spread(model, layout) if layout else model), (NotImplementedError, ValueError))


@pytest.mark.parametrize("what", SHARDED)
def test_what_shards_do_not_allow_is_refused(pair, what):
    for text in pair.both(of_shards, what):
        assert SHARDED[what][0] in text


def in_other_dtypes(rank: int) -> str:
    mesh, model = init_device_mesh("cpu", (2,)), build()
    part = model[0].weight.detach().chunk(2)[rank].to([torch.float32, torch.bfloat16][rank])
    model[0].weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
    return refusal(lambda: sc.prune_(model, sparsity=0.5, scope="global"), ValueError)


@several("the dtypes of two differ")
def test_shards_of_other_dtypes_are_refused(pair):
    for text in pair.both(in_other_dtypes):
        assert "do not do the same" in text


def in_another_sharding(rank: int, source: str, target: str) -> tuple[str, bool]:
    def built(layout: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to(DEVICE)
        return shard_by_hand(model, int(layout)) if layout else model

    plan, model = sc.plan(built(source), sparsity=0.5), built(target)
    text = refusal(lambda: plan.apply_(model), ValueError)
    return text, all(bool((whole(p) != 0).all()) for p in model.parameters())


@several("a shard is the whole")
@pytest.mark.parametrize(("source", "target"), [("0", "1"), ("0", ""), ("", "1")])
def test_a_plan_of_a_model_in_another_sharding_is_refused(pair, source, target):
    """The parts of a square matrix along both axes have as many elements, and the mask of one would fit the other."""
    for text, untouched in pair.both(in_another_sharding, source, target):
        assert "sharded in one way in the model and in another in the plan" in text
        assert untouched


# --- one process raises, or does something else ---------------------------------------------------------------------


def odd_batches(rank: int):
    yield torch.ones(2, 8, device=DEVICE)
    if rank == 1:
        raise OSError("the disk is gone")


def mean(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.mean()


ODD = {
    "argument": lambda rank, model: sc.prune_(model, sparsity=0.5 + rank),
    "argument of a pruner": lambda rank, model: sc.Pruner(model, sparsity=0.5 + rank),
    "glob": lambda rank, model: sc.prune_(model, sparsity=0.5, include=["0", "7"][rank]),
    "share by name": lambda rank, model: sc.prune_(model, sparsity=0.5, spread={"0.weight": 0.9 - 0.1 * rank}),
    "step": lambda rank, model: one_step_ahead(rank, model).step(),
    "criterion": lambda rank, model: sc.prune_(model, sc.weight.map([abs, failing][rank]), sparsity=0.5, include="2"),
    "data": lambda rank, model: sc.prune_(model, sc.wanda, sparsity=0.5, data=odd_batches(rank)),
    "batch": lambda rank, model: sc.prune_(
        model, sc.wanda, sparsity=0.5, data=[[torch.ones(2, 8, device=DEVICE), "text"][rank]]
    ),
    "loss": lambda rank, model: sc.prune_(
        model, sc.taylor, sparsity=0.5, data=[torch.ones(2, 8, device=DEVICE)], loss=[mean, lambda a, b: failing(a)][rank]
    ),
    "state": lambda rank, model: sc.Pruner(model, sparsity=0.5).load_state_dict({"version": [1, 7][rank]}),
    "zeros": lambda rank, model: overwritten(rank, model).verify(),
}


def failing(_: object) -> torch.Tensor:
    raise ArithmeticError("this one fails")


def one_step_ahead(rank: int, model: nn.Module) -> sc.Pruner:
    pruner = sc.Pruner(model, sc.random(0), sparsity=sc.constant(0.5))
    pruner._step += rank
    return pruner


def overwritten(rank: int, model: nn.Module) -> sc.Pruner:
    pruner = sc.Pruner(model, sparsity=0.5)
    pruner.step()
    if rank == 1:
        model[0].weight.to_local().detach().fill_(1)
    return pruner


def odd_one_out(rank: int, what: str, layout: str) -> str:
    model = spread(build(), layout)
    return refusal(lambda: ODD[what](rank, model), Exception)


@several("only one cannot go on")
@pytest.mark.parametrize("what", ODD)
def test_all_processes_raise_if_one_of_them_cannot_go_on(pair, what):
    for text in pair.both(odd_one_out, what, "fsdp"):
        assert text


@several("only one cannot use its data")
@pytest.mark.parametrize("what", ["data", "batch", "loss"])
def test_all_replicas_raise_if_one_of_them_cannot_use_its_data(pair, what):
    other, own = pair.both(odd_one_out, what, "ddp")
    assert "another process" in other
    assert "another process" not in own


def ragged(rank: int) -> str:
    model = spread(build(), "ddp")
    data = [torch.ones(2, 8 - rank)]
    return refusal(lambda: sc.plan(model, sparsity=0.5, method="sparsegpt", data=data), Exception)


@several("the batch fits on another")
def test_a_batch_that_does_not_fit_on_one_process_is_refused_on_all(pair):
    other, own = pair.both(ragged)
    assert "another process" in other
    assert "(2, 7)" in own


# --- copies that are not copies, groups that overlap ----------------------------------------------------------------


def with_own_copies(rank: int) -> str:
    model = build()
    fully_shard(model[0])
    with torch.no_grad():
        model[2].weight.mul_(1 + rank)  # as experts of which each process has its own
    return refusal(lambda: sc.prune_(model, sparsity=0.5, scope="global"), ValueError)


@several("the tensors of two differ")
def test_whole_tensors_that_differ_between_the_processes_are_refused(pair):
    for text in pair.both(with_own_copies):
        assert "'2.weight'" in text
        assert "group=" in text


def square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


def with_other_replicas(rank: int, how: dict) -> tuple[str, bool]:
    model = spread(build(), "ddp")
    with torch.no_grad():
        model.module[0].weight[:, ::2].mul_(1 + 9 * rank)
    before = model.module[0].weight.clone()
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))]
    text = refusal(lambda: sc.prune_(model, sparsity=0.5, data=data, **how), ValueError)
    return text, torch.equal(model.module[0].weight, before)


@several("the replicas differ")
@pytest.mark.parametrize(
    "how",
    [{"criterion": sc.wanda}, {"criterion": sc.taylor, "loss": square}, {"method": "sparsegpt"}],
    ids=["wanda", "taylor", "sparsegpt"],
)
def test_masks_from_data_that_differ_between_replicas_are_refused(pair, how):
    """The digests of the masks are compared after each cut that used data."""
    for text, untouched in pair.both(with_other_replicas, how):
        assert "made different masks" in text
        assert "'module.0.weight'" in text
        assert untouched


def gated(rank: int, layout: str, numbers: list[int], alike: bool) -> tuple[str, dict]:
    model = spread(build(), layout)
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i if alike else i + rank)) for i in range(numbers[rank])]
    data = [batch.to(DEVICE) for batch in data]
    if alike:
        gates = sc.gate_(model, at="*", data=data)
        return "", {name: gate.threshold for name, gate in gates.gates.items()}
    return refusal(lambda: sc.gate_(model, at="*", data=data), ValueError), {}


@several("the data of two differ")
@pytest.mark.parametrize("numbers", [[2, 2], [2, 1]], ids=["other batches", "fewer batches"])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_gates_of_data_that_differ_between_the_processes_are_refused(pair, layout, numbers):
    for text, _ in pair.both(gated, layout, numbers, False):
        assert "not the same on all processes" in text


@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_the_same_data_gives_the_same_gates(pair, layout):
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(2)]
    alone = sc.gate_(build(), at="*", data=data)
    for _, found in pair.both(gated, layout, [2, 2], True):
        assert list(found.values()) == [gate.threshold for gate in alone.gates.values()]


def sharded_over_its_group(rank: int) -> str:
    model = spread(build(), "fsdp")
    return refusal(lambda: sc.prune_(model, sparsity=0.5, scope="global", group=dist.group.WORLD), ValueError)


@several("a group of one is that of no stages")
def test_a_group_over_which_the_tensors_are_sharded_is_refused(pair):
    for text in pair.both(sharded_over_its_group):
        assert "need no group=" in text


def outside_of_the_group(rank: int) -> str:
    group = dist.new_group([0, 1])
    if rank > 1:
        return refusal(lambda: sc.prune_(build(), sparsity=0.5, scope="global", group=group), ValueError)
    sc.prune_(build(), sparsity=0.5, scope="global", group=group)
    return refusal(lambda: sc.prune_(build(), "no such criterion"), ValueError)


@several("there is no other outside of the group")
def test_a_process_outside_of_the_group_is_told(four):
    *_, text = four.both(outside_of_the_group)
    assert "not in group=" in text
