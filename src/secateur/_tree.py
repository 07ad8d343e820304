"""Where the parameters of a model live: their names, their owners, and which names are one tensor."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One parameter of a model: its full name, the module that owns it, its name there; if tied, its other names and owners."""

    name: str
    module: nn.Module
    attribute: str
    also: tuple[str, ...] = ()
    owners: tuple[tuple[nn.Module, str], ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The parameter as it is registered now; under a parametrization, the one that is trained."""
        parameter = self.module._parameters.get(self.attribute)
        return self.module.parametrizations[self.attribute].original if parameter is None else parameter  # type: ignore[index]


class Loose(nn.Module):
    """Tensors that are in no module, held where parameters would be, so that all the rest sees a model."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._parameters.update(tensors)  # type: ignore[arg-type]  # the tensors themselves, so that an optimizer knows them


class Packed(nn.Module):
    """A layer that holds its weight in another form, so that there is none to prune or cut; `stood`: the type it stands for."""

    stood: type[nn.Module]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        refuse_save_pretrained("has compressed layers", "Call sc.decompress_(model) first, or use sc.save(model, path).")
        super()._save_to_state_dict(*args, **kwargs)


def refuse_save_pretrained(what: str, advice: str) -> None:
    """Raises when `save_pretrained` (transformers, diffusers, huggingface_hub) is among the callers.

    It writes the state dict as it is, and `from_pretrained` would replace the weights whose names it does not find by random
    ones. A module with such a state dict calls this while its state dict is made.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "save_pretrained":
            raise ValueError(f"save_pretrained: the model {what}, which from_pretrained could not load. {advice}")
        frame = frame.f_back


def packed_layers(model: nn.Module) -> dict[str, Packed]:
    """The layers of a model whose weight is packed, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed)}


def check_unpacked(model: nn.Module, what: str) -> None:
    """Raises where a layer's weight is packed; `what` says what cannot be done then."""
    if name := next(iter(packed_layers(model)), None):
        raise ValueError(
            f"{name!r} is compressed, and {what}. Call sc.decompress_(model) first, and sc.compress_ again afterwards. "
            "The model is as it was."
        )


Prunable = nn.Module | Mapping[str, Tensor] | Tensor


def as_module(model: Prunable) -> nn.Module:
    """The model itself; a tensor, or a mapping of names to tensors, as something that holds them."""
    if isinstance(model, nn.Module):
        return model
    tensors = {"tensor": model} if isinstance(model, Tensor) else model
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"the model must be a torch.nn.Module, a mapping of names to tensors or a tensor, not {type(model).__name__}"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(f"a mapping to prune is of names to tensors; {name!r} is a {type(tensor).__name__}")
        if not tensor.is_leaf:
            raise ValueError(f"{name!r} is computed from other tensors, so zeros would not stay in it; prune those instead")
    return Loose(tensors)


def slots(model: nn.Module) -> Iterator[Slot]:
    """Every parameter once, in registration order. A tied parameter comes under its first name, the rest in `also`."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((f"{path}.{attribute}" if path else attribute, module, attribute))
    for (name, module, attribute), *others in found.values():
        owners = {(id(owner), own): (owner, own) for _, owner, own in ((name, module, attribute), *others)}
        yield Slot(name, module, attribute, tuple(other for other, _, _ in others), tuple(owners.values()))


def nearest(name: str, names: Iterable[str]) -> str:
    """' Did you mean ...?' with the closest existing names, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
