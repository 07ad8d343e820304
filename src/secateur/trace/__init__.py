"""Runs a model once on example inputs and records its operators, its axes and where its integers come from."""

from .attributes import Change, solve_attributes, undetermined
from .equations import axes_in, bound_axes, signature
from .outline import Outlined, ValueRead
from .planner import plan_counts
from .provenance import Dim, evaluate
from .replay import LeftTrace, Replay, paired
from .run import GIVEN, Trace, answers, main_outputs, trace
from .tracer import Ref, Step

__all__ = [
    "Change",
    "Dim",
    "GIVEN",
    "LeftTrace",
    "Outlined",
    "Ref",
    "Replay",
    "Step",
    "Trace",
    "ValueRead",
    "answers",
    "axes_in",
    "bound_axes",
    "evaluate",
    "main_outputs",
    "paired",
    "plan_counts",
    "signature",
    "solve_attributes",
    "trace",
    "undetermined",
]
