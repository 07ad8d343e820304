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
        self.seen = []

    def training_step(self, batch, _):
        inputs, labels = batch
        self.seen.append(inputs)
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Stateful(DataLoader):
    """A loader whose state is in the checkpoints: a resumed epoch goes on with the next batch."""

    at = 0

    def __iter__(self):
        for place, batch in enumerate(super().__iter__()):
            if place >= self.at:
                self.at = place + 1
                yield batch
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def loader(kind=DataLoader):
    """Six different batches, in the same order in each epoch."""
    torch.manual_seed(0)
    return kind(TensorDataset(torch.randn(24, 8), torch.randint(4, (24,))), batch_size=4)


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


@pytest.mark.parametrize(("step", "kind"), [(6, DataLoader), (4, Stateful), (8, Stateful)], ids=["epoch", "early", "late"])
def test_training_resumes_in_mid_schedule_bit_for_bit(tmp_path, step, kind):
    """At the end of an epoch; in the middle of one if the loader is part of the checkpoint."""
    whole, first = build(), callback()
    saved = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(tmp_path, 12, first, saved).fit(whole, loader(kind))
    assert first.plan.metrics()["sparsity"] == pytest.approx(0.75, abs=0.01)
    assert sum(int((p == 0).sum()) for p in whole.parameters() if p.ndim > 1) == 144

    other, again = build(seed=7), callback()
    trainer(tmp_path, 12, again, enable_checkpointing=False).fit(other, loader(kind), ckpt_path=tmp_path / f"step={step}.ckpt")
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert all(torch.equal(mask, first.plan.masks[name]) for name, mask in again.plan.masks.items())


@pytest.mark.parametrize("pruned", [False, True])
def test_lightning_resumes_an_epoch_with_its_first_batches(tmp_path, pruned):
    """What the guide says of a plain loader. It is the same without pruning."""
    whole, saved = build(), pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, 12, saved, *([callback()] if pruned else [])).fit(whole, loader())
    other = build()
    resumed = trainer(tmp_path, 12, *([callback()] if pruned else []), enable_checkpointing=False)
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        resumed.fit(other, loader(), ckpt_path=tmp_path / "step=4.ckpt")
    order = [next(i for i in range(6) if torch.equal(whole.seen[i], batch)) for batch in other.seen]
    assert order == [0, 1, 0, 1, 2, 3, 4, 5]  # two steps were left; they would have been on batches 4 and 5


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
