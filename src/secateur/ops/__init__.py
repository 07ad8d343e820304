"""One record per operator: how axes pass, what zero, constant and varying inputs become, scaling, FLOPs, shapes.

`register` teaches the package an operator: everything about it in one call. `lookup` finds the record of an operator.
"""

from . import arithmetic, indexing, views  # noqa: F401  (importing them registers their operators)
from .arithmetic import SPATIAL
from .flops import flop_formula
from .record import (
    Attention,
    Axes,
    AxisRule,
    Call,
    Contraction,
    Convolution,
    Operator,
    arguments_of,
    elementwise,
    lookup,
    name_of,
    operator,
    register,
)
from .shapes import Blank, Unfit

__all__ = [
    "register",
    "operator",
    "lookup",
    "Operator",
    "Contraction",
    "Convolution",
    "Attention",
    "Call",
    "Axes",
    "AxisRule",
    "elementwise",
    "arguments_of",
    "name_of",
    "SPATIAL",
    "flop_formula",
    "Blank",
    "Unfit",
]
