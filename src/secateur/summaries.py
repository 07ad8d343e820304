"""`summary`: lists the zeros of each layer, their pattern, compressed formats, and the calls that changed the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ._dist import sharded
from ._layers import layout_of
from ._tree import Prunable, Slot, as_module, bare_name, packed_layers, slots
from .display import Shown, Table, notes_by_reason
from .edit import Step, steps_of
from .execute import Compressed, zeros_of

FEW = 0.01  # a smaller fraction of zeros is taken for chance


@dataclass(frozen=True)
class LayerSummary:
    """One weight: its zeros, the pattern that they make, and the format if its layer is compressed."""

    name: str
    shape: tuple[int, ...]
    total: int
    zeros: int
    pattern: str
    format: str = "dense"

    @property
    def sparsity(self) -> float:
        return self.zeros / self.total if self.total else 0.0


@dataclass(frozen=True, repr=False)
class Summary(Shown):
    """The result of `sc.summary`. `print` shows a table.

    `layers`: one entry for each weight with two or more dims. `skipped`: weights that could not be read, and why. `history`:
    the calls that changed the model, as `sc.save` stores them.
    """

    _folded = "history and notes"

    model: str
    layers: list[LayerSummary]
    skipped: dict[str, str]
    history: list[Step]

    def metrics(self) -> dict[str, float]:
        """Plain numbers in a flat dictionary: totals, and `sparsity/NAME` for each weight."""
        total, zeros = sum(layer.total for layer in self.layers), sum(layer.zeros for layer in self.layers)
        return {
            "tensors": len(self.layers),
            "total": total,
            "zeros": zeros,
            "sparsity": zeros / total if total else 0.0,
            "skipped": len(self.skipped),
            **{f"sparsity/{layer.name}": layer.sparsity for layer in self.layers},
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        return {
            "model": self.model,
            "layers": [{**asdict(layer), "shape": list(layer.shape), "sparsity": layer.sparsity} for layer in self.layers],
            "skipped": dict(self.skipped),
            "history": [list(step) for step in self.history],
        }

    def _table(self) -> Table:
        packed = any(layer.format != "dense" for layer in self.layers)

        def row(layer: LayerSummary) -> tuple[str, ...]:
            cells = (layer.name, "x".join(map(str, layer.shape)), f"{layer.zeros:,}", f"{layer.total:,}")
            return (*cells, f"{layer.sparsity:.2%}", layer.pattern, *([layer.format] if packed else ()))

        whole = self.metrics()
        total = ("in all", "", f"{whole['zeros']:,}", f"{whole['total']:,}", f"{whole['sparsity']:.2%}", "")
        notes = [f"{n}. {what}: {recipe}" for n, (what, recipe) in enumerate(self.history, 1)]
        return Table(
            ("weight", "shape", "zeros", "of", "sparsity", "pattern", *(["format"] if packed else ())),
            [row(layer) for layer in self.layers],
            [(*total, "") if packed else total],
            right=range(2, 5),
            title=self.model,
            notes=[*notes, *notes_by_reason("not read", self.skipped)],
        )


@torch.no_grad()
def summary(model: Prunable) -> Summary:
    """Describes a model: for each weight its zeros, their pattern, and its format if the layer is compressed.

    Patterns have the names that `pattern=` takes: n:m, blocks such as "16x1", "out" and "in" (whole rows and columns of the
    weight), "unstructured"; also "k per row", "all zero", and "dense" for a weight without zeros or with at most 1 % of them.
    Weights are parameters with two or more dims. The model is unchanged.
    """
    given = as_module(model)
    layers: list[LayerSummary] = []
    skipped: dict[str, str] = {}
    for name, owner, tensor, form in weights_of(given):
        if why := unreadable(tensor):
            skipped[name] = why
        else:
            layers.append(_described(name, owner, tensor, form))
    return Summary(type(getattr(given, "_orig_mod", given)).__name__, layers, skipped, steps_of(given))


def weights_of(model: nn.Module) -> list[tuple[str, nn.Module, Tensor, str]]:
    """Name, layer, values and format of each weight, as the forward pass uses it, in the order of the modules."""
    order = {bare_name(path): place for place, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return sorted(_weights(model), key=lambda weight: order.get(weight[0].rpartition(".")[0], 0))


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor, str]]:
    for name, layer in packed_layers(model).items():
        if isinstance(layer, Compressed):
            yield bare_name(f"{name}.weight" if name else "weight"), layer, layer.weight, layer.form
    packed = {id(module) for layer in packed_layers(model).values() for module in layer.modules()}
    for slot in slots(model):
        name, owner, tensor = _effective(model, slot)
        if id(slot.module) not in packed and (is_lazy(tensor) or tensor.dim() > 1):
            yield bare_name(name), owner, tensor, "dense"


def _effective(model: nn.Module, slot: Slot) -> tuple[str, nn.Module, Tensor]:
    """The tensor that a parameter becomes: itself, or what a parametrization or torch.nn.utils.prune computes from it."""
    if isinstance(slot.module, ParametrizationList):
        path, _, attribute = slot.name.removesuffix(f".{slot.attribute}").rpartition("parametrizations.")
        path = path.removesuffix(".")
        return f"{path}.{attribute}" if path else attribute, model.get_submodule(path), slot.module()
    base = slot.attribute.removesuffix("_orig")
    mask = slot.module._buffers.get(f"{base}_mask")
    if base != slot.attribute and mask is not None:
        return slot.name.removesuffix("_orig"), slot.module, slot.tensor * mask
    return slot.name, slot.module, slot.tensor


def unreadable(tensor: Tensor) -> str | None:
    """The reason why the values of a tensor cannot be read here, if there is one."""
    if is_lazy(tensor):
        return "not initialised"
    if sharded(tensor):
        return "sharded; gather it first"
    if tensor.is_meta:
        return "on the meta device"
    return None if tensor.numel() else "empty"


def _described(name: str, owner: nn.Module, tensor: Tensor, form: str) -> LayerSummary:
    matrix = layout_of(owner, tuple(tensor.shape)).matrix(tensor.detach())
    zeros = matrix.numel() - int(torch.count_nonzero(matrix))
    pattern = _pattern(matrix) if zeros > FEW * matrix.numel() else "dense"
    return LayerSummary(name, tuple(tensor.shape), tensor.numel(), zeros, pattern, form)


def _pattern(matrix: Tensor) -> str:
    """The pattern of the zeros. Where groups of four leave a rest of each row, n:m must hold in the groups and in the rest."""
    found, rest = zeros_of(matrix).pattern, matrix.shape[1] % 4
    if rest and matrix.shape[1] > 4 and (found == "unstructured" or found.endswith("per row")):
        inner = zeros_of(matrix[:, :-rest]).pattern
        n, colon, m = inner.partition(":")
        if colon and m == "4" and int((matrix[:, -rest:] != 0).sum(1).max()) <= int(n):
            return inner
    return found
