"""Pruning in a real Lightning `Trainer`: on schedule, resumed from its checkpoints, with DDP and with FSDP2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc

pl = pytest.importorskip("lightning.pytorch")

from secateur.integrations.lightning import SecateurCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*num_workers", "ignore:.*treespec", "ignore:Checkpoint directory", "ignore:Be aware", "ignore:.*litlogger"
    ),
]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 4))

    def training_step(self, batch, _):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader():
    """Six equal batches: a resumed Lightning run (2.6) starts with another batch of the epoch than the run that went on."""
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(4, 8).repeat(6, 1), torch.randint(4, (4,)).repeat(6)), batch_size=4)


def build(seed=0):
    torch.manual_seed(seed)
    return Net()


def callback():
    return SecateurCallback(sc.taylor, sparsity=sc.cubic(0.75, start=2, end=10, every=2))


def trainer(folder, steps, *callbacks, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "max_steps": steps, "default_root_dir": folder, "callbacks": [*callbacks], **quiet, **options}
    )


def test_training_resumes_in_mid_schedule_bit_for_bit(tmp_path):
    whole, first = build(), callback()
    saved = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    trainer(tmp_path, 12, first, saved).fit(whole, loader())
    assert first.plan.metrics()["sparsity"] == pytest.approx(0.75, abs=0.01)
    assert sum(int((p == 0).sum()) for p in whole.parameters() if p.ndim > 1) == 144

    other, again = build(seed=7), callback()
    trainer(tmp_path, 12, again, enable_checkpointing=False).fit(other, loader(), ckpt_path=tmp_path / "step=6.ckpt")
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert all(torch.equal(mask, first.plan.masks[name]) for name, mask in again.plan.masks.items())


def test_sparsity_reaches_the_loggers(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    run = trainer(tmp_path, 12, callback(), logger=logger, log_every_n_steps=4, enable_checkpointing=False)
    run.fit(build(), loader())
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    found = [float(line.split(",")[lines[0].split(",").index("sparsity")]) for line in lines[1:]]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(0.75, abs=0.01)


def run_pair(strategy, folder, *more):
    script = Path(__file__).with_name("lightning_pair.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-W", "ignore", str(script), strategy, str(folder), *map(str, more)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_make_the_same_zeros_and_resume(strategy, tmp_path):
    run_pair(strategy, tmp_path)
    (one, metrics), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert metrics["pruned"] == 144
    assert sum(int((value == 0).sum()) for value in one.values() if value.ndim > 1) == 144
    run_pair(strategy, tmp_path, tmp_path / "half.ckpt")
    again, _ = torch.load(tmp_path / "0-resumed.pt")
    assert all(torch.equal(value, one[name]) for name, value in again.items())
