"""Scorers of scikit-learn evaluate torch models."""

import numpy as np
import pytest
import torch
from torch import nn

metrics = pytest.importorskip("sklearn.metrics")

from secateur.integrations.scikit import evaluator  # noqa: E402


@pytest.fixture
def data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    return model, torch.randn(50, 8), torch.randint(3, (50,))


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(inputs)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("accuracy", lambda truth, out: metrics.accuracy_score(truth, out.argmax(1))),
        ("f1_macro", lambda truth, out: metrics.f1_score(truth, out.argmax(1), average="macro")),
        ("neg_log_loss", lambda truth, out: -metrics.log_loss(truth, out.double().softmax(1))),
        ("roc_auc_ovr", lambda truth, out: metrics.roc_auc_score(truth, out.double().softmax(1), multi_class="ovr")),
    ],
)
def test_a_classifier_scores_as_its_predictions_do(name, expected, data):
    model, inputs, labels = data
    found = evaluator(name, inputs, labels, batch_size=16)(model.train())
    assert model.training
    assert found == pytest.approx(expected(labels.numpy(), logits(model, inputs)), rel=1e-6)
    assert isinstance(found, float)


def test_a_regressor_and_a_scorer_of_ones_own(data):
    _, inputs, _ = data
    torch.manual_seed(1)
    model, truth = nn.Linear(8, 1), torch.randn(50)
    predicted = logits(model, inputs).squeeze(1).numpy()
    assert evaluator("r2", inputs, truth)(model) == pytest.approx(metrics.r2_score(truth.numpy(), predicted))
    own = metrics.make_scorer(lambda a, b: float(np.abs(a - b).max()), greater_is_better=False)
    assert evaluator(own, inputs, truth)(model) == pytest.approx(-float(np.abs(truth.numpy() - predicted).max()))


def test_data_of_the_wrong_shape_is_named(data):
    model, _, labels = data
    with pytest.raises(ValueError, match=r"does not run on a batch.*\(50, 7\)"):
        evaluator("accuracy", torch.randn(50, 7), labels)(model)
