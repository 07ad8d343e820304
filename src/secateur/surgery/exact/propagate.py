"""What removed units say on their way through the traced run: nothing, a constant, or something that varies.

Nothing is run but single operators on a few numbers: what varies is stood for by samples, what is constant along a dim is kept
once (a dim of stride 0). Where a removed unit is summed away, its contribution is what the sum loses by the cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...axes import Atom, Expr, Fam, Prod, atoms, norm
from ...ops import SPATIAL, lookup, pointwise
from ...trace import GIVEN, Step, Trace
from .operands import Contribution, RemovedValue, aliases, call, is_random, once, pads_with_more, same, where, wide
from .pointwise import elementwise
from .products import RULES
from .wiring import Keep, Silence, reduced, tensors_in

# Layouts and sums for which zeros in are zeros out; indices move entries, never units.
_ZERO_TO_ZERO = (
    *("cat", "stack", "view", "reshape", "index", "gather", "scatter", "sum", "mean", "pool", "upsample", "col2im", "im2col"),
    *(
        "roll",
        "flip",
        "sort",
        "topk",
        "repeat",
        "embedding",
        "pad",
        "fft",
        "select",
        "slice",
        "vector_norm",
        "unfold",
        "diagonal",
    ),
    *("split", "chunk", "unbind", "amax", "amin"),
)
# These take units as they are; what they leave out is not summed away.
_PICKS = ("index", "select", "slice", "gather", "split", "chunk", "unbind", "narrow", "take", "topk", "sort")
# Kernels that misread dims of stride 0, or write to statistics without saying so: they get memory of their own.
_SOLID = ("group_norm", "batch_norm", "median")
# Over more of the same, these give another number.
_LONGER = ("sum", "nansum", "logsumexp", "linalg_vector_norm", "prod", "cumsum", "cumprod")


def _of_inputs(axis: Expr) -> bool:
    """Whether other inputs may have another size there."""
    return any(a.frozen in (GIVEN, SPATIAL) for a in atoms(axis))


class Propagation:
    """Follows the removed units of `keep` through the trace; `losses` is what came of it."""

    def __init__(self, trace: Trace, keep: Keep, silence: Silence, counted: Mapping[Atom, Iterable[str]]) -> None:
        """`counted`: the kinds of operators that run over an atom and mix its units, so that none of them is constant after."""
        self.trace, self.silence = trace, silence
        self.keep = {a: m for a, m in keep.items() if not bool(m.all())}
        self.counted = {a: tuple(counted.get(a, ())) for a in self.keep}
        self.found: dict[int, RemovedValue] = {}
        self.losses: list[Contribution] = []
        self.roots: dict[int, int] = {}  # views of one memory
        self.families: dict[int, list[int]] = {}
        self.cut: dict[int, dict[Atom, list[int]]] = {}
        self.zeros: dict[Any, bool] = {}
        self.written: set[int] = set()  # whose memory was written to by another name
        for i, step in enumerate(trace.steps):
            if i in silence.idle:
                continue
            if step.weights:
                self.share(step, None)
                self.sum_weights_away(i, step, tensors_in(step))
            else:
                self.follow(i, step)

    # ------------------------------------------------------------ facts

    def cut_atoms(self, number: int) -> Mapping[Atom, list[int]]:
        """The atoms of a tensor that lose units, with the dims that carry them."""
        if number not in self.cut:
            found = self.cut[number] = {}
            for d, e in enumerate(self.trace.axes[number]):
                for atom in dict.fromkeys(a for a in atoms(e) if a in self.keep):
                    found.setdefault(atom, []).append(d)
        return self.cut[number]

    def dims(self, number: int, atom: Atom) -> int:
        """How many dims of a tensor carry an atom."""
        return len(self.cut_atoms(number).get(atom, ()))

    def whole(self, number: int) -> list[int]:
        """The dims of a tensor that lose nothing."""
        cut = {d for dims in self.cut_atoms(number).values() for d in dims}
        return [d for d in range(len(self.trace.axes[number])) if d not in cut]

    def ghost(self, number: int) -> RemovedValue:
        if number not in self.found and self.silence.made_of_weights(number):
            self.found[number] = self.of_weights(number)
        if number not in self.found:
            maker = self.trace.steps[self.silence.makers[number]] if number in self.silence.makers else None
            why = f"is drawn at random, in {where(maker)}" if maker is not None and is_random(maker) else "is given"
            return RemovedValue(bad=dict.fromkeys(self.cut_atoms(number), why))
        return self.found[number]

    def of_weights(self, number: int) -> RemovedValue:
        cut = self.cut_atoms(number)
        zero = {a for a, dims in cut.items() if all(self.silence.zero(number, d, a) for d in dims)}
        return RemovedValue(frozenset(zero), {}, None if len(zero) == len(cut) else wide(self.silence.value(number)))

    def gone(self, number: int, dim: int, atom: Atom) -> Tensor | None:
        """The indices that an atom's removed units have in a dim; None where they depend on another dim."""
        e = self.trace.axes[number][dim]
        if isinstance(e, Fam) or any(isinstance(p, Fam) for p in getattr(e, "parts", ())):
            return None
        return self.silence.gone(e, atom)

    def removed(self, value: Tensor, number: int, atom: Atom) -> list[tuple[int, Tensor]]:
        """The entries of an atom's removed units, for each dim that carries them; once, along dims of stride 0."""
        found, value = [], once(value)
        for d in self.cut_atoms(number)[atom]:
            gone = None if value.shape[d] == 1 else self.gone(number, d, atom)
            found.append((d, value if gone is None else value.index_select(d, gone)))
        return found

    # ------------------------------------------------------------ one step

    def follow(self, i: int, step: Step) -> None:
        inputs = tensors_in(step)
        if not any(map(self.cut_atoms, (*inputs, *step.outs))):
            self.share(step, None)
            return
        kind, rule = step.kind, RULES.get(step.kind)
        made = None if rule is None else rule(self, i, step)
        if made is None:
            self.sum_away(i, step, inputs)
            self.longer(i, step)
            mixed = self.mixed(step, inputs)
            if is_random(step):
                mixed = {a: f"is drawn at random, in {where(step)}" for n in step.outs for a in self.cut_atoms(n)}
            lost = {**self.lost(inputs), **mixed}
            if all(a in lost for n in step.outs for a in self.cut_atoms(n)):
                made = [RemovedValue(bad={a: lost[a] for a in self.cut_atoms(n)}) for n in step.outs]
            else:
                made = elementwise(self, step) if lookup(step.func) is pointwise else self.other(step, kind)
                for number, ghost in zip(step.outs, made) if mixed else ():
                    ghost.zero -= mixed.keys()
                    ghost.bad |= {a: mixed[a] for a in self.cut_atoms(number) if a in mixed}
        self.share(step, made[0] if made else None)
        for number, ghost in zip(step.outs, made):
            self.settle(step, number, ghost, inputs)

    def mixed(self, step: Step, inputs: Sequence[int]) -> dict[Atom, str]:
        """Atoms whose units this step makes depend on each other (a normalisation, a softmax over their axis), or on how many
        places the inputs have (a softmax over those)."""
        places = "softmax" in step.kind and _of_inputs(self.trace.axes[inputs[0]][step.args[1]])
        cut = dict.fromkeys(a for n in inputs for a in self.cut_atoms(n))
        found = [a for a in cut if places or any(k in step.kind for k in self.counted[a])]
        alone = set(atoms(self.trace.axes[inputs[0]][1])) if found and "batch_norm" in step.kind else ()
        return {a: f"varies with the inputs, from {where(step)} on" for a in found if a not in alone}

    def longer(self, i: int, step: Step) -> None:
        """A constant that is summed over places is another one for inputs of another size, unless a mean is made of it."""
        axes = reduced(self.trace, step) if step.kind in _LONGER else []
        if not any(map(_of_inputs, axes)):
            return
        divides = [self.trace.steps[j] for j in self.silence.readers.get(step.outs[0], ())]
        size = math.prod(e.size for e in axes)
        if divides and all(s.name == "aten::div" and s.args[1] == size for s in divides):
            return
        ghost = self.ghost(tensors_in(step)[0])
        for atom in self.cut_atoms(step.outs[0]):
            if atom not in ghost.bad and (step.kind == "logsumexp" or atom not in ghost.zero):
                why = f"what its removed units give grows with the size of the inputs, in {where(step)}"
                self.losses.append(Contribution(i, atom, why))

    def lost(self, inputs: Sequence[int]) -> dict[Atom, str]:
        """Atoms that vary in one of these tensors, and are silent in none."""
        quiet = {a for n in inputs for a in self.ghost(n).zero}
        return {a: why for n in inputs for a, why in self.ghost(n).bad.items() if a not in quiet}

    def settle(self, step: Step, number: int, ghost: RemovedValue, inputs: Sequence[int]) -> None:
        value, axes = ghost.value, self.trace.axes[number]
        if value is not None and any(value.stride(d) and axes[d].size > 1 for d in self.whole(number)):
            ghost.since = next((s for n in inputs if n in self.found and (s := self.found[n].since)), where(step))
        self.found[number] = ghost

    def share(self, step: Step, ghost: RemovedValue | None) -> None:
        """Others see the memory that a step writes to; zeros over zeros change nothing."""
        writes, shares = aliases(step.func)
        inputs = tensors_in(step) if shares else ()
        if not inputs or not step.outs:
            return
        root = self.roots.get(inputs[0], inputs[0])
        family = self.families.setdefault(root, [root])
        for number in family if writes else ():
            cut = self.cut_atoms(number)
            old = self.ghost(number)
            self.written.add(number)
            same = ghost is not None and old.zero.issuperset(cut) and ghost.zero.issuperset(self.cut_atoms(step.outs[0]))
            self.found[number] = (
                old if same else RemovedValue(bad=dict.fromkeys(cut, f"is written to in place ({where(step)})"))
            )
        for number in step.outs:
            self.roots[number] = root
            family.append(number)

    def sum_away(self, i: int, step: Step, inputs: Sequence[int]) -> None:
        """Atoms that no output has any more (as often) were summed over, by something that has no bias."""
        kind = step.kind
        if aliases(step.func)[1] or any(k in kind for k in _PICKS):
            return
        for n in inputs:
            ghost = self.ghost(n)
            for atom in self.cut_atoms(n):
                left = max((self.dims(out, atom) for out in step.outs), default=0)
                if left < self.dims(n, atom) and step.outs and atom not in ghost.zero:
                    why = f"its removed units give a constant to {where(step)}, which has no bias to take it"
                    self.losses.append(Contribution(i, atom, self.reason(atom, ghost) or why))

    def sum_weights_away(self, i: int, step: Step, inputs: Sequence[int]) -> None:
        """The same among weights alone: a sum of products needs one factor that is zero."""
        left = {a for n in step.outs for a in self.cut_atoms(n)}
        for atom in dict.fromkeys(a for n in inputs for a in self.cut_atoms(n) if a not in left):
            bearers = [n for n in inputs if atom in self.cut_atoms(n)]
            if step.outs and not any(atom in self.ghost(n).zero for n in bearers):
                self.losses.append(
                    Contribution(i, atom, f"its removed units are part of a number that {where(step)} makes of weights")
                )

    def reason(self, atom: Atom, ghost: RemovedValue) -> str | None:
        return f"what its removed units give {ghost.bad[atom]}" if atom in ghost.bad else None

    # ------------------------------------------------------------ values

    def known(self, number: int) -> Tensor | None:
        """The value at removed units, or of a tensor made of weights; None for what varies."""
        cut = self.cut_atoms(number)
        sizes = [e.size for e in self.trace.axes[number]]
        if not math.prod(sizes):  # a cache that is empty still
            return torch.zeros(sizes, dtype=torch.float64)
        if not cut:
            fixed = self.silence.made_of_weights(number) and number not in self.written
            return wide(self.silence.value(number)) if fixed else None
        ghost = self.ghost(number)
        if ghost.value is None:
            kind = torch.bool if self.silence.whole.get(number) == torch.bool else torch.float64
            return None if not ghost.zero else torch.zeros((), dtype=kind).expand([e.size for e in self.trace.axes[number]])
        return ghost.value

    def sample(self, number: int, shape: Sequence[int]) -> Tensor:
        kind = self.silence.whole.get(number, torch.float64)
        if kind == torch.bool:
            return torch.arange(math.prod(shape)).remainder(2).bool().reshape(tuple(shape))
        made = torch.rand(tuple(shape), generator=torch.Generator().manual_seed(number), dtype=torch.float64) + 0.5
        return made if kind.is_floating_point else torch.zeros(tuple(shape), dtype=kind)

    def samples(self, number: int, full: Sequence[bool]) -> Tensor:
        axes = self.trace.axes[number]
        at = len(full) - len(axes)
        return self.sample(number, [e.size if full[at + d] or e.size == 1 else 2 for d, e in enumerate(axes)])

    def unknown(self, step: Step, why: str) -> list[RemovedValue]:
        return [RemovedValue(bad=dict.fromkeys(self.cut_atoms(n), why)) for n in step.outs]

    # ------------------------------------------------------------ anything else

    def other(self, step: Step, kind: str) -> list[RemovedValue]:
        """Layouts, pools and the like: zeros stay zeros; constants go through the operator itself."""
        inputs = [n for n in dict.fromkeys(tensors_in(step)) if self.cut_atoms(n)]
        ghosts = {n: self.ghost(n) for n in inputs}
        passes = (aliases(step.func)[1] or any(k in kind for k in _ZERO_TO_ZERO)) and not pads_with_more(step, kind)
        new = {a for n in step.outs for a in self.cut_atoms(n)} - {a for n in inputs for a in self.cut_atoms(n)}  # copies
        if passes and not new and all(a in ghosts[n].zero for n in inputs for a in self.cut_atoms(n)):
            return [RemovedValue(frozenset(self.cut_atoms(n))) for n in step.outs]
        bad = {a: why for g in ghosts.values() for a, why in g.bad.items()}
        zero = {a for n in inputs for a in self.cut_atoms(n)}
        zero = {a for a in zero if all(a in ghosts[n].zero for n in inputs if a in self.cut_atoms(n))}
        try:
            outs = self.through(step, kind)
        except Exception as error:
            return self.unknown(step, f"cannot be followed through {where(step)} ({type(error).__name__})")
        found = []
        for number, out in zip(step.outs, outs):
            cut, axes = self.cut_atoms(number), self.trace.axes[number]
            if not aliases(step.func)[1] and "view" not in kind:
                out = self.flattened(out, number, axes)
            silent = {a for a in cut if not any(bool(once(t).any()) for _, t in self.removed(out, number, a))}
            known = {a: bad[a] for a in cut if a in bad and not (a in zero and a in silent)}
            strange = {a: f"varies, from {where(step)} on" for a in cut if not any(a in self.cut_atoms(n) for n in inputs)}
            sized = f"differs from place to place before {where(step)}, which is right for inputs of this size alone"
            strange |= {a: sized for a in cut if any(self.loses_places(n, number, out, a) for n in inputs)}
            found.append(RemovedValue(frozenset(silent - known.keys() - strange.keys()), {**strange, **known}, out))
        return found

    def loses_places(self, number: int, result: int, out: Tensor, atom: Atom) -> bool:
        """Whether an atom's removed units differ along places of the inputs in a tensor, and no longer do in its result."""
        value = self.ghost(number).value
        if value is None or atom not in self.cut_atoms(number):
            return False
        axes = self.trace.axes
        for d in self.whole(number):
            axis = norm(axes[number][d])
            places = {a for a in atoms(axis) if a.frozen in (GIVEN, SPATIAL)}
            mixed = isinstance(axis, Prod) and len(places) < len(set(atoms(axis)))  # batch x heads: heads may differ
            if not (value.stride(d) and places) or mixed or same(self.removed(value, number, atom)[0][1], d):
                continue
            left = [r for r, e in enumerate(axes[result]) if places & set(atoms(e))]
            dims = self.cut_atoms(result)[atom]
            if not any(r in dims or (out.stride(r) and not same(self.removed(out, result, atom)[0][1], r)) for r in left):
                return True
        return False

    def through(self, step: Step, kind: str) -> list[Tensor]:
        """The operator on values in full size, what varies as random numbers."""
        stand: dict[int, Tensor] = {}
        few = any(k in kind for k in ("pool", "upsample", "pad"))  # a sample of the batch is enough
        for n in dict.fromkeys(tensors_in(step)):
            value = self.known(n)
            if value is None:
                value = self.sample(n, [e.size for e in self.trace.axes[n]])
            solid = any(k in kind for k in _SOLID)
            value = value.clone(memory_format=torch.contiguous_format) if solid else torch.ops.aten.alias(value)
            stand[n] = value[:1] if few and value.dim() > 2 else value
        name = {"view": "reshape", "_unsafe_view": "reshape", "empty_like": "zeros_like"}.get(kind)  # not what is in memory
        out = call(step, stand, None if name is None else getattr(torch.ops.aten, name).default)
        outs = [o for o in (out if isinstance(out, list | tuple) else [out]) if isinstance(o, Tensor)]
        sizes = [[e.size for e in self.trace.axes[n]] for n in step.outs]
        return [o.expand(s) if o.dim() == len(s) else o.double() for o, s in zip(outs, sizes)]

    def flattened(self, out: Tensor, number: int, axes: Sequence[Any]) -> Tensor:
        """Dims along which the removed units are constant after all, kept once."""
        cut = self.cut_atoms(number)
        for d in self.whole(number):
            if out.stride(d) and out.shape[d] > 1 and all(same(t, d) for a in cut for _, t in self.removed(out, number, a)):
                out = out.narrow(d, 0, 1)
        return out.expand([e.size for e in axes])
