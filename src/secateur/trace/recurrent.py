"""Recurrent layers: initial states that torch fills in have no units of their own; they take those of the layer they start."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..axes import ONE, Atom, Expr, Fam, fresh, norm, pick, unify
from .tracer import Tracer

LAYERS = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
CELLS = frozenset(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
_FILLS = frozenset(["aten::zeros", "aten::new_zeros", "aten::zeros_like"])


def states_of(args: tuple[Any, ...]) -> list[Tensor]:
    """The initial states: one, or hidden and cell."""
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()  # data, batch sizes, states
    given = args[2 if packed else 1]
    return [t for t in (given if isinstance(given, tuple | list) else [given]) if isinstance(t, Tensor)]


def untie_layers(tracer: Tracer, args: tuple[Any, ...]) -> None:
    """Zeros for several layers are one tensor: each layer (and direction) gets units of its own, only as many."""
    for state in states_of(args):
        info = tracer.info(state)
        step = next((s for s in reversed(tracer.record.steps) if info.number in s.outs), None)
        if step is None or step.name not in _FILLS or len(info.axes) != 3 or info.axes[0].size < 2:
            continue
        last = norm(info.axes[2])
        if isinstance(last, Fam) or last.size == 1:
            continue
        key = Atom(info.axes[0].size, "numbers the layers of a recurrent layer")
        key.key = True
        parts = [last, *(fresh(last.size) for _ in range(key.size - 1))]
        tracer.equal_counts(parts)
        info.axes[:] = [key, info.axes[1], Fam(key, parts)]


def close_loops(tracer: Tracer, name: str, args: tuple[Any, ...], out: Any) -> None:
    """The states that come out have the units of those that went in, also after a single step, when nothing shows it."""
    made = [out] if isinstance(out, Tensor) else list(out) if name in CELLS else list(out[1:])
    for before, after in zip(states_of(args), made):
        a, b = tracer.axes_of(before), tracer.axes_of(after)
        for i in range(a[0].size if len(a) == 3 else 1):
            unify(_at(a, i), _at(b, i))


def _at(axes: list[Expr], index: int) -> Expr:
    return pick(axes[-1], norm(axes[0]), index) if len(axes) == 3 and axes[0] is not ONE else axes[-1]
