"""The record, in a model, of what was done to it: ("shrink", recipe) and ("prune", recipe), the first one first.

That is text for people. With each step are stored the arguments for a recipe that repeats it, or the reason why there are none.
The cuts that rebuild a model are stored apart (`cuts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from .._tree import bare_name
from .cuts import history

Step = tuple[str, str]
Arguments = dict[str, Any] | str  # plain data; a text is the reason why a recipe cannot repeat the step
UNKNOWN = "its arguments were not recorded"
IN_TRAINING = "a Pruner made it during training"
_STEPS = "_secateur_steps"
_ORDERS = "_secateur_orders"


def steps_of(model: nn.Module) -> list[Step]:
    """What was done to the models inside a model, the innermost first, and then to the model itself.

    Cuts that were applied by other means come before all that.
    """
    return [step for step, _ in record_of(model)]


def record_of(model: nn.Module) -> list[tuple[Step, Arguments]]:
    """The steps of `steps_of`, each with the arguments that a recipe would repeat it with, or the reason why none can."""
    found = [(bare_name(path), _own(module)) for path, module in saved_module(model).named_modules() if _STEPS in vars(module)]
    made: list[tuple[Step, Arguments]] = []
    for path, steps in sorted(found, key=lambda item: -len(item[0].split(".")) if item[0] else 0):
        for (what, recipe), arguments in steps:
            inside = f"{recipe} (in {path})" if path else recipe
            made.append(((what, inside), f"it changed the module {path!r} alone" if path else arguments))
    known = {recipe for _, steps in found for (_, recipe), _ in steps}
    others = [cuts.recipe for cuts in history(saved_module(model)) if cuts.recipe and cuts.recipe not in known]
    return [*((("shrink", recipe), UNKNOWN) for recipe in others), *made]


def record_(model: nn.Module, step: Step, arguments: Arguments = UNKNOWN, replaces: Step | None = None) -> None:
    """Adds a step to the record, in the place of `replaces` if that is there.

    A repetition of the last step with the same arguments is not added. The text of a step does not name all arguments.
    """
    steps, new = _own(model), (step, arguments)
    if replaces is not None and any(one == replaces for one, _ in steps):
        steps = [new if one[0] == replaces else one for one in steps]
    elif steps[-1:] != [new]:
        steps.append(new)
    _put(model, steps)


def forget_(model: nn.Module, step: Step, arguments: Arguments | None = None) -> None:
    """Takes a step that was undone, the last of its kind (and with these arguments), from the record."""
    steps = _own(model)
    for place in [i for i, (one, given) in enumerate(steps) if one == step and arguments in (None, given)][-1:]:
        del steps[place]
    _put(model, steps)


def forget_all_(model: nn.Module, what: str) -> None:
    """Takes all steps of one kind from the record of the model."""
    _put(model, [one for one in _own(model) if one[0][0] != what])


def restore_record_(model: nn.Module, record: Sequence[tuple[Step, Arguments]]) -> None:
    """Stores these steps as all that was done to the model and to the models inside it."""
    for module in model.modules():
        vars(module).pop(_STEPS, None)
    _put(model, record)


def order_of(model: nn.Module, key: str) -> tuple[float, ...] | None:
    """The numbers that `set_order_` stored for an order of channels; None if the model does not have this order.

    Copies of the model have it too.
    """
    return dict(vars(saved_module(model)).get(_ORDERS, ())).get(key)


def set_order_(model: nn.Module, key: str, seen: Sequence[float] | None) -> None:
    """Remembers in the model that its channels have the order with this key, with numbers; with None, that they do not."""
    space = vars(saved_module(model))
    orders = {other: numbers for other, numbers in space.pop(_ORDERS, ()) if other != key}
    if seen is not None:
        orders[key] = tuple(seen)
    if orders:
        space[_ORDERS] = tuple(orders.items())


def saved_module(model: nn.Module) -> nn.Module:
    """The module that is saved: the one inside torch.compile, DistributedDataParallel and DataParallel."""
    wraps = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
    inside = model.module if wraps else getattr(model, "_orig_mod", model)
    return model if inside is model else saved_module(inside)


def _put(model: nn.Module, record: Sequence[tuple[Step, Arguments]]) -> None:
    space = vars(saved_module(model))
    space.pop(_STEPS, None)
    if record:
        space[_STEPS] = tuple((*step, arguments) for step, arguments in record)


def _own(model: nn.Module) -> list[tuple[Step, Arguments]]:
    held = vars(saved_module(model)).get(_STEPS, ())
    return [((what, recipe), arguments[0] if arguments else UNKNOWN) for what, recipe, *arguments in held]
