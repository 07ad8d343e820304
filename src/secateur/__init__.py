"""Secateur: pruning for PyTorch. Score elements, fold them into units, let units compete in pools, keep what the budget
allows, and remember the result as masks outside the model."""

from ._axes import input_first
from .activations import Gates, gate_
from .budgets import erk, owl, uniform
from .criteria import (
    Criterion,
    criterion,
    fisher,
    grad,
    grad_square,
    input_norm,
    lamp,
    linear_grad,
    magnitude,
    movement,
    random,
    ria,
    snip,
    synflow,
    taylor,
    wanda,
    weight,
)
from .masks import Masks
from .patterns import Pattern
from .plan import Plan, plan
from .prune import Pruner, prune_
from .schedules import cosine, cubic, exponential, join, linear, one_shot
from .targets import targets

__version__ = "0.1.0"

__all__ = [
    "Criterion",
    "Gates",
    "Masks",
    "Pattern",
    "Plan",
    "Pruner",
    "cosine",
    "criterion",
    "cubic",
    "erk",
    "exponential",
    "fisher",
    "gate_",
    "grad",
    "grad_square",
    "input_first",
    "input_norm",
    "join",
    "lamp",
    "linear",
    "linear_grad",
    "magnitude",
    "movement",
    "one_shot",
    "owl",
    "plan",
    "prune_",
    "random",
    "ria",
    "snip",
    "synflow",
    "targets",
    "taylor",
    "uniform",
    "wanda",
    "weight",
]
