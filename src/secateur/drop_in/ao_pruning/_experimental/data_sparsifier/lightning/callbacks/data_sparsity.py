"""Callbacks that sparsify a copy of the model that Lightning trains."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from ._data_sparstity_utils import _attach_model_to_data_sparsifier, _log_sparsified_level

try:
    from pytorch_lightning import Callback  # type: ignore[import-not-found]
except ImportError:  # the same package under its newer name
    from lightning.pytorch import Callback  # type: ignore[import-not-found]


class PostTrainingDataSparsity(Callback):  # type: ignore[misc]  # one of two base classes
    """Sparsifies a copy of `pl_module.model` at the end of the fit. The model itself does not change.

    The copy is the attribute `sparsified`, and its sparsifier is `data_sparsifier`.

    Args:
        data_sparsifier_class: the class of the data sparsifier, which is created at the end of the fit.
        data_sparsifier_args: its arguments, without `data_list`.
    """

    def __init__(self, data_sparsifier_class: Any, data_sparsifier_args: dict[str, Any]) -> None:
        super().__init__()
        self.data_sparsifier_class = data_sparsifier_class
        self.data_sparsifier_args = data_sparsifier_args
        self.data_sparsifier: Any = None
        self.sparsified: nn.Module | None = None

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.sparsified = _copy_of_model(pl_module).eval()
        self.data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        _attach_model_to_data_sparsifier(self.sparsified, self.data_sparsifier)
        self.data_sparsifier.step()
        self.data_sparsifier.squash_mask()
        _log_sparsified_level(self.sparsified, self.data_sparsifier)


class TrainingAwareDataSparsity(Callback):  # type: ignore[misc]
    """Sparsifies a new copy of `pl_module.model` after every epoch, at the current level of a scheduler.

    The model in training does not change. The last copy is the attribute `sparsified`; at the end of training the zeros are
    written into its weights.

    Args:
        data_sparsifier_class: the class of the data sparsifier, which is created when training starts.
        data_sparsifier_args: its arguments, without `data_list`.
        data_scheduler_class: the class of the data scheduler, which is created when training starts.
        data_scheduler_args: its arguments, without `data_sparsifier`.
    """

    def __init__(
        self,
        data_sparsifier_class: Any,
        data_sparsifier_args: dict[str, Any],
        data_scheduler_class: Any,
        data_scheduler_args: dict[str, Any],
    ) -> None:
        super().__init__()
        self.data_sparsifier_class = data_sparsifier_class
        self.data_sparsifier_args = data_sparsifier_args
        self.data_scheduler_class = data_scheduler_class
        self.data_scheduler_args = data_scheduler_args
        self.data_sparsifier: Any = None
        self.data_scheduler: Any = None
        self.sparsified: nn.Module | None = None
        self.data_sparsifier_state_dict: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.data_sparsifier = self.data_sparsifier_class(**self.data_sparsifier_args)
        self.sparsified = _copy_of_model(pl_module)
        _attach_model_to_data_sparsifier(self.sparsified, self.data_sparsifier)  # the scheduler reads the levels of all data
        self.data_scheduler = self.data_scheduler_class(
            **deepcopy(self.data_scheduler_args), data_sparsifier=self.data_sparsifier
        )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self.data_sparsifier_state_dict is not None:
            self.data_sparsifier.load_state_dict(self.data_sparsifier_state_dict)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sparsified = _copy_of_model(pl_module)
        _attach_model_to_data_sparsifier(self.sparsified, self.data_sparsifier)  # keeps masks and levels
        self.data_sparsifier.step()
        self.data_scheduler.step()
        self.data_sparsifier_state_dict = self.data_sparsifier.state_dict()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.data_sparsifier.squash_mask()


def _copy_of_model(pl_module: Any) -> nn.Module:
    model = getattr(pl_module, "model", None)
    if model is None:
        raise AttributeError(f"{type(pl_module).__name__} has no `model`; store the network to sparsify in `self.model`")
    return deepcopy(model)
