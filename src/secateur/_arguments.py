"""The arguments and outputs of modules as trees of tuples, lists and dicts: their tensors, copies, and replacements."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._transfers import to_device


def copied(value: Any, memo: dict[Any, Any]) -> Any:
    """A copy of arguments that a call can write to. Modules, functions and numbers are not copied.

    An object that occurs twice is copied once: `memo` maps an object's id (and the version of a tensor) to its copy.
    """
    if isinstance(value, tuple | list | dict):
        return _rebuilt(value, [copied(item, memo) for item in _items(value)])
    if _is_constant(value):
        return value
    key = (id(value), value._version) if isinstance(value, Tensor) and not value.is_inference() else id(value)
    if key not in memo:
        memo[key] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return memo[key]


def fresh(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """The same arguments with copies of the objects that a call may write to, such as a cache; tensors are not copied."""
    memo = {} if memo is None else memo
    if isinstance(value, tuple | list | dict):
        return _rebuilt(value, [fresh(item, memo) for item in _items(value)])
    if isinstance(value, Tensor) or _is_constant(value):
        return value
    if id(value) not in memo:
        memo[id(value)] = copy.deepcopy(value)
    return memo[id(value)]


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of arguments or of an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in _items(value) for tensor in tensors_of(part)]


def objects_of(value: Any) -> list[Any]:
    """The objects in arguments that calls may leave something in: lists, dicts, caches. Tensors are not among them."""
    own = [] if isinstance(value, tuple | Tensor) or _is_constant(value) else [value]
    return own + [each for part in _items(value) for each in objects_of(part)]


def replaced(value: Any, new: Mapping[int, Any], at: list[int]) -> Any:
    """The same tree with some of its tensors replaced, by their number in `tensors_of`; `at` counts the tensors seen."""
    if isinstance(value, Tensor):
        at[0] += 1
        return new.get(at[0] - 1, value)
    if not isinstance(value, tuple | list | dict):
        return value
    return _rebuilt(value, [replaced(item, new, at) for item in _items(value)])


def moved(value: Any, device: torch.device | None) -> Any:
    """The same tree with its tensors on a device; None leaves them where they are."""
    if device is None:
        return value
    here: dict[int, Tensor] = {}
    for tensor in tensors_of(value):
        if id(tensor) not in here:
            here[id(tensor)] = to_device(tensor, device)
    return replaced(value, {i: here[id(tensor)] for i, tensor in enumerate(tensors_of(value))}, [0])


def apart(value: Any) -> Any:
    """The same tree with copies of its tensors, which the module that returned them cannot write to later."""
    return replaced(value, {i: tensor.clone() for i, tensor in enumerate(tensors_of(value))}, [0])


def first_row(value: Any) -> Any:
    """The same tree with the first row of each tensor alone; the tree itself where its tensors differ in the number of rows."""
    tensors = tensors_of(value)
    if len({tensor.shape[:1] for tensor in tensors}) != 1 or not tensors[0].ndim:
        return value
    return replaced(value, {i: tensor[:1] for i, tensor in enumerate(tensors)}, [0])


def is_tree(value: Any) -> bool:
    """True if a tree holds only tensors, numbers and text, so that `tensors_of` finds all its tensors."""
    if isinstance(value, tuple | list | dict):
        return all(map(is_tree, _items(value)))
    return value is None or isinstance(value, Tensor | str | bytes | int | float | complex)


def same(one: Any, other: Any) -> bool:
    """True if two trees certainly hold equal values. Objects that `tensors_of` does not look into have to be identical."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        plain = one.layout == other.layout == torch.strided and not one.is_nested and not other.is_nested
        return plain and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and list(one) != list(other):
        return False
    if isinstance(one, tuple | list | dict):
        return len(one) == len(other) and all(map(same, _items(one), _items(other)))
    return isinstance(one, str | bytes | int | float | complex) and one == other


def signature(value: Any) -> Any:
    """A key that is equal for calls which run through the same operators: types, dtypes and numbers of axes, not sizes."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim, value.device.type
    if isinstance(value, dict):
        return tuple((key, signature(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(signature, value))
    return value if value is None or isinstance(value, bool | str) else type(value)


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, nn.Module | str | bytes | int | float | complex | type) or callable(value)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A container of the same type with other items."""
    if isinstance(value, dict):
        new = copy.copy(value)
        for key, item in zip(value, items, strict=True):
            new[key] = item
        return new
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items
