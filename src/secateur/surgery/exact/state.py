"""What is known about the removed units of each tensor of a traced run, while they are propagated through it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...axes import Atom, Fam, atoms
from ...trace import Step, Trace
from .values import Contribution, RemovedValue, alternating, is_random, once, where, wide
from .weights import Keep, MaskedWeights


class State:
    """The removed values found so far, and questions about them. `contributions`: what sums lose by the cut."""

    def __init__(self, trace: Trace, keep: Keep, weights: MaskedWeights, mixing: Mapping[Atom, Iterable[str]]) -> None:
        """`mixing`: for each atom, the kinds of operators that run over it and make its units depend on each other."""
        self.trace, self.weights = trace, weights
        self.keep = {a: m for a, m in keep.items() if not bool(m.all())}
        self.mixing = {a: frozenset(mixing.get(a, ())) for a in self.keep}
        self.found: dict[int, RemovedValue] = {}
        self.contributions: list[Contribution] = []
        self.written: set[int] = set()  # tensors whose memory was written to under another name
        self.started: dict[int, bool] = {}  # tensors that the run writes to -> whether removed units are zero before it
        self.zero_stays: dict[Any, bool] = {}
        self._cut: dict[int, dict[Atom, list[int]]] = {}

    def cut_atoms(self, number: int) -> Mapping[Atom, list[int]]:
        """The atoms of a tensor that lose units, with the dims that carry them."""
        if number not in self._cut:
            found = self._cut[number] = {}
            for d, e in enumerate(self.trace.axes[number]):
                for atom in dict.fromkeys(a for a in atoms(e) if a in self.keep):
                    found.setdefault(atom, []).append(d)
        return self._cut[number]

    def dims(self, number: int, atom: Atom) -> int:
        """How many dims of a tensor carry an atom."""
        return len(self.cut_atoms(number).get(atom, ()))

    def whole(self, number: int) -> list[int]:
        """The dims of a tensor that lose nothing."""
        cut = {d for dims in self.cut_atoms(number).values() for d in dims}
        return [d for d in range(len(self.trace.axes[number])) if d not in cut]

    def sizes(self, number: int) -> list[int]:
        """The shape of a tensor."""
        return [e.size for e in self.trace.axes[number]]

    def removed(self, number: int) -> RemovedValue:
        """What the removed units of a tensor hold."""
        if number not in self.found and self.weights.made_of_weights(number):
            self.found[number] = self._of_weights(number)
        if number not in self.found and self.starts_as_zeros(number):
            self.found[number] = RemovedValue(frozenset(self.cut_atoms(number)))
        if number not in self.found:
            return RemovedValue(varies=dict.fromkeys(self.cut_atoms(number), self._source(number)))
        return self.found[number]

    def starts_as_zeros(self, number: int) -> bool:
        """Whether a tensor that the run writes to (a cache of keys and values) has zeros at all removed units before it."""
        record, cut = self.trace.record, self.cut_atoms(number)
        if number not in record.changed or number in record.dropped or not cut:
            return False
        if number not in self.started:
            at = [(d, self.indices(number, d, a)) for a, dims in cut.items() for d in dims]
            zeros = (gone is not None and not bool(self.weights.part(number, {d: gone}).any()) for d, gone in at)
            self.started[number] = all(zeros)
        return self.started[number]

    def _source(self, number: int) -> str:
        """Why the values of a tensor that no step of the propagation produced are not known."""
        maker = self.trace.steps[self.weights.makers[number]] if number in self.weights.makers else None
        if maker is not None and is_random(maker):
            return f"is drawn at random, in {where(maker)}"
        if maker is not None and maker.weights:
            return f"depends on a tensor that the model changes while it runs, from {where(maker)} on"
        name = self.trace.names.get(number)
        return "is given" if name is None else f"depends on {name}, which the model changes while it runs"

    def _of_weights(self, number: int) -> RemovedValue:
        cut = self.cut_atoms(number)
        zero = {a for a, dims in cut.items() if all(self.weights.zero(number, d, a) for d in dims)}
        return RemovedValue(frozenset(zero), {}, None if len(zero) == len(cut) else wide(self.weights.value(number)))

    def is_zero(self, number: int, dim: int, atom: Atom) -> bool:
        """Whether an atom's removed units are zero in a tensor (in a dim of it, where it is made of weights)."""
        if self.weights.made_of_weights(number):
            return self.weights.zero(number, dim, atom)
        return atom in self.removed(number).zero

    def is_constant(self, number: int) -> bool:
        """Whether a tensor is made of weights alone, so that it never varies."""
        return number not in self.found and self.weights.made_of_weights(number)

    def indices(self, number: int, dim: int, atom: Atom) -> Tensor | None:
        """The indices of an atom's removed units in a dim; None where they depend on another dim."""
        e = self.trace.axes[number][dim]
        if isinstance(e, Fam) or any(isinstance(p, Fam) for p in getattr(e, "parts", ())):
            return None
        return self.weights.removed_indices(e, atom)

    def entries(self, value: Tensor, number: int, atom: Atom) -> list[Tensor]:
        """The entries of an atom's removed units, for each dim that carries them; one entry along dims of stride 0."""
        found, value = [], once(value)
        for d in self.cut_atoms(number)[atom]:
            at = None if value.shape[d] == 1 else self.indices(number, d, atom)
            found.append(value if at is None else value.index_select(d, at))
        return found

    def zero_atoms(self, value: Tensor | None, number: int, varies: Iterable[Atom]) -> frozenset[Atom]:
        """The atoms whose removed units are zero in a value, except those that vary."""
        cut, varies = self.cut_atoms(number), set(varies)
        if value is None:
            return frozenset(cut.keys() - varies)
        nonzero = (a for a in cut if a not in varies and any(bool(t.any()) for t in self.entries(value, number, a)))
        return frozenset(cut.keys() - varies - set(nonzero))

    def reason(self, atom: Atom, value: RemovedValue) -> str | None:
        """Why an atom's removed units have no constant value, as a sentence; None if they have one."""
        return f"what its removed units give {value.varies[atom]}" if atom in value.varies else None

    def known(self, number: int) -> Tensor | None:
        """The value at removed units, or that of a tensor made of weights; None for a tensor that varies."""
        cut = self.cut_atoms(number)
        sizes = self.sizes(number)
        if not math.prod(sizes):  # a cache that is still empty
            return torch.zeros(sizes, dtype=torch.float64)
        if not cut:
            fixed = self.weights.made_of_weights(number) and number not in self.written
            return wide(self.weights.value(number)) if fixed else None
        found = self.removed(number)
        if found.value is None:
            kind = torch.bool if self.weights.integers.get(number) == torch.bool else torch.float64
            return torch.zeros((), dtype=kind).expand(sizes) if found.zero else None
        return found.value

    def sample(self, number: int, shape: Sequence[int], draw: int = 0) -> Tensor:
        """Numbers that stand for a tensor that varies: of both signs, or False and True, or an index that is legal anywhere."""
        kind = self.weights.integers.get(number, torch.float64)
        if kind == torch.bool:
            return (torch.arange(math.prod(shape)) + draw).remainder(2).bool().reshape(tuple(shape))
        if not kind.is_floating_point:
            return torch.full(tuple(shape), draw, dtype=kind)
        return alternating(shape, number + 7919 * draw)

    def unknown(self, step: Step, why: str) -> list[RemovedValue]:
        """The answer for a step about which nothing is known: all its outputs vary."""
        return [RemovedValue(varies=dict.fromkeys(self.cut_atoms(n), why)) for n in step.outs]
