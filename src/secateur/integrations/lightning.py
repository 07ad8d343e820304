"""Pruning in the `Trainer` of Lightning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..criteria import Criterion, magnitude
from ..plans import Plan
from ..pruner import Pruner
from .run import PruningRun

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback  # type: ignore[import-not-found]  # the package that this program uses
else:
    from lightning.pytorch import Callback  # type: ignore[import-not-found]


class SecateurCallback(Callback):  # type: ignore[misc]
    """Prunes a `LightningModule` while it trains::

        callback = SecateurCallback(sc.magnitude, sparsity=sc.cubic(0.8, end=900, every=50))
        trainer = Trainer(max_steps=1000, callbacks=[callback])
        trainer.fit(module, loader)
        print(callback.plan)

    The arguments are those of `sc.Pruner`, without the model, which is the whole module. Schedules count optimizer steps, as
    `trainer.global_step` does with one optimizer. The pruner follows all optimizers that train pruned tensors.

    The state is part of the checkpoints of Lightning, and `trainer.fit(..., ckpt_path=...)` continues from it. Loggers get the
    current `sparsity`. At the end of training the module has plain weights with exact zeros, and `callback.plan` is the plan.

    Works with one device, with DDP, and with FSDP2 (`ModelParallelStrategy` and `fully_shard` in `configure_model`).
    `FSDPStrategy` flattens the parameters, so that they cannot be ranked; training then raises an error that says so.
    """

    def __init__(self, criterion: Criterion | Callable[..., Tensor] | str = magnitude, **options: Any) -> None:
        self._run = PruningRun(criterion, options)
        self._loaded: dict[str, Any] | None = None

    @property
    def pruner(self) -> Pruner | None:
        """The pruner, from the beginning of training on."""
        return self._run.pruner

    @property
    def plan(self) -> Plan | None:
        """What was pruned, when training has ended."""
        return self._run.plan

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loaded, self._loaded = self._loaded, None
        self._run.begin(pl_module, trainer.optimizers, loaded)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.loggers and self.pruner is not None and (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            pl_module.log("sparsity", self.pruner.sparsity)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end()

    def state_dict(self) -> dict[str, Any]:
        return self._run.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict or None
