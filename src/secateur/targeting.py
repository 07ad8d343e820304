"""Targets: which tensors of a model are pruned, and why the others are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ._dist import Share, local, refuse_flat, reshard_, share_of
from ._hints import hints
from ._layers import DEFAULT_TYPES, Kind, Layout, adapter_parameters, is_experts, is_kind, is_weight, layout_of
from ._tree import Loose, Prunable, Slot, as_module, bare_name, nearest_glob, packed_layers, slots
from .scores import RANKED

_META = "on the meta device: it has no values yet"

Globs = str | Iterable[str] | None


@dataclass(frozen=True)
class Target:
    """One tensor to prune: a parameter of a model, seen as a matrix (outputs, inputs x kernel).

    Of a sharded parameter, `weight` and `layout` are the part that this process holds, and `share` is its position in the
    whole.
    """

    slot: Slot
    layout: Layout

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameter: several where it is tied."""
        return (self.slot.name, *self.slot.also)

    @property
    def tensor(self) -> Tensor:
        """The parameter itself, sharded or not."""
        return self.slot.tensor

    @property
    def weight(self) -> Tensor:
        """The part of the parameter that this process holds, detached."""
        return local(self.slot.tensor).detach()

    @cached_property
    def share(self) -> Share:
        """Which part of the whole parameter this process holds."""
        whole = layout_of(self.slot.module, tuple(self.tensor.shape), self.slot.attribute)
        return share_of(self.name, self.tensor, whole)


@hints
def targets(
    model: Prunable,
    *,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    meta: bool = False,
) -> tuple[list[Target], dict[str, str]]:
    """Returns the targets of a model, and the reason why each other parameter is skipped.

    `include` and `exclude` are globs over parameter and module names ("encoder.*", "*.bias", "head"), with or without the parts
    that torch.compile and other wrappers add to a name ("_orig_mod."). By default the weights of linear layers (GPT-2's
    `Conv1D` included), convolutions, `nn.MultiheadAttention` and experts (tensors of transformers with a matrix for each
    expert) are targets. `types` replaces these layer types, and an `include` without a wildcard selects a parameter or a module
    of any type. Adapters (LoRA) are targets only if `include` names them. Tied parameters are one target. A mapping of names to
    tensors can be passed instead of a model. All of its tensors are targets, except in the state dict of a model: there only
    those that `include` names are, because a state dict does not tell which tensors are weights. `meta` also takes tensors on
    the meta device.
    """
    model = as_module(model)
    include, exclude = globs_of("include", include), globs_of("exclude", exclude)
    kinds = DEFAULT_TYPES if types is None else _kinds(types)
    reshard_(model)
    refuse_flat(model)
    if isinstance(model, Loose) and model.state and not include:
        raise ValueError(
            "this mapping is the state dict of a model: it holds biases or statistics beside the weights, and does not say "
            "which layers the weights belong to. Pass the model itself, or name the tensors to prune in include=, whose axis 0 "
            "is then taken as the outputs."
        )
    everything = list(slots(model))
    packed = {name: Slot(f"{name}.weight" if name else "weight", m, "weight") for name, m in packed_layers(model).items()}
    kind = "the mapping" if isinstance(model, Loose) else type(model).__name__
    if not everything and not packed:
        raise ValueError(f"{kind} has no parameters, so there is nothing to prune")
    all_match(model, [*everything, *packed.values()], include, "include")
    all_match(model, [*everything, *packed.values()], exclude, "exclude")
    adapters = adapter_parameters(model)
    found: list[Target] = []
    skipped = {slot.name: _why_packed(name, slot, include, exclude, kinds) for name, slot in packed.items()}
    for slot in everything:
        reason = _reason(slot, include, exclude, kinds, meta)
        if reason is None and id(slot.tensor) in adapters and not _named(slot, include):
            reason = "an adapter (PEFT); name it in include= to prune it"
        if reason is None:
            found.append(Target(slot, layout_of(slot.module, tuple(local(slot.tensor).shape), slot.attribute)))
        else:
            skipped |= dict.fromkeys((slot.name, *slot.also), reason)
    if not found:
        why = "; ".join(sorted(set(skipped.values())))
        advice = "load its weights first" if set(skipped.values()) == {_META} else "widen include=, types= or exclude="
        raise ValueError(f"no tensor of {kind} is left to prune ({why}); {advice}")
    return found, skipped


def globs_of(argument: str, given: Globs) -> tuple[str, ...]:
    if given is None:
        return ()
    globs = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{argument}={given!r} must be a name or glob such as 'encoder.*', or several of them")
    return globs


