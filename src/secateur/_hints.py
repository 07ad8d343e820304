"""Errors for arguments that do not exist: the nearest name, or our word for an argument of another pruning library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from ._tree import nearest

P = ParamSpec("P")
R = TypeVar("R")

_AMOUNT = [
    ("channels", "channels=, params=, flops= or latency= is the fraction that remains: 0.7 removes 30 %"),
    ("count", "sparsity= is the fraction to prune, count= the number of units"),
    ("sparsity", "sparsity= is the fraction"),
]
# Arguments of torch.nn.utils.prune, torch.ao.pruning and Torch-Pruning: {name: [(our argument, what to say)]}. The first entry
# counts whose argument the function has; "" fits any function.
FOREIGN: dict[str, list[tuple[str, str]]] = {
    **dict.fromkeys(("amount", "pruning_ratio", "ch_sparsity", "sparsity_level"), _AMOUNT),
    "sparsity": _AMOUNT,
    "round_to": [
        ("multiple_of", "multiple_of= keeps sizes at multiples of a number"),
        ("", "sc.shrink, which removes channels, has multiple_of= for it"),
    ],
    "importance": [("criterion", "criterion= scores what is pruned")],
    "pruning_method": [("criterion", "criterion= scores what is pruned")],
    "ignored_layers": [("exclude", "exclude= takes the names, or globs, of layers that stay whole")],
    "global_pruning": [("scope", 'scope="global" lets all tensors compete')],
}


def unknown_argument(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an argument that a function does not have."""
    known = ["", *known]
    hint = next((f"; {text}" for ours, text in FOREIGN.get(name, ()) if ours in known), f".{nearest(name, known)}")
    return TypeError(f"{function} has no argument {name}={hint}")


def hints(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that an unknown keyword raises `unknown_argument`."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    shown = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(shown, name, known)
        return function(*args, **kwargs)

    return checked
