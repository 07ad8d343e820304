"""Pruning in the `Trainer` of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback  # type: ignore[import-not-found]

from ..criteria import Criterion, magnitude
from ..following import hook_owners, innermost
from ..plans import Plan
from ..pruner import Pruner
from .run import PruningRun


class SecateurCallback(TrainerCallback):
    """Prunes the model of a `transformers.Trainer` while it trains::

        callback = SecateurCallback(sc.magnitude, sparsity=sc.cubic(0.8, end=900, every=50), exclude="lm_head")
        trainer = Trainer(model, args, train_dataset=dataset, callbacks=[callback])
        trainer.train()
        print(callback.plan)

    The arguments are those of `sc.Pruner`, without the model. Schedules count optimizer steps, as `state.global_step` does.

    Each checkpoint folder also gets the pruner's state (`pruner.pt`: masks, step, gathered gradients), and
    `trainer.train(resume_from_checkpoint=...)` continues from it. If you resume from a folder that is not in `output_dir`, pass
    its path as `checkpoint`. The log has the current `sparsity`. Reporters that come before this callback do not see it: to
    have it in TensorBoard, pass `report_to="none"` and `callbacks=[callback, TensorBoardCallback()]`.

    At the end of training the model has plain weights with exact zeros, and `callback.plan` is the plan. With
    `load_best_model_at_end`, the zeros are those of the best checkpoint. A second call of `train` keeps the zeros. Several
    callbacks may prune different tensors; the state of the second is `pruner-1.pt`.
    """

    def __init__(
        self,
        criterion: Criterion | Callable[..., Tensor] | str = magnitude,
        *,
        checkpoint: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._run = PruningRun(criterion, options)
        self._checkpoint = checkpoint
        self._file = "pruner.pt"  # in the folder of each checkpoint

    @property
    def pruner(self) -> Pruner | None:
        """The pruner, from the beginning of training on."""
        return self._run.pruner

    @property
    def plan(self) -> Plan | None:
        """What was pruned, when training has ended."""
        return self._run.plan

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self._run.leave()
        others = len(hook_owners(innermost(optimizer), Pruner))  # those of callbacks before this one
        self._file = f"pruner-{others}.pt" if others else "pruner.pt"
        saved = None
        if state.global_step:
            saved = _load(Path(self._checkpoint or _folder(args, state.global_step)) / self._file)
        self._run.begin(model, [optimizer], saved)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _folder(args, state.global_step)
        found = self._run.state()  # on every process, because the masks of a sharded model are gathered
        if found and state.is_world_process_zero and folder.is_dir():
            torch.save(found, folder / self._file)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **kwargs: Any) -> None:
        if self.pruner is not None:
            logs["sparsity"] = self.pruner.sparsity
            if state.log_history:
                state.log_history[-1]["sparsity"] = logs["sparsity"]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best and self.pruner is not None:  # its weights are in the model now
            self.pruner.load_state_dict(_load(Path(best) / self._file))
        self._run.end()


def _load(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise FileNotFoundError(
            f"training resumes from a checkpoint, and the pruner's state, {file}, does not exist. Pass the folder that you "
            "resume from: SecateurCallback(..., checkpoint=folder)."
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"
