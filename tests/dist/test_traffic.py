"""How often the processes talk and how much they send: no more for large models, and as few bytes at thousands of ranks."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from layouts import build, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode
from where import DEVICE, SINGLE, several

import secateur as sc
from secateur import digits
from secateur._dist import Comm, like
from secateur.digits import Pool, find_cuts
from secateur.patterns import Pattern
from secateur.resuming import packed_mask
from secateur.scores import Scores
from secateur.select import select
from secateur.shards import select_shared

pytestmark = pytest.mark.dist
MIB = 1 << 20


@contextmanager
def traffic():
    """The collectives that are called inside, as (name, bytes that this process sends)."""
    calls: list[tuple[str, int]] = []
    saved = dist.all_reduce, dist.all_to_all_single

    def all_reduce(tensor, *args, **kwargs):
        calls.append(("all_reduce", tensor.numel() * tensor.element_size()))
        if dist.get_backend() == "fake":  # it sends nothing: all ranks hold what this one holds
            return tensor.mul_(dist.get_world_size(kwargs.get("group")))
        return saved[0](tensor, *args, **kwargs)

    def all_to_all_single(output, input, *args, **kwargs):
        calls.append(("all_to_all", input.numel() * input.element_size()))
        return saved[1](output, input, *args, **kwargs)

    dist.all_reduce, dist.all_to_all_single = all_reduce, all_to_all_single
    try:
        yield calls
    finally:
        dist.all_reduce, dist.all_to_all_single = saved


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator returns, and the elements of the largest that is no buffer of bytes."""

    def __init__(self):
        super().__init__()
        self.bytes = self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if type(one) is torch.Tensor:  # of a DTensor, the part that lies here
                self.bytes = max(self.bytes, one.numel() * one.element_size())
                self.elements = max(self.elements, 0 if one.dtype == torch.uint8 else one.numel())
        return result


def refuse(self, **_):
    raise AssertionError("a whole tensor was gathered")


