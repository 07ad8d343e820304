"""The tensors that a model owns: finding them, replacing them while the model is run, and giving them new contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, tuple, dict)
_EMPTY = frozenset({OrderedDict, dict, list, set})
_PLAIN = frozenset({bool, int, float, str, type(None)})  # most attributes; an isinstance check with Tensor is slow for them
_LONG = 4096  # longer containers are not searched
OWN = frozenset(nn.Module().__dict__)  # the attributes that nn.Module itself uses

Slot = tuple[str, str]  # the path of a module and the name of an attribute


def attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module, without those of nn.Module itself, plain values, and tuples of plain values."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name not in OWN
        and type(value) not in _PLAIN
        and not (type(value) is tuple and len(value) <= _LONG and _PLAIN.issuperset(map(type, value)))
    ]


def owned_tensors(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """id -> (first name, tensor): parameters, buffers, plain tensor attributes, and tensors in lists and dicts of modules."""
    found: dict[int, tuple[str, Tensor]] = {}
    modules = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    for slots in ("_parameters", "_buffers"):
        for path, module in modules:
            for name, tensor in getattr(module, slots).items():
                if tensor is not None:
                    found.setdefault(id(tensor), (path + name, tensor))
    for path, module in modules:
        for name, value in attributes(module):
            if isinstance(value, Tensor):
                found.setdefault(id(value), (path + name, value))
            elif name[0] != "_" and isinstance(value, _CONTAINERS) and len(value) <= _LONG:
                for key, item in _items(value):
                    if isinstance(item, Tensor):
                        found.setdefault(id(item), (f"{path}{name}[{key!r}]", item))
    return found


def states(model: nn.Module) -> dict[Slot, Tensor]:
    """Tensors that modules hold as plain attributes: neither parameters nor buffers."""
    named = ((path, name, value) for path, module in model.named_modules() for name, value in attributes(module))
    return {(path, name): value for path, name, value in named if isinstance(value, Tensor)}


def tensors_inside(value: Any, depth: int = 0) -> list[Tensor]:
    """The tensors in nested containers and objects, six levels deep at most."""
    if isinstance(value, Tensor):
        return [value]
    if depth > 5:
        return []
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    else:
        items = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return [t for item in list(items) for t in tensors_inside(item, depth + 1)]


def put_(tensor: Tensor, data: Tensor) -> None:
    """Gives a tensor new contents, possibly of another shape, even where an autograd graph holds it.

    The graph's node for the tensor stores the old shape and would refuse the next gradient. Torch discards that node when the
    dtype changes, so the tensor takes another dtype in between.
    """
    if tensor.shape != data.shape and tensor.requires_grad and tensor.is_leaf:
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)


class StandIns:
    """While entered, modules hold `stand_in(name, tensor)` for their tensors and are in evaluation mode.

    Tensors are matched by identity, so tied tensors and modules under two names stay consistent. On exit every module has its
    own attributes back, including those that the run added or changed.
    """

    def __init__(self, model: nn.Module, stand_in: Callable[[str, Tensor], Tensor]) -> None:
        self.modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.owned = owned_tensors(model)
        self.stand_in = stand_in
        self.saved: list[tuple[Any, Any]] = []
        self.empty: list[Any] = []  # containers that hold nothing before the run, mostly dicts of hooks

    def __enter__(self) -> StandIns:
        made = {key: self.stand_in(name, tensor) for key, (name, tensor) in self.owned.items()}
        for module in self.modules:
            space = vars(module)
            before = space.copy()
            self.saved.append((space, before))
            for name, value in before.items():
                if type(value) in _PLAIN:
                    continue
                if type(value) in _EMPTY and not value:
                    self.empty.append(value)
                elif isinstance(value, Tensor):
                    space[name] = made.get(id(value), value)
                elif isinstance(value, list | dict | set | tuple) and len(value) <= _LONG:
                    self._refill(space, name, value, made)
            space["training"] = False
        return self

    def _refill(self, space: dict[str, Any], name: str, value: Any, made: dict[int, Tensor]) -> None:
        """Puts the stand-ins into a container; a container of the user's is replaced by a copy."""
        if not isinstance(value, tuple):
            self.saved.append((value, value.copy()))
        if name in ("_parameters", "_buffers") and isinstance(value, dict):
            value.update({k: made[id(v)] for k, v in value.items() if id(v) in made})
        elif name != "_modules" and type(value) in _CONTAINERS and any(id(v) in made for _, v in _items(value)):
            if isinstance(value, dict):
                space[name] = {k: made.get(id(v), v) for k, v in value.items()}
            else:
                space[name] = type(value)(made.get(id(v), v) for v in value)

    def __exit__(self, *_: object) -> None:
        for container in self.empty:
            if container:
                container.clear()
        for container, content in reversed(self.saved):  # for one saved twice, the first save counts
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
