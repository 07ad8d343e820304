"""A schedule given by a function of the epoch."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from ..sparsifier.base_sparsifier import BaseSparsifier
from ..sparsifier.utils import clone, refuse_lambdas
from .base_scheduler import BaseScheduler

__all__ = ["LambdaSL"]


class LambdaSL(BaseScheduler):
    """Sets the level of each group to its target times `sl_lambda(epoch)`: one function for all groups, or a list of them."""

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        sl_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sparsifier = sparsifier
        self.sl_lambdas = self._make_sure_a_list(sl_lambda)
        super().__init__(sparsifier, last_epoch, verbose)

    def get_sl(self) -> list[float]:
        """Returns the level of every group at `last_epoch`."""
        self._warn_outside_step()
        return [base * function(self.last_epoch) for function, base in zip(self.sl_lambdas, self.base_sl)]

    def state_dict(self) -> dict[str, Any]:
        """Returns all attributes except the sparsifier, and except functions that cannot be pickled."""
        state = super().state_dict()
        try:
            pickle.dumps(self.sl_lambdas)
        except Exception:
            del state["sl_lambdas"]
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_lambdas(self, {f"sl_lambdas[{at}]": function for at, function in enumerate(self.sl_lambdas)})
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return clone(self, vars(self), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return clone(self, vars(self), memo)
