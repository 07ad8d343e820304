"""Initial states of recurrent layers.

Torch replaces missing initial states by one tensor of zeros for all layers. Zeros do not couple the units of different layers,
so each layer gets an axis of its own there. A state that comes out of a layer has the units of the state that went in.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..axes import ONE, Atom, Expr, Fam, fresh, norm, pick, unify
from .tracer import Tracer

LAYERS = frozenset(["lstm", "gru", "rnn_tanh", "rnn_relu"])
CELLS = frozenset(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
_FILLS = frozenset(["aten::zeros", "aten::new_zeros", "aten::zeros_like"])


def states_of(args: tuple[Any, ...]) -> list[Tensor]:
    """Returns the initial states in the arguments of a recurrent function: one tensor, or hidden and cell state."""
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()  # data, batch sizes, states
    given = args[2 if packed else 1]
    return [t for t in (given if isinstance(given, tuple | list) else [given]) if isinstance(t, Tensor)]


def separate_layers(tracer: Tracer, args: tuple[Any, ...]) -> None:
    """Gives each layer and direction units of its own in a state of zeros, with equal counts."""
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


def unify_states(tracer: Tracer, name: str, args: tuple[Any, ...], out: Any) -> None:
    """Couples the units of returned states with those of the initial states. A run of a single step does not show this."""
    made = [out] if isinstance(out, Tensor) else list(out) if name in CELLS else list(out[1:])
    for before, after in zip(states_of(args), made):
        a, b = tracer.axes_of(before), tracer.axes_of(after)
        for i in range(a[0].size if len(a) == 3 else 1):
            unify(_units_of_layer(a, i), _units_of_layer(b, i))


def _units_of_layer(axes: list[Expr], index: int) -> Expr:
    return pick(axes[-1], norm(axes[0]), index) if len(axes) == 3 and axes[0] is not ONE else axes[-1]
