"""One small model on several processes, in every layout: FSDP2, HSDP, tensor parallel, both, DDP, stages of a pipeline."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from where import DEVICE

LAYOUTS = ("fsdp", "hsdp", "fsdp on axis 1", "tp", "fsdp + tp", "ddp")


def build(kind: str = "even") -> nn.Module:
    """`even`: sizes that four processes divide. `uneven`: sizes that they do not, and a single row. `large`: worth a sample."""
    torch.manual_seed(3)
    sizes = {"uneven": (9, 17, 13, 1), "large": (1024, 768, 512, 16)}.get(kind.partition(",")[0], (32, 64, 32, 16))
    scale = 2000 if "large" in kind else 24
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if "ties" in kind:
                parameter.copy_((parameter * scale).round() / scale)
            if "infinite" in kind and parameter.ndim == 2:
                parameter.view(-1)[::7] = torch.inf
    for dtype in ("bfloat16", "float16", "float64"):
        if dtype in kind:
            model.to(getattr(torch, dtype))
    return model.to(DEVICE)


def two_axes() -> tuple[int, int]:
    """The shape of a mesh of all processes with two axes, the first of size 2 where there are several."""
    first = min(2, dist.get_world_size())
    return first, dist.get_world_size() // first


def spread(model: nn.Module, layout: str) -> nn.Module:
    """The model laid out over all processes."""
    world = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp":
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)
    if layout == "hsdp":
        mesh = init_device_mesh(DEVICE.type, two_axes(), mesh_dim_names=("replicas", "shards"))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if layout == "fsdp on axis 1":
        return fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % world == 0 else None)
    shape = two_axes() if layout == "fsdp + tp" else (world,)
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("data", "model")[: len(shape)])
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel()}  # the third layer is whole on every process
    parallelize_module(model, mesh["model"] if layout == "fsdp + tp" else mesh, styles)
    if layout == "fsdp + tp":
        fully_shard(model, mesh=mesh["data"])
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bare(masks) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(mask) for name, mask in masks.items()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(value.detach()) for name, value in model.named_parameters()}


def shard_by_hand(model: nn.Module, axis: int) -> nn.Module:
    """Every weight as a DTensor that is cut along one axis, also into uneven and empty parts."""
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in model:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(axis)]))
    return model
