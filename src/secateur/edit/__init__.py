"""Reads and edits a model safely: owned tensors, cuts applied all or nothing, copies, guards around runs, configs."""

from .configs import Place, built_from, number_at, numbers_of, with_numbers
from .copies import copied
from .cuts import (
    Attribute,
    Cuts,
    Indices,
    Passing,
    apply_cuts_,
    check_fits,
    held_objects,
    history,
    is_cut,
    object_at,
    put_,
    remember_,
    select_indices,
    without,
    write_attribute,
)
from .guards import all_or_nothing, fresh_casts, keep_rng_state, plain_kernels, preserve_rng, run
from .tensors import OWN, Slot, StandIns, owned_tensors, states, tensors_inside

__all__ = [
    "object_at",
    "Indices",
    "Attribute",
    "Cuts",
    "OWN",
    "Passing",
    "Place",
    "Slot",
    "StandIns",
    "all_or_nothing",
    "apply_cuts_",
    "built_from",
    "check_fits",
    "copied",
    "fresh_casts",
    "held_objects",
    "history",
    "is_cut",
    "keep_rng_state",
    "number_at",
    "numbers_of",
    "owned_tensors",
    "plain_kernels",
    "preserve_rng",
    "put_",
    "remember_",
    "run",
    "select_indices",
    "states",
    "tensors_inside",
    "with_numbers",
    "without",
    "write_attribute",
]
