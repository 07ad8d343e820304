"""Scores of units, and repairs of a cut model from data."""

from .importance import (
    Scores,
    UnitCriterion,
    activation_variance,
    bn_scale,
    comparable,
    fpgm,
    structure,
    unit_criterion,
    unit_scores,
)
from .norms import checked, reestimate_
from .reconstruct import reconstruction
from .refit import refit_

__all__ = [
    "Scores",
    "UnitCriterion",
    "activation_variance",
    "bn_scale",
    "checked",
    "comparable",
    "fpgm",
    "reconstruction",
    "reestimate_",
    "refit_",
    "structure",
    "unit_criterion",
    "unit_scores",
]
