"""How the units of a group travel through the traced run: do they feed themselves, what makes them, and what makes them silent?

A removed unit is silent when every weight that makes it is zero; its bias and what comes after (a normalisation's shift, an
activation of zero) make it a constant, which is folded into its consumers. Biases go to zero too where a constant could not go
anywhere: of units that feed themselves (recurrent layers, a layer applied twice), which would carry it on from use to use, and
of units that are multiplied with each other (queries and keys). Units that still speak then (a query head whose values are
those of other heads too) are silenced where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...axes import Atom, Cat, Expr, Group, atoms, keep_mask, norm
from ...ops import arguments_of
from ...trace import Ref, Step, Trace
from .operands import aliases, is_random

Keep = Mapping[Atom, Tensor]
_TURNS = {"aten::t", "aten::transpose", "aten::permute", "aten::detach", "aten::alias", "aten::contiguous"}

# Products of two activations, of which the last one is what comes out: its units are those of the result.
_PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::matmul", "scaled_dot_product")


class Wiring:
    """Questions about the steps of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.roots = {number: frozenset({name}) for number, name in trace.names.items()}  # of tensors made of weights alone
        self.maker: dict[int, Step] = {}
        self.readers: dict[str, list[Step]] = {}
        for step in trace.steps:
            used = frozenset().union(*(self.roots.get(n, frozenset()) for n in tensors_in(step)))
            fresh = [n for n in step.outs if n not in trace.names]
            if step.weights:
                self.roots |= dict.fromkeys(fresh, used)
            else:
                self.maker |= dict.fromkeys(fresh, step)
                for name in used:
                    self.readers.setdefault(name, []).append(step)
        self.known: dict[tuple[int, Atom], bool] = {}
        self.parts: dict[tuple[str, str], set[Atom]] = {}

    def carries(self, number: int, atom: Atom) -> bool:
        return atom in self.trace.atoms_of(number)

    def plays(self, name: str, atom: Atom, role: str) -> bool:
        """Whether a tensor of the model makes (or reads) these units."""
        if (name, role) not in self.parts:
            roles, axes = self.trace.record.roles, self.trace.dims[name]
            self.parts[name, role] = {a for d, e in enumerate(axes) if role in roles.get((name, d), ()) for a in atoms(e)}
        return atom in self.parts[name, role]

    def feeds_itself(self, group: Group) -> bool:
        """Whether a tensor makes these units out of these units, more than once: a recurrent layer, a layer applied twice."""
        made = {m.tensor: m.dim for m in group.members if m.role == "produce"}
        both = {m.tensor for m in group.members if m.role == "consume" and made.get(m.tensor, m.dim) != m.dim}
        return any(map(self._recurrent, made)) or any(len(self.readers.get(name, ())) > 1 for name in both)

    @cached_property
    def multiplied(self) -> frozenset[Atom]:
        """Atoms that are summed over in products of two activations: queries and keys."""
        found: set[Atom] = set()
        for step in self.trace.steps:
            data = [n for n in tensors_in(step) if n not in self.roots] if any(p in step.name for p in _PRODUCTS) else []
            if len(data) > 1 and step.outs:
                left, right = map(self.trace.atoms_of, data[:2] if "scaled_dot" in step.name else data[-2:])
                found |= (left & right) - self.trace.atoms_of(step.outs[0])
        return frozenset(found)

    def _recurrent(self, name: str) -> bool:
        """The traced sequence may have been one step long, so here the layer's type has to say it."""
        module = self.trace.model.get_submodule(name.rpartition(".")[0])
        return isinstance(module, nn.RNNBase | nn.RNNCellBase)

    def speaks(self, group: Group) -> bool:
        """Whether a consumer still hears something of the inputs when the weights that make the units are zero."""
        atom = group.atom
        for name in dict.fromkeys(m.tensor for m in group.members if m.role == "consume"):
            for step in self.readers.get(name, ()):
                data = [n for n in tensors_in(step) if n not in self.roots and self.carries(n, atom)]
                if any(not self.silent(n, atom) for n in data):
                    return True
        return False

    def silent(self, number: int, atom: Atom) -> bool:
        """Whether the units in this tensor come from weights that make them, by every way that leads here."""
        order = [number]
        while order:  # without recursion: runs are thousands of steps deep
            n = order[-1]
            if (n, atom) in self.known:
                order.pop()
                continue
            sources = self._sources(n, atom)
            if isinstance(sources, bool):
                self.known[n, atom] = sources
                order.pop()
            elif open_ones := [s for s in sources if (s, atom) not in self.known]:
                order += open_ones
            else:
                self.known[n, atom] = all(self.known[s, atom] for s in sources)
                order.pop()
        return self.known[number, atom]

    def _sources(self, number: int, atom: Atom) -> list[int] | bool:
        """The activations whose units become the units of this one, or the answer itself."""
        step = self.maker.get(number)
        if step is None:  # made of weights, or given
            return number in self.roots
        inputs = tensors_in(step)
        if any(self.plays(name, atom, "produce") for n in inputs for name in self.roots.get(n, ())):
            return True
        data = [n for n in inputs if n not in self.roots]
        if len(data) > 1 and any(name in step.name for name in _PRODUCTS):
            last = data[:3][-1]  # a mask may follow
            return [last] if self.carries(last, atom) else False
        bearers = [n for n in data if self.carries(n, atom)]
        return bearers or not data  # units that appear here are copies of what has none


