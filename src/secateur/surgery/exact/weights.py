"""The weights of the masked model, and what the run computes from weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...axes import Atom, Expr, keep_mask, norm
from ...trace import Ref, Trace
from ..cut import Keep
from .values import aliases, is_random

_SLAB = 1 << 16  # elements that stay in the caches while they are worked with
_PERMUTES = frozenset({"aten::t", "aten::transpose", "aten::permute", "aten::detach", "aten::alias", "aten::contiguous"})
_OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})


class MaskedWeights:
    """The weights of the masked model, without making one: those of `tensors`, with the places `zeros` set to zero."""

    def __init__(
        self, trace: Trace, keep: Keep, tensors: Mapping[str, Tensor], zeros: Mapping[str, list[tuple[int, Atom]]]
    ) -> None:
        self.trace, self.keep, self.tensors = trace, keep, tensors
        self.zeros = {name: set(places) for name, places in zeros.items()}
        self.integers = trace.record.non_floating  # dtypes of tensors that hold no fractions
        self.makers: dict[int, int] = {}
        changed = set(filter(self._read_first, trace.record.changed))
        self.origin: dict[int, frozenset[str]] = {n: frozenset({name}) for n, name in trace.names.items() if n not in changed}
        self.origin |= dict.fromkeys(trace.record.constants, frozenset())
        drawn = changed  # tensors that depend on random numbers, or on tensors that hold other values in the next run
        for i, step in enumerate(trace.steps):
            self.makers |= dict.fromkeys((n for n in step.outs if n not in trace.names), i)
            if is_random(step) or not drawn.isdisjoint(step.inputs):
                drawn.update(step.outs)
            elif step.weights:
                made_of = frozenset().union(*(self.origin.get(n, frozenset()) for n in step.inputs))
                self.origin |= {n: made_of for n in step.outs if n not in trace.names}
        self.known: dict[tuple[int, int, Atom], bool] = {}
        self._removed: dict[tuple[Expr, Atom], Tensor] = {}
        self._unmasked: dict[tuple[int, int], Tensor] = {}

    def _read_first(self, number: int) -> bool:
        """Whether the run reads a tensor before it overwrites all of it."""
        steps = [self.trace.steps[i] for i in self.readers.get(number, ())[:1]]
        return any(s.name not in _OVERWRITES or s.inputs[0] != number or number in s.inputs[1:] for s in steps)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Tensor number -> the steps that read it."""
        found: dict[int, list[int]] = {}
        for i, step in enumerate(self.trace.steps):
            for n in dict.fromkeys(step.inputs):
                found.setdefault(n, []).append(i)
        return found

    @cached_property
    def idle(self) -> set[int]:
        """Steps whose outputs are neither read nor returned by the model, such as attention maps that were not asked for."""
        steps, returned = self.trace.steps, self.trace.record.returned
        return {
            i
            for i, step in enumerate(steps)
            if returned
            and step.outs
            and not any(aliases(step.func))
            and not any(n in returned or n in self.readers for n in step.outs)
        }

    @cached_property
    def made_with(self) -> dict[str, list[int]]:
        """Name of a tensor of the model -> the numbers of the tensors that are computed from it."""
        found: dict[str, list[int]] = {}
        for number, names in self.origin.items():
            for name in names:
                found.setdefault(name, []).append(number)
        return found

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in self.trace.names.items()}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.trace.model.named_parameters())

    def made_of_weights(self, number: int) -> bool:
        """Whether a tensor is computed from weights alone."""
        return number in self.origin

    def value(self, number: int) -> Tensor:
        """The value of a tensor that is computed from weights alone."""
        name = self.trace.names.get(number)
        if name is not None:
            tensor = self.tensors[name].detach()
            for d, atom in self.zeros.get(name, ()):
                tensor = tensor.index_fill(d, self.removed_indices(self.trace.dims[name][d], atom).to(tensor.device), 0)
            return tensor
        if number in self.trace.record.constants:
            return self.trace.record.constants[number]
        if number not in self.makers:
            raise LookupError("no module owns this tensor")
        step = self.trace.steps[self.makers[number]]

        def plain(v: Any) -> Any:
            if isinstance(v, Ref):
                return self.value(v.number).clone() if aliases(step.func)[0] else self.value(v.number)
            return [plain(x) for x in v] if isinstance(v, tuple) else v

        with torch.no_grad():
            out = step.func(*map(plain, step.args), **{k: plain(v) for k, v in step.kwargs.items()})
        return out[step.outs.index(number)] if isinstance(out, list | tuple) else out

    def zero(self, number: int, dim: int, atom: Atom) -> bool:
        """Whether an atom's removed units are zero in a dim of a tensor that is computed from weights."""
        if (number, dim, atom) not in self.known:
            self.known[number, dim, atom] = self._zero(number, dim, atom)
        return self.known[number, dim, atom]

    def _zero(self, number: int, dim: int, atom: Atom) -> bool:
        name = self.trace.names.get(number)
        if name is not None and (dim, atom) in self.zeros.get(name, ()):
            return True
        permuted = self._permuted(number)
        if permuted is not None:
            return self.zero(permuted[0], permuted[1][dim], atom)
        gone = self.removed_indices(self.trace.axes[number][dim], atom)  # the first of them is usually enough to tell
        return not any(bool(self.part(number, {dim: some}).any()) for some in (gone[:1], gone[1:]))

    def _permuted(self, number: int) -> tuple[int, list[int]] | None:
        """The tensor of which this one is a permutation, and for each dim the dim there; None if it is not one."""
        step = self.trace.steps[self.makers[number]] if number in self.makers else None
        if step is None or step.name not in _PERMUTES:
            return None
        source = step.inputs[0]
        sizes = range(1, len(self.trace.axes[source]) + 1)
        return source, [size - 1 for size in step.func(torch.empty(*sizes, device="meta"), *step.args[1:]).shape]

    def stored(self, number: int) -> bool:
        """Whether a tensor is one of the model's, or a permutation of one."""
        permuted = self._permuted(number)
        return number in self.trace.names if permuted is None else self.stored(permuted[0])

    def part(self, number: int, at: Mapping[int, Tensor]) -> Tensor:
        """The entries `at[dim]` of the value, without computing the rest of it."""
        name, permuted = self.trace.names.get(number), self._permuted(number)
        if permuted is not None:
            step = self.trace.steps[self.makers[number]]
            return step.func(self.part(permuted[0], {permuted[1][d]: some for d, some in at.items()}), *step.args[1:])
        part = self.value(number) if name is None else self.tensors[name].detach()
        for d, some in at.items():
            part = part.index_select(d, some.to(part.device))
        for d in {d for d, _ in self.zeros.get(name or "", ())}:
            kept = self.unmasked(number, d)[at[d]] if d in at else self.unmasked(number, d)
            if not bool(kept.all()):
                part = part.index_fill_(d, (~kept).nonzero()[:, 0].to(part.device), 0)
        return part

    def unmasked(self, number: int, dim: int) -> Tensor:
        """Which indices of a dim are not masked, as a bool tensor."""
        if (number, dim) not in self._unmasked:
            name = self.trace.names.get(number, "")
            axis = (self.trace.dims[name] if name else self.trace.axes[number])[dim]
            zeros = {a: self.keep[a] for d, a in self.zeros.get(name, ()) if d == dim}
            self._unmasked[number, dim] = keep_mask(axis, zeros)
        return self._unmasked[number, dim]

    def removed_indices(self, e: Expr, atom: Atom) -> Tensor:
        """The indices of an atom's removed units in an axis."""
        e = norm(e)
        if (e, atom) not in self._removed:
            self._removed[e, atom] = (~keep_mask(e, {atom: self.keep[atom]})).nonzero()[:, 0]
        return self._removed[e, atom]

    def slabs(self, number: int, rows: Tensor, width: int) -> Sequence[Tensor]:
        """Rows of a weight, as many at a time as stay in the caches; all at once where the weight has to be computed first."""
        return rows.split(max(_SLAB // max(width, 1), 1) if self.stored(number) else max(len(rows), 1))
