"""Lightning callbacks in a real `Trainer.fit`: ours beside torch's, and Lightning's ModelPruning on our module."""

from __future__ import annotations

import copy
import importlib
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.ao.pruning._experimental import data_scheduler as their_schedulers
from torch.ao.pruning._experimental import data_sparsifier as their_sparsifiers
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader, TensorDataset

from secateur.drop_in import prune as our_prune
from secateur.drop_in.ao_pruning._experimental import data_scheduler as our_schedulers
from secateur.drop_in.ao_pruning._experimental import data_sparsifier as our_sparsifiers

pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's and torch's own, about workers, loggers and names

OURS = "secateur.drop_in.ao_pruning._experimental.data_sparsifier.lightning.callbacks.data_sparsity"
THEIRS = "torch.ao.pruning._experimental.data_sparsifier.lightning.callbacks.data_sparsity"
LEVEL = {"sparsity_level": 0.2, "sparse_block_shape": (1, 4), "zeros_per_block": 3}


def doubling(base: type) -> Any:
    """Makes a scheduler class that doubles the level after each epoch."""

    class Doubling(base):
        def __init__(self, data_sparsifier, schedule_param="sparsity_level", gamma=2, last_epoch=-1, verbose=False):
            self.gamma = gamma
            super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

        def get_schedule_param(self):
            factor = self.gamma if self.last_epoch else 1
            return {name: config[self.schedule_param] * factor for name, config in self.data_sparsifier.data_groups.items()}

    return Doubling


def fit(callback: Any, package: str, folder: Path, epochs: int = 2) -> Any:
    """Trains a small network with this callback."""
    pl: Any = importlib.import_module(package)

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Sequential(nn.Linear(16, 4, bias=False)))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(5)
    module = Small()
    data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 4)), batch_size=8)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[callback], default_root_dir=folder, **quiet)
    trainer.fit(module, data)
    return module


def post_training(ours: bool) -> Any:
    module = importlib.import_module(OURS if ours else THEIRS)
    return module.PostTrainingDataSparsity((our_sparsifiers if ours else their_sparsifiers).DataNormSparsifier, LEVEL)


def training_aware(ours: bool) -> Any:
    module = importlib.import_module(OURS if ours else THEIRS)
    return module.TrainingAwareDataSparsity(
        (our_sparsifiers if ours else their_sparsifiers).DataNormSparsifier,
        LEVEL,
        doubling((our_schedulers if ours else their_schedulers).BaseDataScheduler),
        {"gamma": 2},
    )


@pytest.mark.parametrize("make", [post_training, training_aware])
def test_a_fit_gives_the_model_that_torch_gives(make, tmp_path):
    mine, other = make(ours=True), make(ours=False)
    trained = fit(mine, "pytorch_lightning", tmp_path, epochs=3)
    fit(other, "pytorch_lightning", tmp_path, epochs=3)
    assert mine.sparsified.state_dict().keys() == other.sparsified.state_dict().keys()
    for key, value in other.sparsified.state_dict().items():
        assert torch.equal(mine.sparsified.state_dict()[key], value), key
        assert 0 < (value == 0).sum() < value.numel()
    assert dict(mine.data_sparsifier.data_groups) == dict(other.data_sparsifier.data_groups)
    assert all((parameter != 0).all() for parameter in trained.model.parameters())  # only the copy is sparse


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_training_aware_sparsity_follows_the_scheduler_in_either_package(package, tmp_path):
    pytest.importorskip(package)
    callback = training_aware(ours=True)
    told: list[Any] = []
    step = callback.on_train_epoch_end

    def watched(trainer: Any, module: Any) -> None:
        step(trainer, module)
        masks = [callback.data_sparsifier.get_mask(name) for name in callback.data_sparsifier.data_groups]
        told.append((callback.data_scheduler.get_last_param(), [(mask == 0).double().mean().item() for mask in masks]))

    callback.on_train_epoch_end = watched
    fit(callback, package, tmp_path, epochs=3)
    names = ["0_weight", "2_0_weight"]
    assert [levels for levels, _ in told] == [dict.fromkeys(names, 0.2 * 2**epoch) for epoch in (1, 2, 3)]
    assert [zeros for _, zeros in told] == [
        [pytest.approx(round(blocks * 0.2 * 2**epoch) / blocks * 3 / 4) for blocks in (32, 16)] for epoch in (0, 1, 2)
    ]
    for name in names:
        assert not is_parametrized(callback.data_sparsifier._container, name)
    first, last = callback.sparsified[0].weight, callback.sparsified[2][0].weight
    assert torch.equal(first, callback.data_sparsifier.get_data("0_weight", return_original=False))
    assert (last == 0).double().mean() == pytest.approx(told[-1][1][1])


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_post_training_sparsity_sparsifies_a_copy_and_says_how_much(package, tmp_path, caplog):
    pytest.importorskip(package)
    callback = post_training(ours=True)
    with caplog.at_level(logging.INFO, logger="secateur"):
        trained = fit(callback, package, tmp_path)
    assert not callback.sparsified.training
    for (name, sparse), dense in zip(callback.sparsified.named_parameters(), trained.model.parameters(), strict=True):
        kept = sparse != 0
        assert torch.equal(sparse[kept], dense[kept])
        assert f"Sparsity in layer {name} = {100 * (1 - kept.double().mean().item()):.2f}%" in caplog.messages


