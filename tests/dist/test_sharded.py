"""FSDP2: a model that `fully_shard` cut up is pruned where it lies, and comes out as if it had been whole."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from where import DEVICE, several

import secateur as sc

pytestmark = pytest.mark.dist


def build(kind: str = "plain", seed: int = 1) -> nn.Module:
    """Rows that two processes share unevenly (17), evenly (12), and a single row, of which one process has nothing."""
    torch.manual_seed(seed)
    if kind == "large":  # more than select samples, so that its bracketing is at work
        model: nn.Module = nn.Sequential(nn.Linear(640, 517, bias=False), nn.ReLU(), nn.Linear(517, 64))
    elif kind == "conv":
        model = nn.Sequential(nn.Conv2d(4, 7, 3), nn.ReLU(), nn.Conv2d(7, 6, 2), nn.Flatten(), nn.Linear(6 * 25, 3))
    elif kind == "even":
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    else:
        model = nn.Sequential(nn.Linear(8, 17), nn.ReLU(), nn.Linear(17, 12), nn.ReLU(), nn.Linear(12, 1))
    if kind in ("ties", "large"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter * 16).round() / 16)
    if kind in ("float64", "bfloat16"):
        model.to(getattr(torch, kind))
    return model.to(DEVICE)


def shard(model: nn.Module, *, by_layer: bool = True) -> nn.Module:
    if by_layer:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                fully_shard(module)
    fully_shard(model)
    return model


def whole(masks) -> dict[str, Tensor]:
    return {name: mask.full_tensor() for name, mask in masks.items()}


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}  # one process gathers no copy


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


# --- the same masks as on one process -------------------------------------------------------------------------------

BUDGETS = {
    "tensor": {"sparsity": 0.5},
    "global": {"sparsity": 0.7, "scope": "global"},
    "row": {"sparsity": 0.5, "scope": "row"},
    "count": {"count": 7},
    "2:4": {"pattern": "2:4"},
    "1x4": {"pattern": "1x4", "sparsity": 0.5, "exclude": "2"},
    "named": {"sparsity": 0.5, "spread": {"0.weight": 0.9}},
}


def pruned(rank: int, kind: str, by_layer: bool, criterion: sc.Criterion, arguments: dict) -> tuple:
    model = shard(build(kind), by_layer=by_layer)
    plan = sc.prune_(model, criterion, **arguments)
    return whole(plan.masks), whole_state(model), plan.metrics()


def same_as_whole(pair, kind, criterion, arguments, *, by_layer=True):
    model = build(kind)
    plan = sc.prune_(model, criterion, **arguments)
    assert 0 < plan.metrics()["pruned"] < plan.metrics()["total"]
    for masks, state, metrics in pair.both(pruned, kind, by_layer, criterion, arguments):
        assert masks.keys() == plan.masks.keys()
        for name, mask in masks.items():
            assert torch.equal(mask, plan.masks[name]), name
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value), name
        assert metrics == plan.metrics()


@pytest.mark.parametrize("kind", ["plain", "ties", "conv", "bfloat16", "float64"])
@pytest.mark.parametrize("budget", ["tensor", "global", "row", "2:4"])
def test_sharded_masks_are_those_of_the_whole_model(pair, kind, budget):
    same_as_whole(pair, kind, sc.magnitude, BUDGETS[budget])


@pytest.mark.parametrize("budget", ["count", "named"])
def test_other_budgets_hold_over_the_shards(pair, budget):
    same_as_whole(pair, "ties", sc.magnitude, BUDGETS[budget])


def test_blocks_within_a_row_cross_no_shard(pair):
    same_as_whole(pair, "ties", sc.magnitude, {"pattern": "1x4", "sparsity": 0.5, "exclude": "2"})


@pytest.mark.parametrize("scope", ["tensor", "global", "row"])
def test_ties_in_large_pools_go_to_the_first_rank_first(pair, scope):
    same_as_whole(pair, "large", sc.magnitude, {"sparsity": 0.61, "scope": scope})


@pytest.mark.parametrize("budget", ["tensor", "global", "row", "2:4"])
def test_random_scores_do_not_depend_on_the_sharding(pair, budget):
    same_as_whole(pair, "plain", sc.random(5), BUDGETS[budget])


@pytest.mark.parametrize("criterion", [sc.weight**2, -sc.magnitude, sc.magnitude + 0.1 * sc.random(1)], ids=str)
def test_expressions_are_scored_row_by_row(pair, criterion):
    same_as_whole(pair, "ties", criterion, BUDGETS["global"])


def test_one_group_for_the_whole_model_is_like_one_per_layer(pair):
    same_as_whole(pair, "ties", sc.magnitude, BUDGETS["global"], by_layer=False)


@pytest.mark.parametrize("arguments", [{"sparsity": 0.5}, {"count": 2}], ids=str)
def test_whole_outputs_compete_over_the_shards(pair, arguments):
    same_as_whole(pair, "even", sc.magnitude, {"pattern": "out", **arguments})


def test_whole_outputs_of_uneven_shards(pair):
    same_as_whole(pair, "plain", sc.magnitude, {"pattern": "out", "sparsity": 0.5, "exclude": "4"})


def test_whole_outputs_where_one_process_has_no_row(pair):
    same_as_whole(pair, "plain", sc.magnitude, {"pattern": "out", "sparsity": 0.5})


def test_a_count_for_each_row_where_one_process_has_no_row(pair):
    same_as_whole(pair, "plain", sc.magnitude, {"count": 3, "scope": "row"})


def test_blocks_of_rows_that_lie_within_shards(pair):
    same_as_whole(pair, "even", sc.magnitude, {"pattern": "4x2", "sparsity": 0.5})


def combined(rank: int) -> tuple:
    model = shard(build())
    a, b = sc.plan(model, sparsity=0.5).masks, sc.plan(model, sparsity=0.3).masks
    return a == copy.copy(a), a == b, (a & b) == a, (a | b) == b, (b - a).kept, b.kept - a.kept, (~a).kept + a.kept - a.total


def test_masks_of_sharded_tensors_combine_and_count_as_a_whole(pair):
    for same, differs, both, either, only, difference, rest in pair.both(combined):
        assert same
        assert not differs
        assert both
        assert either
        assert only == difference > 0
        assert rest == 0


def looked_at(rank: int) -> str:
    model = shard(build())
    plan = sc.prune_(model, sparsity=0.5)
    pruner = sc.Pruner(model, sparsity=0.5)
    return f"{plan}{plan.masks!r}{pruner!r}" if rank == 0 else ""


def test_one_process_alone_may_print(pair):
    text = pair.both(looked_at)[0]
    assert "50.00%" in text


def undone(rank: int) -> tuple:
    model = shard(build())
    before = whole_state(model)
    plan = sc.prune_(model, sparsity=0.5, keep_dense=True)
    zeros = whole_state(model)
    plan.undo_(model)
    return before, zeros, whole_state(model)


def test_undo_brings_the_shards_back(pair):
    for before, zeros, after in pair.both(undone):
        assert any(not torch.equal(before[name], zeros[name]) for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)


# --- what a forward pass leaves behind ------------------------------------------------------------------------------


def pruned_after_forward(rank: int) -> tuple:
    model = shard(build(), by_layer=False)
    with torch.no_grad():
        model(batch(0))  # the root stays gathered until a backward pass
    plan = sc.prune_(model, sparsity=0.5)
    model.reshard()
    return plan.metrics()["sparsity"], whole_state(model)


def test_pruning_after_a_forward_pass_reaches_the_shards(pair):
    plan = sc.prune_(expected := build(), sparsity=0.5)
    for sparsity, state in pair.both(pruned_after_forward):
        assert sparsity == plan.metrics()["sparsity"]
        assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


def finished_after_evaluation(rank: int) -> float:
    model = shard(build(), by_layer=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    train(model, optimizer, range(2))
    with torch.no_grad():
        model(batch(9))
    pruner.verify()
    return pruner.finish().metrics()["sparsity"]


def test_pruner_finishes_after_an_evaluation(pair):
    assert pair.both(finished_after_evaluation) == [pytest.approx(0.5, abs=0.01)] * pair.world


# --- training -------------------------------------------------------------------------------------------------------


def trained(rank: int, pruner_arguments: dict, optimizer_arguments: dict) -> tuple:
    model = shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, **optimizer_arguments)
    pruner = sc.Pruner(model, **pruner_arguments)
    pruner.attach(optimizer)
    held = []
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        pruner.verify()
        state = whole_state(model)
        masks = whole(pruner.masks)
        held.append(all(bool((state[name][~mask] == 0).all()) for name, mask in masks.items()))
    return held, pruner.finish().metrics(), whole_state(model)


@pytest.mark.parametrize("foreach", [True, False])
def test_adamw_keeps_the_zeros_of_the_shards(pair, foreach):
    found = pair.both(trained, {"sparsity": 0.5, "scope": "global"}, {"foreach": foreach})
    _, metrics, state = found[0]
    assert metrics["pruned"] == round(0.5 * metrics["total"])
    for held, other_metrics, other in found:
        assert held == [True] * 6
        assert metrics == other_metrics
        assert all(torch.equal(state[name], other[name]) for name in state)


def test_a_schedule_ends_at_the_exact_number_over_all_shards(pair):
    schedule = sc.cubic(0.8, start=1, end=5)
    for held, metrics, _ in pair.both(trained, {"sparsity": schedule, "scope": "global"}, {}):
        assert held == [True] * 6
        assert metrics["pruned"] == round(0.8 * metrics["total"])


def with_gradients(rank: int, criterion: sc.Criterion, sharded: bool, more: dict) -> dict[str, Tensor]:
    model = shard(build()) if sharded else build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = sc.Pruner(model, criterion, sparsity=sc.linear(0.6, start=1, end=3), **more)
    pruner.attach(optimizer)
    train(model, optimizer, range(4))
    return whole(pruner.masks) if sharded else dict(pruner.masks)


@pytest.mark.parametrize("criterion", [sc.taylor, sc.movement, sc.fisher], ids=str)
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_gradients_of_the_training_rank_the_shards(pair, criterion, scope):
    expected = with_gradients(0, criterion, False, {"scope": scope})
    for masks in pair.both(with_gradients, criterion, True, {"scope": scope}):
        assert all(torch.equal(masks[name], expected[name]) for name in expected)


def swapped(rank: int, grow: sc.Criterion, sharded: bool) -> dict[str, Tensor]:
    model = shard(build()) if sharded else build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=0.5, grow=grow, swap=sc.cosine(0.0, initial=0.5, end=4))
    pruner.attach(optimizer)
    train(model, optimizer, range(4))
    return whole(pruner.masks) if sharded else dict(pruner.masks)


@pytest.mark.parametrize("grow", [abs(sc.grad), sc.random(3)], ids=["rigl", "set"])
def test_swapping_over_the_shards_is_that_of_the_whole_model(pair, grow):
    expected = swapped(0, grow, False)
    for masks in pair.both(swapped, grow, True):
        assert all(torch.equal(masks[name], expected[name]) for name in expected)


def resumed(rank: int, criterion: sc.Criterion, keep_dense: bool, interrupted: bool, path: str) -> tuple:
    def start():
        model = shard(build())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = sc.cubic(0.8, start=1, end=6, every=2)
        pruner = sc.Pruner(model, criterion, sparsity=schedule, scope="global", keep_dense=keep_dense)
        return model, optimizer, pruner.attach(optimizer)

    model, optimizer, pruner = start()
    train(model, optimizer, range(4))
    if interrupted:
        file = f"{path}.{rank}"
        torch.save(pruner.state_dict(), file)
        weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model, optimizer, pruner = start()
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        pruner.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer, range(4, 8))
    pruner.verify()
    masks = whole(pruner.masks)
    if keep_dense:
        pruner.undo_()
    return masks, whole_state(model)


@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize("criterion", [sc.magnitude, sc.taylor], ids=str)
def test_each_process_resumes_from_its_own_state(pair, tmp_path, criterion, keep_dense):
    path = str(tmp_path / "pruner")
    straight = pair.both(resumed, criterion, keep_dense, False, path)
    again = pair.both(resumed, criterion, keep_dense, True, path)
    for (masks, state), (other_masks, other_state) in zip(straight, again, strict=True):
        assert all(torch.equal(masks[name], other_masks[name]) for name in masks)
        assert all(torch.equal(state[name], other_state[name]) for name in state)


def checkpointed(rank: int, folder: str) -> dict[str, Tensor]:
    model = shard(build())
    sc.prune_(model, sparsity=0.5)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    return whole_state(model)


def test_a_distributed_checkpoint_loads_into_the_dense_model(pair, tmp_path):
    saved = pair.both(checkpointed, str(tmp_path / "checkpoint"))[0]
    model = build(seed=2)
    state = model.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        checkpoint.load(state, checkpoint_id=str(tmp_path / "checkpoint"))
    model.load_state_dict(state, strict=True)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert (model[0].weight == 0).sum() == 68


def pruned_then_sharded(rank: int) -> tuple:
    model = build()
    plan = sc.prune_(model, sparsity=0.5)
    pruner = sc.Pruner(shard(model), sparsity=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner.attach(optimizer)
    train(model, optimizer, range(3))
    return dict(plan.masks), whole(pruner.masks)


def test_zeros_made_before_sharding_are_held_after_it(pair):
    for before, after in pair.both(pruned_then_sharded):
        assert all(torch.equal(before[name], after[name]) for name in before)


# --- what is refused, on every process alike ------------------------------------------------------------------------


def refused(rank: int, kind: str, criterion: sc.Criterion, arguments: dict) -> list[bool]:
    model = shard(build(kind))
    before = whole_state(model)
    try:
        sc.prune_(model, criterion, **arguments)
    except NotImplementedError:
        return [torch.equal(value, before[name]) for name, value in whole_state(model).items()]
    raise AssertionError("was not refused")


@pytest.mark.parametrize(
    ("criterion", "arguments"),
    [
        (sc.lamp, {"sparsity": 0.5, "scope": "global"}),
        (sc.magnitude, {"sparsity": 0.5, "pattern": "in"}),
        (sc.magnitude, {"sparsity": 0.5, "pattern": "2x1"}),
        (sc.magnitude, {"pattern": "16x1/2:4"}),
        (sc.magnitude, {"sparsity": 0.5, "spread": sc.erk}),
        (sc.magnitude, {"sparsity": 0.3, "pattern": "out", "scope": "global", "exclude": "4"}),
        (sc.magnitude, {"sparsity": 0.5, "pattern": "1x3"}),
    ],
    ids=["lamp", "in", "2x1", "16x1/2:4", "erk", "out of several widths", "1x3 with a rest"],
)
def test_what_needs_whole_tensors_or_rows_is_that_of_the_whole_model(pair, criterion, arguments):
    same_as_whole(pair, "plain", criterion, arguments)


def a_spread(scores, sparsity):
    return dict.fromkeys(scores, sparsity)


@several("it has whole tensors, which a spread may read")
def test_a_spread_of_ones_own_is_refused(pair):
    for untouched in pair.both(refused, "plain", sc.magnitude, {"sparsity": 0.5, "spread": a_spread}):
        assert all(untouched)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("criterion", [sc.synflow], ids=str)
def test_evidence_of_the_linearised_model_is_refused_on_shards(pair, criterion):
    arguments = {"sparsity": 0.5, "data": [(batch(0), torch.zeros(4, 1, device=DEVICE))], "loss": mean_square}
    for untouched in pair.both(refused, "plain", criterion, arguments):
        assert all(untouched)


def transposed(rank: int, arguments: dict) -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(20).round_()
    model.to(DEVICE)
    expected = sc.plan(model, **arguments).masks["0.weight"]
    fully_shard(model)
    return expected, sc.plan(model, **arguments).masks["0.weight"].full_tensor()


@pytest.mark.parametrize("budget", ["tensor", "row", "2:4"])
def test_a_transposed_convolution_is_pruned_as_a_whole(pair, budget):
    """Its rows are its second axis, so shards cut across its columns."""
    for expected, mask in pair.both(transposed, BUDGETS[budget]):
        assert torch.equal(expected, mask)


def straight_through(rank: int) -> None:
    model = shard(build())
    try:
        sc.Pruner(model, sparsity=0.5, ste=True)
    except NotImplementedError:
        model(batch(0)).sum().backward()  # and the model still works
        return
    raise AssertionError("was not refused")


def test_a_straight_through_estimator_on_shards_is_refused(pair):
    pair.both(straight_through)


def nan_on_one(rank: int, where: int, arguments: dict) -> str:
    model = shard(build())
    if rank == where:
        model[0].weight.to_local().detach()[0, 0] = torch.nan
    try:
        sc.prune_(model, **arguments)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("budget", ["tensor", "global", "row", "2:4"])
@pytest.mark.parametrize("where", [0, 1])
def test_nan_on_one_process_raises_on_both(pair, budget, where):
    for text in pair.both(nan_on_one, where % pair.world, BUDGETS[budget]):
        assert "'0.weight'" in text
        assert "NaN" in text


def partly_sharded(rank: int) -> tuple:
    model = build("ties")
    fully_shard(model[0])
    plan = sc.prune_(model, sparsity=0.5, scope="global")
    return {name: getattr(mask, "full_tensor", lambda mask=mask: mask)() for name, mask in plan.masks.items()}, plan.metrics()


def test_sharded_and_whole_tensors_are_pruned_together(pair):
    plan = sc.plan(build("ties"), sparsity=0.5, scope="global")
    for masks, metrics in pair.both(partly_sharded):
        assert all(torch.equal(masks[name], mask) for name, mask in plan.masks.items())
        assert metrics == plan.metrics()
