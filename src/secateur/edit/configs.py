"""Config objects: the numbers in them, copies with other numbers, and the model that a class builds from a config."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Place = tuple[str | int, ...]  # attributes from the config down to a number


def numbers_of(config: Any, above: Place = ()) -> list[Place]:
    """The places of numbers, of integers in lists, and of None (a size that follows from another), in nested configs too."""
    found: list[Place] = []
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if value is None or type(value) in (int, float):
            found.append((*above, name))
        elif type(value) in (list, tuple):
            found += [(*above, name, i) for i, item in enumerate(value) if type(item) is int]
        elif hasattr(value, "to_dict") and len(above) < 2:
            found += numbers_of(value, (*above, name))
    return found


def number_at(config: Any, place: Place) -> Any:
    for part in place:
        config = config[part] if isinstance(part, int) else vars(config)[part]
    return config


def with_numbers(config: Any, changes: Mapping[Place, Any]) -> Any:
    """Returns a copy of the config with these numbers."""
    made = copy.deepcopy(config)
    for place, value in changes.items():
        *path, last = place if not isinstance(place[-1], int) else place[:-1]
        owner = number_at(made, tuple(path))
        if isinstance(place[-1], int):
            held = vars(owner)[last]
            value = type(held)(value if i == place[-1] else item for i, item in enumerate(held))
        vars(owner)[last] = value
    return made


def held_objects(owner: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(path, object) for the objects with attributes that a module holds, such as configs, and for those inside them."""
    for name, value in list(vars(owner).items()):
        if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type):
            at = f"{path}.{name}" if path else name
            yield at, value
            if depth < 2:
                yield from held_objects(value, at, depth + 1)


def own_objects_(model: nn.Module, objects: Sequence[Any]) -> None:
    """Replaces these objects, wherever the model holds them, by shallow copies: the caller may use a config elsewhere.

    Modules that share an object share its copy. An object that holds one of them is copied too.
    """
    wanted = {id(each) for each in objects}
    copies: dict[int, tuple[Any, Any]] = {}  # id -> the object, kept alive so that its id stays taken, and its copy
    made: set[int] = set()
    for module in model.modules() if wanted else ():
        for path, held in list(held_objects(module, "")):
            if id(held) not in wanted:
                continue
            holder: Any = module
            for name in path.split("."):
                value = vars(holder)[name]
                if id(value) not in made:
                    if id(value) not in copies:
                        copies[id(value)] = value, copy.copy(value)
                    value = vars(holder)[name] = copies[id(value)][1]
                    made.add(id(value))
                holder = value


def built_from(kind: type[nn.Module], config: Any) -> nn.Module:
    """Builds `kind(config)`; its weights take no memory. Raises whatever the class raises."""
    return built(lambda: kind(copy.deepcopy(config)))


def built(into: Callable[[], nn.Module]) -> nn.Module:
    """Calls a function that builds a model; its weights are on the meta device and take no memory."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _EmptyIsMeta():
            warnings.simplefilter("ignore")
            return into()
    finally:
        log.setLevel(level)


def built_model(into: Callable[[], Any]) -> nn.Module:
    """The model that `into=` builds, in evaluation mode and without its weights. Raises TypeError if it builds none."""
    if isinstance(into, nn.Module) or not callable(into):
        raise TypeError(f"into= is a function that builds the model, such as lambda: Model(config), not {type(into).__name__}")
    check_no_arguments(into)
    if not isinstance(model := built(into), nn.Module):
        raise TypeError(f"into= must build a torch.nn.Module, and returned {type(model).__name__}")
    return model.eval()


def check_no_arguments(into: Callable[..., Any]) -> None:
    """Raises TypeError if the function that is to build a model needs arguments."""
    try:
        inspect.signature(into).bind()
    except TypeError as error:
        name = getattr(into, "__name__", type(into).__name__).replace("<lambda>", "build")
        raise TypeError(
            f"into= is a function without arguments that builds the model, such as lambda: {name}(...): {error}"
        ) from None
    except ValueError:  # some functions written in C have no signature
        pass


class _EmptyIsMeta(TorchFunctionMode):
    """Puts what torch.empty makes on the meta device: layers allocate weights with it. Other tensors are computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
