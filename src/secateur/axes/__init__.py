"""The algebra of axes, without any model: which units of which tensors are removed together, and how many may stay.

- `expressions`: a dimension of a tensor as an expression over atoms (sets of units)
- `align`: unites, splits and reshapes expressions
- `groups`: coupled groups, made of the atoms in a model's tensors
- `integers`: expressions for the integers in a model's code
- `equations`: constraints on counts that follow from these integers
- `solutions`: the value of an integer on which all solutions of equations agree
- `search`, `planner`: legal counts nearest to the wanted ones

    width = fresh(12)
    heads, head_dim = reshape([width], [3, 4])     # width is now heads * head_dim
"""

from .align import closed, collapse, reshape, split_at, split_outer, take, unify
from .equations import (
    AttrPlace,
    Constraint,
    FormulaUse,
    Guard,
    SizeUse,
    attr_place,
    axes_in,
    bindings,
    bound_axes,
    constraints,
    flag_sizes_in_formulas,
)
from .expressions import (
    ONE,
    ZERO,
    Atom,
    Cat,
    Expr,
    Fam,
    Prod,
    atoms,
    axis_signature,
    factors,
    families,
    flag,
    freeze,
    fresh,
    keep_mask,
    new_size,
    norm,
    pick,
)
from .groups import HARMLESS, KERNEL, Group, Member, Role, build_groups, skipped
from .integers import (
    Arithmetic,
    Attr,
    AttrId,
    AttrKey,
    AxisSize,
    Const,
    Source,
    attributes_in,
    evaluate,
    is_literal,
    signature,
)
from .planner import PlannedCounts, Planner
from .solutions import Equation, determined

__all__ = [
    # expressions
    "Atom", "Cat", "Expr", "Fam", "ONE", "Prod", "ZERO", "atoms", "axis_signature", "factors", "families", "flag", "freeze",
    "fresh", "keep_mask", "new_size", "norm", "pick",
    # alignment
    "closed", "collapse", "reshape", "split_at", "split_outer", "take", "unify",
    # groups
    "Group", "HARMLESS", "KERNEL", "Member", "Role", "build_groups", "skipped",
    # integers
    "Arithmetic", "Attr", "AttrId", "AttrKey", "AxisSize", "Const", "Source", "attributes_in", "evaluate", "is_literal",
    "signature",
    # constraints and counts
    "AttrPlace", "Constraint", "Equation", "FormulaUse", "Guard", "PlannedCounts", "Planner", "SizeUse", "attr_place",
    "axes_in", "bindings", "bound_axes", "constraints", "determined", "flag_sizes_in_formulas",
]  # fmt: skip
