"""Pruning in a Lightning Trainer: a callback prunes on schedule, and a checkpoint from the middle continues it.

(The file is not called lightning.py, because Python would then import it in place of the package.)
"""

from __future__ import annotations

from pathlib import Path

import click
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateur as sc
from secateur.integrations.lightning import SecateurCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(epochs: int = 6, out: str = "out/lightning") -> float:
    """Returns the accuracy of the pruned model."""
    pl.seed_everything(0, verbose=False)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True)

    def trainer(epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
        off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
        return pl.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=out, callbacks=[*callbacks], **off)

    def pruning() -> SecateurCallback:
        last = epochs * len(loader)
        return SecateurCallback(sc.magnitude, sparsity=sc.cubic(0.9, end=last * 2 // 3, every=10), scope="global")

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch == epochs // 2 - 1:
                trainer.save_checkpoint(Path(out) / "half.ckpt")

    trainer(epochs, pruning(), Save()).fit(Classifier(), loader)

    model, callback = Classifier(), pruning()  # as in a new process
    trainer(epochs, callback).fit(model, loader, ckpt_path=Path(out) / "half.ckpt")
    print(callback.plan)
    with torch.inference_mode():
        found = float((model.eval().layers(images[1400:]).argmax(1) == labels[1400:]).float().mean())
    print(f"\n{found:.1%} of {len(labels) - 1400} test images right")
    return found


@click.command(help=__doc__)
@click.option("--epochs", default=6, show_default=True)
@click.option("--out", default="out/lightning", show_default=True)
def command(epochs: int, out: str) -> None:
    main(epochs, out)


if __name__ == "__main__":
    command()
