"""The drop-in for `torch.nn.utils.prune`: change the import, and the code that uses it runs on this package's engine.

    from secateur.drop_in import prune      # was: import torch.nn.utils.prune as prune

Names, signatures, error types, hooks, state_dict keys and masks are those of torch, seed for seed. Differences:

* among exactly equal scores the lowest index goes first, on every device (torch: whatever `topk` returns);
* NaN cannot be ranked: a ValueError names the tensor, and nothing has changed (torch keeps NaN as if it were the largest);
* a call that fails leaves the module, or all modules of a global call, exactly as it found them;
* parameters keep their order through prune and remove; modules can be deep-copied; `module.weight` is up to date after an
  optimizer's step, `load_state_dict` and `.to()` (see `_upkeep` for what it does not see);
* `global_unstructured` takes tensors of several devices and any iterable, and copies no weights;
* a mask handed to `custom_from_mask` is not kept beside `weight_mask`: `hook.mask` is None once it was applied.

As in torch, `amount` counts against what is *left*, an int is a number of units and a float a fraction, masks have the dtype
of the weight, and what lies under a mask still moves with momentum and weight decay. To script or quantize, `remove` first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._masks import (
    _compute_norm,
    _validate_pruning_amount_init,
    count,
    count_channels,
    keep,
    spread,
    without,
)
from ._module import all_or_nothing, commit, hook_of, kind, parameter_to_prune, rename
from ._pool import Member, keep_largest_of, one_vector, ranks_in_place, warn_of_strays
from ._upkeep import MaskHook, hooks, let_go

# --- the methods ----------------------------------------------------------------------------------------------------


class BasePruningMethod(MaskHook, ABC):
    """A rule that masks one tensor of a module, and the forward-pre-hook that applies the mask.

    A subclass gives `PRUNING_TYPE` ("unstructured", "structured" with an attribute `dim`, or "global": what `compute_mask`
    gets to see when the tensor was pruned before) and `compute_mask`.
    """

    PRUNING_TYPE: str

    @abstractmethod
    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The mask for scores `t`, on top of the mask that is there already."""

    @classmethod
    def apply(
        cls, module: nn.Module, name: str, *args: Any, importance_scores: Tensor | None = None, **kwargs: Any
    ) -> BasePruningMethod:
        """Prune `name` of `module` by `cls(*args, **kwargs)`; gives the hook. If anything fails, nothing has changed."""
        with all_or_nothing([module]):
            old = hook_of(module, name)
            method = cls(*args, **kwargs)
            hook = _chain(old, method, name)
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
                default_mask = _ones(method, original)
            mask = hook.compute_mask(scores, default_mask=default_mask)
            commit(module, name, old, hook, mask.contiguous() if mask is default_mask else mask)
            method._settle()
        return hook

    def _settle(self) -> None:
        """Called when the mask is on the module."""

    def prune(self, t: Tensor, default_mask: Tensor | None = None, importance_scores: Tensor | None = None) -> Tensor:
        """`t` with the mask of this method applied; no module is involved."""
        if importance_scores is not None and importance_scores.shape != t.shape:
            raise AssertionError(
                f"importance_scores has shape {tuple(importance_scores.shape)} and t {tuple(t.shape)}; "
                "give one score for each element"
            )
        scores = t if importance_scores is None else importance_scores
        return t * self.compute_mask(scores, default_mask=torch.ones_like(t) if default_mask is None else default_mask)

    def remove(self, module: nn.Module) -> None:
        """Make the pruning of the tensor permanent. Leaves the hook where it is; the function `remove` takes that too."""
        name = self._tensor_name
        masked = self.apply_mask(module)
        if name in vars(module):
            delattr(module, name)
        original = module._parameters[name + "_orig"]
        assert original is not None
        original.data = masked.data
        rename(module._parameters, name + "_orig", name)
        del module._buffers[name + "_mask"]
        setattr(module, name, original)  # an RNN keeps its flat weights up to date here


