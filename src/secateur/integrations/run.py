"""What the callbacks of trainers share: a pruner that is made when training begins, resumed, and finished at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .._dist import sharded
from ..criteria import Criterion
from ..plans import Plan
from ..pruner import Pruner


class PruningRun:
    """The arguments of a `Pruner` without the model, and the pruner once training has begun."""

    def __init__(self, criterion: Criterion | Callable[..., Tensor] | str, options: Mapping[str, Any]) -> None:
        try:
            inspect.signature(Pruner).bind(None, criterion, **options)
        except TypeError as error:
            raise TypeError(f"the arguments are those of sc.Pruner, without the model: {error}") from None
        self.criterion, self.options = criterion, dict(options)
        self.pruner: Pruner | None = None
        self.plan: Plan | None = None

    def begin(self, model: nn.Module, optimizers: Iterable[Any], state: Mapping[str, Any] | None) -> None:
        """Makes the pruner, or resumes it from a state, and attaches it to the optimizers that train its tensors.

        After an earlier run on the same model that was finished, the zeros of that run are kept.
        """
        finished = self.plan is not None and self.pruner is not None and self.pruner.model is model
        self.plan = None
        if state is None and finished:
            self.pruner = Pruner.hold(model)
        else:
            self.pruner = Pruner(model, self.criterion, **self.options)
        if state is not None:
            before = self._nonzero()
            self.pruner.load_state_dict(state)
            self._check_weights(before)
        self.pruner.attach(*optimizers)

    def leave(self) -> None:
        """Detaches the pruner of a run that was stopped by an error, before another one takes its place."""
        if self.pruner is not None:
            self.pruner.detach()

    def state(self) -> dict[str, Any]:
        """The state of the pruner with whole tensors. With a sharded model, every process has to call this."""
        if self.pruner is None:
            return {}
        return tree_map(_whole, self.pruner.state_dict())

    def _nonzero(self) -> dict[str, int]:
        """The number of weights that are not zero in each tensor, the same on every process."""
        assert self.pruner is not None
        counts = {name: (tensor.detach() != 0).sum() for name, tensor in self.pruner.tensors().items()}
        return {name: int(_whole(count)) for name, count in counts.items()}

    def _check_weights(self, before: Mapping[str, int]) -> None:
        """Raises ValueError if loading the state has set weights to zero: those of its own checkpoint were zero before."""
        if changed := [name for name, number in self._nonzero().items() if number != before[name]]:
            raise ValueError(
                f"the pruner's state prunes weights of {changed[0]!r} that were not zero in the model: the state and the "
                "weights come from different checkpoints. Resume both from the same one."
            )

    def end(self) -> Plan:
        """Finishes the pruner and keeps its plan."""
        assert self.pruner is not None
        self.plan = self.pruner.finish()
        return self.plan


def _whole(value: Any) -> Any:
    """A sharded tensor gathered from all processes; anything else as it is."""
    return value.full_tensor().cpu() if sharded(value) else value
