"""Decides whether a cut is exact: propagates the values of removed units, folds constants, rescales."""

from .fold import Folds, find, fold_
from .wiring import Silence, Wiring, silenced, tensors_in, units_along

__all__ = ["Folds", "Silence", "Wiring", "find", "fold_", "silenced", "tensors_in", "units_along"]
