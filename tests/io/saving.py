"""Helpers for the tests of saved files: a small model, comparison bit for bit, a load that must be refused."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from secateur import io


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


def saved_until(stop: int, model: nn.Module, path: Path, **options: Any) -> bool:
    """Saves a model, and interrupts after `stop` files were renamed. Returns whether all were renamed before."""
    done, rename = [], io.rename

    def crash(a: Any, b: Any) -> None:
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(b)
        rename(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "rename", crash)
        try:
            io.save(model, path, **options)
        except KeyboardInterrupt:
            return False
    return True


def refused(path: Path, model: nn.Module, words: str) -> None:
    before, shown = copy.deepcopy(model.state_dict()), str(model)
    with pytest.raises(ValueError, match=words):
        io.load(path, model)
    after = model.state_dict()
    assert str(model) == shown
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def resign(path: Path, change) -> None:
    """Changes the manifest and gives it a digest that fits, as an attacker would."""
    data = json.loads((path / "secateur.json").read_text())
    del data["sha256"]
    change(data)
    body = json.dumps(data, indent=1).removesuffix("\n}").encode()
    (path / "secateur.json").write_bytes(body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')
