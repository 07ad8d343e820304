"""Decides which weights are set to zero to mask the removed units of a group.

Masking zeroes the weights that produce a unit and keeps its bias. The bias, and what follows it (the shift of a
normalisation, an activation of zero), make the unit a constant, which is folded into its consumers. The bias is zeroed as well,
with the scale and shift of normalisations, where a constant cannot be folded: for units that feed themselves (recurrent layers,
a layer applied twice), for units that are multiplied with each other (queries and keys), and for channels that a convolution
with zero padding reads, where a constant would be lost at the border only. Units that depend on the inputs all the same (a
query head that shares its values with other heads) are masked in the weights that read them.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from ...axes import Atom, Cat, Expr, Group, atoms, norm
from ...ops import Attention, Contraction, Convolution
from ...trace import Step, Trace
from .values import operands
from .weights import Keep


class Wiring:
    """Which steps produce, carry and read the units of a group."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        # the names of the weights that tensors are computed from, for tensors that depend on weights alone
        self.roots = {number: frozenset({name}) for number, name in trace.names.items()}
        self.roots |= dict.fromkeys(trace.record.constants, frozenset())
        self.maker: dict[int, Step] = {}
        self.readers: dict[str, list[Step]] = {}
        for step in trace.steps:
            used = frozenset().union(*(self.roots.get(n, frozenset()) for n in step.inputs))
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
        """Whether a tensor of the model produces (or consumes) these units."""
        if (name, role) not in self.parts:
            roles, axes = self.trace.record.roles, self.trace.dims[name]
            self.parts[name, role] = {a for d, e in enumerate(axes) if role in roles.get((name, d), ()) for a in atoms(e)}
        return atom in self.parts[name, role]

    def feeds_itself(self, group: Group) -> bool:
        """Whether a tensor produces these units from these units, more than once: a recurrent layer, a layer applied twice."""
        made = {m.tensor: m.dim for m in group.members if m.role == "produce"}
        both = {m.tensor for m in group.members if m.role == "consume" and made.get(m.tensor, m.dim) != m.dim}
        return any(map(self._recurrent, made)) or any(len(self.readers.get(name, ())) > 1 for name in both)

    @cached_property
    def multiplied(self) -> frozenset[Atom]:
        """Atoms that are summed over in products of two activations: queries and keys."""
        found: set[Atom] = set()
        for step in self.trace.steps:
            pair = self._factors(step)
            if pair is not None and step.outs:
                left, right = map(self.trace.atoms_of, pair)
                found |= (left & right) - self.trace.atoms_of(step.outs[0])
        return frozenset(found)

    def meets_padding(self, group: Group) -> bool:
        """Whether a convolution reads these units in which a constant would depend on position. A depthwise one does not: its
        own weights for these units are masked."""
        made = {(m.tensor, m.dim) for m in group.members if m.role == "produce"}
        read = {(m.tensor, m.dim) for m in group.members if m.role == "consume" and m.tensor in self._uneven}
        return not read <= made

    @cached_property
    def _uneven(self) -> frozenset[str]:
        """The weights of convolutions that give another result for a constant at the border than inside: those that pad, that
        read a padded tensor, or that are transposed."""
        found, padded = frozenset[str](), set[int]()
        for step in self.trace.steps:
            values, given = step.operator.values, step.arguments
            if isinstance(values, Convolution):
                data, weight = operands(step, values.left, values.right)
                kernel = self.trace.axes[weight][2:] if weight is not None else ()
                spreads = given["transposed"] and any(e.size > 1 for e in kernel)
                if weight is not None and (any(given["padding"]) or spreads or data in padded):
                    found |= self.roots.get(weight, frozenset())
            elif self._pads(step) or (not isinstance(values, Contraction | Attention) and not padded.isdisjoint(step.inputs)):
                padded.update(step.outs)
        return found

    def _pads(self, step: Step) -> bool:
        """Whether a step gives a constant another value at the border: padding of dims after the first two, or an average that
        counts its padding."""
        given = step.arguments
        if step.name in _AVERAGES:
            return given["count_include_pad"] and any(given["padding"])
        return step.name in _PADS and any(given["pad"][: 2 * (len(self.trace.axes[step.inputs[0]]) - 2)])

    def _factors(self, step: Step) -> tuple[int, int] | None:
        """The two operands of a product of activations; None for any other step."""
        values = step.operator.values
        if not isinstance(values, Contraction | Attention):
            return None
        left, right = operands(step, values.left, values.right)
        return None if left is None or right is None or left in self.roots or right in self.roots else (left, right)

    def _recurrent(self, name: str) -> bool:
        """Asks the layer's type: the traced sequence may have been one step long."""
        module = self.trace.model.get_submodule(name.rpartition(".")[0])
        return isinstance(module, nn.RNNBase | nn.RNNCellBase)

    def depends_on_inputs(self, group: Group) -> bool:
        """Whether consumers read units that depend on the inputs even when the weights that produce them are zero."""
        atom = group.atom
        for name in dict.fromkeys(m.tensor for m in group.members if m.role == "consume"):
            for step in self.readers.get(name, ()):
                data = [n for n in step.inputs if n not in self.roots and self.carries(n, atom)]
                if any(not self.produced_by_weights(n, atom) for n in data):
                    return True
        return False

    def produced_by_weights(self, number: int, atom: Atom) -> bool:
        """Whether the units of this tensor come from weights that produce them, on every path that leads here."""
        order = [number]
        while order:  # no recursion: runs may be thousands of steps deep
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
        if step is None:  # computed from weights, or an input
            return number in self.roots
        inputs = step.inputs
        if any(self.plays(name, atom, "produce") for n in inputs for name in self.roots.get(n, ())):
            return True
        data = [n for n in inputs if n not in self.roots]
        if self._factors(step) is not None:  # the units of the result are those of the second factor, or of the values
            values = step.operator.values
            (last,) = operands(step, values.value if isinstance(values, Attention) else values.right)  # type: ignore[union-attr]
            return [last] if last is not None and self.carries(last, atom) else False
        bearers = [n for n in data if self.carries(n, atom)]
        return bearers or not data  # units that appear here are copies


