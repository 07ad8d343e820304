"""Which processes run the tests of this folder: two and four with gloo, or a single one, on a device of choice.

The variable SECATEUR_TEST_DIST names the backend of the single process: `nccl`, on a CUDA device, or `gloo`, on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

SINGLE = bool(os.environ.get("SECATEUR_TEST_DIST"))
BACKEND = os.environ.get("SECATEUR_TEST_DIST") or "gloo"
DEVICE = torch.device("cuda", 0) if BACKEND == "nccl" else torch.device("cpu")


def several(reason: str) -> pytest.MarkDecorator:
    """Skips a test where only one process runs."""
    return pytest.mark.skipif(SINGLE, reason=f"one process: {reason}")


def moved(value: Any, device: torch.device | str) -> Any:
    """All tensors in nested tuples, lists and dicts, on this device. Between processes, tensors travel on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
