"""Runs a model once on example inputs, and records its operators, its axes and where its integers come from.

- `run`: `trace(model, inputs)`, the entry point; `result`: the `Trace` that it returns
- `tracer`: the dispatch mode that follows axes through operators; `recurrent`: initial states of recurrent layers
- `provenance`: integers that remember their source; `size_uses`: where integers are used as sizes
- `constructor`, `layer_sizes`, `attributes`: which attributes change with a cut, and to which values
- `untraced`: modules that the run did not reach
- `outline`: runs without the arithmetic; `replay`: runs again along a trace
- `outputs`, `run_context`: outputs, and context managers around a run

    traced = trace(model, inputs)
    counts = plan_counts(traced, {group: group.size // 2 for group in traced.prunable}).counts
"""

from .attributes import Change, solve_attributes, undetermined
from .outline import Outlined, ValueRead
from .outputs import main_outputs, output_shapes
from .replay import LeftTrace, Replay, paired
from .result import Trace, plan_counts
from .run import GIVEN, trace
from .tracer import Ref, Step

__all__ = [
    "Change",
    "GIVEN",
    "LeftTrace",
    "Outlined",
    "Ref",
    "Replay",
    "Step",
    "Trace",
    "ValueRead",
    "main_outputs",
    "output_shapes",
    "paired",
    "plan_counts",
    "solve_attributes",
    "trace",
    "undetermined",
]
