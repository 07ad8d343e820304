"""One record per operator: how axes pass, what zero, constant and varying inputs become, scaling, FLOPs, shapes.

`register` teaches the package an operator: everything about it in one call. `lookup` finds the record of an operator.
"""

from . import arithmetic, indexing, views  # noqa: F401  (importing them registers their operators)
from .arithmetic import SPATIAL
from .flops import flop_formula
from .integers import argument, in_formula, reads, view_sizes
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
    lookup_function,
    name_of,
    operator,
    register,
)
from .shapes import Blank, Unfit

__all__ = [
    "register",
    "operator",
    "lookup",
    "lookup_function",
    "reads",
    "in_formula",
    "argument",
    "view_sizes",
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
