"""The base class of schedulers, which set the sparsity levels of a sparsifier's groups at every step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from ..sparsifier.base_sparsifier import BaseSparsifier, count_steps

__all__ = ["BaseScheduler"]


class BaseScheduler:
    """Writes the levels that `get_sl` returns, one for each group, at every `step` and once on construction.

    `base_sl` are the levels that the user gave the groups. The sparsifier remembers them while a scheduler writes other ones,
    so that a scheduler which is created again in the middle of a schedule has the same targets.
    """

    _last_sl: list[float]

    def __init__(self, sparsifier: BaseSparsifier, last_epoch: int = -1, verbose: bool = False) -> None:
        if not isinstance(sparsifier, BaseSparsifier):
            raise TypeError(f"a scheduler needs a BaseSparsifier, not a {type(sparsifier).__name__}")
        self.sparsifier = sparsifier
        self.base_sl = _targets(sparsifier)
        self.last_epoch = last_epoch
        count_steps(sparsifier)
        vars(sparsifier)["_step_count"] = 0
        self._step_count = 0
        self.verbose = verbose
        self._get_sl_called_within_step = False
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns all attributes except the sparsifier."""
        return {name: value for name, value in vars(self).items() if name != "sparsifier"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict` and sets the levels of the groups to those of that time."""
        if len(base := state_dict.get("base_sl", self.base_sl)) != (groups := len(self.sparsifier.groups)):
            raise ValueError(f"the sparsifier has {groups} groups, and this state_dict is for {len(base)}")
        vars(self).update({name: list(value) if isinstance(value, list) else value for name, value in state_dict.items()})
        self._write(state_dict.get("_last_sl", ()))

    def get_last_sl(self) -> list[float]:
        """Returns the levels that were written last."""
        return self._last_sl

    def get_sl(self) -> list[float]:
        """Returns the level of every group at `last_epoch`. A subclass implements it, and `step` calls it."""
        self._warn_outside_step()
        raise NotImplementedError(f"{type(self).__name__} must implement get_sl, which returns the levels")

    def _warn_outside_step(self) -> None:
        if not self._get_sl_called_within_step:
            warnings.warn("only step should call get_sl; use get_last_sl() for the levels that were written last", stacklevel=3)

    def print_sl(self, is_verbose: bool, group: int, sl: float, epoch: int | None = None) -> None:
        """Prints the level of a group if `is_verbose`."""
        if is_verbose:
            text = f"adjusting sparsity level of group {group} to {sl:.4e}."
            print(text.capitalize() if epoch is None else f"Epoch {epoch:5d}: {text}")

    def __repr__(self) -> str:
        return f"{type(self).__name__} (\nSparsifier {self.sparsifier}\n    base_sl: {self.base_sl}\n)"

    def step(self, epoch: int | None = None) -> None:
        """Writes the next levels. Call it after `sparsifier.step()`."""
        if self._step_count == 1:
            warn_of_order(self.sparsifier)
        self._step_count += 1
        self._get_sl_called_within_step = True
        try:
            self.last_epoch += 1
            levels = self.get_sl()
        finally:
            self._get_sl_called_within_step = False
        for at, level in enumerate(self._write(levels)):
            self.print_sl(self.verbose, at, level, epoch)
        self._last_sl = [group["sparsity_level"] for group in self.sparsifier.groups]
        self.sparsifier.enable_mask_update = True

    def _write(self, levels: Iterable[float]) -> list[float]:
        remembered = vars(self.sparsifier).setdefault("_scheduled", {})
        written = []
        for group, base, level in zip(self.sparsifier.groups, self.base_sl, levels):
            group["sparsity_level"] = level
            remembered[group["tensor_fqn"]] = base, level
            written.append(level)
        return written

    def _make_sure_a_list(self, var: Any) -> list[Any]:
        """Returns a list with one value for each group."""
        groups = len(self.sparsifier.groups)
        if not isinstance(var, list | tuple):
            return [var] * groups
        if len(var) != groups:
            raise ValueError(f"the sparsifier has {groups} groups, but {len(var)} values were given: {var!r}")
        return list(var)


def warn_of_order(sparsifier: BaseSparsifier) -> None:
    """Warns if the sparsifier has not been stepped before the second step of a scheduler, or if its steps are not counted."""
    if not hasattr(sparsifier.step, "_with_counter"):
        text = "sparsifier.step was replaced after this scheduler was created, so its calls are not counted"
    elif vars(sparsifier)["_step_count"] < 1:
        text = "scheduler.step() was called before sparsifier.step(), so the first levels were not used"
    else:
        return
    warnings.warn(f"{text}; call sparsifier.step() before scheduler.step()", UserWarning, stacklevel=3)


def _targets(sparsifier: BaseSparsifier) -> list[float]:
    """Returns the levels that the user gave the groups: their current ones, unless a scheduler wrote those."""
    remembered, targets = vars(sparsifier).get("_scheduled", {}), []
    for group in sparsifier.groups:
        if "sparsity_level" not in group:
            raise KeyError(
                f"{group['tensor_fqn']!r} has no 'sparsity_level' to schedule ({type(sparsifier).__name__} does not use one)"
            )
        target, written = remembered.get(group["tensor_fqn"], (None, None))
        targets.append(target if written == group["sparsity_level"] else group["sparsity_level"])
    return targets
