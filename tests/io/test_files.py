"""Files: whole or not there, read back bit for bit, and refused in words when a bit of them is wrong."""

import copy
import hashlib
import json
import os
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import secateur as sc
from secateur import io
from secateur.io import files, packed
from secateur.surgery import shrink, shrink_


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)).eval()


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(left[n].reshape(-1).view(torch.uint8), right[n].reshape(-1).view(torch.uint8)) for n in left
    )


def pruned(sparsity: float = 0.9) -> nn.Module:
    model = build()
    sc.prune_(model, sparsity=sparsity)
    return model


# --- there and back -------------------------------------------------------------------------------------------------


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


def test_a_tensor_that_nothing_fills_is_noticed_before_the_model_is_touched(tmp_path):
    model = build()
    io.save(build(3), tmp_path)
    model.register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    refused(tmp_path, model, "'table' are on the meta device")


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
    assert data["tensors"]["2.weight"]["zeros"] == int((model[2].weight == 0).sum())


# --- small models ---------------------------------------------------------------------------------------------------


def test_a_shrunk_model_is_cut_again_from_a_fresh_one(tmp_path):
    small, plan = shrink(build(), X, channels=0.5)
    assert io.save(small, tmp_path)["recipe"] == plan.recipe
    back = io.load(tmp_path, lambda: build(5))
    assert same(back, small)
    assert torch.equal(back(X), small(X))
    assert back[0].out_channels == small[0].out_channels == 8
    io.save(back, tmp_path / "again")
    assert same(io.load(tmp_path / "again", build), small)


@pytest.mark.parametrize("how", ["twice", "in place", "copied", "inside another", "inside, then as a whole"])
def test_cuts_are_remembered(tmp_path, how):
    def whole():
        return build() if how in ("twice", "in place", "copied") else nn.Sequential(nn.Identity(), build()).eval()

    if how == "twice":
        model, _ = shrink(shrink(build(), X, channels=0.75)[0], X, channels=0.5)
    elif how == "in place":
        model, _ = shrink_(build(), X, channels=0.5)
    elif how == "copied":
        model = copy.deepcopy(shrink(build(), X, channels=0.5)[0])
    else:
        model = nn.Sequential(nn.Identity(), shrink(build(), X, channels=0.75)[0])
        if how != "inside another":
            model, _ = shrink(model, X, channels=0.5)
    io.save(model, tmp_path)
    back = io.load(tmp_path, whole)
    assert same(back, model)
    assert torch.equal(back(X), model(X))


def test_a_model_that_forgot_its_cuts_is_saved_with_its_plan(tmp_path):
    small, plan = shrink(build(), X, channels=0.5)
    rebuilt = nn.Sequential(*small.children()).eval()
    io.save(rebuilt, tmp_path, plan=plan)
    assert same(io.load(tmp_path, build), small)


@pytest.mark.parametrize("options", [{"channels": 0.5}, {"depth": 0.5}], ids=str)
def test_a_plan_of_another_model_is_refused_and_nothing_is_written(tmp_path, options):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)))
    small, plan = shrink(model, torch.randn(3, 6), **options)
    for other in (model, nn.Linear(2, 3)):
        with pytest.raises(ValueError, match=r"plan= .* this model h.*save the small model .*Nothing was written"):
            io.save(other, tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()
    io.save(small, tmp_path / "out", plan=plan)


def test_a_model_that_is_small_already_is_filled(tmp_path):
    small, _ = shrink(build(), X, channels=0.5)
    io.save(small, tmp_path)
    other = copy.deepcopy(small)
    with torch.no_grad():
        other[0].weight.zero_()
    assert io.load(tmp_path, other) is other
    assert same(other, small)


def test_a_shrunk_and_pruned_model_comes_back_packed(tmp_path):
    small, _ = shrink(build(), X, channels=0.5)
    sc.prune_(small, sparsity=0.9)
    io.save(small, tmp_path, packed=True)
    assert same(io.load(tmp_path, build), small)


def test_parameters_that_folding_added_come_back(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 5, bias=False))

    x = torch.randn(3, 6)
    small, plan = shrink(make(), x, channels=0.5)
    assert plan.cuts.added
    io.save(small, tmp_path)
    assert torch.equal(io.load(tmp_path, make)(x), small(x))


# --- errors leave everything as it was ------------------------------------------------------------------------------


