"""Masks: accepted values, operations, and errors."""

import numpy as np
import pytest
import torch

from secateur import Masks
from secateur.masks import pack_bits, unpack_bits

A = Masks({"a": torch.tensor([[True, False], [True, True]]), "b": torch.tensor([False, False, True])})


def test_masks_are_a_mapping_of_bool_tensors():
    assert list(A) == ["a", "b"]
    assert len(A) == 2
    assert "a" in A
    assert A["b"].dtype == torch.bool
    assert A.total == 7
    assert A.kept == 4
    assert A.density == pytest.approx(4 / 7)
    assert A.sparsity == pytest.approx(3 / 7)


def test_no_masks_are_dense():
    assert Masks({}).density == 1.0
    assert Masks({}).sparsity == 0.0


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(3, dtype=torch.uint8), [True, False], None])
def test_only_bool_tensors_are_masks(bad):
    with pytest.raises(TypeError, match=r"'layer'.*bool tensor"):
        Masks({"layer": bad})


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(KeyError, match=r"encoder.weight"):
        Masks({"encoder.weight": torch.ones(1, dtype=torch.bool)})["encodr.weight"]


@pytest.mark.parametrize("combine", [lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a - b])
def test_masks_of_other_tensors_do_not_combine(combine):
    with pytest.raises(ValueError, match="'c'"):
        combine(A, Masks({"a": A["a"], "c": A["b"]}))
    with pytest.raises(ValueError, match="'b' differ"):
        combine(A, Masks({"a": A["a"], "b": torch.ones(4, dtype=torch.bool)}))
    with pytest.raises(TypeError):
        combine(A, {"a": A["a"], "b": A["b"]})


def test_masks_differ_from_masks_of_other_names_or_values():
    assert Masks({"a": A["a"], "b": A["b"].clone()}) == A
    assert ~A != A
    assert Masks({"a": A["a"]}) != A
    assert {"a": A["a"], "b": A["b"]} != A


def test_combining_leaves_the_operands_alone():
    before = {name: mask.clone() for name, mask in A.items()}
    A & ~A, A | ~A, A - A, ~A
    assert Masks(before) == A


def test_packed_masks_of_the_wrong_size_are_refused():
    packed = A.pack()
    bits, shape = packed["a"]
    with pytest.raises(ValueError, match=r"'a' must have 1 elements of torch\.uint8"):
        Masks.unpack({"a": (torch.cat([bits, bits]), shape)})
    with pytest.raises(ValueError, match="'a' must have 1 elements"):
        Masks.unpack({"a": (bits.to(torch.int32), shape)})


def test_packed_masks_pass_through_a_file_read_without_pickled_code(tmp_path):
    torch.save(A.pack(), tmp_path / "masks.pt")
    assert Masks.unpack(torch.load(tmp_path / "masks.pt", weights_only=True)) == A


def test_strided_masks_pack_as_their_copies_do():
    mask = torch.rand(5, 7) < 0.5
    assert torch.equal(Masks({"m": mask.t()}).pack()["m"][0], Masks({"m": mask.t().contiguous()}).pack()["m"][0])


def test_the_print_says_how_sparse_they_are():
    assert repr(A) == "Masks(2 tensors, 4 of 7 elements kept, 42.86% sparse)"


@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (1001,), (5, 37), (3, 0), (0, 5), (2, 3, 64)], ids=str)
def test_bits_are_those_of_numpy_and_come_back(shape):
    mask = torch.rand(shape) < 0.5
    bits = pack_bits(mask)
    assert np.array_equal(bits.numpy(), np.packbits(mask.numpy(), axis=-1, bitorder="little"))
    assert torch.equal(unpack_bits(bits, shape[-1]), mask)
    assert torch.equal(
        pack_bits(mask.mT if mask.dim() > 1 else mask[1:]), pack_bits((mask.mT if mask.dim() > 1 else mask[1:]).clone())
    )
