"""Errors for arguments that do not exist: they suggest our name for an argument of another library, or the nearest name."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from ._tree import nearest

P = ParamSpec("P")
R = TypeVar("R")

_AMOUNT = [
    ("channels", "channels=, params=, flops= or latency= is the fraction that remains: 0.7 removes 30 %"),
    ("count", "sparsity= is the fraction to prune, count= the number of units"),
    ("levels", "levels= are the sparsities to measure"),
    ("vary", "search finds the number; vary={'prune.sparsity': (0.3, 0.9)} limits its range"),
    ("sparsity", "sparsity= is the fraction that becomes zero"),
]
_EXCLUDE = [("exclude", "exclude= takes the names, or globs, of layers that stay whole")]
_INCLUDE = [
    ("include", "include= takes the names, or globs, of the layers to prune"),
    ("at", "at= takes the names, or globs, of the layers whose inputs are gated"),
    ("channels", "channels= takes ratios by name, such as channels={'layer1.*': 0.5}; exclude= names what stays whole"),
]
_DATA = [
    ("data", "data= takes batches: a DataLoader, or a list such as [batch]"),
    ("example_inputs", "example_inputs= takes one set of inputs: a tensor, a tuple or a mapping"),
]
_SCHEDULE = [
    ("steps", "steps= is the number of training steps"),
    ("end", "end= is the step at which the final number is reached"),
    ("ste", "sparsity= takes a schedule, such as sparsity=sc.cubic(0.9, end=1000)"),
    ("count", "sc.Pruner, which prunes while a model trains, takes sparsity=sc.cubic(0.9, end=1000)"),
]
_PATTERN = [
    ("pattern", 'pattern= says what is pruned together: "2:4" keeps 2 of 4, "out" prunes whole outputs'),
    ("channels", "shrink removes whole channels and heads; sc.prune_ has pattern= and method="),
]
_ROUNDS = [("seconds", "seconds= is the measuring time for each model")]
# Arguments of torch.nn.utils.prune, torch.ao.pruning, Torch-Pruning and llm-compressor, and arguments of our own that another
# function has: {name: [(our argument, what to say)]}. The first entry counts whose argument the function has; "" fits any.
FOREIGN: dict[str, list[tuple[str, str]]] = {
    **dict.fromkeys(("amount", "ratio", "pruning_ratio", "prune_ratio", "ch_sparsity", "sparsity_level"), _AMOUNT),
    **dict.fromkeys(("sparsity", "target_sparsity", "level"), _AMOUNT),
    **dict.fromkeys(("calibration", "calibration_data", "calib_data", "dataset", "dataloader", "loader", "data"), _DATA),
    **dict.fromkeys(("inputs", "example_inputs"), _DATA),
    **dict.fromkeys(("ignore", "ignored_layers", "skip"), _EXCLUDE),
    **dict.fromkeys(("include", "layers", "modules", "targets", "target_modules"), _INCLUDE),
    **dict.fromkeys(("schedule", "scheduler", "steps", "epochs", "iterative_steps"), _SCHEDULE),
    **dict.fromkeys(("n", "m", "dim", "structured", "pattern", "method"), _PATTERN),
    **dict.fromkeys(("repeat", "repeats", "runs", "iters", "iterations", "rounds"), _ROUNDS),
    "heads": [
        (
            "channels",
            "channels= (or params=, flops=) removes attention heads too; channels={name: 0.5} cuts one group of units",
        ),
        ("", "sc.shrink removes attention heads"),
    ],
    "width": [("channels", "channels= is the fraction of the channels that remains")],
    "spread": [("channels", "channels= takes ratios by name, such as channels={'layer1.*': 0.5}")],
    "round_to": [
        ("multiple_of", "multiple_of= keeps sizes at multiples of a number"),
        ("", "sc.shrink, which removes channels, has multiple_of= for it"),
    ],
    "importance": [("criterion", "criterion= scores what is pruned")],
    "pruning_method": [("criterion", "criterion= scores what is pruned")],
    "global_pruning": [("scope", 'scope="global" lets all tensors compete')],
    "dtype": [("store", "store=torch.bfloat16 stores the weights in half the bytes")],
    "format": [("objective", "all formats that fit are measured, and each layer gets the best one")],
    "device": [("", "it works where the model is; move the model first, with model.to(device)")],
}
RENAMED = {"inputs": "example_inputs"}  # old names, which are accepted with a warning


def unknown_argument(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an argument that a function does not have."""
    known = ["", *known]
    hint = next((f"; {text}" for ours, text in FOREIGN.get(name, ()) if ours in known), f".{nearest(name, known)}")
    return TypeError(f"{function} has no argument {name}={hint}")


def hints(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that errors for wrong arguments suggest the right ones.

    An unknown keyword raises `unknown_argument`, too many positional arguments raise a list of the keywords. The names in
    `RENAMED` are accepted, with a FutureWarning.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.name != "self"]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    kinds = {p.kind for p in parameters}
    shown = function.__qualname__.removesuffix(".__init__")

    def renamed(given: dict[str, Any]) -> dict[str, Any]:
        for old, new in RENAMED.items():
            if old in given and old not in known and new in known and new not in given:
                warnings.warn(
                    f"{shown}: {old}= is called {new}= now; the old name will be removed in version 0.2",
                    FutureWarning,
                    stacklevel=3,
                )
                given = {**{name: value for name, value in given.items() if name != old}, new: given[old]}
        return given

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = renamed(kwargs)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for name in given:
                if name not in known:
                    raise unknown_argument(shown, name, known)
        if len(args) > len(by_place) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise _too_many(shown, len(args), by_place, known)
        return function(*args, **given)  # type: ignore[call-arg]  # the same keywords, but for their names

    return checked


def _too_many(shown: str, count: int, by_place: list[str], known: list[str]) -> TypeError:
    """The error for more positional arguments than a function takes."""
    own = [name for name in by_place if name != "self"]
    named = [f"{name}=" for name in known if name not in by_place]
    rest = f"; pass the others by name: {', '.join(named)}" if named else ""
    values = count - (len(by_place) - len(own))
    return TypeError(f"{shown} takes {' and '.join(own) or 'nothing'} by position, and {values} values were given{rest}")
