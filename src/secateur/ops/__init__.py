"""What each operator does to axes."""

from . import arithmetic, indexing, views  # noqa: F401  (importing them registers their rules)
from .arithmetic import SPATIAL
from .record import Axes, Call, Rule, arguments_of, elementwise, lookup, name_of, pointwise, rule

__all__ = ["SPATIAL", "Axes", "Call", "Rule", "arguments_of", "elementwise", "lookup", "name_of", "pointwise", "rule"]
