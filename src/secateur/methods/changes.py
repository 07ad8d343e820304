"""Solutions: checked, written into a model for a while, and taken out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from .._dist import local
from ..targeting import Target
from .seam import Solution


class Changes:
    """Weights written into the model for a while. Each is exchanged with the dense values, and exchanged back at the end."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._dense: dict[tuple[int, str], tuple[Tensor, bool]] = {}  # by layer and attribute; whether they were changed

    def write(self, target: Target, solution: Solution) -> None:
        weight = local(target.tensor.data)  # its version does not count, so a graph that saved the weight stays valid
        new = solution.weight if solution.weight is not None else weight.masked_fill(~solution.mask, 0)
        self._pairs.append((weight, new))
        differs = not torch.equal(weight, new)
        self._dense |= {(id(owner), attribute): (new, differs) for owner, attribute in target.slot.owners}
        self._exchange(weight, new)

    @staticmethod
    def _exchange(one: Tensor, other: Tensor) -> None:
        before = one.clone()
        write_(one, other)
        other.copy_(before)

    def __len__(self) -> int:
        return len(self._pairs)

    def forget(self) -> None:
        """Drops all changes: the tensors they were made to were copies."""
        self._pairs, self._dense = [], {}

    def _inside(self, module: nn.Module) -> list[tuple[nn.Module, str, Tensor, bool]]:
        """The changed tensors of a module and its children, with their dense values, also if other modules share them."""
        names = [(owner, attribute) for owner in module.modules() for attribute, _ in owner._parameters.items()]  # TorchScript
        return [(one, name, *self._dense[id(one), name]) for one, name in names if (id(one), name) in self._dense]

    def differ(self, module: nn.Module) -> bool:
        """Whether any value of a module was changed."""
        return any(differs for *_, differs in self._inside(module))

    @contextlib.contextmanager
    def out(self, module: nn.Module) -> Iterator[None]:
        """Puts the dense weights of a module in place, inside the context. Nothing is copied: layers get other tensors."""
        places = [(owner, attribute, dense) for owner, attribute, dense, _ in self._inside(module)]
        before = [owner._parameters[attribute] for owner, attribute, _ in places]
        for (owner, attribute, dense), own in zip(places, before, strict=True):
            assert own is not None
            owner._parameters[attribute] = nn.Parameter(dense, own.requires_grad)  # torch multiplies in another way without
        try:
            yield
        finally:
            for (owner, attribute, _), weight in zip(places, before, strict=True):
                owner._parameters[attribute] = weight

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *exception: object) -> None:
        for weight, new in self._pairs:
            self._exchange(weight, new)
        self.forget()


def checked(target: Target, solution: Solution) -> Solution:
    """The solution in the shape and dtype of the target, zero where it is pruned. Raises where it is not a solution."""
    if not isinstance(solution, Solution):
        given = type(solution).__name__
        raise TypeError(f"solve returned a {given} for {target.name!r}; it must return Solution(mask, weight or None)")
    shape = (target.layout.rows, target.layout.cols)
    mask, weight = solution.mask, solution.weight
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(f"the mask for {target.name!r} must be bool of shape {shape}, not {mask.dtype} of {tuple(mask.shape)}")
    if weight is None:
        return replace(solution, mask=target.layout.restore(mask))
    if weight.shape != shape or not weight.is_floating_point():
        given = f"{weight.dtype} of {tuple(weight.shape)}"
        raise ValueError(f"the weight for {target.name!r} must be float of shape {shape}, not {given}")
    new = target.layout.restore(weight.masked_fill(~mask, 0)).to(target.weight, copy=True)
    if not bool(new.isfinite().all()):
        raise ValueError(f"the new weight of {target.name!r} is NaN or infinite; look at its weights and at the data")
    return replace(solution, mask=target.layout.restore(mask), weight=new)


def write_(tensor: Tensor, values: Tensor) -> None:
    """Writes values into a tensor, also into one that was made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        tensor.copy_(values)
