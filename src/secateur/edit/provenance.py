"""The record, in a model, of what was done to it: ("shrink", recipe) and ("prune", recipe), the first one first.

It is text for people. The cuts that rebuild a model are stored apart (`cuts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .._tree import bare_name
from .cuts import history

Step = tuple[str, str]
_STEPS = "_secateur_steps"


def steps_of(model: nn.Module) -> list[Step]:
    """What was done to the models inside a model, the innermost first, and then to the model itself.

    Cuts that were applied by other means come before all that.
    """
    found = [(bare_name(path), vars(module)[_STEPS]) for path, module in model.named_modules() if _STEPS in vars(module)]
    steps = [
        (what, f"{recipe} (in {path})" if path else recipe)
        for path, made in sorted(found, key=lambda item: -len(item[0].split(".")) if item[0] else 0)
        for what, recipe in made
    ]
    known = {recipe for _, made in found for _, recipe in made}
    return [*(("shrink", cuts.recipe) for cuts in history(model) if cuts.recipe and cuts.recipe not in known), *steps]


def record_(model: nn.Module, step: Step, replaces: Step | None = None) -> None:
    """Adds a step to the record, in the place of `replaces` if that is there. A repetition of the last step is not added."""
    steps = _own(model)
    if replaces in steps:
        steps = [step if one == replaces else one for one in steps]
    elif steps[-1:] != [step]:
        steps.append(step)
    _put(model, steps)


def forget_(model: nn.Module, step: Step) -> None:
    """Takes a step that was undone, the last of its kind, from the record."""
    steps = _own(model)
    for place in [place for place, one in enumerate(steps) if one == step][-1:]:
        del steps[place]
    _put(model, steps)


def restore_steps_(model: nn.Module, steps: Sequence[Step]) -> None:
    """Stores these steps as all that was done to the model and to the models inside it."""
    for module in model.modules():
        vars(module).pop(_STEPS, None)
    _put(model, steps)


def _put(model: nn.Module, steps: Sequence[Step]) -> None:
    space = vars(getattr(model, "_orig_mod", model))  # torch.compile: the module that is saved
    space.pop(_STEPS, None)
    if steps:
        space[_STEPS] = tuple(steps)


def _own(model: nn.Module) -> list[Step]:
    return list(vars(getattr(model, "_orig_mod", model)).get(_STEPS, ()))
