"""Runs of a masked model: what it returns, and which units are zero, for these inputs or for all inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from .....axes import Atom, Cat, Expr, Fam, atoms, new_size, norm
from .....trace import LeftTrace, Replay, Trace, paired

Keep = dict[Atom, Tensor]

# Operators with an axis rule that sum over products of their input and a weight.
_CONVOLUTIONS = {"convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "cudnn_convolution"}
_CONVOLUTIONS |= {"thnn_conv2d", "_slow_conv2d_forward", "_conv_depthwise2d", "conv_depthwise3d"}
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "_addmm_activation", "_grouped_mm"}
_MATRIX_PRODUCTS |= {"linear", "mkldnn_linear", "_linear_pointwise", "_mkl_linear", "_trilinear"}


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


class Observed:
    """Two runs of the masked model, on the example inputs and on different ones.

    `returned` are the atoms of the model's outputs. `nonzero` are, for each atom, the units of which a matrix product or a
    convolution reads a value other than zero in these runs, and `possible` those of which it could for some input. `passing`
    are pairs of a convolution's weight and an atom of its input.
    """

    def __init__(self, plain: nn.Module, traced: Trace, args: Any, kwargs: Any) -> None:
        self.traced = traced
        self.nonzero: Keep = {}
        self.possible: Keep = {}
        self.passing = {
            (traced.names.get(getattr(step.args[1], "number", -1)), atom)
            for step in traced.steps
            if step.kind in _CONVOLUTIONS
            for e in traced.axes[step.args[0].number]
            for atom in atoms(e)
        }
        self.values, self.axes = self._run(plain, args, kwargs, torch.clone)
        try:
            self.others = self._run(plain, args, kwargs, _other)[0]
        except LeftTrace:  # other values take another branch of the model
            self.others = self.values
        self.returned = {atom for axes in self.axes for e in axes or () for atom in atoms(e)}

    def _run(self, plain: nn.Module, args: Any, kwargs: Any, change: Any) -> tuple[list[Tensor], list[Any]]:
        made: Any = WeakIdKeyDictionary()
        replay = Replay(plain, self.traced, args, kwargs)
        generic_run = _Generic(self.traced, replay.origin.keys())

        def visit(i: int, step: Any, func: Any, given: Any, named: Any) -> Any:
            reads = step.kind in _CONVOLUTIONS | _MATRIX_PRODUCTS

            def note(into: Keep, tensor: Tensor, number: int) -> Tensor:
                if reads and number not in replay.origin:
                    _note_nonzero(into, tensor, self.traced.axes[number])
                return tensor

            paired(step, given, named, lambda t, n: note(self.nonzero, t, n))
            generic = paired(step, given, named, lambda t, n: note(self.possible, generic_run.like(t, n), n))
            generic_run.follow(step, func, *generic)
            out = func(*given, **named)
            made.update(zip(_tensors(out), step.outs))
            return out

        tensors = [leaf for leaf in tree_leaves(replay.run(visit, change)) if isinstance(leaf, Tensor)]
        return tensors, [self.traced.axes[made[t]] if t in made else None for t in tensors]

    def alive(self, keep: Keep) -> dict[Atom, str]:
        """Returns the atoms that have removed units which the model returns and which are not constant, with the reason."""
        bad = {}
        for atom, mask in keep.items():
            for value, other, axes in zip(self.values, self.others, self.axes):
                gone = ~_kept(value, axes or (), {atom: mask})
                if not torch.allclose(value[gone], other[gone]):
                    bad[atom] = "the model returns these units, and not only the masked layer computes them"
        return bad

    def kept(self, keep: Keep) -> list[Tensor]:
        """Returns the outputs of the model without the removed units."""
        counts = {atom: int(mask.sum()) for atom, mask in keep.items()}
        return [
            value[_kept(value, axes, keep)].view([new_size(e, counts) for e in axes]) if axes else value
            for value, axes in zip(self.values, self.axes)
        ]


class _Generic:
    """Propagates zeros through the operators of a run, with random numbers in the place of all other values.

    This tells units that are zero for every input from units that are zero only for these inputs, such as behind a ReLU.
    """

    def __init__(self, traced: Trace, fixed: Any) -> None:
        self.traced, self.fixed = traced, fixed
        self.zeros: dict[int, dict[int, Tensor]] = {}  # tensor number -> dim -> indices that are zero

    def like(self, tensor: Tensor, number: int) -> Tensor:
        if number in self.fixed or not tensor.is_floating_point():
            return tensor.clone()
        made = (1 + torch.rand_like(tensor)) * torch.sign(torch.rand_like(tensor) - 0.5 + 1e-12)
        for d, gone in self.zeros.get(number, {}).items():
            made.index_fill_(d, gone, 0)
        return made

    def follow(self, step: Any, func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Records where the operator returns zero for these numbers and for their negatives."""
        opposite = paired(
            step, tuple(args), kwargs, lambda t, n: -t if n not in self.fixed and t.is_floating_point() else t.clone()
        )
        try:
            outs = [_tensors(func(*args, **kwargs)), _tensors(func(*opposite[0], **opposite[1]))]
        except RuntimeError:  # some operators do not accept arbitrary numbers, such as sampling from probabilities
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


def _note_nonzero(into: Keep, tensor: Tensor, axes: list[Expr]) -> None:
    """Adds the units of a tensor that are not zero to `into`."""
    for d, e in enumerate(axes):
        for atom in dict.fromkeys(atoms(e)):
            if atom.frozen is None and tensor.numel():
                units = _units(axes, d, atom)
                whole = tuple(dim for dim, size in enumerate(units.shape) if size == 1)
                found = into.setdefault(atom, torch.zeros(atom.size, dtype=torch.bool))
                nonzero = (tensor != 0).any(whole, keepdim=True) if whole else tensor != 0
                found[units[nonzero.cpu() & (units >= 0)]] = True


def _other(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.clone() if tensor.dtype == torch.bool or tensor.dim() == 0 else tensor.flip(-1)
    return tensor * 0.7 + 0.5 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)).to(tensor)