def reduced(trace: Trace, step: Step) -> list[Expr]:
    """The axes that a sum, a mean or a norm runs over."""
    axes, dims = trace.axes[step.inputs[0]], step.arguments.get("dim")
    return [axes[d] for d in ([dims] if isinstance(dims, int) else dims or range(len(axes)))]


def units_along(e: Expr, atom: Atom) -> list[Tensor]:
    """For each occurrence of the atom in the axis: the unit that every index stands for, -1 for none."""
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


def masked_places(trace: Trace, keep: Keep) -> dict[str, list[tuple[int, Atom]]]:
    """Name of a tensor -> the dims in which an atom's removed units are set to zero in the masked model."""
    wiring, directions = Wiring(trace), _directions(trace)
    ranks = {name: len(axes) for name, axes in trace.dims.items()}
    parameters = {name for name, _ in trace.model.named_parameters()}
    found: dict[str, list[tuple[int, Atom]]] = {}
    for group in (g for g in trace.groups if g.atom in keep):
        meet = wiring.feeds_itself(group) or group.atom in wiring.multiplied
        biases_too = meet or wiring.meets_padding(group)
        consumers_too = meet or wiring.depends_on_inputs(group)  # a learned initial state is read, too
        for m in group.members:
            zero = m.role in ("produce", "elementwise") or (consumers_too and m.role == "consume")
            if zero and m.tensor in parameters and m.tensor not in directions and (ranks[m.tensor] > 1 or biases_too):
                found.setdefault(m.tensor, []).append((m.dim, group.atom))
    return found


_PADS = frozenset({"aten::constant_pad_nd", "aten::pad"})
_AVERAGES = frozenset({"aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d"})
_WEIGHT_NORMS = frozenset({"aten::_weight_norm", "aten::_weight_norm_interface"})


def _directions(trace: Trace) -> set[str]:
    """Weights that are divided by their own norm: rows of zeros would be 0/0, and zeroing the gain is enough."""
    return {
        trace.names[step.args[0].number]
        for step in trace.steps
        if step.name in _WEIGHT_NORMS and step.args[0].number in trace.names
    }
