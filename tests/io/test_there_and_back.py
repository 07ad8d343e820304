"""A saved model is loaded bit for bit, whatever its tensors are, and other readers of safetensors open its file."""

import json
import os
import time

import pytest
import safetensors.torch
import torch
from saving import X, build, pruned, same
from torch import nn

import secateur as sc
from secateur import io
from secateur.io import files, packed


@pytest.mark.parametrize("pack", [False, True])
def test_a_pruned_model_comes_back_bit_for_bit(tmp_path, pack):
    model = pruned()
    io.save(model, tmp_path, packed=pack)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "secateur.json"]
    for into in (lambda: build(7), build(8)):
        assert same(io.load(tmp_path, into), model)
    assert same(io.load(tmp_path, build, as_="dense"), model)


def test_packed_at_ninety_percent_is_at_most_fourteen_percent_of_dense(tmp_path):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    sc.prune_(model, sparsity=0.9)
    io.save(model, tmp_path / "dense")
    io.save(model, tmp_path / "packed", packed=True)
    dense, small = (os.path.getsize(tmp_path / kind / "model.safetensors") for kind in ("dense", "packed"))
    assert small <= 0.14 * dense


def test_a_dense_save_loads_in_plain_torch_unchanged(tmp_path):
    model = pruned()
    io.save(model, tmp_path)
    fresh = build(3)
    fresh.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=True)
    assert same(fresh, model)


def test_the_tensor_file_and_one_function_give_a_dense_state_dict_without_a_model(tmp_path):
    model = pruned()
    io.save(model, tmp_path, packed=True)
    for source in (tmp_path, str(tmp_path), safetensors.torch.load_file(tmp_path / "model.safetensors")):
        found = io.dense_state_dict(source)
        fresh = build(3)
        fresh.load_state_dict(found, strict=True)
        assert same(fresh, model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    model = Tied()
    io.save(model, tmp_path)
    assert list(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["embed.weight"]
    assert io.dense_state_dict(tmp_path).keys() == model.state_dict().keys()
    with torch.device("meta"):
        empty = Tied()
    for into in (Tied, empty):
        back = io.load(tmp_path, into)
        assert same(back, model)
        assert back.head.weight is back.embed.weight
    assert safetensors.torch.load_model(Tied(), tmp_path / "model.safetensors") == (set(), [])


def test_a_model_on_the_meta_device_becomes_real(tmp_path):
    model = pruned()
    io.save(model, tmp_path, packed=True)
    back = io.load(tmp_path, lambda: build().to("meta"))
    assert same(back, model)
    assert torch.equal(back(X), model(X))


@pytest.mark.parametrize("pack", [False, True])
def test_views_that_say_conjugate_or_minus_are_saved_by_value(tmp_path, pack):
    whole = torch.zeros(300, dtype=torch.complex64)
    whole[:9] = torch.randn(9, dtype=torch.complex64)
    model = nn.ParameterList(nn.Parameter(each, False) for each in (whole, whole.conj(), whole.conj().imag))
    io.save(model, tmp_path, packed=pack)
    back = io.load(tmp_path, nn.ParameterList(nn.Parameter(torch.zeros_like(each), False) for each in model))
    assert all(map(torch.equal, back, model))


@pytest.mark.parametrize("dtype", sorted(files.CODES, key=str), ids=str)
def test_every_dtype_comes_back_bit_for_bit_packed_too(tmp_path, dtype):
    raw = torch.randint(-128, 128, (64, 40, dtype.itemsize), dtype=torch.int8)
    raw[torch.rand(64, 40) < 0.9] = 0
    tensor = (raw.view(torch.uint8) & 1 if dtype == torch.bool else raw).view(dtype).reshape(64, 40)

    class Held(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("held", value)

    for pack in (False, True):
        io.save(Held(tensor), tmp_path, packed=pack)
        back = io.load(tmp_path, Held(torch.zeros_like(tensor)))
        assert back.held.dtype == dtype
        assert torch.equal(back.held.view(torch.uint8), tensor.view(torch.uint8))
        plain = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert torch.equal(io.dense_state_dict(plain)["held"].view(torch.uint8), tensor.view(torch.uint8))


def test_negative_zero_nan_and_empty_tensors_survive_packing():
    tensor = torch.zeros(40, 40)
    tensor[3, :4] = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-45])
    parts = packed.entries("w", tensor, packed.count_values(tensor))
    assert parts is not None
    bits, values = parts["w#bitmask"].data(), parts["w#values"].data()
    assert values.numel() == 4
    assert torch.equal(packed.unpack("w", bits, values, (40, 40)).view(torch.int32), tensor.view(torch.int32))
    assert packed.entries("w", torch.zeros(0, 3), 0) is None
    assert packed.entries("w", torch.randn(64, 64), 4096) is None


def test_memory_formats_and_scalars_are_saved_by_value(tmp_path):
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last)
    io.save(model, tmp_path)
    assert same(io.load(tmp_path, nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))), model)