def tensors_in(step: Step) -> tuple[int, ...]:
    """The numbers of the tensors that a step is given."""
    return step.inputs


def reduced(trace: Trace, step: Step) -> list[Expr]:
    """The axes that a sum, a mean or a norm runs over."""
    axes, names = trace.axes[tensors_in(step)[0]], arguments_of(step.func)
    dims = {**dict(zip(names, step.args)), **step.kwargs}.get("dim")
    return [axes[d] for d in ([dims] if isinstance(dims, int) else dims or range(len(axes)))]


def units_along(e: Expr, atom: Atom) -> list[Tensor]:
    """For each place of the atom in the axis: which unit every index stands for, -1 where it stands for none."""
    e = norm(e)
    if isinstance(e, Atom):
        return [torch.arange(e.size)] if e is atom else []
    found: list[Tensor] = []
    sizes = [p.size for p in e.parts]
    for i, part in enumerate(e.parts):
        for inner in units_along(part, atom):
            if isinstance(e, Cat):
                whole = torch.full((e.size,), -1)
                whole[sum(sizes[:i]) : sum(sizes[: i + 1])] = inner
            else:
                before, after = torch.Size(sizes[:i]).numel(), torch.Size(sizes[i + 1 :]).numel()
                whole = inner[None, :, None].expand(before, -1, after).reshape(-1)
            found.append(whole)
    return found


def silenced(trace: Trace, keep: Keep) -> dict[str, list[tuple[int, Atom]]]:
    """Tensor -> the dims in which the removed units of an atom are set to zero, in the masked model."""
    wiring, directions = Wiring(trace), _directions(trace)
    ranks = {name: len(axes) for name, axes in trace.dims.items()}
    parameters = {name for name, _ in trace.model.named_parameters()}
    found: dict[str, list[tuple[int, Atom]]] = {}
    for group in (g for g in trace.groups if g.atom in keep):
        mute = wiring.feeds_itself(group) or group.atom in wiring.multiplied
        speaks = mute or wiring.speaks(group)  # a first state that was learned is read, too
        for m in group.members:
            zero = m.role in ("produce", "elementwise") or (speaks and m.role == "consume")
            if zero and m.tensor in parameters and m.tensor not in directions and (ranks[m.tensor] > 1 or mute):
                found.setdefault(m.tensor, []).append((m.dim, group.atom))
    return found


def _directions(trace: Trace) -> set[str]:
    """Weights that are divided by their own norm: zeroed rows would be 0/0, and the gain that multiplies them is enough."""
    return {
        trace.names[step.args[0].number]
        for step in trace.steps
        if "_weight_norm" in step.name and step.args[0].number in trace.names
    }


