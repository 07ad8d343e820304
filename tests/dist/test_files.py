"""A sharded model is saved as the whole one would be, and loaded into other shards, without a whole tensor on any process."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import build, shard_by_hand, spread, weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from where import DEVICE

import secateur as sc

pytestmark = pytest.mark.dist
UNEVEN = ("fsdp", "fsdp on axis 1", "axis 0", "axis 1")  # layouts of sizes that the processes do not divide
CASES = [(layout, "even") for layout in (*UNEVEN, "tp")] + [(layout, "uneven bfloat16") for layout in UNEVEN]
CUT = {"sparsity": 0.6, "scope": "global"}


class _NoLarger(TorchDispatchMode):
    """Raises where an operator makes a tensor of more bytes than any process holds of a weight."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                assert tensor.nbytes <= self.most, f"{function} made {tuple(tensor.shape)}"
        return found


@contextmanager
def only_shards(model: nn.Module):
    """No tensor is gathered, and none has more bytes than the largest part on this process (or than names and digests)."""
    real = DTensor.full_tensor
    held = [p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters()]

    def refuse(self, **_):
        raise AssertionError("a whole tensor was gathered")

    DTensor.full_tensor = refuse
    try:
        with _NoLarger(max(*held, 4096)):
            yield
    finally:
        DTensor.full_tensor = real


def laid_out(layout: str, kind: str) -> nn.Module:
    return shard_by_hand(build(kind), int(layout[-1])) if layout in ("axis 0", "axis 1") else spread(build(kind), layout)


def saved(rank: int, layout: str, kind: str, folder: str, most: int | None) -> dict:
    model = laid_out(layout, kind)
    sc.prune_(model, **CUT)
    with only_shards(model):
        return sc.save(model, folder, max_file_bytes=most)


def loaded(rank: int, layout: str, kind: str, folder: str) -> dict[str, torch.Tensor]:
    model = laid_out(layout, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    with only_shards(model):
        sc.load(folder, model)
    return weights(model)


def alone(kind: str, folder: Path, most: int | None) -> nn.Module:
    model = build(kind)
    sc.prune_(model, **CUT)
    sc.save(model, folder, max_file_bytes=most)
    return model


def same_files(one: Path, other: Path) -> None:
    """The same bytes, and the same manifest but for the patterns of zeros, which nobody looks for in shards."""
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    for file in one.glob("*.safetensors*"):
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name
    found, expected = (json.loads((folder / "secateur.json").read_text()) for folder in (one, other))
    for name, entry in expected["tensors"].items():
        assert found["tensors"][name]["sha256"] == entry["sha256"]
        assert found["tensors"][name]["zeros"] == entry["zeros"]
    assert {**found, "tensors": 0, "sha256": 0} == {**expected, "tensors": 0, "sha256": 0}


@pytest.mark.parametrize("most", [None, 3000], ids=["one file", "several"])
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_two_processes_save_and_load_what_one_does(pair, tmp_path, layout, kind, most):
    model = alone(kind, tmp_path / "one", most)
    said = pair.both(saved, layout, kind, str(tmp_path / "two"), most)
    assert said[0]["history"] == said[-1]["history"] != []
    same_files(tmp_path / "two", tmp_path / "one")
    for found in pair.both(loaded, layout, kind, str(tmp_path / "one")):
        assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "fsdp + tp"])
def test_four_processes_save_and_load_what_one_does(four, tmp_path, layout):
    model = alone("even", tmp_path / "one", None)
    four.both(saved, layout, "even", str(tmp_path / "four"), None)
    same_files(tmp_path / "four", tmp_path / "one")
    for found in four.both(loaded, layout, "even", str(tmp_path / "four")):
        assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


# --- the same files by torch.distributed.checkpoint -----------------------------------------------------------------


def loaded_by_torch(rank: int, layout: str, kind: str, folder: str) -> dict[str, torch.Tensor]:
    model = laid_out(layout, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1)
    state = model.state_dict()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
    model.load_state_dict(state)
    return weights(model)


FILES = [("fsdp", "even", False), ("fsdp on axis 1", "even", True), ("axis 0", "uneven bfloat16", True), ("tp", "even", True)]


