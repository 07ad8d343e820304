"""Trains with Lightning on two processes, and writes the zeros of each into a folder. Run by test_lightning.py."""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import secateur as sc
from secateur.integrations.lightning import SecateurCallback


class Net(pl.LightningModule):
    def __init__(self, sharded):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.sharded = sharded

    def configure_model(self):
        if self.sharded:
            for layer in (self.layers[0], self.layers[2], self):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Save(pl.Callback):
    """Saves a checkpoint after the first epoch of four steps, in mid-schedule."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, _):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def main(strategy, folder, resume=""):
    torch.manual_seed(0 if not resume else 5)
    net = Net(strategy == "fsdp2")
    torch.manual_seed(1)
    # Equal rows, because Lightning shuffles those of several processes.
    data = torch.utils.data.TensorDataset(torch.randn(1, 8).repeat(32, 1), torch.randint(4, (1,)).repeat(32))
    callback = SecateurCallback(sparsity=sc.cubic(0.75, start=2, end=6, every=2), scope="global")
    kinds = {"ddp": "ddp", "fsdp2": pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    callbacks = [callback] if resume else [callback, Save(Path(folder) / "half.ckpt")]
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=kinds[strategy], max_steps=8, callbacks=callbacks, **quiet)
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=resume or None)
    whole = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in net.state_dict().items()}
    torch.save((whole, callback.plan.metrics()), Path(folder) / f"{trainer.global_rank}{'-resumed' if resume else ''}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    time.sleep(0.2)  # gloo's threads release the last tensors; a process that exits earlier may be aborted


if __name__ == "__main__":
    main(*sys.argv[1:])
