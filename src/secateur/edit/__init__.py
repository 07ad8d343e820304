"""Edits a model safely. The room that `surgery`, `io` and `drop_in` share; import from here, not from its modules.

- `tensors`: which tensors a model owns, stand-ins for them during a run, new contents for one of them.
- `cuts`: a cut as plain data, the check that a model fits it, its application, and the record of it in the model.
- `provenance`: the record, in a model, of what was done to it.
- `configs`: config objects, their numbers, and models built from them without memory for weights.
- `copies`: deep copies with hooks.
- `guards`: all or nothing, evaluation mode, RNG state, plain kernels, and runs that leave the model as it was.
"""

from .configs import (
    Place,
    built,
    built_from,
    built_model,
    check_no_arguments,
    held_objects,
    number_at,
    numbers_of,
    with_numbers,
)
from .copies import copied
from .cuts import (
    Attribute,
    Cuts,
    Indices,
    Passing,
    apply_cuts_,
    check_fits,
    history,
    is_cut,
    object_at,
    remember_,
    select_indices,
    without,
    write_attribute,
)
from .guards import (
    Inputs,
    RngGuard,
    Snapshot,
    all_or_nothing,
    batch_error,
    check_inputs,
    eager_experts,
    eval_mode,
    fresh_casts,
    half_products,
    has_bfloat16,
    inputs_error,
    no_mha_fastpath,
    plain_kernels,
    preserve_rng,
    raised_outside,
    run,
    split_inputs,
    why_failed,
)
from .provenance import (
    IN_TRAINING,
    UNKNOWN,
    Arguments,
    Step,
    forget_,
    forget_all_,
    order_of,
    record_,
    record_of,
    restore_record_,
    saved_module,
    set_order_,
    steps_of,
)
from .tensors import OWN, Slot, StandIns, attributes, owned_tensors, put_, states, tensors_inside

__all__ = [
    # tensors
    "OWN",
    "Slot",
    "StandIns",
    "attributes",
    "owned_tensors",
    "put_",
    "states",
    "tensors_inside",
    # cuts
    "Attribute",
    "Cuts",
    "Indices",
    "Passing",
    "apply_cuts_",
    "check_fits",
    "history",
    "is_cut",
    "object_at",
    "remember_",
    "select_indices",
    "without",
    "write_attribute",
    # provenance
    "IN_TRAINING",
    "UNKNOWN",
    "Arguments",
    "Step",
    "forget_",
    "forget_all_",
    "order_of",
    "record_",
    "record_of",
    "restore_record_",
    "saved_module",
    "set_order_",
    "steps_of",
    # configs
    "Place",
    "built",
    "built_from",
    "built_model",
    "check_no_arguments",
    "held_objects",
    "number_at",
    "numbers_of",
    "with_numbers",
    # copies
    "copied",
    # guards and runs
    "Inputs",
    "RngGuard",
    "Snapshot",
    "all_or_nothing",
    "batch_error",
    "check_inputs",
    "eager_experts",
    "eval_mode",
    "fresh_casts",
    "half_products",
    "has_bfloat16",
    "inputs_error",
    "no_mha_fastpath",
    "plain_kernels",
    "preserve_rng",
    "raised_outside",
    "run",
    "split_inputs",
    "why_failed",
]