def refused(path: Path, model: nn.Module, words: str) -> None:
    before, shown = copy.deepcopy(model.state_dict()), str(model)
    with pytest.raises(ValueError, match=words):
        io.load(path, model)
    after = model.state_dict()
    assert str(model) == shown
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def resign(path: Path, change) -> None:
    """The manifest with a change, and a digest that fits it: what someone who means harm would write."""
    data = json.loads((path / "secateur.json").read_text())
    del data["sha256"]
    change(data)
    body = json.dumps(data, indent=1).removesuffix("\n}").encode()
    (path / "secateur.json").write_bytes(body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')


def test_another_model_is_refused(tmp_path):
    io.save(shrink(build(), X, channels=0.5)[0], tmp_path)
    refused(tmp_path, nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12)), "the cuts are for")
    io.save(build(), tmp_path)
    refused(tmp_path, nn.Sequential(nn.Conv2d(3, 16, 3)), "has no .*which the file holds")
    refused(tmp_path, nn.Sequential(*build(), nn.Linear(10, 2)), "the file holds no")
    refused(tmp_path, nn.Sequential(*build()[:4], nn.Linear(16 * 36, 11)), "in the model and")
    refused(tmp_path, build().double(), "build the model in that dtype")
    for into in (lambda: 3, None):
        with pytest.raises(TypeError, match="a function that builds one"):
            io.load(tmp_path, into)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as_="):
        io.load(tmp_path, build, as_="dens")
    with pytest.raises(FileNotFoundError, match=r"holds no secateur\.json"):
        io.load(tmp_path / "nowhere", build)


