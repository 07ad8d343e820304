"""What runs of a masked model show: what it returns, and which units are zero, for these inputs or for any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .....axes import Atom, Cat, Expr, Fam, atoms, new_size, norm
from .....trace import Trace

Keep = dict[Atom, Tensor]


def unit_of_index(e: Expr, atom: Atom, at: Mapping[Atom, int] | None = None) -> Tensor:
    """Returns for every index of an axis the unit of this atom that it belongs to, or -1.

    `at` gives the index along the axis that a family of expressions depends on.
    """
    e = norm(e)
    if isinstance(e, Atom):
        return torch.arange(e.size) if e is atom else torch.full((e.size,), -1)
    if isinstance(e, Fam):
        return unit_of_index(e.parts[(at or {})[_key(e)]], atom, at)
    parts = [unit_of_index(p, atom, at) for p in e.parts]
    if isinstance(e, Cat):
        return torch.cat(parts)
    units = torch.full((1,), -1)
    for part in parts:
        units = torch.maximum(units[:, None], part[None]).reshape(-1)
    return units


def _units(axes: Sequence[Expr], dim: int, atom: Atom, at: Mapping[Atom, int] | None = None) -> Tensor:
    """Returns the units of this atom along one dimension, in a shape that broadcasts against the tensor.

    The units may depend on the index along another dimension: the states of a recurrent network with several layers are
    stacked along the first dimension, and each layer has hidden units of its own along the last.
    """
    at = at or {}
    key = next((key for key in _keys(axes[dim]) if key not in at), None)
    if key is None:
        shape = [1] * len(axes)
        shape[dim] = -1
        return unit_of_index(axes[dim], atom, at).view(shape)
    other = next(d for d, e in enumerate(axes) if key in atoms(e))
    slices = [_units(axes, dim, atom, {**at, key: index}) for index in range(key.size)]
    return torch.cat(slices, other).index_select(other, unit_of_index(axes[other], key))


def _key(family: Fam) -> Atom:
    key = norm(family.key)
    assert isinstance(key, Atom)  # the algebra never splits the key of a family
    return key


def _keys(e: Expr) -> list[Atom]:
    """Returns the atoms on whose index an expression depends."""
    e = norm(e)
    if isinstance(e, Atom):
        return []
    return ([_key(e)] if isinstance(e, Fam) else []) + [key for part in e.parts for key in _keys(part)]


def _kept(tensor: Tensor, axes: Sequence[Expr], keep: Keep) -> Tensor:
    """Returns a bool tensor that is False for the elements of removed units."""
    kept = torch.ones((), dtype=torch.bool)
    for dim, e in enumerate(axes):
        for atom in dict.fromkeys(atoms(e)):
            if atom in keep:
                units = _units(axes, dim, atom)
                kept = kept & ((units < 0) | keep[atom].cpu()[units.clamp(min=0)])
    return kept.expand(tensor.shape).to(tensor.device)


class Seen:
    """Two runs of the masked model, on the example inputs and on others.

    `returned`: the atoms of what it returns. `loud`: for each atom, the units of which a matrix product or a convolution reads
    a value other than zero; `possible`: those of which it could, for some input. `passing`: weights of convolutions with the
    atoms of what they read.
    """

    def __init__(self, plain: nn.Module, traced: Trace, args: Any, kwargs: Any) -> None:
        from .....trace import LeftTrace

        self.traced = traced
        self.loud: Keep = {}
        self.possible: Keep = {}
        self.passing = {
            (traced.names.get(getattr(step.args[1], "number", -1)), atom)
            for step in traced.steps
            if "convolution" in step.name
            for e in traced.axes[step.args[0].number]
            for atom in atoms(e)
        }
        self.values, self.axes = self._run(plain, args, kwargs, torch.clone)
        try:
            self.others = self._run(plain, args, kwargs, _other)[0]
        except LeftTrace:  # other values take another way through the model
            self.others = self.values
        self.returned = {atom for axes in self.axes for e in axes or () for atom in atoms(e)}

    def _run(self, plain: nn.Module, args: Any, kwargs: Any, change: Any) -> tuple[list[Tensor], list[Any]]:
        from torch.utils.weak import WeakIdKeyDictionary

        from .....trace import Replay, paired

        made: Any = WeakIdKeyDictionary()
        replay = Replay(plain, self.traced, args, kwargs)
        anything = _Anything(self.traced, replay.origin.keys())

        def visit(i: int, step: Any, func: Any, given: Any, named: Any) -> Any:
            reads = any(kind in step.name for kind in ("conv", "mm", "linear"))

            def heard(into: Keep, tensor: Tensor, number: int) -> Tensor:
                if reads and number not in replay.origin:
                    _listen(into, tensor, self.traced.axes[number])
                return tensor

            paired(step, given, named, lambda t, n: heard(self.loud, t, n))
            generic = paired(step, given, named, lambda t, n: heard(self.possible, anything.like(t, n), n))
            anything.follow(step, func, *generic)
            out = func(*given, **named)
            made.update(zip(_tensors(out), step.outs))
            return out

        tensors = [leaf for leaf in tree_leaves(replay.run(visit, change)) if isinstance(leaf, Tensor)]
        return tensors, [self.traced.axes[made[t]] if t in made else None for t in tensors]

    def alive(self, keep: Keep) -> dict[Atom, str]:
        """Atoms of which the model returns units that are not constant; without them the output would say less."""
        bad = {}
        for atom, mask in keep.items():
            for value, other, axes in zip(self.values, self.others, self.axes):
                gone = ~_kept(value, axes or (), {atom: mask})
                if not torch.allclose(value[gone], other[gone]):
                    bad[atom] = "the model returns these units, and something else than the masked layer makes them"
        return bad

    def kept(self, keep: Keep) -> list[Tensor]:
        """What a model without the removed units returns."""
        counts = {atom: int(mask.sum()) for atom, mask in keep.items()}
        return [
            value[_kept(value, axes, keep)].view([new_size(e, counts) for e in axes]) if axes else value
            for value, axes in zip(self.values, self.axes)
        ]


class _Anything:
    """Follows zeros through a run with random numbers in the place of all others, operator by operator.

    A unit that is zero by accident, behind an activation that these inputs do not open, is not taken for one that always is.
    """

    def __init__(self, traced: Trace, fixed: Any) -> None:
        self.traced, self.fixed = traced, fixed
        self.zeros: dict[int, dict[int, Tensor]] = {}  # number of a tensor -> dim -> indices that are zero

    def like(self, tensor: Tensor, number: int) -> Tensor:
        if number in self.fixed or not tensor.is_floating_point():
            return tensor.clone()
        made = (1 + torch.rand_like(tensor)) * torch.sign(torch.rand_like(tensor) - 0.5 + 1e-12)
        for d, gone in self.zeros.get(number, {}).items():
            made.index_fill_(d, gone, 0)
        return made

    def follow(self, step: Any, func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Notes what the operator makes zero of these numbers and of their opposites."""
        from .....trace import paired

        opposite = paired(
            step, tuple(args), kwargs, lambda t, n: -t if n not in self.fixed and t.is_floating_point() else t.clone()
        )
        try:
            outs = [_tensors(func(*args, **kwargs)), _tensors(func(*opposite[0], **opposite[1]))]
        except RuntimeError:  # not made for just any numbers, as a draw from probabilities
            return
        for one, other, number in zip(*outs, step.outs):
            found = {}
            for d, e in enumerate(self.traced.axes[number]):
                if one.is_floating_point() and one.numel() and any(atom.frozen is None for atom in atoms(e)):
                    gone = (~(_nonzero(one, d) | _nonzero(other, d))).nonzero()[:, 0]
                    found |= {d: gone} if len(gone) else {}
            self.zeros[number] = found


def _tensors(out: Any) -> list[Tensor]:
    return [o for o in (out if isinstance(out, list | tuple) else (out,)) if isinstance(o, Tensor)]


def _nonzero(tensor: Tensor, dim: int) -> Tensor:
    return (tensor != 0).movedim(dim, 0).reshape(tensor.shape[dim], -1).any(1)


def _listen(into: Keep, tensor: Tensor, axes: list[Expr]) -> None:
    """Notes the units of a tensor that are not zero."""
    for d, e in enumerate(axes):
        for atom in dict.fromkeys(atoms(e)):
            if atom.frozen is None and tensor.numel():
                units = _units(axes, d, atom)
                whole = tuple(dim for dim, size in enumerate(units.shape) if size == 1)
                heard = into.setdefault(atom, torch.zeros(atom.size, dtype=torch.bool))
                nonzero = (tensor != 0).any(whole, keepdim=True) if whole else tensor != 0
                heard[units[nonzero.cpu() & (units >= 0)]] = True


def _other(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone() if tensor.dtype == torch.bool or tensor.dim() == 0 else tensor.flip(-1)
    return tensor * 0.7 + 0.5 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor)