def counted(rank: int, side: int, arguments: dict, axis: int = 0, equal: int = 1) -> tuple:
    """The collectives of a cut, the bytes of its largest tensor, and those of a shard. So many weights are equal each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4)))
    with torch.no_grad():
        for layer, values in zip(model, torch.randperm(4 * side * side).view(4, side, side), strict=True):
            layer.weight.copy_(values // equal)
    model.to(DEVICE)
    model, gather = fully_shard(model, shard_placement_fn=lambda _: Shard(axis)), DTensor.full_tensor
    DTensor.full_tensor = refuse
    try:
        with traffic() as calls, Largest() as largest:
            sc.plan(model, **arguments)
    finally:
        DTensor.full_tensor = gather
    return calls, largest.bytes, side * side * 4 // dist.get_world_size()


@pytest.mark.parametrize(
    ("arguments", "equal", "most_calls", "most_bytes"),
    [
        ({"sparsity": 0.5, "scope": "global"}, 1, 5, 0.41 * MIB),
        ({"sparsity": 0.3, "scope": "global"}, 4, 5, 0.41 * MIB),
        ({"criterion": sc.weight**2, "sparsity": 0.3, "scope": "global"}, 4, 5, 1.04 * MIB),
        ({"sparsity": 0.5}, 1, 6, 0.1 * MIB),
    ],
    ids=["global", "global, ties", "global, no magnitude", "tensor"],
)
def test_traffic_does_not_grow_with_the_model(pair, arguments, equal, most_calls, most_bytes):
    small, _, _ = pair.both(counted, 512, arguments, 0, equal)[0]  # 1 M weights
    large, biggest, shard = pair.both(counted, 2048, arguments, 0, equal)[0]  # 16 M weights
    assert len(small) <= most_calls
    assert sum(size for _, size in small) <= most_bytes
    assert len(large) == len(small)
    assert sum(size for _, size in large) == sum(size for _, size in small)
    assert SINGLE or biggest <= max(shard, MIB)  # no allocation is larger than a shard


@several("it ranks whole tensors")
@pytest.mark.parametrize(
    ("arguments", "axis", "times"),
    [
        ({"pattern": "2:4"}, 0, 1),
        ({"sparsity": 0.5, "pattern": "16x16"}, 0, 1),
        ({"sparsity": 0.5, "pattern": "out"}, 0, 1),
        ({"criterion": sc.random(1), "sparsity": 0.5}, 0, 1),
        ({"sparsity": 0.5, "pattern": "in"}, 0, 2),
        ({"sparsity": 0.5, "pattern": "out"}, 1, 2),
        ({"sparsity": 0.5, "scope": "row"}, 0, 1),
        ({"sparsity": 0.5, "scope": "row"}, 1, 2),
    ],
    ids=str,
)
def test_nothing_larger_than_a_shard_is_made(pair, arguments, axis, times):
    """Of the whole call, also where an axis is moved; then at most twice a shard."""
    for _, biggest, shard in pair.both(counted, 1024, arguments, axis):
        assert biggest <= times * shard


def sharded(side: int, count: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(count))).to(DEVICE)
    return fully_shard(model)


@contextmanager
def no_gather():
    real, DTensor.full_tensor = DTensor.full_tensor, refuse
    try:
        yield
    finally:
        DTensor.full_tensor = real


def pruned_in_training(rank: int, side: int) -> tuple[int, int]:
    model = sharded(side, 2)
    with no_gather(), Largest() as largest:
        pruner = sc.Pruner(model, sparsity=sc.cubic(0.5, end=4), scope="global")
        for _ in range(3):
            pruner.step()
        state = pruner.state_dict()
        pruner.load_state_dict(state)
        pruner.verify()
    return largest.bytes, side * side * 4 // dist.get_world_size()


@several("its shard is the whole tensor")
def test_a_pruner_and_its_state_hold_nothing_larger_than_a_shard(pair):
    for biggest, shard in pair.both(pruned_in_training, 1024):
        assert biggest <= shard


def ranked_by_owner(rank: int, side: int) -> tuple[int, int]:
    """The elements of the largest tensor, and those of a shard; the scores themselves are in float64."""
    model = sharded(side, 1)
    with no_gather(), Largest() as largest:
        sc.plan(model, sc.lamp, sparsity=0.5, scope="global")
    return largest.elements, side * side // dist.get_world_size()


@several("its shard is the whole tensor")
def test_a_criterion_of_whole_tensors_gathers_them_on_one_process_alone(pair):
    found = pair.both(ranked_by_owner, 1024)
    assert sorted(biggest / shard for biggest, shard in found) == [1, 2]


def moved(rank: int) -> list:
    model = spread(build(), "tp")
    with traffic() as calls:
        sc.plan(model, sparsity=0.5, scope="row", include="1")
    return calls


def test_an_axis_is_moved_with_two_exchanges(four):
    """The second layer is cut along its inputs: its shard goes out once, and a bit for each element comes back.

    One process sends nothing.
    """
    for calls in four.both(moved):
        sizes = [size for kind, size in calls if kind == "all_to_all"]
        assert sizes == ([] if SINGLE else [32 * 64 * 4 // 4, 32 * 64 // 4 // 8])


EXCHANGES = {  # how often parts of the first two layers are sent if these are cut along their outputs, and along their inputs
    "row": ({"sparsity": 0.5, "scope": "row"}, 0, 2),
    "2:4": ({"pattern": "2:4"}, 0, 0),
    "1x4": ({"pattern": "1x4", "sparsity": 0.5}, 0, 0),
    "1x12": ({"pattern": "1x12", "sparsity": 0.5}, 0, 2),
    "4x1": ({"pattern": "4x1", "sparsity": 0.5}, 0, 0),
    "12x1": ({"pattern": "12x1", "sparsity": 0.5}, 2, 0),
    "out": ({"pattern": "out", "sparsity": 0.5}, 0, 2),
    "in": ({"pattern": "in", "sparsity": 0.5}, 2, 0),
    "tensor": ({"sparsity": 0.5}, 0, 0),
    "erk": ({"sparsity": 0.5, "spread": sc.erk}, 0, 0),
    "random": ({"criterion": sc.random(1), "sparsity": 0.5, "scope": "global"}, 0, 0),
}


def exchanges(rank: int) -> dict[str, list[tuple[int, int]]]:
    """For each operation and layer, the number of exchanges, and of other collectives."""
    model, found = spread(build(), "tp"), {}
    for name, (how, _, _) in EXCHANGES.items():
        for layer in "01":
            with traffic() as calls:
                sc.plan(model, include=layer, **how)
            kinds = [kind for kind, _ in calls]
            found.setdefault(name, []).append((kinds.count("all_to_all"), kinds.count("all_reduce")))
    return found


def test_a_part_is_sent_only_where_the_sharding_divides_a_pool(four):
    """The table of operations, cell by cell: n:m, rows and blocks are local where they are whole on a process."""
    for found in four.both(exchanges):
        for name, (_, outputs, inputs) in EXCHANGES.items():
            assert [sent for sent, _ in found[name]] == ([0, 0] if SINGLE else [outputs, inputs]), name
            assert max(others for _, others in found[name]) <= 9, name


def held(rank: int) -> tuple[list, list, list]:
    model = spread(build(), "fsdp")
    pruner = sc.Pruner(model, sparsity=0.5)
    pruner.step()
    with traffic() as applied:
        pruner.apply_()
    with traffic() as stepped:  # no new masks are due
        pruner.step()
    with traffic() as verified:
        pruner.verify()
    return applied, stepped, verified


def test_holding_masks_takes_no_collectives_and_verifying_one(pair):
    for applied, stepped, verified in pair.both(held):
        assert applied == stepped == []
        assert verified == [("all_reduce", 8 * 3)]  # a count for each tensor


@pytest.fixture
def fake():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks: int) -> None:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("tie", "calls", "megabytes"), [(False, 12, 82), (True, 24, 164)], ids=["no ties", "ties"])
def test_many_tensors_share_their_rounds_in_buckets(tie, calls, megabytes):
    """What a process that holds none of 10,000 tensors of 10^8 float32 weights receives, if half of each goes."""
    sizes = []

    class Others(Comm):
        def add_(self, table: torch.Tensor) -> torch.Tensor:
            bins = table[:-1].view(-1, 256)
            bins[:, 0] += 10**8 if tie else 10**8 // 2
            bins[:, 255] += 0 if tie else 10**8 // 2
            sizes.append(table.nbytes)
            return table

    pools = [Pool([], 10**8 // 2, 10**8) for _ in range(10_000)]
    assert not find_cuts(pools, 32, Others(), longest=10**8, tensors=len(pools))
    assert len(sizes) == calls
    assert round(sum(sizes) / 1e6) == megabytes


@pytest.mark.parametrize("shape", [(64,), (32, 8), (128, 8), (16, 32, 8)], ids=str)
def test_counts_are_all_that_travels_at_thousands_of_ranks(fake, shape):
    fake(math.prod(shape))
    names = ("replicas", "data", "model")[-len(shape) :] if len(shape) > 1 else ("data",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    axes = [Shard(0)] if len(shape) == 1 else [*[Replicate()] * (len(shape) - 2), Shard(0), Shard(1)]
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False, device="meta"), nn.Linear(4096, 4096, bias=False, device="meta"))
    for layer in model:
        weight = torch.empty(4096, 4096, device="meta")
        part = torch.randn(4096 // (shape[-2] if len(shape) > 1 else shape[0]), 4096 // (shape[-1] if len(shape) > 1 else 1))
        layer.weight = nn.Parameter(DTensor.from_local(part, mesh, axes, run_check=False, shape=weight.shape, stride=(4096, 1)))
    with traffic() as calls:
        sc.plan(model, sparsity=1e-4, scope="global")
    bins = [size for _, size in calls if size > 65_536]
    assert all(size <= 8 * 65_537 for size in bins)
    assert 2 <= len(bins) <= 3  # a sample, and the digits of the score; those of ties are narrower
    assert len(calls) <= 8
    assert sum(size for _, size in calls) <= 1.2 * MIB


def test_masks_of_offloaded_weights_lie_with_the_weights(fake):
    """FSDP2 offloads parts to the host, and their mesh is one of GPUs."""
    fake(2)
    mesh = DeviceMesh("cuda", torch.arange(2), _init_backend=False)
    meta = TensorMeta(torch.Size((16, 8)), (8, 1), torch.float32)
    weight = DTensor(torch.randn(8, 8), DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)
    mask = like(torch.rand(8, 8) > 0.5, weight)
    bits, shape = packed_mask("weight", mask)
    assert mask.to_local().device == bits.to_local().device == torch.device("cpu")
    assert tuple(mask.shape) == tuple(shape) == (16, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("values", ["distinct", "ties", "zeros", "infinite"])
@pytest.mark.parametrize("listed", [0, digits.LISTED], ids=["counted", "listed"])
def test_the_cut_by_digits_is_that_of_select(fake, monkeypatch, listed, values, dtype):
    """On one process; also where nearly all scores are equal, and with elements that are pruned already."""
    fake(1)
    monkeypatch.setattr(digits, "LISTED", listed)
    torch.manual_seed(0)
    weights = {str(i): torch.randn(37 * (i + 1), 65) for i in range(3)}
    for weight in weights.values():
        if values == "ties":
            weight.mul_(8).round_()
        elif values == "zeros":
            weight[torch.rand(weight.shape) < 0.9] = 0
        elif values == "infinite":
            weight.view(-1)[::3] = -torch.inf
    scores = {name: Scores.magnitude(weight.to(dtype)) for name, weight in weights.items()}
    held = {name: torch.rand(weight.shape) < 0.8 for name, weight in weights.items()}
    for scope in ("tensor", "global"):
        for pattern in ("unstructured", "4x4"):
            for sparsity in (0.001, 0.3, 0.95):
                for previous in (None, held if pattern == "unstructured" else None):
                    how = {"scope": scope, "sparsity": sparsity, "previous": previous}
                    got = select_shared(scores, Pattern.parse(pattern), comm=Comm([dist.group.WORLD], 0), **how)
                    want = select(scores, Pattern.parse(pattern), **how)
                    assert all(torch.equal(got[name], mask) for name, mask in want.items()), how


@pytest.mark.parametrize("floor", [0.0, 0.4])
@pytest.mark.parametrize("scope", ["tensor", "global", "row"])
def test_powers_that_are_equal_by_rounding_are_ranked_as_by_select(fake, scope, floor):
    fake(1)
    torch.manual_seed(0)
    scores = {str(i): Scores.magnitude(1 + torch.rand(300, 1000) / 10_000, power=0.5) for i in range(2)}
    how = {"scope": scope, "sparsity": 0.5, "floor": floor}
    want = select(scores, Pattern(), **how)
    got = select_shared(scores, Pattern(), comm=Comm([dist.group.WORLD], 0), **how)
    assert all(torch.equal(got[name], mask) for name, mask in want.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_lie_in_memory_are_counted_without_making_keys(fake, monkeypatch, dtype):
    """In one pass for the leading 16 bits, and one for the few weights that share those of the cut."""
    fake(1)
    torch.manual_seed(0)
    scores = {str(i): Scores.magnitude(torch.randn(256, 257 + i).to(dtype)) for i in range(3)}
    how = {"scope": "tensor", "sparsity": 0.5}
    want = select(scores, Pattern(), **how)

    def refused(*_, **__):
        raise AssertionError("all weights of a part were made keys")

    monkeypatch.setattr(digits.Part, "keys", refused)
    got = select_shared(scores, Pattern(), comm=Comm([dist.group.WORLD], 0), **how)
    assert all(torch.equal(got[name], mask) for name, mask in want.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_is_found_among_infinite_magnitudes(fake, dtype):
    fake(1)
    comm, weight = Comm([dist.group.WORLD], 0), torch.full((4, 9), -torch.inf, dtype=dtype)
    select_shared({"w": Scores.magnitude(weight)}, Pattern(), comm=comm, sparsity=0.5)
    weight[2, 3] = -torch.nan
    with pytest.raises(ValueError, match="NaN"):
        select_shared({"w": Scores.magnitude(weight)}, Pattern(), comm=comm, sparsity=0.5)
