"""Decides whether a cut is exact, and makes it so where possible: masks units, propagates their values, folds, rescales."""

from .fold import Folds, find, fold_
from .weights import Keep, MaskedWeights
from .wiring import Wiring, masked_places, units_along

__all__ = ["Folds", "Keep", "MaskedWeights", "Wiring", "find", "fold_", "masked_places", "units_along"]