def test_a_second_fit_works(tmp_path):
    callback = training_aware(ours=True)
    fit(callback, "pytorch_lightning", tmp_path)
    once = copy.deepcopy(callback.sparsified)
    fit(callback, "pytorch_lightning", tmp_path)
    assert (callback.sparsified[0].weight == 0).sum() > (once[0].weight == 0).sum()


def test_a_module_that_has_no_model_is_told_so():
    pl: Any = importlib.import_module("pytorch_lightning")
    with pytest.raises(AttributeError, match=r"self\.model"):
        post_training(ours=True).on_fit_end(None, pl.LightningModule())


# --- ModelPruning -----------------------------------------------------------------------------------------------------

PACKAGES = ["pytorch_lightning", "lightning.pytorch"]
SETTINGS: dict[str, dict[str, Any]] = {
    "global l1": {"pruning_fn": "l1_unstructured", "use_global_unstructured": True},
    "global random": {"pruning_fn": "random_unstructured", "use_global_unstructured": True},
    "local l1": {"pruning_fn": "l1_unstructured", "use_global_unstructured": False},
    "local random": {"pruning_fn": "random_unstructured", "use_global_unstructured": False},
    "channels": {"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0, "pruning_norm": 2},
    "random channels": {"pruning_fn": "random_structured", "use_global_unstructured": False, "pruning_dim": 1},
}


def put_in_place(monkeypatch: pytest.MonkeyPatch, package: str) -> Any:
    """Makes the callback of this package use our module instead of torch's."""
    module = importlib.import_module(f"{package}.callbacks.pruning")
    monkeypatch.setattr(module, "pytorch_prune", our_prune)
    for table in ("_PYTORCH_PRUNING_FUNCTIONS", "_PYTORCH_PRUNING_METHOD"):
        names = {key: value.__name__ for key, value in vars(module)[table].items()}
        monkeypatch.setattr(module, table, {key: getattr(our_prune, name) for key, name in names.items()})
    return module


def weights(module: Any) -> list[Tensor]:
    return [parameter.detach() for parameter in module.model.parameters()]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("package", PACKAGES)
def test_model_pruning_gives_the_same_weights_with_ours_in_place(settings, package, tmp_path, monkeypatch):
    pytest.importorskip(package)
    module = importlib.import_module(f"{package}.callbacks.pruning")
    # Pruned once, because a second round of torch's ranks the weights of the last forward pass and ours the current ones.
    arguments = {"amount": 0.5, "apply_pruning": lambda epoch: epoch == 0, **SETTINGS[settings]}
    expected = weights(fit(module.ModelPruning(**arguments), package, tmp_path, epochs=3))
    put_in_place(monkeypatch, package)
    found = fit(module.ModelPruning(**arguments), package, tmp_path, epochs=3)
    assert not our_prune.is_pruned(found)
    for mine, other in zip(weights(found), expected, strict=True):
        assert torch.equal(mine, other)
        assert (mine == 0).any()


@pytest.mark.parametrize("method", ["L1Unstructured", "RandomUnstructured"])
@pytest.mark.parametrize("package", PACKAGES)
def test_model_pruning_accepts_our_classes(method, package, tmp_path):
    pytest.importorskip(package)
    module = importlib.import_module(f"{package}.callbacks.pruning")
    found = []
    for library in (our_prune, torch.nn.utils.prune):
        callback = module.ModelPruning(getattr(library, method), amount=0.3, use_global_unstructured=True)
        found.append(weights(fit(callback, package, tmp_path, epochs=3)))
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("lottery", [False, True])
def test_rounds_of_model_pruning_compound(lottery, tmp_path, monkeypatch):
    module = put_in_place(monkeypatch, "pytorch_lightning")
    callback = module.ModelPruning(
        "l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=lottery, make_pruning_permanent=False
    )
    trained = fit(callback, "pytorch_lightning", tmp_path, epochs=3)
    layers = [layer for layer in trained.model.modules() if isinstance(layer, nn.Linear)]
    kept = sum(int(layer.weight_mask.sum()) for layer in layers)
    assert kept == sum(layer.weight_mask.numel() for layer in layers) / 8
    assert torch.nn.utils.prune.is_pruned(trained)
    checkpoint: dict[str, Any] = {}
    callback._make_pruning_permanent = True
    callback.on_save_checkpoint(None, trained, checkpoint)
    assert checkpoint["state_dict"].keys() == {"model.0.weight", "model.2.0.weight"}
    callback.on_train_end(None, trained)
    assert not torch.nn.utils.prune.is_pruned(trained)
    assert sum(int((weight != 0).sum()) for weight in weights(trained)) == kept


def test_lightning_is_not_imported_with_the_sparsifiers():
    code = """
import sys
import secateur.drop_in.ao_pruning._experimental.data_sparsifier.lightning.callbacks
print([name for name in sys.modules if name.partition(".")[0] in ("lightning", "pytorch_lightning")])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
