"""Prunes the blocks of a tensor that have the lowest norms. `select` does the ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from .... import kernels
from ....patterns import Pattern
from ....scores import RANKED, Scores, nan_in
from ....select import fold, select
from .base_sparsifier import BaseSparsifier
from .utils import FakeSparsity, parts

__all__ = ["WeightNormSparsifier"]

_PART = 1 << 20  # elements that are compared at once, one byte each
_PEEK = 4096  # elements that suffice to see that most pruned masks are not all ones


class WeightNormSparsifier(BaseSparsifier):
    """Prunes the blocks of a tensor that have the lowest norms.

    `sparsity_level` is the fraction of blocks that are pruned (below 1.0 at least one is kept), `sparse_block_shape` their
    rows and columns, and `zeros_per_block` how many elements are pruned in such a block, the lowest (by default all). `norm` is
    1, 2 (the default) or a function that scores each element; the score of a block is the mean over its elements. A tensor
    of more than two dimensions is treated as a matrix with its first dimension as rows. Pruned elements score 0, so they stay
    pruned.
    """

    def __init__(
        self,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int] = (1, 4),
        zeros_per_block: int | None = None,
        norm: Callable[[Tensor], Tensor] | int | None = None,
    ) -> None:
        if not callable(norm) and norm not in (None, 1, 2):
            raise NotImplementedError(f"norm={norm!r} is not supported; give 1, 2, or a function that scores each element")
        super().__init__(
            defaults={
                "sparsity_level": sparsity_level,
                "sparse_block_shape": sparse_block_shape,
                "zeros_per_block": math.prod(sparse_block_shape) if zeros_per_block is None else zeros_per_block,
            }
        )
        self.norm_fn: Callable[[Tensor], Tensor] = norm if callable(norm) else _magnitude if norm == 1 else _square

    def update_mask(  # type: ignore[override]
        self,
        module: nn.Module,
        tensor_name: str,
        sparsity_level: float,
        sparse_block_shape: Sequence[int],
        zeros_per_block: int,
        **kwargs: Any,
    ) -> None:
        """Ranks the blocks of the masked tensor and writes its new mask."""
        name, size = kwargs.get("tensor_fqn", tensor_name), math.prod(sparse_block_shape)
        check_blocks(name, sparsity_level, sparse_block_shape, zeros_per_block)
        mask = self._holder(module, tensor_name).mask
        there = parts(module, tensor_name)
        alone = len(there) == 1 and type(there[0]) is FakeSparsity and mask.shape == there.original.shape
        weight = (there.original if alone else getattr(module, tensor_name)).detach()
        if sparsity_level <= 0 or zeros_per_block == 0:
            write_mask(mask, True, weight)
        elif sparsity_level >= 1 and zeros_per_block == size:
            write_mask(mask, False, weight)
        else:
            scores = self._scores(weight, mask if alone else None)
            write_mask(mask, keep_blocks(scores, sparsity_level, sparse_block_shape, zeros_per_block, name, spare=1), weight)

    def step(self, use_path: bool = True) -> None:
        """Updates every mask, unless `enable_mask_update` is False. If a setting is wrong, no mask is updated."""
        if self.enable_mask_update and type(self).update_mask is WeightNormSparsifier.update_mask:
            if self._step_on_gpu(_ON_GPU.get(self)):
                return
            for group in self.groups:
                asked = (group[key] for key in ("sparsity_level", "sparse_block_shape", "zeros_per_block"))
                check_blocks(group["tensor_fqn"], *asked)
            if self._step_on_gpu(self._on_gpu()):
                return
        super().step(use_path)

    def _step_on_gpu(self, held: _OnGPU | None) -> bool:
        """Updates all masks with a few kernels and one synchronisation. Returns False if the prepared state no longer fits."""
        if held is None or held.norm is not self.norm_fn or len(held.updates) != len(self.groups):
            return False
        if not all(_unchanged(one, group) for one, group in zip(held.updates, self.groups, strict=True)):
            return False
        bad = held.steps(held.jobs, held.drops)
        if bad is not None:
            raise nan_in(self.groups[bad]["tensor_fqn"])
        return True

    def _on_gpu(self) -> _OnGPU | None:
        """Prepares steps on a GPU, if all masks are on one GPU and there are kernels for them. Reuses what still fits."""
        updates = [_update_of(group) for group in self.groups]
        there = [one for one in updates if one is not None]
        if not there or len(there) < len(updates) or len({one.weight.device for one in there}) > 1:
            return None
        if self.norm_fn not in (_magnitude, _square):
            return None
        new = _OnGPU(there, self.norm_fn, [one.drop for one in there], None)
        held = _ON_GPU.pop(self, None)
        same = held is not None and held.norm is new.norm and [a.key for a in held.updates] == [a.key for a in there]
        steps = held.steps if held is not None and same else None
        del held  # frees its memory for the new one
        _ON_GPU[self] = new = new._replace(steps=steps or kernels.gpu_steps().Steps(new.jobs()))
        return new

    def _scores(self, weight: Tensor, mask: Tensor | None) -> Scores:
        """Returns the scores of `weight`, masked if a mask is given. Only a function as norm needs their product."""
        if self.norm_fn not in (_magnitude, _square):
            scores = self.norm_fn(weight if mask is None else mask.to(weight.dtype) * weight).detach()
            return Scores.of(_matrix(scores if scores.dtype in RANKED else scores.double()))
        under = None if mask is None or (mask.device.type == "cpu" and _is_ones(mask)) else _matrix(mask).to(weight.dtype)
        return Scores.magnitude(_matrix(weight), power=1 if self.norm_fn is _magnitude else 2, under=under)

    # --- helpers that subclasses call by name ------------------------------------------------------------------------------

    def _make_tensor_mask(
        self,
        data: Tensor,
        input_shape: Any,
        sparsity_level: float,
        sparse_block_shape: Sequence[int],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Returns a mask that is zero in the fraction `sparsity_level` of blocks, those with the lowest scores in `data`."""
        zeros = math.prod(sparse_block_shape)
        return _filled(mask, keep_blocks(Scores.of(data), sparsity_level, sparse_block_shape, zeros, spare=1), data.shape)

    def _make_block_mask(
        self, data: Tensor, sparse_block_shape: Sequence[int], zeros_per_block: int, mask: Tensor | None = None
    ) -> Tensor:
        """Returns a mask with `zeros_per_block` zeros in every block, at the lowest scores in `data`."""
        return _filled(mask, keep_blocks(Scores.of(data), 1.0, sparse_block_shape, zeros_per_block), data.shape)

    def _scatter_fold_block_mask(
        self,
        output_shape: Sequence[int],
        dim: int,
        indices: Tensor,
        block_shape: Sequence[int],
        mask: Tensor | None = None,
        input_shape: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Zeroes a mask in the layout of `F.unfold` (1, elements of a block, blocks) at `indices`, and folds it."""
        if mask is None:
            if input_shape is None:
                raise AssertionError("give either a mask or its input_shape")
            mask = torch.ones(tuple(input_shape), device=device)
        unfolded = mask.scatter_(dim, indices, 0)
        mask.data = F.fold(unfolded, tuple(output_shape), kernel_size=tuple(block_shape), stride=tuple(block_shape))
        return mask


def _magnitude(T: Tensor) -> Tensor:
    return T.abs()


def _square(T: Tensor) -> Tensor:
    return T * T


def _flat_idx_to_2d(idx: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """Returns row and column of a position in a flattened matrix."""
    return idx // shape[1], idx % shape[1]


def check_blocks(name: str, level: float, block: Sequence[int], zeros: int) -> None:
    """Raises unless the level, the block shape and the number of zeros per block are valid."""
    try:
        known = math.isnan(level) or (zeros % 1 == 0 and all(isinstance(one, Integral) for one in block))
    except TypeError:  # the level is not a number, or the block not a sequence
        known = False
    if not known:
        raise TypeError(
            f"sparsity_level={level!r}, sparse_block_shape={block!r}, zeros_per_block={zeros!r} for {name!r}: "
            "expected a number, (rows, columns) and an integer"
        )
    if math.isnan(level):
        raise ValueError(f"sparsity_level of {name!r} is NaN; give the fraction of blocks to prune, from 0 to 1")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"sparse_block_shape={block} for {name!r} must be (rows, columns), both at least 1")
    if not 0 <= zeros <= math.prod(block):
        raise ValueError(
            f"zeros_per_block={zeros} for {name!r} must be from 0 to {math.prod(block)} for blocks of {tuple(block)}"
        )


class _Update(NamedTuple):
    """The update of one mask on a GPU: of `total` blocks, `drop` lose `lose` elements each, or all if `lose` is 0."""

    there: Any  # the parametrizations of the weight
    weight: Tensor
    mask: Tensor
    level: float
    shape: Any  # of the blocks, as the user gave it
    zeros: int
    block: tuple[int, int]
    lose: int
    drop: int
    total: int
    where: tuple[int, int]

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns what must not change for the same kernels to be launched again."""
        weight = self.weight
        return *self.where, weight.shape, weight.dtype, weight.device, self.block, self.lose, self.drop < self.total


class _OnGPU(NamedTuple):
    """What a sparsifier keeps between its steps on a GPU."""

    updates: list[_Update]
    norm: Callable[[Tensor], Tensor]
    drops: list[int]
    steps: Any

    def jobs(self) -> list[Any]:
        power = 1 if self.norm is _magnitude else 2
        return [
            kernels.gpu_steps().Job(
                _matrix(one.weight.detach()), _matrix(one.mask), one.block, power, one.lose, one.drop < one.total
            )
            for one in self.updates
        ]


_ON_GPU: WeakKeyDictionary[Any, _OnGPU] = WeakKeyDictionary()  # by sparsifier; not part of its state


def _unchanged(one: _Update, group: Mapping[str, Any]) -> bool:
    """Returns whether settings, tensors and addresses of a group are the same as before. Runs in every step."""
    listed = group["module"]._modules.get("parametrizations")
    there, weight, mask = one.there, one.weight, one.mask
    return (
        listed is not None
        and listed._modules.get(group["tensor_name"]) is there
        and len(there._modules) == 1
        and there.original is weight
        and there._modules["0"]._buffers.get("mask") is mask
        and (weight.data_ptr(), mask.data_ptr()) == one.where
        and weight.shape == mask.shape
        and weight.dtype == mask.dtype
        and weight.is_contiguous()
        and mask.is_contiguous()
        and group["sparsity_level"] == one.level
        and group["sparse_block_shape"] == one.shape
        and group["zeros_per_block"] == one.zeros
    )


def _update_of(group: Mapping[str, Any]) -> _Update | None:
    """Returns the update that a group needs, or None if there are no kernels for it."""
    module, name, level, shape = (group[key] for key in ("module", "tensor_name", "sparsity_level", "sparse_block_shape"))
    there = parts(module, name) if is_parametrized(module, name) else ()
    if len(there) != 1 or type(there[0]) is not FakeSparsity:
        return None
    weight, mask = cast(Tensor, there.original), cast(FakeSparsity, there[0]).mask  # type: ignore[union-attr]
    if weight.device.type != "cuda" or weight.shape != mask.shape or weight.dtype != mask.dtype:
        return None
    plain = type(mask) is Tensor and type(weight) in (Tensor, nn.Parameter) and 0 < weight.numel() <= kernels.LARGEST_STEP
    if not plain or not kernels.readable_by_triton([weight, mask]):
        return None
    rows = len(weight) if weight.dim() > 1 else 1
    cols, (height, width), zeros = weight.numel() // rows, map(int, shape), int(group["zeros_per_block"])
    total, lose = -(-rows // height) * -(-cols // width), 0 if zeros == height * width else zeros
    drop = total if level >= 1 else min(round(level * total), total - 1)
    offsets = weight.storage_offset(), mask.storage_offset()  # the kernel reads four elements as one word
    fours = (height, width) == (1, 4) and weight.element_size() == 2 and not any(n % 4 for n in (cols, *offsets))
    if zeros == 0 or drop < 1 or width > kernels.WIDEST_BLOCK or cols > 1 << 22 or not (fours if lose else drop < total):
        return None
    where = weight.data_ptr(), mask.data_ptr()
    return _Update(there, weight, mask, level, shape, zeros, (height, width), lose, drop, total, where)


class Kept(NamedTuple):
    """The kept units of a matrix: a bool grid of units, each of `height` rows and `width` columns."""

    grid: Tensor
    height: int
    width: int
    shape: tuple[int, int]

    def write_(self, out: Tensor) -> None:
        matrix = out.reshape(self.shape)
        kernels.spread_(matrix, self.grid, self.height, self.width)
        if matrix.data_ptr() != out.data_ptr():  # reshape has copied a tensor that is not contiguous
            out.copy_(matrix.view(out.shape))


def keep_blocks(scores: Scores, level: float, block: Sequence[int], zeros: int, name: str = "data", *, spare: int = 0) -> Kept:
    """Prunes `zeros` elements in each of the fraction `level` of blocks. Below 1.0 it always keeps `spare` blocks."""
    height, width = (int(size) for size in block)
    pattern = Pattern((height, width), lose=None if zeros in (0, height * width) else int(zeros))
    blocks, shape = math.prod(pattern.grid(scores.layout)), (scores.layout.rows, scores.layout.cols)
    drop = blocks if level >= 1 else max(min(round(level * blocks), blocks - spare), 0)
    if pattern.lose is not None:
        return Kept(select({name: scores}, pattern, count=drop)[name], 1, 1, shape)
    return Kept(select({name: fold(scores, pattern)}, Pattern(), count=drop if zeros else 0)[name], height, width, shape)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(1, -1) if tensor.dim() < 2 else tensor.flatten(1)


def _is_ones(mask: Tensor) -> bool:
    flat = mask.reshape(-1)
    return all(bool((part == 1).all()) for part in (flat[:_PEEK], *flat[_PEEK:].split(_PART)))


def write_mask(mask: Tensor, kept: Kept | bool, weight: Tensor) -> None:
    """Writes a mask in place. Writes through `data`, because autograd may have saved the mask for a backward pass."""
    if (mask.shape, mask.dtype) != (weight.shape, weight.dtype):  # loaded from a file, or set by the user
        mask.data = torch.empty_like(weight, device=mask.device)
    if isinstance(kept, bool):
        mask.data.fill_(kept)
    else:
        kept.write_(mask.data)


def _filled(mask: Tensor | None, kept: Kept, shape: Sequence[int]) -> Tensor:
    mask = torch.ones((), device=kept.grid.device) if mask is None else mask
    mask.data = torch.empty(tuple(shape), dtype=mask.dtype, device=kept.grid.device)
    kept.write_(mask.data)
    return mask
