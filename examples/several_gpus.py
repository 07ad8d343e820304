"""FSDP2, AdamW and gradual pruning on any number of processes. A checkpoint can be continued with another number of them.

torchrun --nproc-per-node=2 examples/several_gpus.py out/checkpoint --until 6
torchrun --nproc-per-node=4 examples/several_gpus.py out/checkpoint --until 12
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import secateur as sc

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--until", type=int, default=12)
arguments = parser.parse_args()

gpus = torch.cuda.is_available()
dist.init_process_group("nccl" if gpus else "gloo")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if gpus else torch.device("cpu")

torch.manual_seed(0)  # all processes begin with the same weights
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pruner = sc.Pruner(model, sparsity=sc.cubic(0.9, start=2, end=10, every=2), scope="global")

done = 0  # steps
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "pruner": pruner, "done": done}
if arguments.folder.exists():  # continue, on as many processes as there are now
    dcp.load(state, checkpoint_id=arguments.folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    done = state["done"]
pruner.attach(optimizer)

for step in range(done, arguments.until):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())  # each process has its own data
    inputs, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
    optimizer.step()

weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments, "pruner": pruner, "done": arguments.until}, checkpoint_id=arguments.folder)
pruner.verify()
sparsity = pruner.sparsity  # all processes count
if dist.get_rank() == 0:
    print(f"step {arguments.until}, {dist.get_world_size()} processes, {sparsity:.4f} sparse")
dist.destroy_process_group()
time.sleep(0.2)  # gloo's threads release the last tensors; a process that exits earlier may be aborted
