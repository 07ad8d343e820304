"""The masks of a model that several processes share are those of one process, bit for bit, in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, bare, build, shard_by_hand, spread, two_axes, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from where import DEVICE, SINGLE, several

import secateur as sc

pytestmark = pytest.mark.dist

OPERATIONS = {
    "tensor": {"sparsity": 0.5},
    "global": {"sparsity": 0.6, "scope": "global"},
    "count": {"count": 11},
    "global count": {"count": 37, "scope": "global"},
    "row": {"sparsity": 0.5, "scope": "row"},
    "row of blocks": {"pattern": "2x2", "sparsity": 0.5, "scope": "row"},
    "2:4": {"pattern": "2:4"},
    "16x1/2:4": {"pattern": "16x1/2:4"},
    "1x4": {"pattern": "1x4", "sparsity": 0.5},
    "4x1": {"pattern": "4x1", "sparsity": 0.5},
    "16x16": {"pattern": "16x16", "sparsity": 0.5},
    "3x5 with rests": {"pattern": "3x5", "sparsity": 0.5},
    "4x4-3": {"pattern": "4x4-3", "sparsity": 0.1},
    "out": {"pattern": "out", "sparsity": 0.5},
    "out, global": {"pattern": "out", "sparsity": 0.25, "scope": "global"},
    "in": {"pattern": "in", "sparsity": 0.5},
    "in, global": {"pattern": "in", "sparsity": 0.25, "scope": "global"},
    "in/2:4": {"pattern": "in/2:4"},
    "erk": {"sparsity": 0.7, "spread": sc.erk},
    "by name": {"sparsity": 0.5, "spread": {"0.weight": 0.9}},
    "owl": {"sparsity": 0.7, "spread": sc.owl()},
    "floor": {"sparsity": 0.8, "scope": "global", "floor": 0.15},
    "floor of outputs": {"sparsity": 0.75, "pattern": "out", "scope": "global", "floor": 0.2},
    "lamp": {"criterion": sc.lamp, "sparsity": 0.6, "scope": "global"},
    "random": {"criterion": sc.random(5), "sparsity": 0.5, "scope": "global"},
    "square": {"criterion": sc.weight**2, "sparsity": 0.5, "scope": "global"},
    "negative": {"criterion": -sc.magnitude, "sparsity": 0.3},
}


def plans(model: nn.Module, names: list[str], prefix: str = "") -> dict[str, dict]:
    found = {}
    for name in names:
        arguments = dict(OPERATIONS[name])
        if isinstance(arguments.get("spread"), dict):
            arguments["spread"] = {prefix + key: value for key, value in arguments["spread"].items()}
        plan = sc.plan(model, arguments.pop("criterion", sc.magnitude), **arguments)
        found[name] = (bare(plan.masks), plan.metrics()["kept"])
    return found


@pytest.mark.parametrize("kind", ["large", "large, ties", "large, bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pool_that_a_sample_brackets(four, layout, kind):
    compare(four.both(in_layout, kind, layout, ["global"]), plans(build(kind), ["global"]))


def in_layout(rank: int, kind: str, layout: str, names: list[str]) -> dict[str, dict]:
    return plans(spread(build(kind), layout), names, "module." if layout == "ddp" else "")


def compare(found: list[dict], expected: dict) -> None:
    for name, (masks, kept) in expected.items():
        assert 0 < kept < sum(mask.numel() for mask in masks.values())
        for rank, answer in enumerate(found):
            got, number = answer[name]
            assert got.keys() == masks.keys()
            for tensor, mask in masks.items():
                assert torch.equal(got[tensor], mask), (name, tensor, rank)
            assert number == kept, (name, rank)


@pytest.mark.parametrize("kind", ["even", "even, ties"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_on_four_processes(four, layout, kind):
    compare(four.both(in_layout, kind, layout, list(OPERATIONS)), plans(build(kind), list(OPERATIONS)))


@pytest.mark.parametrize("layout", ["fsdp", "tp", "ddp"])
def test_every_operation_on_two_processes(pair, layout):
    compare(pair.both(in_layout, "even, ties", layout, list(OPERATIONS)), plans(build("even, ties"), list(OPERATIONS)))


SOME = ["tensor", "global", "row", "2:4", "16x16", "out, global", "in", "random"]


DTYPES = ("bfloat16", "float16", "float64", "infinite")
IN_DTYPES = [(layout, dtype) for layout in LAYOUTS for dtype in (DTYPES if layout in ("fsdp", "fsdp + tp") else DTYPES[:1])]


@pytest.mark.parametrize(("layout", "dtype"), IN_DTYPES)
def test_every_dtype(four, layout, dtype):
    kind = f"even, ties, {dtype}"
    compare(four.both(in_layout, kind, layout, SOME), plans(build(kind), SOME))


UNEVEN = [name for name in OPERATIONS if name not in ("16x16", "floor", "floor of outputs")]


def in_uneven_shards(rank: int, kind: str, axis: int) -> dict[str, dict]:
    return plans(shard_by_hand(build(kind), axis), UNEVEN)


@pytest.mark.parametrize("kind", ["uneven", "uneven, ties"])
@pytest.mark.parametrize("axis", [0, 1])
def test_uneven_and_empty_shares(four, axis, kind):
    compare(four.both(in_uneven_shards, kind, axis), plans(build(kind), UNEVEN))


# --- unusual meshes and models --------------------------------------------------------------------------------------

FEW = ["global", "tensor", "row", "2:4", "4x1", "in", "out", "random", "lamp", "erk"]


def on_mesh(rank: int, shape: tuple[int, ...], axes: str, kind: str) -> dict[str, dict]:
    """Weights on a mesh whose axes shard rows ("0"), columns ("1"), or replicate ("r")."""
    model, mesh = build(kind), init_device_mesh(DEVICE.type, shape)
    places = [Replicate() if axis == "r" else Shard(int(axis)) for axis in axes]
    for layer in model:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, places))
    return plans(model, FEW)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((1, 4), "00"), ((4, 1), "10"), ((4, 1), "r0"), ((2, 1, 2), "0r1"), ((2, 2), "10"), ((1, 2, 2), "r01"), ((2, 2), "00")],
    ids=str,
)
def test_meshes_of_several_axes_with_uneven_shares(four, shape, axes):
    kind, shape = "uneven, ties", (1,) * len(shape) if SINGLE else shape
    compare(four.both(on_mesh, shape, axes, kind), plans(build(kind), FEW))


def on_two_meshes(rank: int) -> dict[str, dict]:
    """One layer over all processes, and one over each axis of a mesh of two."""
    model, line = build("even, ties"), init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    square = init_device_mesh(DEVICE.type, two_axes(), mesh_dim_names=("a", "b"))
    for layer, mesh, axis in zip(model, (line, square["b"], square["a"]), (0, 1, 0), strict=True):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(axis)]))
    return plans(model, FEW)


def test_layers_on_different_meshes_rank_together(four):
    compare(four.both(on_two_meshes), plans(build("even, ties"), FEW))


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(13, 8), nn.Linear(8, 8), nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.to(DEVICE)


def of_special_models(rank: int) -> list[dict]:
    tied = fully_shard(Tied())
    compiled = torch.compile(spread(build(), "fsdp"), backend="eager")
    offloaded = fully_shard(build().cpu(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    frozen = build().requires_grad_(False)
    words, mesh = nn.Sequential(Tied().embed), init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    parallelize_module(words, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    models = [(tied, ("head", "middle")), (compiled, ()), (offloaded, ()), (spread(frozen, "fsdp"), ()), (words, "0")]
    found = [bare(sc.plan(m, sparsity=0.5, scope="global", include=i).masks) for m, i in models]
    return [{name.removeprefix("_orig_mod."): mask for name, mask in masks.items()} for masks in found]


def test_tied_compiled_offloaded_frozen_and_embedded_weights(pair):
    plain = [
        (Tied(), ("head", "middle")),
        (build(), ()),
        (build().cpu(), ()),
        (build(), ()),
        (nn.Sequential(Tied().embed), "0"),
    ]
    expected = [dict(sc.plan(m, sparsity=0.5, scope="global", include=i).masks) for m, i in plain]
    for found in pair.both(of_special_models):
        for got, masks in zip(found, expected, strict=True):
            assert got.keys() == masks.keys()
            assert all(torch.equal(got[name], mask.to(DEVICE)) for name, mask in masks.items())


# --- training: what is pruned stays pruned --------------------------------------------------------------------------


def trained(rank: int, layout: str | None, more: dict) -> tuple:
    model = build("even")
    model = model if layout is None else spread(model, layout)
    # On a GPU, torch would update several plain tensors in one call, and round differently than for each DTensor.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    pruner = sc.Pruner(model, **more).attach(optimizer)
    for step in range(4):
        for number, parameter in enumerate(model.parameters()):  # the same gradients in every layout
            torch.manual_seed(10 * step + number)
            gradient = torch.randn(parameter.shape).to(DEVICE)
            parameter.grad = gradient if not hasattr(parameter, "placements") else _like(gradient, parameter)
        optimizer.step()
    pruner.verify()
    return bare(pruner.masks), weights(model)


def _like(value, parameter):
    mesh = parameter.device_mesh
    return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim).redistribute(placements=parameter.placements)


RUNS = {
    "cubic": {"sparsity": sc.cubic(0.8, end=3), "scope": "global"},
    "blocks": {"sparsity": sc.linear(0.5, end=3), "pattern": "4x4"},
    "rows": {"sparsity": sc.linear(0.5, end=3), "scope": "row"},
    "taylor": {"criterion": sc.taylor, "sparsity": sc.linear(0.6, start=1, end=3)},
    "rigl": {"sparsity": 0.6, "grow": abs(sc.grad), "swap": sc.cosine(0.0, initial=0.3, end=5)},
    "rigl of blocks": {"sparsity": 0.5, "pattern": "4x2", "grow": abs(sc.grad), "swap": sc.cosine(0.0, initial=0.3, end=5)},
    "erk": {"sparsity": sc.linear(0.6, end=3), "spread": sc.erk},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "fsdp + tp"])
def test_training_prunes_as_one_process_does(four, layout, run):
    masks, state = trained(0, None, RUNS[run])
    for got, other in four.both(trained, layout, RUNS[run]):
        assert all(torch.equal(got[name], mask) for name, mask in masks.items())
        assert all(torch.equal(other[name], value) for name, value in state.items())


# --- stages of a pipeline -------------------------------------------------------------------------------------------


def staged(rank: int, kind: str, sharded: bool) -> dict:
    model = build(kind)
    if sharded:  # two stages, each sharded over two processes
        mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("stage", "data"))
        stage, group = rank // 2, mesh.get_group("stage")
        own = nn.ModuleDict({str(i): fully_shard(model[i], mesh=mesh["data"]) for i in ((0,), (1, 2))[stage]})
    else:
        group = dist.group.WORLD
        own = nn.ModuleDict({str(i): model[i] for i in range(rank, 2, dist.get_world_size())})
    found = {}
    for name in STAGED:
        arguments = dict(OPERATIONS[name])
        plan = sc.plan(own, arguments.pop("criterion", sc.magnitude), group=group, **arguments)
        found[name] = bare(plan.masks)
    return found


STAGED = ("tensor", "global", "global count", "out, global", "erk", "owl", "lamp", "random", "2:4", "floor")


@pytest.mark.parametrize("kind", ["even", "even, ties"])
def test_stages_rank_together_in_their_group(pair, kind):
    model = build(kind)[:2]
    expected = {name: bare(sc.plan(model, **_with_criterion(OPERATIONS[name])).masks) for name in STAGED}
    for rank, found in enumerate(pair.both(staged, kind, False)):
        for name, masks in found.items():
            assert masks.keys() == {f"{i}.weight" for i in range(rank, 2, pair.world)}
            assert all(torch.equal(mask, expected[name][tensor]) for tensor, mask in masks.items()), name


@several("the stages of a pipeline lie on different processes")
@pytest.mark.parametrize("kind", ["even", "even, ties", "large", "large, ties"])
def test_stages_that_are_sharded_rank_together(four, kind):
    expected = {name: bare(sc.plan(build(kind), **_with_criterion(OPERATIONS[name])).masks) for name in STAGED}
    for rank, found in enumerate(four.both(staged, kind, True)):
        for name, masks in found.items():
            assert masks.keys() == ({"0.weight"} if rank < 2 else {"1.weight", "2.weight"})
            assert all(torch.equal(mask, expected[name][tensor]) for tensor, mask in masks.items()), name


def _with_criterion(arguments: dict) -> dict:
    return {"criterion": sc.magnitude, **arguments}


def nan_on_one(rank: int, where: int, layout: str, names: list[str]) -> list[str]:
    model = spread(build(), layout)
    if rank == where:
        getattr(model[0].weight, "to_local", lambda: model[0].weight)().detach()[0, 0] = torch.nan
    found = []
    for name in names:
        try:
            sc.prune_(model, **OPERATIONS[name])
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("layout", ["fsdp", "fsdp on axis 1", "tp", "fsdp + tp"])
def test_nan_on_one_process_raises_on_all(four, layout):
    names = ["tensor", "global", "row", "2:4", "16x16", "4x4-3", "out", "in"]
    for texts in four.both(nan_on_one, four.world - 1, layout, names):
        assert len(texts) == len(names)
        assert all("'0.weight'" in text and "NaN" in text for text in texts)


def disagreeing(rank: int, what: str) -> str:
    model = spread(build(), "fsdp")
    try:
        sc.prune_(model, sparsity=0.5 + 0.1 * rank if what == "recipe" else 0.5, exclude=str(rank) if what == "names" else ())
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@several("the recipes of two differ")
@pytest.mark.parametrize("what", ["recipe", "names"])
def test_processes_that_do_not_do_the_same_all_raise(pair, what):
    for text in pair.both(disagreeing, what):
        assert "do not do the same" in text


def too_many_outputs(rank: int) -> str:
    with pytest.raises(ValueError, match="floor=") as found:
        sc.plan(spread(build(), "fsdp"), pattern="out", scope="global", sparsity=0.7, floor=0.3)
    return str(found.value)


def test_outputs_that_a_floor_does_not_allow_are_refused_as_by_one_process(pair):
    with pytest.raises(ValueError, match="allows 77 of the 112 units") as expected:
        sc.plan(build(), pattern="out", scope="global", sparsity=0.7, floor=0.3)
    assert set(pair.both(too_many_outputs)) == {str(expected.value)}
