"""The pruning methods of `torch.nn.utils.prune`, as subclasses of torch's own classes that rank with this package's engine.

Constructors and the signatures of `apply` are torch's. `BasePruningMethod` overrides how a module is changed, and each method
how its mask is computed.
"""
# torch's abstract `compute_mask` has no annotations and no body, which pyright reads as "returns None":
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.utils.prune as theirs
from torch import Tensor, nn

from ._masks import count, count_channels, keep, random_like, spread, without
from ._module import all_or_nothing, commit, hook_of, kind, parameter_to_prune, rename
from ._upkeep import let_go


class BasePruningMethod(theirs.BasePruningMethod):
    """A rule that masks one tensor of a module, and the forward-pre-hook that applies the mask.

    A subclass defines `compute_mask` and `PRUNING_TYPE`, which decides what `compute_mask` receives of a tensor that was pruned
    before: "unstructured" (the elements that are left), "structured" (the channels that are left along an attribute `dim`) or
    "global" (everything). Methods that derive from torch's base class count as instances of this one.
    """

    PRUNING_TYPE: str

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return True if cls is BasePruningMethod and theirs.BasePruningMethod in other.__mro__ else NotImplemented

    @classmethod
    def apply(
        cls, module: nn.Module, name: str, *args: Any, importance_scores: Tensor | None = None, **kwargs: Any
    ) -> theirs.BasePruningMethod:
        """Prunes `name` of `module` with `cls(*args, **kwargs)` and returns the hook. On any error nothing has changed."""
        with all_or_nothing([module]):
            old = hook_of(module, name)
            method = cls(*args, **kwargs)
            hook = chain(old, method, name)
            original = parameter_to_prune(module, name, old)
            if importance_scores is not None and importance_scores.shape != original.shape:
                raise AssertionError(
                    f"importance_scores has shape {tuple(importance_scores.shape)} and {name!r} of {kind(module)} "
                    f"{tuple(original.shape)}; give one score for each element"
                )
            if old is not None:
                with torch.no_grad():
                    scores = old.apply_mask(module) if importance_scores is None else importance_scores
                default_mask = getattr(module, name + "_mask").detach()
            else:
                scores = original if importance_scores is None else importance_scores
                default_mask = ones(method, original)
            mask = hook.compute_mask(scores, default_mask=default_mask)
            commit(module, name, old, hook, mask.contiguous() if mask is default_mask else mask)
            method._release()
        return hook

    def _release(self) -> None:
        """Frees what is no longer needed once the mask is on the module."""

    def remove(self, module: nn.Module) -> None:
        """Makes the pruning of the tensor permanent. Does not remove the hook; the function `remove` does that too."""
        masked, name = self.apply_mask(module), self._tensor_name
        if name in vars(module):
            delattr(module, name)
        original = module._parameters[name + "_orig"]
        assert original is not None
        original.data = masked.data
        rename(module._parameters, name + "_orig", name)
        del module._buffers[name + "_mask"]
        setattr(module, name, original)  # an RNN updates its flat weights here
        let_go(module)


class PruningContainer(theirs.PruningContainer, BasePruningMethod):
    """The methods that pruned one tensor, in order. The last one computes the mask, from what the others left."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Returns `default_mask` with the mask of the last method on what it leaves. Does not write to `default_mask`."""
        method: Any = self[-1]
        mask = default_mask.to(dtype=t.dtype, copy=True, memory_format=torch.contiguous_format)
        if method.PRUNING_TYPE == "global":
            return method.compute_mask(t, default_mask=default_mask.clone()).to(dtype=mask.dtype)
        if method.PRUNING_TYPE == "unstructured":
            region: Any = default_mask == 1
        elif method.PRUNING_TYPE == "structured":
            region = _channels_left(method, default_mask)
        else:
            raise ValueError(
                f"{type(method).__name__}.PRUNING_TYPE is {method.PRUNING_TYPE!r}; "
                "it must be 'unstructured', 'structured' or 'global'"
            )
        mask[region] = method.compute_mask(t[region], default_mask=default_mask[region]).to(dtype=mask.dtype)
        return mask


