"""`Masks`: which elements of which tensors are kept, stored outside the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from . import kernels
from ._dist import add_counts, count_local, counts, local, sharded
from ._tree import nearest


class Masks(Mapping[str, Tensor]):
    """A mapping from tensor name to a bool tensor of that tensor's shape, True where an element is kept.

    Masks of the same tensors combine elementwise: `a & b` keeps the elements that both keep, `a | b` those that either keeps,
    `~a` those that `a` prunes, and `a - b` those that `a` keeps and `b` prunes.
    """

    def __init__(self, masks: Mapping[str, Tensor]):
        if not isinstance(masks, Mapping):
            raise TypeError(f"masks are given as a mapping of tensor names to bool tensors, not {type(masks).__name__}")
        for name, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"the mask of {name!r} must be a bool tensor (True = kept), not {given}")
        self._masks = dict(masks)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._masks[name]
        except KeyError:
            raise KeyError(f"no mask for {name!r}.{nearest(name, self._masks)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __contains__(self, name: object) -> bool:
        return name in self._masks

    def _with(self, other: Masks, combine: Callable[[Tensor, Tensor], Tensor]) -> Masks:
        if not isinstance(other, Masks):
            return NotImplemented
        if odd := self.keys() ^ other.keys():
            raise ValueError(f"both masks must have the same tensors, but only one of them has {sorted(odd)}")
        for name in self:
            if self[name].shape != other[name].shape:
                raise ValueError(
                    f"the masks of {name!r} differ in shape: {tuple(self[name].shape)} and {tuple(other[name].shape)}"
                )
        return Masks({name: combine(self[name], other[name]) for name in self})

    def __and__(self, other: Masks) -> Masks:
        return self._with(other, torch.logical_and)

    def __or__(self, other: Masks) -> Masks:
        return self._with(other, torch.logical_or)

    def __sub__(self, other: Masks) -> Masks:
        return self._with(other, lambda a, b: a & ~b)

    def __invert__(self) -> Masks:
        return Masks({name: ~mask for name, mask in self.items()})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks):
            return NotImplemented
        return self.keys() == other.keys() and all(torch.equal(self[n], other[n]) for n in self)

    __hash__ = None  # type: ignore[assignment]  # mutable tensors inside

    @property
    def total(self) -> int:
        """The number of elements that the masks cover."""
        return sum(mask.numel() for mask in self.values())

    @property
    def kept(self) -> int:
        """The number of kept elements."""
        return sum(counts(self))

    @property
    def density(self) -> float:
        """The kept fraction; 1.0 if there are no elements."""
        return self.kept / self.total if self.total else 1.0

    @property
    def sparsity(self) -> float:
        """The pruned fraction, `1 - density`."""
        return 1.0 - self.density

    def to(self, device: torch.device | str) -> Masks:
        """Returns the masks on another device."""
        return Masks({name: mask.to(device) for name, mask in self.items()})

    def pack(self) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        """Returns a mapping from name to (uint8 tensor on the CPU, shape), with one bit per element, padded with zeros."""
        return {name: (pack_bits(local(mask).reshape(-1)).cpu(), tuple(local(mask).shape)) for name, mask in self.items()}

    @staticmethod
    def unpack(packed: Mapping[str, tuple[Tensor, tuple[int, ...]]], device: torch.device | str = "cpu") -> Masks:
        """Returns the masks that `pack` packed."""
        return Masks({name: _unbits(bits, tuple(shape), name).to(device) for name, (bits, shape) in packed.items()})

    def __repr__(self) -> str:
        if any(sharded(mask) for mask in self.values()):  # counting needs every process, but a single one may print this
            return f"Masks({len(self)} tensors, {self.total:,} elements, sharded)"
        return f"Masks({len(self)} tensors, {self.kept:,} of {self.total:,} elements kept, {self.sparsity:.2%} sparse)"


_CHANCE = 0.01  # a smaller fraction of zeros in every tensor is taken for chance
_SAMPLED = 1 << 20  # elements from which a sample is looked at before all of them
_SAMPLE = 4096


def count_kept(masks: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> tuple[list[int] | None, dict[str, int]]:
    """How many elements each mask keeps, and how many of them are zero already, for each tensor that has such elements.

    The former only of sharded tensors (otherwise None). The latter are left out if no tensor has more than 1 % of zeros: random
    weights have a few. `tensors` are the parts on this process, and all processes that hold parts have to ask.
    """
    there = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    split = any(sharded(mask) for mask in masks.values())
    if not split and _zeros_are_rare(there.values()):
        return None, {}
    zeros = {name: kernels.count_zeros(tensor) for name, tensor in there.items()}
    found, kept = [zeros.get(name, 0) for name in masks], None
    if split:
        both = add_counts(masks, count_local(masks), found)
        kept, found = both[: len(masks)], both[len(masks) :]
    if not any(number > _CHANCE * mask.numel() for number, mask in zip(found, masks.values(), strict=True)):
        return kept, {}
    zero = [kernels.count_zeros(there[name], local(masks[name])) if zeros.get(name) else 0 for name in masks]
    zero = add_counts(masks, zero) if split else zero
    return kept, {name: number for name, number in zip(masks, zero, strict=True) if number}


def _zeros_are_rare(tensors: Iterable[Tensor]) -> bool:
    """True if at most 1 % of the elements of each tensor are zero. A random sample of a large tensor must not have any zero.

    For a tensor with more than 1 % of zeros, the probability of this is at most 0.99 ** 4096, or 1e-18. A GPU is waited for
    once.
    """
    samples: dict[torch.device, list[Tensor]] = {}
    found: dict[torch.device, list[Tensor]] = {}  # on a GPU, whether there are too many zeros
    for tensor in tensors:
        whole, limit = tensor.detach(), int(_CHANCE * tensor.numel())
        if tensor.numel() >= _SAMPLED:
            if not tensor.is_contiguous():
                return False
            samples.setdefault(tensor.device, []).append(whole.view(-1)[_places(tensor.numel(), tensor.device)])
        elif tensor.device.type != "cpu":
            found.setdefault(tensor.device, []).append((whole == 0).sum() > limit)
        elif kernels.count_zeros(whole) > limit:
            return False
    for device, parts in samples.items():
        found.setdefault(device, []).append((torch.cat(parts) == 0).any())
    return not any(any(torch.stack(each).tolist()) for each in found.values())


@functools.lru_cache(64)
def _places(size: int, device: torch.device) -> Tensor:
    """Returns the places of a random sample, the same every time."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randint(size, (_SAMPLE,), generator=generator, device="cpu").to(device)


