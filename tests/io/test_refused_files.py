"""A file that is damaged in any bit, or made for another model, is refused with a reason, and the model is unchanged."""

import copy
import json
import os
import struct

import pytest
import torch
from saving import X, build, refused, resign, same
from torch import nn

import secateur as sc
from secateur import io
from secateur.io import files
from secateur.surgery import shrink


def test_a_tensor_that_nothing_fills_is_noticed_before_the_model_is_touched(tmp_path):
    model = build()
    io.save(build(3), tmp_path)
    model.register_buffer("table", torch.zeros(2, device="meta"), persistent=False)
    refused(tmp_path, model, "'table' are on the meta device")


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
    with pytest.raises(
        TypeError, match=r"a function without arguments .* such as lambda: Linear\(\.\.\.\): missing .* 'in_features'"
    ):
        io.load(tmp_path, nn.Linear)
    with pytest.raises(ValueError, match="as_="):
        io.load(tmp_path, build, as_="dens")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; pass a folder that"):
        io.load(tmp_path / "nowhere", build)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no secateur\.json"):
        io.load(tmp_path / "empty", build)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is a file: .*; pass the path of the folder, '"):
        io.load(tmp_path / "model.safetensors", build)
    with pytest.raises(TypeError, match="'a' is a int; a mapping of names to tensors"):
        io.dense_state_dict({"a": 3})  # type: ignore[dict-item]


def test_a_manifest_that_claims_gigabytes_is_not_read(tmp_path):
    io.save(build(), tmp_path)
    os.truncate(tmp_path / "secateur.json", 1 << 32)  # a sparse file, which takes no space on the disk
    refused(tmp_path, build(1), "longer than 100000000 bytes")


def test_changed_line_ends_are_named(tmp_path):
    io.save(build(), tmp_path)
    text = (tmp_path / "secateur.json").read_bytes()
    (tmp_path / "secateur.json").write_bytes(text.replace(b"\n", b"\r\n"))
    refused(tmp_path, build(1), "its line ends were changed")


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
    for version in (2, 0, True, 1.0, "1", None):
        io.save(build(), tmp_path)
        resign(tmp_path, lambda data, version=version: data.update(version=version))
        refused(tmp_path, build(), f"of version {version}; this version of secateur reads 1")


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

    wrong(lambda d: d["tensors"].pop("4.weight"), "do not list the same tensors")
    wrong(lambda d: d["tensors"].update(more=d["tensors"]["4.bias"]), "do not list the same tensors")
    wrong(lambda d: at(d, "tensors", "4.weight").update(shape=[1 << 40, 1 << 20]), "do not make a tensor")
    wrong(lambda d: at(d, "tensors", "4.weight").update(shape=[36 * 10, 8]), "another shape")
    wrong(lambda d: at(d, "tensors", "4.bias").update(shape=[11]), "different in the manifest")
    wrong(lambda d: at(d, "tensors", "4.bias").update(dtype=["F32"]), "unknown dtype")
    wrong(lambda d: at(d, "cuts", 0).update(kept=["0-99999999999999999"]), "expected indices below")
    wrong(lambda d: at(d, "cuts", 0)["shapes"].update({"0.weight": [1 << 50, 3, 3, 3]}), "units than|the cuts are for")
    wrong(lambda d: at(d, "cuts", 0).update(attributes=[["__class__", "x", None, 1, 2, False]]), "attribute")
    wrong(lambda d: at(d, "cuts", 0).update(drop={"": [0]}), "do not state how many")
    attribute = ["0", "out_channels", None, 16, 8, False]
    for place, odd in ((2, True), (3, True), (4, True), (5, 1)):
        changed = [odd if i == place else value for i, value in enumerate(attribute)]
        wrong(lambda d, changed=changed: at(d, "cuts", 0).update(attributes=[changed]), "an attribute is not described as one")
    for changes in ({2: 0}, {1: "nothing", 3: None}, {0: "9", 3: None}, {0: "0.weight.shape", 3: None}):
        changed = [changes.get(i, value) for i, value in enumerate(attribute)]
        wrong(lambda d, changed=changed: at(d, "cuts", 0).update(attributes=[changed]), "is missing in this model")
    for zeros in (True, -1, 1.0, 1 << 40, None):
        wrong(lambda d, zeros=zeros: at(d, "tensors", "4.weight").update(zeros=zeros), "'4.weight' is said to have .* zeros")
    wrong(lambda d: at(d, "tensors", "4.weight").update(pattern=True), "'4.weight' is said to have the pattern True")
    wrong(lambda d: at(d, "file").update(bytes=True), "'bytes' should be a int")
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
    for name, value, words in (
        ("w#values", torch.ones(1, 2), "a row of numbers"),
        ("w#values", torch.ones(2, dtype=torch.complex128), "a row of numbers"),
        ("w#values", torch.ones(2).to_sparse(), "a row of numbers"),
        ("w", torch.ones(2, 2), "'w' is there twice"),
    ):
        with pytest.raises(io.BadFile, match=words):
            io.dense_state_dict({**whole, name: value})
    for name in whole:
        with pytest.raises(io.BadFile, match="beside it"):
            io.dense_state_dict({part: tensor for part, tensor in whole.items() if part != name})