@pytest.mark.parametrize(("layout", "kind", "several"), FILES)
def test_torch_loads_what_a_sharded_model_saved(pair, tmp_path, layout, kind, several):
    pair.both(saved, layout, kind, str(tmp_path), 3000 if several else None)
    model = build(kind)
    sc.prune_(model, **CUT)
    for found in pair.both(loaded_by_torch, layout, kind, str(tmp_path)):
        assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


def saved_by_torch(rank: int, layout: str, kind: str, folder: str, files: dict[str, int] | None, consolidated: bool) -> None:
    model = laid_out(layout, kind)
    sc.prune_(model, **CUT)
    how = {"fqn_to_index_mapping": files, "save_distributed": True, "enable_consolidation": consolidated}
    dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(folder, **how))


@pytest.mark.parametrize(("layout", "kind", "several"), FILES)
def test_what_torch_saved_of_a_sharded_model_is_loaded(pair, tmp_path, layout, kind, several):
    model = build(kind)
    files = {name: 1 + i % 2 for i, name in enumerate(model.state_dict())} if several else None
    pair.both(saved_by_torch, layout, kind, str(tmp_path), files, True)
    sc.prune_(model, **CUT)
    for found in (weights(sc.load(tmp_path, build(kind))), *pair.both(loaded, layout, kind, str(tmp_path))):
        assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


def test_parts_that_torch_did_not_put_together_are_refused(pair, tmp_path):
    pair.both(saved_by_torch, "fsdp", "even", str(tmp_path), None, False)
    with pytest.raises(FileNotFoundError, match="enable_consolidation=True"):
        sc.load(tmp_path, build())


# --- tied tensors, buffers ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.to(DEVICE)


def saved_tied(rank: int, folder: str) -> tuple[bool, bool]:
    sc.save(fully_shard(Tied()), folder)
    again = fully_shard(Tied())
    with torch.no_grad():
        again.norm.running_mean.add_(1)
        again.embed.weight.zero_()
    sc.load(folder, again)
    return again.embed.weight is again.head.weight, torch.equal(again.embed.weight.full_tensor(), Tied().embed.weight)


def test_tied_tensors_are_written_once_and_stay_tied(pair, tmp_path):
    assert pair.both(saved_tied, str(tmp_path)) == [(True, True)] * pair.world
    manifest = json.loads((tmp_path / "secateur.json").read_text())
    assert manifest["tied"] == {"head.weight": "embed.weight"}
    model = sc.load(tmp_path, Tied)
    assert torch.equal(model.embed.weight, Tied().embed.weight)
    assert torch.equal(model.norm.running_mean, Tied().norm.running_mean)


def saved_llama(rank: int, folder: str) -> tuple[object, torch.Tensor]:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    sc.prune_(model, pattern="2:4")
    return sc.save(model, folder, max_file_bytes=5000)["from_pretrained"], model.lm_head.weight.full_tensor().detach()


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).eval().to(DEVICE)


def test_from_pretrained_reads_what_a_sharded_model_wrote(pair, tmp_path):
    pytest.importorskip("transformers")
    found = pair.both(saved_llama, str(tmp_path))
    assert all(readable is True for readable, _ in found)
    head = found[0][1]
    model = llama()
    sc.prune_(model, pattern="2:4")
    again = type(model).from_pretrained(tmp_path).to(DEVICE)
    assert torch.equal(again.lm_head.weight, head)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


# --- refused on all processes ---------------------------------------------------------------------------------------


def refused(rank: int, folder: str) -> list[str]:
    model = spread(build(), "fsdp")
    said = []
    for call in (lambda: sc.load(folder, model), lambda: sc.save(model, folder, packed=True)):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


def test_damage_is_refused_on_all_processes(pair, tmp_path):
    alone("even", tmp_path, None)
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # in one tensor, of which one process takes the digest
    file.write_bytes(content)
    for damage, packed in pair.both(refused, str(tmp_path)):
        assert "is damaged" in damage or "another process" in damage
        assert "without packed=True" in packed


def test_a_shrunk_model_is_not_loaded_into_shards_of_the_full_size(pair, tmp_path):
    small, _ = sc.shrink(build(), torch.zeros(2, 32, device=DEVICE), channels=0.5)
    sc.save(small, tmp_path)
    for text, _ in pair.both(refused, str(tmp_path)):
        assert "before sharding" in text