class PruningContainer(BasePruningMethod):
    """The methods that pruned one tensor, in order. Its mask is that of the last one, on what the others left."""

    def __init__(self, *args: BasePruningMethod) -> None:
        self._pruning_methods: tuple[BasePruningMethod, ...] = ()
        if len(args) == 1:
            self._tensor_name = args[0]._tensor_name
        for method in args:
            self.add_pruning_method(method)

    def add_pruning_method(self, method: BasePruningMethod | None) -> None:
        """Append a method that acts on the same tensor."""
        if method is not None and not isinstance(method, BasePruningMethod):
            raise TypeError(f"a PruningContainer holds BasePruningMethod instances, and this is a {type(method).__name__}")
        if method is not None and self._tensor_name != method._tensor_name:
            raise ValueError(
                f"this PruningContainer is for the tensor {self._tensor_name!r}, and the method for {method._tensor_name!r}"
            )
        self._pruning_methods += (method,)  # pyright: ignore[reportAttributeAccessIssue]  # None: as torch has it

    def __len__(self) -> int:
        return len(self._pruning_methods)

    def __iter__(self) -> Iterator[BasePruningMethod]:
        return iter(self._pruning_methods)

    def __getitem__(self, idx: Any) -> Any:
        return self._pruning_methods[idx]

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` with what it leaves masked by the last method. `default_mask` itself is not written to."""
        method = self._pruning_methods[-1]
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
                "it is one of 'unstructured', 'structured', 'global'"
            )
        mask[region] = method.compute_mask(t[region], default_mask=default_mask[region]).to(dtype=mask.dtype)
        return mask


def _channels_left(method: BasePruningMethod, mask: Tensor) -> tuple[Any, ...]:
    """The index of the channels along the method's `dim` that are not masked away altogether."""
    if not hasattr(method, "dim"):
        raise AttributeError(f"{type(method).__name__} is of PRUNING_TYPE 'structured' and needs an attribute `dim`")
    dim: int = method.dim  # pyright: ignore[reportAttributeAccessIssue]
    dim = dim + mask.dim() if dim < 0 else dim
    if dim < 0:
        raise IndexError(f"dim={dim - mask.dim()} does not exist in a tensor of {mask.dim()} dimensions")
    left = mask.sum(dim=[other for other in range(mask.dim()) if other != dim]) != 0
    return tuple(left if at == dim else slice(None) for at in range(mask.dim()))


class Identity(BasePruningMethod):
    """Prunes nothing, but puts mask and hook in place."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """The mask that is there already."""
        return default_mask

    @classmethod
    def apply(cls, module: nn.Module, name: str) -> BasePruningMethod:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().apply(module, name)


class RandomUnstructured(BasePruningMethod):
    """Prunes elements at random: those with the largest draws of `torch.rand_like`."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: float) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less `amount` of its elements."""
        drop = count(self.amount, t.nelement())
        if drop == 0:
            return without(default_mask, None)
        draws = torch.rand_like(t)
        return without(default_mask, keep(self, (draws.real if draws.is_complex() else draws).neg_(), drop))

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: float) -> BasePruningMethod:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().apply(module, name, amount=amount)


class L1Unstructured(BasePruningMethod):
    """Prunes the elements of smallest magnitude; of scores, too, it is the magnitude that counts."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, amount: float) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less `amount` of its elements."""
        drop = count(self.amount, t.nelement())
        return without(default_mask, keep(self, t, drop, magnitude=True) if drop else None)

    @classmethod
    def apply(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, module: nn.Module, name: str, amount: float, importance_scores: Tensor | None = None
    ) -> BasePruningMethod:
        return super().apply(module, name, amount=amount, importance_scores=importance_scores)


class RandomStructured(BasePruningMethod):
    """Prunes channels along `dim` at random: those with the smallest draws of `torch.rand(channels)`, on the CPU."""

    PRUNING_TYPE = "structured"

    def __init__(self, amount: float, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less `amount` of its channels."""
        size = count_channels(t, self.dim)
        drop = count(self.amount, size)
        if drop == 0:
            return default_mask
        return spread(keep(self, torch.rand(size), drop), t, self.dim, default_mask)

    @classmethod
    def apply(cls, module: nn.Module, name: str, amount: float, dim: int = -1) -> BasePruningMethod:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().apply(module, name, amount=amount, dim=dim)


class LnStructured(BasePruningMethod):
    """Prunes the channels along `dim` whose L`n` norm is smallest."""

    PRUNING_TYPE = "structured"

    def __init__(self, amount: float, n: float | str, dim: int = -1) -> None:
        _validate_pruning_amount_init(amount)
        self.amount = amount
        self.n = n
        self.dim = dim

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` less `amount` of its channels."""
        amount = int(self.amount) if isinstance(self.amount, bool) else self.amount
        drop = count(amount, count_channels(t, self.dim))
        norm = _compute_norm(t.detach(), self.n, self.dim)
        if drop == 0:
            return default_mask
        return spread(keep(self, norm, drop), t, self.dim, default_mask)

    @classmethod
    def apply(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        module: nn.Module,
        name: str,
        amount: float,
        n: float | str,
        dim: int,
        importance_scores: Tensor | None = None,
    ) -> BasePruningMethod:
        return super().apply(module, name, amount=amount, n=n, dim=dim, importance_scores=importance_scores)


class CustomFromMask(BasePruningMethod):
    """Prunes by a mask that is given. Once applied it is let go: the module has it, as `<name>_mask`."""

    PRUNING_TYPE = "global"

    def __init__(self, mask: Tensor) -> None:
        self.mask: Tensor | None = mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """`default_mask` times the mask given."""
        if self.mask is None:
            raise AttributeError("there is no mask: it was None, or it was applied, and the module holds it as '<name>_mask'")
        if default_mask.shape != self.mask.shape:
            raise AssertionError(
                f"the mask has shape {tuple(self.mask.shape)} and the tensor {tuple(default_mask.shape)}; they must be equal"
            )
        return default_mask * self.mask.to(dtype=default_mask.dtype)

    def _settle(self) -> None:
        self.mask = None

    @classmethod
    def apply(cls, module: nn.Module, name: str, mask: Tensor) -> BasePruningMethod:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().apply(module, name, mask=mask)


# --- the functions --------------------------------------------------------------------------------------------------


def identity(module: nn.Module, name: str) -> nn.Module:
    """Put mask and hook in place without pruning anything."""
    Identity.apply(module, name)
    return module


def random_unstructured(module: nn.Module, name: str, amount: float) -> nn.Module:
    """Prune elements at random: `amount` of those left, as a number (int) or a fraction (float)."""
    RandomUnstructured.apply(module, name, amount)
    return module


def l1_unstructured(module: nn.Module, name: str, amount: float, importance_scores: Tensor | None = None) -> nn.Module:
    """Prune the elements of smallest magnitude, or of smallest |importance_scores|."""
    L1Unstructured.apply(module, name, amount=amount, importance_scores=importance_scores)
    return module


def random_structured(module: nn.Module, name: str, amount: float, dim: int) -> nn.Module:
    """Prune channels along `dim` at random."""
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
    """Prune the channels along `dim` with the smallest L`n` norm, of the tensor or of its importance scores."""
    LnStructured.apply(module, name, amount, n, dim, importance_scores=importance_scores)
    return module


def custom_from_mask(module: nn.Module, name: str, mask: Tensor) -> nn.Module:
    """Prune by a mask of the tensor's shape: 0 prunes."""
    CustomFromMask.apply(module, name, mask)
    return module


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: Any,
    importance_scores: dict[tuple[nn.Module, str], Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Prune many tensors as if they were one: all or none of them.

    `pruning_method(**kwargs)` is an unstructured method. `importance_scores` maps (module, name) to the scores of that
    tensor. L1 and random pruning look at the tensors where they lie; a method of your own is given all scores in one vector.
    """
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters is an iterable of (module, name) pairs, and this is a {type(parameters).__name__}")
    if importance_scores is not None and not isinstance(importance_scores, dict):
        raise TypeError(
            f"importance_scores is a dict from (module, name) to a tensor, and this is a {type(importance_scores).__name__}"
        )
    pairs = [(module, name) for module, name in parameters]
    if not pairs:
        raise ValueError("parameters is empty; give (module, name) pairs, such as (model.fc1, 'weight')")
    method: BasePruningMethod = pruning_method(**kwargs)
    if method.PRUNING_TYPE != "unstructured":
        raise TypeError(
            f"global pruning takes methods of PRUNING_TYPE 'unstructured', and {pruning_method} is {method.PRUNING_TYPE!r}"
        )
    given = importance_scores or {}
    warn_of_strays(given, pairs)
    pool = [Member(at, module, name, given.get((module, name))) for at, (module, name) in enumerate(pairs)]
    masks = _masks_of(method, pool)
    with all_or_nothing([module for module, _ in pairs]):
        for one in pool:
            new = CustomFromMask(torch.empty(0))
            old = hook_of(one.module, one.name)
            commit(one.module, one.name, old, _chain(old, new, one.name), one.mask_with(masks.pop(0)))
            new._settle()


def _masks_of(method: BasePruningMethod, pool: Sequence[Member]) -> list[Tensor]:
    """What `method` keeps of each tensor, were they one."""
    if type(method).compute_mask is _L1 and ranks_in_place(pool):
        return keep_largest_of(pool, count(method.amount, sum(one.left for one in pool)))  # pyright: ignore[reportAttributeAccessIssue]
    scores = one_vector(pool, values=type(method).compute_mask is not _RANDOM)
    method._tensor_name = "parameters"
    mask = method.compute_mask(scores, default_mask=_ones(method, scores))
    return list(mask.split([one.left for one in pool]))


def remove(module: nn.Module, name: str) -> nn.Module:
    """Make the pruning of `name` permanent and take hook, mask and original away. The zeros stay."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
            hook.remove(module)
            del module._forward_pre_hooks[key]
            let_go(module)
            return module
    raise ValueError(f"{name!r} of {kind(module)} is not pruned, so there is nothing to remove")


def is_pruned(module: nn.Module) -> bool:
    """Whether any tensor of the module, or of a module inside it, is pruned."""
    return any(isinstance(hook, BasePruningMethod) for child in module.modules() for hook in hooks(child))


def _chain(old: MaskHook | None, method: BasePruningMethod, name: str) -> BasePruningMethod:
    """The hook to have when `method` joins the one that is there."""
    method._tensor_name = name
    if old is None:
        return method
    assert isinstance(old, BasePruningMethod)
    chain = old if isinstance(old, PruningContainer) else PruningContainer(old)
    chain.add_pruning_method(method)
    return chain


def _ones(method: BasePruningMethod, like: Tensor) -> Tensor:
    """A mask of ones; as a broadcast scalar for our own methods, which only read it."""
    if type(method).compute_mask in _READ_ONLY:
        return torch.ones((), dtype=like.dtype, device=like.device).expand(like.shape)
    return torch.ones_like(like)


# Our own rules, to tell them from a subclass's or a mock. They do not write into the mask that they are given.
_L1, _RANDOM = L1Unstructured.compute_mask, RandomUnstructured.compute_mask
_READ_ONLY = (_L1, _RANDOM, RandomStructured.compute_mask, LnStructured.compute_mask)
