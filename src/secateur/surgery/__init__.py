"""Structured pruning: removes whole units from every tensor that carries them, so that the model gets smaller.

`shrink` makes a small copy, `shrink_` cuts in place; both are in `pipeline`, which reads from top to bottom. The other
modules: `request` (the keywords, checked), `names` (groups by name), `budget`, `search` and `sizes` (how many units stay),
`cut`, `masked` and `leftovers` (the small model), `runs`, `compare` and `verify` (checks), `caches`, `optimizers`, `experts`
(whole experts), `result` and `notes` (the plan). The rooms, which are imported through their fronts only: `exact` (which cuts
are exact), `depth` (whole blocks), `calibrate` (scores of units and repairs from data).
"""

from ..edit import Attribute, Cuts, apply_cuts_
from .calibrate import UnitCriterion, activation_variance, bn_scale, fpgm, obs, reap, reconstruction, unit_criterion
from .cut import cuts_of
from .exact import fold_
from .pipeline import shrink, shrink_
from .request import ShrinkRequest, check_request
from .result import GroupCut, Shrunk
from .sizes import FlopCount
from .verify import Verified

__all__ = [
    "shrink",
    "shrink_",
    "ShrinkRequest",
    "check_request",
    "Shrunk",
    "GroupCut",
    "Verified",
    "Cuts",
    "Attribute",
    "apply_cuts_",
    "UnitCriterion",
    "unit_criterion",
    "fpgm",
    "obs",
    "reap",
    "bn_scale",
    "activation_variance",
    "reconstruction",
    "cuts_of",
    "fold_",
    "FlopCount",  # for secateur.reports
]
