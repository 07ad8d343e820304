"""How the units of a group travel through the traced run: do they feed themselves, and are they silent once unmade?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..graph import Atom, Cat, Expr, Group, Trace, atoms, norm
from ..graph.tracer import Ref, Step

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

    def carries(self, number: int, atom: Atom) -> bool:
        return any(a is atom for e in self.trace.axes[number] for a in atoms(e))

    def plays(self, name: str, atom: Atom, role: str) -> bool:
        """Whether a tensor of the model makes (or reads) these units."""
        roles = self.trace.record.roles
        return any(
            role in roles.get((name, d), ()) and any(a is atom for a in atoms(e)) for d, e in enumerate(self.trace.dims[name])
        )

    def feeds_itself(self, group: Group) -> bool:
        """Whether a tensor makes these units out of these units, more than once: a recurrent layer, a layer applied twice."""
        made = {m.tensor: m.dim for m in group.members if m.role == "produce"}
        both = {m.tensor for m in group.members if m.role == "consume" and made.get(m.tensor, m.dim) != m.dim}
        return any(map(self._recurrent, made)) or any(len(self.readers.get(name, ())) > 1 for name in both)

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


def tensors_in(step: Step) -> list[int]:
    """The numbers of the tensors that a step is given."""
    values = (*step.args, *step.kwargs.values())
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item.number for item in flat if isinstance(item, Ref)]


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
