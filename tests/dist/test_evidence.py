"""Each process has its own data: the evidence is that of all data, and the masks are the same on all processes."""

from __future__ import annotations

import pytest
import torch
from layouts import bare, build, spread
from torch import Tensor

import secateur as sc

pytestmark = pytest.mark.dist


def square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def batches(rank: int, numbers: list[int]) -> list[Tensor]:
    """As many batches as `numbers` has for this process; no two batches are alike."""
    first = sum(numbers[:rank])
    return [torch.randn(4, 32, generator=torch.Generator().manual_seed(n)) for n in range(first, first + numbers[rank])]


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
    wanted = expected(numbers)
    for found in four.both(pruned, layout, numbers):
        for got, masks, (criterion, _) in zip(found, wanted, CRITERIA, strict=True):
            for name, mask in masks.items():
                assert torch.equal(got[name], mask), (str(criterion), name)


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
        sc.plan(spread(build(), "tp"), sc.wanda, sparsity=0.5, data=[torch.ones(2, 32)])
    except NotImplementedError as error:
        return str(error)
    return "nothing was raised"


def test_evidence_of_tensor_parallel_layers_is_refused(four):
    for text in four.both(tensor_parallel):
        assert "FSDP2" in text