@pytest.mark.parametrize("pack", [False, True])
def test_a_flipped_bit_anywhere_is_found(tmp_path, pack):
    small, _ = shrink(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(2, 4), channels=0.5)
    sc.prune_(small, sparsity=0.9)
    io.save(small, tmp_path, packed=pack)
    for name in ("model.safetensors", "secateur.json"):
        whole = (tmp_path / name).read_bytes()
        for at in range(0, len(whole), 7):
            wrong = bytearray(whole)
            wrong[at] ^= 1 << (at % 8)
            (tmp_path / name).write_bytes(wrong)
            with pytest.raises(io.BadFile):
                io.dense_state_dict(tmp_path)
        for end in (0, 5, len(whole) // 2, len(whole) - 1):
            (tmp_path / name).write_bytes(whole[:end])
            refused(tmp_path, copy.deepcopy(small), "damaged|cut short|digest|manifest")
        (tmp_path / name).write_bytes(whole)
    assert same(io.load(tmp_path, copy.deepcopy(small)), small)


def test_a_manifest_of_another_version_is_refused(tmp_path):
    io.save(build(), tmp_path)
    resign(tmp_path, lambda data: data.update(version=2))
    refused(tmp_path, build(), "of version 2; this version of secateur reads 1")


def test_what_is_signed_is_still_not_believed(tmp_path):
    small, _ = shrink(build(), X, channels=0.5)
    sc.prune_(small, sparsity=0.9)

    def wrong(change, words):
        io.save(small, tmp_path, packed=True)
        resign(tmp_path, change)
        refused(tmp_path, build(), words)

    def at(data, *path):
        for part in path:
            data = data[part]
        return data

    wrong(lambda d: d["tensors"].pop("4.weight"), "do not speak of the same tensors")
    wrong(lambda d: d["tensors"].update(more=d["tensors"]["4.bias"]), "do not speak of the same tensors")
    wrong(lambda d: at(d, "tensors", "4.weight").update(shape=[1 << 40, 1 << 20]), "do not make a tensor")
    wrong(lambda d: at(d, "tensors", "4.weight").update(shape=[36 * 10, 8]), "another shape")
    wrong(lambda d: at(d, "tensors", "4.bias").update(shape=[11]), "otherwise in the manifest")
    wrong(lambda d: at(d, "tensors", "4.bias").update(dtype=["F32"]), "unknown dtype")
    wrong(lambda d: at(d, "cuts", 0).update(kept=["0-99999999999999999"]), "indices below|not there")
    wrong(lambda d: at(d, "cuts", 0)["shapes"].update({"0.weight": [1 << 50, 3, 3, 3]}), "units than|the cuts are for")
    wrong(lambda d: at(d, "cuts", 0).update(attributes=[["__class__", "x", None, 1, 2, False]]), "attribute")
    wrong(lambda d: at(d, "cuts", 0).update(drop={"": [0]}), "without saying how many")
    wrong(lambda d: d.update(tied={"5.weight": "nothing"}), "is tied to")


def test_absurd_headers_are_refused(tmp_path):
    def wrong(header, data=b"", length=None):
        text = json.dumps(header).encode() if not isinstance(header, bytes) else header
        (tmp_path / "f").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        with (tmp_path / "f").open("rb") as file, pytest.raises(io.BadFile) as found:
            files.Tensors(file, "f")
        assert str(found.value)

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    wrong({"a": entry}, b"1234567")
    wrong({"a": entry}, b"123456789")
    wrong({"a": entry}, b"12345678", length=1 << 63)
    wrong({"a": {**entry, "shape": [1 << 61, 1 << 61]}}, b"12345678")
    wrong({"a": {**entry, "shape": [-2, -1]}}, b"12345678")
    wrong({"a": {**entry, "shape": [True, 2]}}, b"12345678")
    wrong({"a": {**entry, "dtype": "F99"}}, b"12345678")
    wrong({"a": {**entry, "data_offsets": [0, 8, 8]}}, b"12345678")
    wrong({"a": entry, "b": entry}, b"12345678")
    wrong({"a": {**entry, "data_offsets": [4, 12]}}, b"123456789012")
    wrong([1, 2], b"")
    wrong(b'{"a":' + b"[" * 100_000, b"")
    wrong(b'{"a": 1, "a": 2}', b"")
    wrong(b"\xff\xfe", b"")


def test_a_bitmask_whose_count_is_not_that_of_its_values_is_refused():
    bits, values = torch.tensor([0b101], dtype=torch.uint8), torch.ones(2)
    whole = {"w#bitmask": bits, "w#values": values, "w#shape": torch.tensor([2, 2])}
    assert io.dense_state_dict(whole)["w"].tolist() == [[1, 0], [1, 0]]
    for name, value in {
        "w#bitmask": torch.tensor([0b111], dtype=torch.uint8),
        "w#values": torch.ones(3),
        "w#shape": torch.tensor([3, 4]),
    }.items():
        with pytest.raises(io.BadFile, match="bitmask of 'w'"):
            io.dense_state_dict({**whole, name: value})
    with pytest.raises(io.BadFile, match="beyond its 4"):
        io.dense_state_dict({**whole, "w#bitmask": torch.tensor([0b10001], dtype=torch.uint8)})
    for name in whole:
        with pytest.raises(io.BadFile, match="beside it"):
            io.dense_state_dict({part: tensor for part, tensor in whole.items() if part != name})


# --- writing is all or nothing --------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    old, new = build(1), build(2)
    io.save(old, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    as_bytes, count = files.as_bytes, iter(range(99))

    def full(tensor):
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return as_bytes(tensor)

    monkeypatch.setattr(files, "as_bytes", full)
    with pytest.raises(OSError, match="No space left") as found:
        io.save(new, tmp_path)
    assert any("is as it was before" in note for note in found.value.__notes__)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert same(io.load(tmp_path, build), old)


def test_a_crash_between_any_two_steps_leaves_the_old_model_or_the_new_one(tmp_path, monkeypatch):
    old, new = pruned(0.5), pruned(0.9)
    rename = files.rename
    for stop in range(4):
        io.save(old, tmp_path)
        done = []

        def crash(a, b, done=done, stop=stop):
            if len(done) == stop:
                raise KeyboardInterrupt
            done.append(b)
            rename(a, b)

        monkeypatch.setattr(io, "rename", crash)
        if stop < 3:
            with pytest.raises(KeyboardInterrupt):
                io.save(new, tmp_path)
        else:
            io.save(new, tmp_path)
        monkeypatch.setattr(io, "rename", rename)
        found = io.load(tmp_path, build)
        assert same(found, old if stop < 2 else new)
        assert not list(tmp_path.glob("*.tmp"))


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    alive, most = [0], [0]

    def entry(i):
        def data():
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            tensor = torch.full((1000,), float(i))
            weak = tensor.untyped_storage()
            import weakref

            weakref.finalize(weak, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

        return files.Entry(torch.float32, (1000,), data)

    files.write_tensors(tmp_path / "f", {f"t{i}": entry(i) for i in range(8)}, {})
    found = safetensors.torch.load_file(tmp_path / "f")
    assert all(bool((found[f"t{i}"] == i).all()) for i in range(8))
    assert most[0] <= 2


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    for model, words in (
        (Extra(), "only tensors can be saved"),
        (build().to("meta"), "on the meta device"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex128)]), "complex128"),
        (build().state_dict(), "a torch.nn.Module, not OrderedDict"),
    ):
        with pytest.raises(TypeError, match=words):
            io.save(model, tmp_path / "out")
    with pytest.raises(TypeError, match="what prune_ or shrink returned, not str"):
        io.save(build(), tmp_path / "out", plan="mine")  # type: ignore[arg-type]
    odd = build()
    odd.register_buffer("__metadata__", torch.ones(1))
    with pytest.raises(ValueError, match="'__metadata__' means something else"):
        io.save(odd, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        io.save(build(), tmp_path / "file")
    assert not (tmp_path / "out").exists()


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path):
    model = build()
    io.save(torch.compile(model, backend="eager"), tmp_path)
    assert same(io.load(tmp_path, build), model)


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
