"""Scores of units, and repairs of a cut model from calibration data."""

from .importance import (
    Repair,
    UnitCriterion,
    UnitScores,
    activation_variance,
    bn_scale,
    comparable,
    fpgm,
    reap,
    structure,
    unit_criterion,
    unit_scores,
)
from .norms import list_batches, reestimate_
from .reconstruct import reconstruction
from .refit import refit_
from .surgeon import obs

UNIT_CRITERIA = {c.name: c for c in (fpgm, bn_scale, activation_variance, reconstruction, obs, reap)}

__all__ = [
    "Repair",
    "UNIT_CRITERIA",
    "UnitCriterion",
    "UnitScores",
    "activation_variance",
    "bn_scale",
    "comparable",
    "fpgm",
    "list_batches",
    "obs",
    "reap",
    "reconstruction",
    "reestimate_",
    "refit_",
    "structure",
    "unit_criterion",
    "unit_scores",
]
