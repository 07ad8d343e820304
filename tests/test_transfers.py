"""Copies between the host and a GPU take every kind of tensor that torch's own copies take."""

import pytest
import torch

from secateur._arguments import moved

KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_memory_of_their_own_are_moved_as_torch_moves_them(kind):
    value, device = {"x": KINDS[kind]()}, torch.device("cuda")
    if torch.cuda.is_available():
        assert moved(value, device)["x"].is_cuda
        return
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):  # the copy itself, which needs a GPU
        moved(value, device)
