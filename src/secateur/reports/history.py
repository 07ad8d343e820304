"""The models between the steps: the results of calls are undone on copies, as far as they can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..activations import Gates
from ..distill import Distilled
from ..edit import copied
from ..execute import Bench, Compressed, Compression, decompress_
from ..plans import Plan
from ..reorder import Reordering
from ..surgery import Shrunk

Action = Plan | Shrunk | Compression | Gates | Distilled | Reordering
Result = Action | Bench

# How the page names a step and the model after it.
NAMES: dict[type, tuple[str, str]] = {
    Shrunk: ("shrink", "shrunk"),
    Plan: ("prune_", "pruned"),
    Compression: ("compress_", "compressed"),
    Gates: ("gate_", "gated"),
    Distilled: ("distill_", "distilled"),
    Reordering: ("reorder_", "reordered"),
}


@dataclass(frozen=True)
class Version:
    """A model as it was at one time, if that is known, with the call that made it and the result of that call."""

    name: str
    how: str
    model: nn.Module | None
    result: Action | None = None


def versions(actions: Sequence[Action], before: nn.Module | None, after: nn.Module | None) -> list[Version]:
    """The model before and after each action. A model that can no longer be built is None."""
    now = after if after is not None else _made_by(actions, before)
    found: list[Version] = []
    for action in reversed(actions):
        how, name = NAMES[type(action)]
        found.append(Version(name, f"sc.{how}", now, action))
        now = _undone(action, now)
    if not actions and after is not None:
        found.append(Version("after", "", after))
        now = None
    first = now if before is None else before
    return _numbered([Version("dense" if actions else "before", "", first), *reversed(found)])


def named(stages: Mapping[str, nn.Module], actions: Sequence[Action]) -> list[Version]:
    """The versions that the caller kept. Each action belongs to a stage, in order, where there is one for each."""
    paired = [None, *actions] if len(stages) == len(actions) + 1 else [None] * len(stages)
    return [
        Version(name, "" if action is None else f"sc.{NAMES[type(action)][0]}", model, action)
        for (name, model), action in zip(stages.items(), paired)
    ]


def dense_form(model: nn.Module) -> nn.Module:
    """The model with plain layers: itself, or a copy if some of its layers are compressed."""
    model = getattr(model, "_orig_mod", model)  # the module under torch.compile
    if any(isinstance(module, Compressed) for module in model.modules()):
        return decompress_(copied(model))
    return model


def _made_by(actions: Sequence[Action], before: nn.Module | None) -> nn.Module | None:
    """The model that the last action made or holds. A plan alone is applied to a copy of the model before."""
    last = actions[-1] if actions else None
    if isinstance(last, Shrunk):
        return last.small
    if isinstance(last, Gates):
        return last.model
    if isinstance(last, Plan) and len(actions) == 1 and before is not None:
        model = copied(before)
        replace(last, dense={}).apply_(model)
        return model
    return None


def _undone(action: Action, model: nn.Module | None) -> nn.Module | None:
    """The model before the action, as a copy, or None if it is gone."""
    if isinstance(action, Shrunk):
        return action.original
    if model is None:
        return None
    if isinstance(action, Compression):
        return dense_form(model)
    if isinstance(action, Plan | Distilled) and not action.dense:
        return None
    model = copied(model)
    if isinstance(action, Gates):
        Gates.of(model).undo_()
    elif isinstance(action, Reordering):
        action.undo_(model)
    else:
        replace(action, dense=dict(action.dense)).undo_(model)
    return model


def _numbered(found: list[Version]) -> list[Version]:
    """The same, with a number where two versions would have one name."""
    names = [version.name for version in found]

    def name(place: int) -> str:
        own = names[place]
        return own if names.count(own) == 1 else f"{own} {names[: place + 1].count(own)}"

    return [replace(version, name=name(place)) for place, version in enumerate(found)]
