"""Where the parameters of a model live: their names, their owners, and which names are one tensor."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
