"""From a model and example inputs to coupled groups: which units of which tensors go together.

`trace` runs the model once and follows every axis; `plan_counts` finds legal counts, `solve_attributes` the integers that go
with them (`undetermined`: those it cannot tell), `keep_mask` what stays of a dim. `rule` and `elementwise` teach it operators.
"""

from .align import reshape, split_at, split_outer, take, unify
from .attributes import Change, solve_attributes, undetermined
from .axes import ONE, Atom, Cat, Expr, Prod, atoms, flag, freeze, fresh, keep_mask, new_size, norm
from .equations import Constraint
from .groups import Group, Member
from .planner import Counts, plan_counts
from .rules import Call, elementwise, rule
from .trace import Trace, trace

__all__ = [
    "trace",
    "Trace",
    "Group",
    "Member",
    "Constraint",
    "plan_counts",
    "Counts",
    "solve_attributes",
    "undetermined",
    "Change",
    "keep_mask",
    "new_size",
    "atoms",
    "norm",
    "rule",
    "elementwise",
    "Call",
    "unify",
    "freeze",
    "flag",
    "fresh",
    "reshape",
    "split_outer",
    "split_at",
    "take",
    "Expr",
    "Atom",
    "Prod",
    "Cat",
    "ONE",
]
