"""The variance of each unit's activations over data, at the operators that read them: the traced run, repeated and watched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...axes import Group
from ...edit import plain_kernels, run
from ...progress import track
from ...stats import check_evidence, on_batch, split_batch
from ...trace import Ref, Trace
from ..exact import Wiring, units_along


class _Watch(TorchDispatchMode):
    """Sums the inputs of the operators that read each group, for each unit.

    Values are taken relative to the first mean of their unit, so that a large mean does not hide the variance.
    """

    def __init__(self, trace: Trace, groups: Sequence[Group]) -> None:
        super().__init__()
        self.trace, self.at = trace, 0
        self.sums = {g: torch.zeros(3, g.size, dtype=torch.float64) for g in groups}  # count, sum, sum of squares
        self.centres = {g: torch.full((g.size,), torch.nan, dtype=torch.float64) for g in groups}
        wiring, self.taps = Wiring(trace), {}
        for group in groups:
            for name in dict.fromkeys(m.tensor for m in group.members if m.role == "consume"):
                for step in wiring.readers.get(name, ()):
                    data = [n for n in step.inputs if n not in wiring.roots and wiring.carries(n, group.atom)]
                    self.taps.setdefault(id(step), set()).update((n, group) for n in data)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        step = self.trace.steps[self.at] if self.at < len(self.trace.steps) else None
        if step is None or step.func is not func:
            raise ValueError(f"the model runs other operators on data= than on the example inputs, from {func} on")
        self.at += 1
        given = {r.number: t for r, t in zip(step.args, args) if isinstance(r, Ref)}
        for number, group in self.taps.get(id(step), ()):
            if number in given:
                self.look(given[number], number, group)
        return func(*args, **(kwargs or {}))

    def look(self, tensor: Tensor, number: int, group: Group) -> None:
        for d, e in enumerate(self.trace.axes[number]):
            for along in units_along(e, group.atom):
                here = along >= 0
                rows, units, centres = (
                    tensor.detach().movedim(d, 0).flatten(1).double().cpu()[here],
                    along[here],
                    self.centres[group],
                )
                centres[units] = torch.where(centres[units].isnan(), rows.mean(1), centres[units])
                rows -= centres[units][:, None]
                seen = torch.stack([torch.full((len(rows),), float(rows.shape[1])).double(), rows.sum(1), rows.square().sum(1)])
                self.sums[group].index_add_(1, units, seen)


def variances(trace: Trace, groups: Sequence[Group], data: Iterable[Any] | None) -> dict[Group, Tensor]:
    """The variance of each unit's activations over `data`. A group that no weight reads is left out."""
    check_evidence(frozenset({"activations"}), data, None)
    assert data is not None
    watch = _Watch(trace, groups)
    for batch in track(data, "activations"):
        args, kwargs, _ = split_batch(batch)
        watch.at = 0
        with plain_kernels(), on_batch(trace.model, args, kwargs):
            run(trace.model, args, kwargs, watch)
    found = {g: s for g, s in watch.sums.items() if bool(s[0].all())}
    return {g: s[2] / s[0] - (s[1] / s[0]).square() for g, s in found.items()}