def _kinds(given: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    kinds = tuple(given) if isinstance(given, Iterable) else (given,)
    if not kinds or isinstance(given, type) or not all(isinstance(kind, type) for kind in kinds):
        raise TypeError(f"types={given!r} must be a sequence of layer types such as [nn.Linear, nn.Embedding]")
    return kinds


def _names(slot: Slot) -> list[str]:
    """All names that a glob can match: those of the parameter, of its module, and of the parameters it is tied to.

    Names are also matched without the parts that wrappers such as torch.compile add.
    """
    parameters = _with_bare(slot.name, *slot.also)
    return [*parameters, *(name.rpartition(".")[0] for name in parameters)]


def _with_bare(*names: str) -> list[str]:
    return list(dict.fromkeys((*names, *map(bare_name, names))))


def _matches(slot: Slot, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in _names(slot))


def all_match(model: nn.Module, everything: list[Slot], globs: Iterable[str], which: str) -> None:
    """Raises for a glob of the argument `which` that matches no parameter and no module."""
    modules = set(_with_bare(*(name for name, _ in model.named_modules() if name)))
    for glob in globs:
        if not any(_matches(slot, [glob]) for slot in everything) and not any(fnmatchcase(m, glob) for m in modules):
            names = [slot.name for slot in everything] + sorted(modules)
            raise ValueError(f"{which}={glob!r} matches no parameter and no module of the model.{nearest_glob(glob, names)}")


def under(slot: Slot, globs: Sequence[str]) -> bool:
    """Whether a glob matches the slot or one of the modules that contain it."""
    if not globs:
        return False
    names = [name.split(".") for name in _with_bare(slot.name, *slot.also)]
    parents = {".".join(parts[:n]) for parts in names for n in range(1, len(parts))}
    return _matches(slot, globs) or any(fnmatchcase(parent, glob) for glob in globs for parent in parents)


def _why_packed(name: str, slot: Slot, include: Sequence[str], exclude: Sequence[str], kinds: tuple[Kind, ...]) -> str:
    """Why a compressed layer is skipped. Raises for one that would be a target, because it has no weight to prune."""
    if under(slot, exclude):
        return "excluded"
    if include and not under(slot, include):
        return "not included"
    if not _named(slot, include) and not is_kind(slot.module.stood, kinds):  # type: ignore[arg-type]
        return f"compressed, and {slot.module.stood.__name__} is not among the types"  # type: ignore[union-attr]
    raise ValueError(
        f"{name!r} is compressed, so it has no weight to prune. Call sc.decompress_(model) first, and sc.compress_ again "
        f"afterwards; or skip it with exclude={name!r}. The model is unchanged."
    )


def _named(slot: Slot, include: Sequence[str]) -> bool:
    """Whether a name without a wildcard selects this slot, so that its type does not matter."""
    return any(not set(glob) & set("*?[") and under(slot, [glob]) for glob in include)


def _reason(slot: Slot, include: Sequence[str], exclude: Sequence[str], kinds: tuple[Kind, ...], meta: bool) -> str | None:
    """Why a parameter is skipped, or None if it is a target."""
    tensor = slot.tensor
    if under(slot, exclude):
        return "excluded"
    if isinstance(slot.module, parametrize.ParametrizationList):
        return "parametrized: its values are computed; remove the parametrization first"
    base, _, suffix = slot.attribute.rpartition("_")
    if suffix in ("g", "v", "orig", "bar") and isinstance(slot.module.__dict__.get(base), Tensor):
        return f"{base!r} is computed from it by a hook (weight_norm, nn.utils.prune): remove that first"
    if is_lazy(tensor):
        return "not initialised: it has no values yet"
    if tensor.dtype not in RANKED:
        return f"{tensor.dtype} values cannot be ranked"
    if tensor.numel() > 1 and any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "its elements share memory (expanded): give it memory of its own first"
    if tensor.is_meta and not meta:
        return _META
    if include and not under(slot, include):
        return "not included"
    if isinstance(slot.module, Loose):
        if slot.module.state and tensor.ndim < 2 and not _named(slot, include):
            return "a vector (bias, scale or statistics); name it in include= to prune it"
        return "empty" if tensor.numel() == 0 else None
    experts = kinds is DEFAULT_TYPES and is_experts(slot.module, tuple(tensor.shape))
    strangers = [type(owner).__name__ for owner, _ in slot.owners if not is_kind(owner, kinds) and not experts]
    if strangers and not _named(slot, include):
        tied = "tied: " if len(slot.owners) > 1 else ""
        return f"{tied}{strangers[0]} is not among the types; pass types= or name it in include="
    if (tensor.ndim < 2 or not is_weight(slot.module, slot.attribute)) and slot.name not in include:
        return "a vector (bias or scale); name it in include= to prune it"
    if tensor.numel() == 0:
        return "empty"
    return None
