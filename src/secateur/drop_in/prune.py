"""The drop-in for `torch.nn.utils.prune`: change the import, and your code runs on this package's engine.

    from secateur.drop_in import prune      # was: import torch.nn.utils.prune as prune

Names, signatures, error types, hooks, state_dict keys and masks are torch's, also for a given seed. The classes are subclasses
of torch's, and the functions of either library work on modules that the other has pruned. Differences:

* Among exactly equal scores the lowest index is pruned first, on every device (torch: whichever `topk` returns).
* NaN cannot be ranked: a ValueError names the tensor, and nothing has changed (torch keeps NaN as if it were the largest).
* A call that fails leaves the module, or all modules of a global call, exactly as they were.
* Parameters keep their order through prune and remove; modules can be deep-copied; `module.weight` is up to date after an
  optimizer's step, `load_state_dict` and `.to()` (see `_upkeep` for the exceptions).
* `global_unstructured` accepts tensors on several devices and any iterable, and copies no weights. Importance scores must have
  the shape of their tensor (torch: the number of elements).
* A mask given to `custom_from_mask` is not kept beside `weight_mask`: `hook.mask` is None after it was applied.

As in torch, `amount` counts from what is left, an int is a number of units and a float a fraction, masks have the dtype of the
weight, and masked values still change with momentum and weight decay. To script or quantize a module, call `remove` first.
"""

from __future__ import annotations

import abc
import numbers as _numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.utils.prune as theirs
from torch import Tensor, nn

from ._masks import count
from ._methods import (
    L1_RULE,
    RANDOM_RULE,
    BasePruningMethod,
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    PruningContainer,
    RandomStructured,
    RandomUnstructured,
    chain,
    ones,
)
from ._module import all_or_nothing, commit, hook_of, kind
from ._pool import Member, keep_largest_of, one_vector, ranks_in_place, warn_of_strays
from ._upkeep import hooks, let_go

# Other attributes of torch's module, which its tests and user code read.
numbers, ABC, abstractmethod = _numbers, abc.ABC, abc.abstractmethod
_validate_pruning_amount_init = theirs._validate_pruning_amount_init
_validate_pruning_amount = theirs._validate_pruning_amount
_validate_structured_pruning = theirs._validate_structured_pruning
_compute_nparams_toprune = theirs._compute_nparams_toprune
_validate_pruning_dim = theirs._validate_pruning_dim
_compute_norm = theirs._compute_norm

_METHODS = (
    BasePruningMethod,
    PruningContainer,
    Identity,
    RandomUnstructured,
    L1Unstructured,
    RandomStructured,
    LnStructured,
    CustomFromMask,
)
for _method in _METHODS:  # pickled modules refer to the hooks by this public path
    _method.__module__ = __name__


def identity(module: nn.Module, name: str) -> nn.Module:
    """Adds mask and hook without pruning anything."""
    Identity.apply(module, name)
    return module


def random_unstructured(module: nn.Module, name: str, amount: float) -> nn.Module:
    """Prunes elements at random: `amount` of those left, as a number (int) or a fraction (float)."""
    RandomUnstructured.apply(module, name, amount)
    return module


def l1_unstructured(module: nn.Module, name: str, amount: float, importance_scores: Tensor | None = None) -> nn.Module:
    """Prunes the elements of smallest magnitude, or of smallest |importance_scores|."""
    L1Unstructured.apply(module, name, amount=amount, importance_scores=importance_scores)
    return module


def random_structured(module: nn.Module, name: str, amount: float, dim: int) -> nn.Module:
    """Prunes channels along `dim` at random."""
    RandomStructured.apply(module, name, amount, dim)
    return module


def ln_structured(
    module: nn.Module,
    name: str,
    amount: float,
    n: float | str,
    dim: int,
    importance_scores: Tensor | None = None,
) -> nn.Module:
    """Prunes the channels along `dim` with the smallest L`n` norm, of the tensor or of its importance scores."""
    LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores)
    return module


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """Prunes with a mask of the tensor's shape, in which 0 prunes."""
    CustomFromMask.apply(module, name, mask)
    return module


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: Any,
    importance_scores: dict[tuple[nn.Module, str], Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Prunes many tensors as if they were one. On any error none of them has changed.

    `pruning_method(**kwargs)` is an unstructured method. `importance_scores` maps (module, name) to the scores of that tensor.
    L1 and random pruning read the tensors in place; a method of your own receives all scores in one vector.
    """
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be an iterable of (module, name) pairs, not a {type(parameters).__name__}")
    if importance_scores is not None and not isinstance(importance_scores, dict):
        raise TypeError(
            f"importance_scores must be a dict from (module, name) to a tensor, not a {type(importance_scores).__name__}"
        )
    pairs = [(module, name) for module, name in parameters]
    if not pairs:
        raise ValueError("parameters is empty; give (module, name) pairs, such as (model.fc1, 'weight')")
    method = pruning_method(**kwargs)
    if method.PRUNING_TYPE != "unstructured":
        raise TypeError(
            f"global pruning needs a method of PRUNING_TYPE 'unstructured', and {pruning_method} is {method.PRUNING_TYPE!r}"
        )
    given = importance_scores or {}
    warn_of_strays(given, pairs)
    pool = [Member(at, module, name, given.get((module, name))) for at, (module, name) in enumerate(pairs)]
    masks = _compute_masks(method, pool)
    with all_or_nothing([module for module, _ in pairs]):
        for one in pool:
            new = CustomFromMask(torch.empty(0))
            old = hook_of(one.module, one.name)
            commit(one.module, one.name, old, chain(old, new, one.name), one.mask_with(masks.pop(0)))
            new._release()


def _compute_masks(method: Any, pool: Sequence[Member]) -> list[Tensor]:
    """Returns for each tensor what `method` keeps of it when all of them are one tensor."""
    if type(method).compute_mask is L1_RULE and ranks_in_place(pool):
        return keep_largest_of(pool, count(method.amount, sum(one.left for one in pool)))
    scores = one_vector(pool, values=type(method).compute_mask is not RANDOM_RULE)
    method._tensor_name = "parameters"
    mask = method.compute_mask(scores, default_mask=ones(method, scores))
    return list(mask.split([one.left for one in pool]))


def remove(module: nn.Module, name: str) -> nn.Module:
    """Makes the pruning of `name` permanent: removes hook, mask and original, and keeps the zeros."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
            hook.remove(module)
            del module._forward_pre_hooks[key]
            let_go(module)
            return module
    raise ValueError(f"{name!r} of {kind(module)} is not pruned, so there is nothing to remove")


def is_pruned(module: nn.Module) -> bool:
    """Returns whether any tensor of the module or of its submodules is pruned, by this library or by torch."""
    return any(True for child in module.modules() for _ in hooks(child))