def _unbits(bits: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    size = math.prod(shape)
    if bits.dtype != torch.uint8 or bits.numel() != -(-size // 8):
        raise ValueError(
            f"the packed mask of {name!r} must have {-(-size // 8)} elements of torch.uint8 for shape {shape}, "
            f"not {bits.numel()} of {bits.dtype}"
        )
    return unpack_bits(bits.reshape(-1), size).reshape(shape)


# Eight booleans are one 64-bit integer, and one multiplication moves each byte to its bit, or each bit to its byte.
_GATHER, _SPREAD, _EACH = 0x0102040810204080, 0x0101010101010101, 0x8040201008040201 - (1 << 64)


def pack_bits(mask: Tensor) -> Tensor:
    """Packs booleans along the last axis into bytes, the first in the lowest bit. The last byte is padded with zeros."""
    size = mask.shape[-1]
    eights = mask.new_zeros(*mask.shape[:-1], -(-size // 8), 8)
    eights.flatten(-2)[..., :size] = mask
    return eights.view(torch.int64).squeeze(-1).mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(bits: Tensor, size: int) -> Tensor:
    """Unpacks bytes [..., bytes] to booleans [..., size]."""
    eights = bits.to(torch.int64).mul_(_SPREAD).bitwise_and_(_EACH).view(torch.uint8)
    return eights.ne_(0).view(torch.bool)[..., :size]
