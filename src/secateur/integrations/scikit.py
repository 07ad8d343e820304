"""Metrics of scikit-learn as `evaluate` functions: `evaluate(model) -> float`, larger is better."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # type: ignore[import-not-found]
from sklearn.metrics import get_scorer  # type: ignore[import-not-found]
from torch import Tensor, nn

from ..edit import eval_mode
from ..stats import on_batch


class _Fitted(BaseEstimator):
    """A torch model with the methods that scorers call. `fit` does nothing, because the model is trained."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size

    def fit(self, *_: Any) -> _Fitted:
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def outputs(self, inputs: Tensor) -> Tensor:
        found = []
        with eval_mode(self.model), torch.no_grad():
            for batch in inputs.split(self.batch_size):
                with on_batch(self.model, (batch,), {}):
                    found.append(self.model(batch).float().cpu())
        return torch.cat(found)


class _Classifier(ClassifierMixin, _Fitted):
    def __init__(self, model: nn.Module, batch_size: int, classes: np.ndarray) -> None:
        super().__init__(model, batch_size)
        self.classes_ = classes

    def predict(self, inputs: Tensor) -> np.ndarray:
        return self.outputs(inputs).argmax(1).numpy()

    def predict_proba(self, inputs: Tensor) -> np.ndarray:
        return self.outputs(inputs).double().softmax(1).numpy()


class _Regressor(RegressorMixin, _Fitted):
    def predict(self, inputs: Tensor) -> np.ndarray:
        return self.outputs(inputs).squeeze(-1).numpy()


def evaluator(scoring: str | Callable[..., float], inputs: Tensor, targets: Tensor, *, batch_size: int = 256) -> Any:
    """Returns `evaluate(model) -> float`, which scores a model on this data with a scorer of scikit-learn::

        evaluate = evaluator("balanced_accuracy", images, labels)
        evaluate(model)  # 0.97

    `scoring`: a name that `sklearn.metrics.get_scorer` knows ("accuracy", "f1_macro", "neg_log_loss", "r2", ...), or a scorer
    that `sklearn.metrics.make_scorer` made. Larger is better, as for all scorers. With integer targets the model is a
    classifier that returns one logit for each class; with float targets it is a regressor.
    """
    scorer = get_scorer(scoring) if isinstance(scoring, str) else scoring

    def evaluate(model: nn.Module) -> float:
        if targets.is_floating_point():
            return float(scorer(_Regressor(model, batch_size), inputs, targets.numpy()))
        with eval_mode(model), torch.no_grad(), on_batch(model, (inputs,), {}):
            classes = np.arange(model(inputs[:1]).shape[1])
        return float(scorer(_Classifier(model, batch_size, classes), inputs, targets.numpy()))

    return evaluate