def _channels_left(method: Any, mask: Tensor) -> tuple[Any, ...]:
    """Returns the index of the channels along the method's `dim` that are not masked entirely."""
    if not hasattr(method, "dim"):
        raise AttributeError(f"{type(method).__name__} has PRUNING_TYPE 'structured' and needs an attribute `dim`")
    dim = operator.index(method.dim)
    dim = dim + mask.dim() if dim < 0 else dim
    if not 0 <= dim < mask.dim():
        raise IndexError(f"dim={method.dim} does not exist in a tensor of {mask.dim()} dimensions")
    index: list[Any] = [slice(None)] * mask.dim()
    index[dim] = mask.sum(dim=[other for other in range(mask.dim()) if other != dim]) != 0
    return tuple(index)


class Identity(theirs.Identity, BasePruningMethod):
    """Adds a mask of ones and the hook, and prunes nothing."""


class RandomUnstructured(theirs.RandomUnstructured, BasePruningMethod):
    """Prunes elements at random: those with the largest values of `torch.rand_like`."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Returns `default_mask` without `amount` of its elements."""
        drop = count(self.amount, t.nelement())
        if drop == 0:
            return without(default_mask, None)
        draws = random_like(t)
        return without(default_mask, keep(self, (draws.real if draws.is_complex() else draws).neg_(), drop))


class L1Unstructured(theirs.L1Unstructured, BasePruningMethod):
    """Prunes the elements of smallest magnitude, or those whose importance scores have the smallest magnitude."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Returns `default_mask` without `amount` of its elements."""
        drop = count(self.amount, t.nelement())
        return without(default_mask, keep(self, t, drop, magnitude=True) if drop else None)


class RandomStructured(theirs.RandomStructured, BasePruningMethod):
    """Prunes channels along `dim` at random: those with the smallest values of `torch.rand(channels)` on the CPU."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Returns `default_mask` without `amount` of its channels."""
        size = count_channels(t, self.dim)
        drop = count(self.amount, size)
        if drop == 0:
            return default_mask
        return spread(keep(self, torch.rand(size), drop), t, self.dim, default_mask)


class LnStructured(theirs.LnStructured, BasePruningMethod):
    """Prunes the channels along `dim` that have the smallest L`n` norm."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Returns `default_mask` without `amount` of its channels."""
        amount = int(self.amount) if isinstance(self.amount, bool) else self.amount
        drop = count(amount, count_channels(t, self.dim))
        norm = theirs._compute_norm(t.detach(), self.n, self.dim)
        if norm.shape != (t.shape[self.dim],):  # torch 2.15 computes the nuclear norm of the whole tensor
            raise RuntimeError(f"n={self.n!r} gives no norm for each channel; expected a number, 'fro' or infinity")
        if drop == 0:
            return default_mask
        return spread(keep(self, norm, drop), t, self.dim, default_mask)


class CustomFromMask(theirs.CustomFromMask, BasePruningMethod):
    """Prunes with a given mask. The mask is released once it is applied: the module holds it as `<name>_mask`."""

    mask: Tensor | None

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Returns `default_mask` times the given mask."""
        if self.mask is None:
            raise AttributeError("there is no mask: it was None, or it was applied and the module holds it as '<name>_mask'")
        if default_mask.shape != self.mask.shape:
            raise AssertionError(
                f"the mask has shape {tuple(self.mask.shape)} and the tensor {tuple(default_mask.shape)}; they must be equal"
            )
        return default_mask * self.mask.to(dtype=default_mask.dtype)

    def _release(self) -> None:
        self.mask = None


def chain(old: theirs.BasePruningMethod | None, method: Any, name: str) -> Any:
    """Returns the hook of a tensor after `method` was added to the hook that it has already."""
    method._tensor_name = name
    if old is None:
        return method
    container = old
    if not isinstance(container, PruningContainer):  # a single method, or a container of torch's
        container = PruningContainer()
        container._tensor_name = name
        container._pruning_methods = tuple(old) if isinstance(old, theirs.PruningContainer) else (old,)
    container.add_pruning_method(method)
    return container


def ones(method: theirs.BasePruningMethod, like: Tensor) -> Tensor:
    """Returns a mask of ones. For our own methods, which only read it, that is one element expanded to the shape."""
    if type(method).compute_mask in _READ_ONLY:
        return torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape)
    return torch.ones_like(like)


# Our own rules, to tell them from those of a subclass or a mock. They do not write to the mask that they receive.
L1_RULE, RANDOM_RULE = L1Unstructured.compute_mask, RandomUnstructured.compute_mask
_READ_ONLY = (L1_RULE, RANDOM_RULE, RandomStructured.compute_mask, LnStructured.compute_mask)
