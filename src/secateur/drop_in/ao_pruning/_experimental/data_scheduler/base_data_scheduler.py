"""The base class of data schedulers, which set one setting of a data sparsifier at every step."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ...scheduler.base_scheduler import warn_of_order
from ...sparsifier.base_sparsifier import count_steps
from ..data_sparsifier import BaseDataSparsifier

__all__ = ["BaseDataScheduler"]


class BaseDataScheduler:
    """Writes the values that `get_schedule_param` returns into the configs, at every `step` and once on construction.

    `base_param` are the values that the configs have on construction. A scheduler that continues a schedule (`last_epoch` is
    not -1) takes the values that the first scheduler found.

    Args:
        data_sparsifier: the sparsifier whose configs are written.
        schedule_param: the setting to schedule, such as "sparsity_level".
        last_epoch: the number of steps made so far, minus one, to continue a schedule.
        verbose: whether to print the values.
    """

    _last_param: dict[str, Any]

    def __init__(
        self, data_sparsifier: BaseDataSparsifier, schedule_param: str, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        if not isinstance(data_sparsifier, BaseDataSparsifier):
            raise TypeError(f"a data scheduler needs a BaseDataSparsifier, not a {type(data_sparsifier).__name__}")
        if type(self).get_schedule_param is BaseDataScheduler.get_schedule_param:
            self.get_schedule_param()
        self.data_sparsifier = data_sparsifier
        self.schedule_param = schedule_param
        self.base_param = self._values() if last_epoch == -1 else self._values_before()
        self.last_epoch = last_epoch
        count_steps(data_sparsifier)
        vars(data_sparsifier)["_step_count"] = 0
        self._step_count = 0
        self.verbose = verbose
        self._get_sp_called_within_step = False
        self.step()

    def get_schedule_param(self) -> dict[str, Any]:
        """Returns the value for every name at `last_epoch`. A subclass implements it."""
        raise NotImplementedError(f"{type(self).__name__} must implement get_schedule_param, which returns the values")

    def get_last_param(self) -> dict[str, Any]:
        """Returns the values that were written last."""
        return self._last_param

    def step(self) -> None:
        """Writes the next values. Call it after `data_sparsifier.step()`."""
        if self._step_count == 1:
            warn_of_order(self.data_sparsifier)
        self._step_count += 1
        self._get_sp_called_within_step = True
        try:
            self.last_epoch += 1
            values = self.get_schedule_param()
        finally:
            self._get_sp_called_within_step = False
        for name in values:
            self.data_sparsifier._check_known(name, self.data_sparsifier.data_groups)
        self._write(values)
        if self.verbose:
            for name, value in values.items():
                print(f"Adjusting {self.schedule_param} for group {name} to {value}")
        self._last_param = self._values()
        self.data_sparsifier.enable_mask_update = True

    def _values(self) -> dict[str, Any]:
        return {name: config.get(self.schedule_param) for name, config in self.data_sparsifier.data_groups.items()}

    def _values_before(self) -> dict[str, Any]:
        """Returns the current values, or the original ones where a scheduler has written the current ones."""
        remembered = vars(self.data_sparsifier).get("_scheduled", {})
        found = {}
        for name, value in self._values().items():
            base, written = remembered.get((self.schedule_param, name), (value, value))
            found[name] = base if written == value else value
        return found

    def _write(self, values: Mapping[str, Any]) -> None:
        remembered = vars(self.data_sparsifier).setdefault("_scheduled", {})
        for name, value in values.items():
            self.data_sparsifier.data_groups[name][self.schedule_param] = value
            remembered[self.schedule_param, name] = self.base_param.get(name, value), value

    def state_dict(self) -> dict[str, Any]:
        """Returns all attributes except the data sparsifier. Save (and load) the sparsifier first."""
        return {key: value for key, value in vars(self).items() if key != "data_sparsifier"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict` and sets the values of the data that are present to those of that time."""
        vars(self).update(copy.deepcopy(state_dict))
        last = state_dict.get("_last_param", {})
        self._write({name: value for name, value in last.items() if name in self.data_sparsifier.data_groups})

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} (\nData Sparsifier {self.data_sparsifier}\n    {self.schedule_param}: {self.base_param}\n)"
        )
