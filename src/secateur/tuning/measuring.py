"""The metric of a model, as the user's function measures it, and the journal of what was measured."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import reprlib
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import refuse_sharded
from ..edit import eval_mode, preserve_rng

Evaluate = Callable[[nn.Module], Any]


def measured(evaluate: Evaluate, model: nn.Module) -> float:
    """The metric: `evaluate(model)` in evaluation mode, without gradients. The state of random generators is restored."""
    with eval_mode(model), torch.no_grad(), preserve_rng():
        found = evaluate(model)
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if not isinstance(found, Real) or isinstance(found, bool):
        raise TypeError(f"evaluate must return one number, such as the accuracy; it returned {type(found).__name__}")
    return float(found)


def check_evaluate(evaluate: object, better: str | None) -> None:
    """Raises unless `evaluate` can be called with a model, and `better` says which metric is better, or is left out."""
    if not callable(evaluate):
        raise TypeError(
            f"evaluate={reprlib.repr(evaluate)} must be a function: it is called with a model, several times, and returns the "
            "metric"
        )
    try:
        inspect.signature(evaluate).bind(None)
    except TypeError as error:
        name = getattr(evaluate, "__name__", type(evaluate).__name__)
        raise TypeError(f"evaluate={name} is called with one argument, the model, but does not accept it: {error}") from None
    except ValueError:  # some functions written in C have no signature
        pass
    if better not in (None, "higher", "lower"):
        raise ValueError(f"better={better!r} must be 'higher' (accuracy) or 'lower' (perplexity, loss)")


def measured_before(evaluate: Evaluate, model: nn.Module) -> float:
    """The metric of the model as it is given. Raises ValueError if it is not finite: nothing could be compared with it."""
    found = measured(evaluate, model)
    if not math.isfinite(found):
        raise ValueError(f"evaluate returned {found} for the model as it is given, so no drop can be measured; check evaluate")
    return found


def loss_of(value: float, dense: float, better: str) -> float:
    """How much worse a metric is than that of the dense model; infinite for NaN."""
    drop = dense - value if better == "higher" else value - dense
    return math.inf if math.isnan(drop) else drop


def fingerprint(model: nn.Module) -> str:
    """A digest of the names, shapes and values of a model's state, which has to be whole."""
    refuse_sharded(model, "sensitivity and search measure")
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]
    return digest.hexdigest()


class Journal:
    """What was measured so far: a line of JSON for each measurement, written at once, so that a killed run goes on.

    Without a path nothing is kept. The first line describes the run; the journal of another run is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, about: dict[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.known: dict[str, dict[str, Any]] = {}
        if self.path is None:
            return
        about = json.loads(json.dumps(about))
        if self.path.exists():
            self._read(self.path, about)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write(about)

    def _read(self, path: Path, about: dict[str, Any]) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = []
        for number, line in enumerate(lines, 1):
            try:
                found.append(json.loads(line))
            except ValueError:
                if number < len(lines):  # the last line may be cut short, where the run was killed
                    raise ValueError(f"journal {path}, line {number}: not JSON") from None
        if not found:
            raise ValueError(f"journal {path} is empty; delete it")
        if odd := [key for key in about.keys() | found[0].keys() if about.get(key) != found[0].get(key)]:
            raise ValueError(
                f"journal {path} belongs to another run: {', '.join(sorted(odd))} differ. Delete it, or pass another path"
            )
        self.known = {entry["key"]: entry for entry in found[1:]}
        if len(found) < len(lines):
            path.write_text("".join(json.dumps(entry) + "\n" for entry in found), encoding="utf-8")

    def _write(self, entry: dict[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def get(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The entry of this key: from the journal, or measured now."""
        if key not in self.known:
            self.known[key] = {"key": key, **measure()}
            if self.path is not None:
                self._write(self.known[key])
        return self.known[key]
