"""Each process has its own data: the evidence is that of all data, and the masks are the same on all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts import bare, build, spread
from torch import Tensor, nn
from where import DEVICE, several

import secateur as sc

pytestmark = pytest.mark.dist


def square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def batches(rank: int, numbers: list[int]) -> list[Tensor]:
    """As many batches as `numbers` has for this process; no two batches are alike."""
    first = sum(numbers[:rank])
    seeds = range(first, first + numbers[rank])
    return [torch.randn(4, 32, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in seeds]


CRITERIA = [(sc.wanda, "row"), (sc.taylor, "global"), (sc.fisher, "tensor"), (sc.ria, "row")]


def pruned(rank: int, layout: str, numbers: list[int]) -> list[dict[str, Tensor]]:
    model, found = spread(build(), layout), []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for criterion, scope in CRITERIA:
        plan = sc.plan(model, criterion, sparsity=0.5, scope=scope, data=iter(batches(rank, numbers)), loss=square)
        found.append(bare(plan.masks))
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())  # as they were
    return found


def expected(numbers: list[int]) -> list[dict[str, Tensor]]:
    data = [batch for rank in range(len(numbers)) for batch in batches(rank, numbers)]
    return [
        dict(sc.plan(build(), criterion, sparsity=0.5, scope=scope, data=data, loss=square).masks)
        for criterion, scope in CRITERIA
    ]


@pytest.mark.parametrize("numbers", [[2, 2, 2, 2], [3, 1, 2, 0]], ids=["equal", "unequal, and one without"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
def test_masks_are_those_of_one_process_with_all_the_data(four, layout, numbers):
    """Sums are added in another order, so this holds to rounding; of these data and weights it holds exactly."""
    numbers = numbers[: four.world]
    wanted = expected(numbers)
    for found in four.both(pruned, layout, numbers):
        for got, masks, (criterion, _) in zip(found, wanted, CRITERIA, strict=True):
            for name, mask in masks.items():
                assert torch.equal(got[name], mask), (str(criterion), name)


# --- Gram matrices, block by block ----------------------------------------------------------------------------------


def decoder(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    if kind == "experts":
        config = transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=1, **sizes)
        return transformers.MixtralForCausalLM(config).double().eval().to(DEVICE)
    config = transformers.LlamaConfig(num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).double().eval().to(DEVICE)


def texts(rank: int, numbers: list[int], kind: str) -> list[dict[str, Tensor]]:
    """Batches of different lengths, some with padding."""
    found = []
    for n in range(sum(numbers[:rank]), sum(numbers[: rank + 1])):
        tokens = torch.randint(40, (2, 2 if kind == "experts" else 12 + n), generator=torch.Generator().manual_seed(n))
        mask = torch.ones_like(tokens)
        mask[0, : n % 3] = 0 if kind == "llama" else 1
        found.append({"input_ids": tokens.to(DEVICE), "attention_mask": mask.to(DEVICE)})
    return found


def solved(
    rank: int, kind: str, method: str, how: dict[str, Any], numbers: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = nn.parallel.DistributedDataParallel(decoder(kind))
    plan = sc.plan(model, **how, method=method, data=iter(texts(rank, numbers, kind)), exclude="*lm_head")
    return bare(plan.masks), bare(plan.weights)


@pytest.mark.parametrize("numbers", [[2, 2], [3, 0]], ids=["equal", "one without"])
@pytest.mark.parametrize(
    ("kind", "method", "how"),
    [
        ("llama", "sparsegpt", {"sparsity": 0.5}),
        ("llama", "flow", {"sparsity": 0.5}),
        ("llama", "flow", {"pattern": "2:4"}),
        ("experts", "sparsegpt", {"sparsity": 0.5}),
    ],
    ids=str,
)
def test_methods_that_solve_blocks_use_the_data_of_all_processes(pair, kind, method, how, numbers):
    """Sums are added in another order, so the weights are equal to rounding; the processes have the same bits.

    In double precision: in single precision the order of the batches alone changes some weights by 1e-4.
    """
    numbers = numbers[: pair.world]
    data = [batch for rank in range(pair.world) for batch in texts(rank, numbers, kind)]
    plan = sc.plan(decoder(kind), **how, method=method, data=data, exclude="lm_head")
    alone = sc.plan(decoder(kind), **how, method=method, data=texts(0, [1], kind), exclude="lm_head")
    assert any(not torch.equal(alone.masks[name], mask) for name, mask in plan.masks.items())  # the data do matter
    (masks, weights), *others = pair.both(solved, kind, method, how, numbers)
    for other_masks, other_weights in others:
        assert all(torch.equal(masks[name], mask) for name, mask in other_masks.items())
        assert all(torch.equal(weights[name], tensor) for name, tensor in other_weights.items())
    assert masks.keys() == plan.masks.keys()
    for name, mask in plan.masks.items():
        assert torch.equal(masks[name], mask), name
        torch.testing.assert_close(weights[name], plan.weights[name])


def with_nan(rank: int) -> str:
    data = [torch.randn(4, 32), torch.full((4, 32), torch.nan)][: 1 + rank]
    try:
        sc.plan(nn.parallel.DistributedDataParallel(build()), sparsity=0.5, method="sparsegpt", data=data)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


@several("another has the NaN")
def test_a_batch_with_nan_on_one_process_is_refused_on_all(pair):
    other, own = pair.both(with_nan)
    assert "batch 2" in own
    assert "another process" in other


def without_data(rank: int, layout: str) -> str:
    try:
        sc.plan(spread(build(), layout), sc.wanda, sparsity=0.5, scope="row", data=[])
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_no_batch_on_any_process_raises_on_all(four, layout):
    for text in four.both(without_data, layout):
        assert "gave no batch" in text


def tensor_parallel(rank: int) -> str:
    try:
        sc.plan(spread(build(), "tp"), sc.wanda, sparsity=0.5, data=[torch.ones(2, 32, device=DEVICE)])
    except NotImplementedError as error:
        return str(error)
    return "nothing was raised"


def test_evidence_of_tensor_parallel_layers_is_refused(four):
    for text in four.both(tensor_parallel):
        assert "FSDP2" in text


class Branching(nn.Module):
    """In the second of two blocks, another layer reads the inner channels of long inputs."""

    def __init__(self, long: int) -> None:
        super().__init__()
        self.up, self.down, self.extra, self.long = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8), long

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return x + self.down(h) + (self.extra(h) if x.shape[1] > self.long else 0)


def ordered(rank: int) -> tuple[dict[str, Tensor], list[str], dict[str, str]]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Sequential(Branching(99), Branching(5)), nn.Linear(8, 3)))
    data = [torch.randn(8, (4, 9)[rank], 8) for _ in range(2)]
    plan = sc.prune_(model, method="flow", pattern="2:4", data=data, exclude="*extra")
    assert plan.order is not None
    return model.module.state_dict(), [order.reader for order in plan.order.orders], plan.order.skipped


@several("their channels differ")
def test_processes_agree_on_the_channels_that_they_move(pair):
    first, second = pair.both(ordered)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == second[1] == ["module.0.0.down.weight"]
    assert "not all processes" in first[2]["module.0.1.down.weight"]
