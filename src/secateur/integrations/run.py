"""What the callbacks of trainers share: a pruner that is made when training begins, resumed, and finished at the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .._dist import local
from .._tree import bare_name
from ..criteria import Criterion
from ..masks import Masks
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

        After an earlier run that was finished, the zeros of that run are kept.
        """
        if state is None and self.plan is not None:
            self.pruner = Pruner.hold(model)
        else:
            self.pruner = Pruner(model, self.criterion, **self.options)
        if state is not None:
            self._check_weights(state)
            self.pruner.load_state_dict(state)
        self.pruner.attach(*optimizers)

    def _check_weights(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError where the model has other zeros than the state, which is then of another run."""
        if self.options.get("ste") or self.pruner is None:  # dense weights, which masks do not change
            return
        tensors = {bare_name(name): local(tensor.detach()) for name, tensor in self.pruner.tensors().items()}
        for name, mask in Masks.unpack(state["masks"]).items():
            weight = tensors.get(bare_name(name))
            if weight is not None and weight.shape == mask.shape and bool(weight[~mask.to(weight.device)].any()):
                raise ValueError(
                    f"the pruner's state prunes weights of {name!r} that are not zero in the model: the state and the weights "
                    "come from different checkpoints. Resume both from the same one."
                )

    def end(self) -> Plan:
        """Finishes the pruner and keeps its plan."""
        assert self.pruner is not None
        self.plan = self.pruner.finish()
        return self.plan