def test_the_manifest_says_what_is_in_the_file(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    plan = sc.prune_(model, pattern="2:4", include="0.*")
    sc.prune_(model, sparsity=0.5, pattern="out", include="1.weight")
    sc.prune_(model, sparsity=0.7, include="2.weight")
    said = io.save(model, tmp_path, packed=True, plan=plan)
    data = json.loads((tmp_path / "secateur.json").read_text())
    assert data["version"] == 1
    assert data["about"] == said
    assert (said["recipe"], said["torch"], said["secateur"]) == (plan.recipe, torch.__version__, sc.__version__)
    found = {name: (t["pattern"], t["format"]) for name, t in data["tensors"].items() if name.endswith("weight")}
    assert found == {
        "0.weight": ("2:4", "bitmask"),
        "1.weight": ("out", "bitmask"),
        "2.weight": ("unstructured", "bitmask"),
        "3.weight": (None, "dense"),
    }
    assert data["tensors"]["3.bias"]["pattern"] is None
    assert data["tensors"]["2.weight"]["zeros"] == int((model[2].weight == 0).sum())


def test_a_compiled_model_is_saved_under_its_own_names_and_filled(tmp_path):
    model = build()
    io.save(torch.compile(model, backend="eager"), tmp_path)
    assert same(io.load(tmp_path, build), model)
    into = torch.compile(build(2), backend="eager")
    assert io.load(tmp_path, into) is into
    assert same(into._orig_mod, model)
    assert torch.equal(into(X), model(X))


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_in_distributed_data_parallel_is_saved_under_its_own_names(tmp_path, one_process):
    parallel = nn.parallel.DistributedDataParallel(build())
    sc.prune_(parallel, sparsity=0.5)
    about = io.save(torch.compile(parallel, backend="eager"), tmp_path / "saved")
    assert about["model"] == "Sequential"
    assert about["arguments"] == [{"sparsity": 0.5}]
    assert same(io.load(tmp_path / "saved", build), parallel.module)
    into = nn.parallel.DistributedDataParallel(build(2))
    assert io.load(tmp_path / "saved", into) is into
    assert same(into.module, parallel.module)

    io.save(nn.ModuleDict({"module": parallel.module}), tmp_path / "old")  # the names that the wrapper adds
    assert same(io.load(tmp_path / "old", nn.parallel.DistributedDataParallel(build(2))).module, parallel.module)


def test_a_cut_model_is_not_loaded_into_distributed_data_parallel(tmp_path, one_process):
    io.save(sc.shrink(build(), X, channels=0.5)[0], tmp_path / "saved")
    into = nn.parallel.DistributedDataParallel(build())
    before = [tensor.clone() for tensor in into.state_dict().values()]
    with pytest.raises(ValueError, match=r"load it into the module under it \(\.module\)"):
        io.load(tmp_path / "saved", into)
    assert all(map(torch.equal, before, into.state_dict().values()))


def test_a_model_that_makes_its_own_state_dict_reads_it_too(tmp_path):
    class Own(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2

        def _load_from_state_dict(self, state, prefix, *rest):
            super()._load_from_state_dict({**state, prefix + "weight": state[prefix + "weight"] / 2}, prefix, *rest)

    model = Own(4, 3)
    io.save(model, tmp_path)
    assert torch.equal(io.load(tmp_path, Own(4, 3)).weight, model.weight)


def test_a_model_of_many_tensors_does_not_take_the_square_of_their_number(tmp_path):
    def many(of=6000):
        return nn.ParameterList(nn.Parameter(torch.full((2,), float(i))) for i in range(of))

    begin = time.process_time()
    io.save(many(), tmp_path)
    back = io.load(tmp_path, many())
    assert time.process_time() - begin < 8
    assert back[5999].tolist() == [5999.0, 5999.0]


class Softly(nn.Module):
    """A plain layer, one with a parametrization of its own, and two layers that share a weight."""

    def __init__(self):
        super().__init__()
        self.plain, self.normed = nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.one(self.normed(self.plain(x))))


@pytest.mark.parametrize("pack", [False, True])
def test_soft_masks_are_saved_as_the_weights_that_the_forward_pass_uses(tmp_path, pack):
    model, x = Softly(), torch.randn(4, 8)
    pruner = sc.Pruner(model, sparsity=0.8, ste=True)
    pruner.step()
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model(x)
    io.save(model, tmp_path, packed=pack)
    back = io.load(tmp_path, Softly)
    assert torch.equal(back(x), before)
    assert back.one.weight is back.other.weight
    assert io.dense_state_dict(tmp_path).keys() == Softly().state_dict().keys()
    assert int((back.plain.weight == 0).sum()) == 51  # 80 % of 64
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())  # unchanged
