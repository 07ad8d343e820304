"""The parameters of a model: their names, the modules that own them, and which of them are tied."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One parameter: its full name, its module and its name there. A tied one has other names (`also`) and `owners`."""

    name: str
    module: nn.Module
    attribute: str
    also: tuple[str, ...] = ()
    owners: tuple[tuple[nn.Module, str], ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The parameter that is registered now; under a parametrization, the original that is trained."""
        parameter = self.module._parameters.get(self.attribute)
        return self.module.parametrizations[self.attribute].original if parameter is None else parameter  # type: ignore[index]


class Loose(nn.Module):
    """A module that holds tensors of no module as parameters, so that all other code sees a model.

    `state` is True if they are the state dict or the parameters of a model, and not independent tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self._parameters.update(tensors)  # type: ignore[arg-type]  # the same objects, which an optimizer may hold
        one_layer = {"weight", "bias"} <= tensors.keys()
        self.state = hasattr(tensors, "_metadata") or one_layer or any(_is_of_module(*item) for item in tensors.items())


def _is_of_module(name: str, tensor: Tensor) -> bool:
    """Whether a name and a shape are those of a buffer, a bias or a scale in some layer of a model."""
    path, _, last = name.rpartition(".")
    return last in ("running_mean", "running_var", "num_batches_tracked") or (
        bool(path) and last in ("weight", "bias") and tensor.ndim < 2
    )


class Packed(nn.Module):
    """A layer that holds its weight in another form, so that it cannot be pruned or cut. `stood` is the type it replaced."""

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
    """Raises if the weight of a layer is packed. `what` states what needs the weight."""
    if name := next(iter(packed_layers(model)), None):
        raise ValueError(
            f"{name!r} is compressed, and {what}. Call sc.decompress_(model) first, and sc.compress_ again afterwards. "
            "The model is unchanged."
        )


Prunable = nn.Module | Mapping[str, Tensor] | Tensor


def as_module(model: Prunable) -> nn.Module:
    """Returns a module unchanged, and wraps a tensor or a mapping of names to tensors in one."""
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
            raise ValueError(f"{name!r} is computed from other tensors, which would overwrite its zeros; prune those instead")
    return Loose(tensors)


def slots(model: nn.Module) -> Iterator[Slot]:
    """Yields every parameter once, in registration order, a tied one under its first name."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((f"{path}.{attribute}" if path else attribute, module, attribute))
    for (name, module, attribute), *others in found.values():
        owners = {(id(owner), own): (owner, own) for _, owner, own in ((name, module, attribute), *others)}
        yield Slot(name, module, attribute, tuple(other for other, _, _ in others), tuple(owners.values()))


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def bare_name(name: str) -> str:
    """A name without the parts that wrappers (torch.compile, checkpoint_wrapper, FSDP) add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def nearest_glob(glob: str, names: Iterable[str]) -> str:
    """A sentence with the glob that matches the end of names, or the closest names, for a glob that matches none of them."""
    names = list(names)
    if glob.startswith("re:"):
        return " Names are matched by globs such as '*.q_proj', not by regular expressions."
    wider = (f"{glob}.*", f"*.{glob}", f"*.{glob}.*")
    found = next((one for one in wider if any(fnmatchcase(name, one) for name in names)), None)
    if found:
        return f" Globs match whole names; did you mean {found!r}?"
    return nearest(glob, names) or nearest(glob, sorted({f"*.{name.rpartition('.')[2]}" for name in names if "." in name}))


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence ' Did you mean ...?' with the closest names, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
