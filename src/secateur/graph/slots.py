"""The tensors that a model owns, and a stand-in for each while the model is traced; afterwards the model is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, tuple, dict)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # what most attributes are; asking whether they are tensors takes time
_LONG = 4096


def owned_tensors(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """id -> (first name, tensor): parameters, buffers, plain tensor attributes, and tensors in lists and dicts of modules."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) in _PLAIN or (name[:1] == "_" and isinstance(value, _CONTAINERS)):
                continue
            dotted = f"{path}.{name}" if path else name
            if isinstance(value, Tensor):
                found.setdefault(id(value), (dotted, value))
            elif isinstance(value, _CONTAINERS) and not name.startswith("_") and len(value) <= _LONG:
                for key, item in _items(value):
                    if isinstance(item, Tensor):
                        found.setdefault(id(item), (f"{dotted}[{key!r}]", item))
    return found


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


class Standing:
    """While it is entered, modules hold `stand_in(tensor)` for their tensors and are in evaluation mode.

    Slots are found by identity of the tensor, so ties and modules under two names stay consistent. On exit every module has its
    own attributes back, also those that the run added or changed.
    """

    def __init__(self, model: nn.Module, stand_in: Callable[[str, Tensor], Tensor]) -> None:
        self.modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.owned = owned_tensors(model)
        self.stand_in = stand_in
        self.saved: list[tuple[Any, Any]] = []

    def __enter__(self) -> Standing:
        made = {key: self.stand_in(name, tensor) for key, (name, tensor) in self.owned.items()}
        for module in self.modules:
            space = vars(module)
            for container in (space, *(v for v in space.values() if type(v) in (list, dict, set) or isinstance(v, dict))):
                if len(container) <= _LONG:
                    self.saved.append((container, container.copy()))
        for module in self.modules:
            spaces: list[dict[str, Any]] = [vars(module)[name] for name in ("_parameters", "_buffers")]
            for space in (*spaces, vars(module)):
                for name, value in list(space.items()):
                    if type(value) in _PLAIN or (type(value) in _CONTAINERS and not value):
                        continue
                    if isinstance(value, Tensor):
                        space[name] = made.get(id(value), value)
                    elif space is vars(module) and type(value) in _CONTAINERS and 0 < len(value) <= _LONG:
                        self._refill(space, name, value, made)
            vars(module)["training"] = False
        return self

    def _refill(self, space: dict[str, Any], name: str, value: Any, made: dict[int, Tensor]) -> None:
        if name in ("_parameters", "_buffers", "_modules") or not any(id(v) in made for _, v in _items(value)):
            return
        if isinstance(value, dict):
            space[name] = {k: made.get(id(v), v) for k, v in value.items()}
        else:
            space[name] = type(value)(made.get(id(v), v) for v in value)

    def __exit__(self, *_: object) -> None:
        for container, content in self.saved:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