class Silence:
    """The weights as they are in the masked model, without making one: those of `tensors`, with `zeros` set to zero."""

    def __init__(
        self, trace: Trace, keep: Keep, tensors: Mapping[str, Tensor], zeros: Mapping[str, list[tuple[int, Atom]]]
    ) -> None:
        self.trace, self.keep, self.tensors = trace, keep, tensors
        self.zeros = {name: set(places) for name, places in zeros.items()}
        self.whole = trace.record.non_floating
        self.origin: dict[int, frozenset[str]] = {number: frozenset({name}) for number, name in trace.names.items()}
        self.makers: dict[int, int] = {}
        drawn: set[int] = set()  # what hangs on random numbers
        for i, step in enumerate(trace.steps):
            self.makers |= dict.fromkeys((n for n in step.outs if n not in trace.names), i)
            if is_random(step) or not drawn.isdisjoint(tensors_in(step)):
                drawn.update(step.outs)
            elif step.weights:
                made_of = frozenset().union(*(self.origin.get(n, frozenset()) for n in tensors_in(step)))
                self.origin |= {n: made_of for n in step.outs if n not in trace.names}
        self.known: dict[tuple[int, int, Atom], bool] = {}
        self._gone: dict[tuple[Expr, Atom], Tensor] = {}
        self._loud: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Tensor number -> the steps that read it."""
        found: dict[int, list[int]] = {}
        for i, step in enumerate(self.trace.steps):
            for n in dict.fromkeys(tensors_in(step)):
                found.setdefault(n, []).append(i)
        return found

    @cached_property
    def idle(self) -> set[int]:
        """Steps whose results nobody reads, and the model does not return: attention maps that were not asked for."""
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
        """Tensor of the model -> the numbers of those that are made of it."""
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
        return number in self.origin

    def value(self, number: int) -> Tensor:
        """The value of a tensor that depends on weights alone."""
        name = self.trace.names.get(number)
        if name is not None:
            tensor = self.tensors[name].detach()
            for d, atom in self.zeros.get(name, ()):
                tensor = tensor.index_fill(d, self.gone(self.trace.dims[name][d], atom).to(tensor.device), 0)
            return tensor
        if number not in self.makers:
            raise LookupError("a tensor that no module owns")
        step = self.trace.steps[self.makers[number]]

        def plain(v: Any) -> Any:
            if isinstance(v, Ref):
                return self.value(v.number).clone() if aliases(step.func)[0] else self.value(v.number)
            return [plain(x) for x in v] if isinstance(v, tuple) else v

        with torch.no_grad():
            out = step.func(*map(plain, step.args), **{k: plain(v) for k, v in step.kwargs.items()})
        return out[step.outs.index(number)] if isinstance(out, list | tuple) else out

    def zero(self, number: int, dim: int, atom: Atom) -> bool:
        """Whether the removed units of an atom are zero in a dim of a tensor made of weights."""
        if (number, dim, atom) not in self.known:
            self.known[number, dim, atom] = self._zero(number, dim, atom)
        return self.known[number, dim, atom]

    def _zero(self, number: int, dim: int, atom: Atom) -> bool:
        name = self.trace.names.get(number)
        if name is not None and (dim, atom) in self.zeros.get(name, ()):
            return True
        turned = self._turned(number)
        if turned is not None:
            return self.zero(turned[0], turned[1][dim], atom)
        gone = self.gone(self.trace.axes[number][dim], atom)  # most often the first of them tells
        return not any(bool(self.part(number, {dim: some}).any()) for some in (gone[:1], gone[1:]))

    def _turned(self, number: int) -> tuple[int, list[int]] | None:
        """The tensor that this one is with its dims in another order, and which of its dims each dim is."""
        step = self.trace.steps[self.makers[number]] if number in self.makers else None
        if step is None or step.name not in _TURNS:
            return None
        source = step.inputs[0]
        sizes = range(1, len(self.trace.axes[source]) + 1)
        return source, [size - 1 for size in step.func(torch.empty(*sizes, device="meta"), *step.args[1:]).shape]

    def stored(self, number: int) -> bool:
        """Whether a tensor lies in the model, at most turned."""
        turned = self._turned(number)
        return number in self.trace.names if turned is None else self.stored(turned[0])

    def part(self, number: int, at: Mapping[int, Tensor]) -> Tensor:
        """The entries `at[dim]` of the value, without making the rest of it."""
        name, turned = self.trace.names.get(number), self._turned(number)
        if turned is not None:
            step = self.trace.steps[self.makers[number]]
            return step.func(self.part(turned[0], {turned[1][d]: some for d, some in at.items()}), *step.args[1:])
        part = self.value(number) if name is None else self.tensors[name].detach()
        for d, some in at.items():
            part = part.index_select(d, some.to(part.device))
        for d in {d for d, _ in self.zeros.get(name or "", ())}:
            loud = self.loud(number, d)[at[d]] if d in at else self.loud(number, d)
            if not bool(loud.all()):
                part = part.index_fill_(d, (~loud).nonzero()[:, 0].to(part.device), 0)
        return part

    def loud(self, number: int, dim: int) -> Tensor:
        """Which indices of a dim are not set to zero, as a bool tensor."""
        if (number, dim) not in self._loud:
            name = self.trace.names.get(number, "")
            axis = (self.trace.dims[name] if name else self.trace.axes[number])[dim]
            zeros = {a: self.keep[a] for d, a in self.zeros.get(name, ()) if d == dim}
            self._loud[number, dim] = keep_mask(axis, zeros)
        return self._loud[number, dim]

    def gone(self, e: Expr, atom: Atom) -> Tensor:
        """The indices that an atom's removed units have in an axis."""
        if (e, atom) not in self._gone:
            self._gone[e, atom] = (~keep_mask(e, {atom: self.keep[atom]})).nonzero()[:, 0]
        return self._gone[e, atom]
