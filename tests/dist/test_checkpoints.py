"""The state of a pruner goes through torch.distributed.checkpoint, onto any number of processes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import bare, build, spread, weights
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from where import DEVICE

import secateur as sc

pytestmark = pytest.mark.dist
LAST = 6

RUNS = {
    "cubic": {"sparsity": sc.cubic(0.8, start=1, end=5, every=2), "scope": "global"},
    "taylor": {"criterion": sc.taylor, "sparsity": sc.linear(0.6, start=2, end=5, every=3)},
    "rigl": {"sparsity": 0.6, "grow": abs(sc.grad), "swap": sc.cosine(0.0, initial=0.3, end=6, every=2)},
    "keep_dense": {"sparsity": sc.linear(0.6, start=1, end=5), "keep_dense": True},
    "2:4": {"pattern": "2:4"},
    "uneven": {"criterion": sc.taylor, "sparsity": sc.linear(0.6, start=1, end=5, every=2), "keep_dense": True},
}


def start(layout: str | None, run: str) -> tuple[nn.Module, torch.optim.Optimizer, sc.Pruner]:
    model = build("uneven" if run == "uneven" else "even")
    model = model if layout is None else spread(model, layout)
    return model, optimizer_of(model), sc.Pruner(model, **RUNS[run])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Updates tensor by tensor: on a GPU, torch would update several plain tensors in one call, and round differently."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that do not depend on the layout, so that weights can be compared bit for bit."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    for step in steps:
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + number)).to(DEVICE)
            if hasattr(parameter, "placements"):
                copies = distribute_tensor(gradient, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
                gradient = copies.redistribute(placements=parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def straight(run: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer, pruner = start(None, run)
    pruner.attach(optimizer)
    train(model, optimizer, range(LAST))
    return ended(model, pruner, run)


def ended(model: nn.Module, pruner: sc.Pruner, run: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pruner.verify()
    masks = bare(pruner.masks)
    if run in ("keep_dense", "uneven"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pruner.undo_()
    return masks, weights(model)


def saved(rank: int, layout: str, folders: dict[str, str]) -> None:
    """Trains each run, and saves model, optimizer and pruner at every step."""
    for run, folder in folders.items():
        model, optimizer, pruner = start(layout, run)
        pruner.attach(optimizer)
        for step in range(LAST):
            train(model, optimizer, range(step, step + 1))
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "pruner": pruner}
            dcp.save(state, checkpoint_id=f"{folder}/{step}")


def gone_on(rank: int, layout: str | None, run: str, folder: str, steps: list[int]) -> list[tuple]:
    found = []
    for step in steps:
        model, optimizer, pruner = start(layout, run)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)  # nothing of the fresh model may be left
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "pruner": pruner}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            dcp.load(state, checkpoint_id=f"{folder}/{step}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        pruner.attach(optimizer)
        train(model, optimizer, range(step + 1, LAST))
        found.append(ended(model, pruner, run))
    return found


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    """Checkpoints that two processes wrote at every step, of each run."""
    found = {run: str(tmp_path_factory.mktemp("checkpoint")) for run in RUNS}
    pair.both(saved, "fsdp", found)
    return found


def same(found: list[tuple], run: str) -> None:
    masks, state = straight(run)
    for got, other in found:
        assert all(torch.equal(got[name], mask) for name, mask in masks.items())
        assert all(torch.equal(other[name], value) for name, value in state.items())


@pytest.mark.parametrize("run", RUNS)
def test_saved_on_two_processes_and_gone_on_with_one(folders, run):
    same(gone_on(0, None, run, folders[run], list(range(LAST - 1))), run)


@pytest.mark.parametrize("run", RUNS)
def test_saved_on_two_processes_and_gone_on_with_two(pair, folders, run):
    for found in pair.both(gone_on, "fsdp", run, folders[run], list(range(LAST - 1))):
        same(found, run)


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp + tp"])
@pytest.mark.parametrize("run", RUNS)
def test_saved_on_two_processes_and_gone_on_with_four(four, folders, run, layout):
    if run == "uneven" and "tp" in layout:
        pytest.skip("torch does not divide these sizes")
    for found in four.both(gone_on, layout, run, folders[run], list(range(LAST - 1)) if layout == "fsdp" else [2]):
        same(found, run)


def from_tensor_parallel(rank: int, folder: str) -> None:
    saved(rank, "fsdp + tp", {"taylor": folder})


def test_saved_on_a_mesh_of_two_axes_and_gone_on_with_one_process(four, tmp_path):
    four.both(from_tensor_parallel, str(tmp_path))
    same(gone_on(0, None, "taylor", str(tmp_path), [2, 3]), "taylor")


def from_one_state(rank: int, state: dict) -> tuple:
    _, _, pruner = start("fsdp", "taylor")
    whole = build("even")
    train(whole, optimizer_of(whole), range(3))
    pruner.load_state_dict(state)
    return bare(pruner.masks), {name: value["grad"].full_tensor() for name, value in pruner.state_dict()["gathered"].items()}


def test_the_state_of_one_process_loads_into_shards(pair):
    model, optimizer, pruner = start(None, "taylor")
    pruner.attach(optimizer)
    train(model, optimizer, range(3))
    state = pruner.state_dict()
    for masks, gathered in pair.both(from_one_state, copy.deepcopy(state)):
        assert all(torch.equal(masks[name], mask) for name, mask in pruner.masks.items())
        assert all(torch.equal(gathered[name], entry["grad"]) for name, entry in state["gathered"].items())


def with_version_1(rank: int) -> str:
    _, _, pruner = start("fsdp", "2:4")
    state = {**pruner.state_dict(), "version": 1}
    try:
        pruner.load_state_dict(state)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "nothing was raised"


def test_states_of_version_1_are_refused_for_shards(pair):
    for text in pair.both(with_version_1):
        assert "version 1" in text
