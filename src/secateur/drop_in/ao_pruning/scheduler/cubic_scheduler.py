"""A cubic schedule: levels rise fast at first and slowly at the end."""

from __future__ import annotations

from typing import Any

from ..sparsifier.base_sparsifier import BaseSparsifier
from .base_scheduler import BaseScheduler

__all__ = ["CubicSL"]


class CubicSL(BaseScheduler):
    """Raises the level of each group from `init_sl` to its target in `delta_t * total_t` steps, starting at step `init_t`.

    Before `init_t` the level is `init_sl`, or 0 with `initially_zero`. Each of the five arguments may be a list with one value
    per group. The level changes at every step: `delta_t` only scales the time.
    """

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        init_sl: Any = 0.0,
        init_t: Any = 0,
        delta_t: Any = 10,
        total_t: Any = 100,
        initially_zero: Any = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sparsifier = sparsifier
        self.init_sl = self._make_sure_a_list(init_sl)
        self.init_t = self._make_sure_a_list(init_t)
        self.delta_t = self._make_sure_a_list(delta_t)
        self.total_t = self._make_sure_a_list(total_t)
        self.initially_zero = self._make_sure_a_list(initially_zero)
        if not all(dt * n for dt, n in zip(self.delta_t, self.total_t, strict=True)):
            raise ZeroDivisionError(f"delta_t={delta_t!r} times total_t={total_t!r} is 0; give both at least 1")
        super().__init__(sparsifier, last_epoch, verbose)

    @staticmethod
    def sparsity_compute_fn(
        s_0: float, s_f: float, t: float, t_0: float, dt: float, n: float, initially_zero: bool = False
    ) -> float:
        """Returns the level at step `t`, from `s_0` at `t_0` to `s_f` at `t_0 + dt * n` (Zhu & Gupta, 2017)."""
        if initially_zero and t < t_0:
            return 0
        return max(s_0, min(s_f, s_f + (s_0 - s_f) * (1.0 - (t - t_0) / (dt * n)) ** 3))

    def get_sl(self) -> list[float]:
        """Returns the level of every group at `last_epoch`."""
        self._warn_outside_step()
        settings = zip(self.init_sl, self.base_sl, self.init_t, self.delta_t, self.total_t, self.initially_zero)
        return [
            self.sparsity_compute_fn(s_0, s_f, self.last_epoch, t_0, dt, n, zero) for s_0, s_f, t_0, dt, n, zero in settings
        ]
