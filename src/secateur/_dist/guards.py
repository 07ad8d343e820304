"""Models that cannot be pruned where they lie, and what wrappers around a model do when it runs."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from .shares import sharded


def reshard_(model: nn.Module) -> None:
    """Has FSDP2 drop the gathered copies that a forward pass without a backward pass leaves in a model.

    While they are there, they are the model's parameters, and what is written to them is lost.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module. FSDP2 gives modules a class of its own, which follows in the order of resolution."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = fsdp is not None and isinstance(module, fsdp.FSDPModule)
    return type(module).__mro__[2] if sharded else type(module)


def refuse_flat(model: nn.Module) -> None:
    """Raises for parameters that other libraries replaced by slices of a flat buffer, which have lost their rows."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise NotImplementedError(
                f"{name or 'the model'!r} is wrapped in FullyShardedDataParallel (FSDP1), whose parameters are slices of flat "
                "vectors, so that their rows and columns cannot be ranked. Shard it with torch.distributed.fsdp.fully_shard "
                "(FSDP2) instead, or prune before wrapping."
            )
    if name := next((name for name, p in model.named_parameters() if hasattr(p, "ds_id")), None):
        raise NotImplementedError(
            f"{name!r} is a placeholder of DeepSpeed ZeRO-3, which holds slices of flat vectors. Shard the model with "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead, or prune before deepspeed.initialize."
        )


def refuse_sharded(model: nn.Module, call: str) -> None:
    """Raises for a sharded model: each process would run it as often as its own clock or function says, and wait for others."""
    if name := next((name for name, parameter in model.named_parameters() if sharded(parameter)), None):
        raise NotImplementedError(
            f"parameter {name!r} is sharded over processes; {call} a whole model in one process, so do it before sharding"
        )


def refuse_stage(model: nn.Module) -> None:
    """Raises for a stage of a pipeline, because a pool of all tensors would end at this process."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None or not dist.is_initialized():
        return
    stages = [stage for stage in instances(pipelining._PipelineStageBase) if stage.num_stages > 1]
    if any(module is stage.submod for stage in stages for module in model.modules()):  # torch.compile wraps it
        raise NotImplementedError(
            "this model is one stage of a pipeline, and scope='global' would rank its weights apart from those of the other "
            "stages. Pass group=, the process group of the stages, or use scope='tensor'."
        )


def instances(kind: type[Any]) -> list[Any]:
    """All objects of this type that Python's garbage collector knows."""
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def run_of(model: nn.Module) -> nn.Module:
    """The module to run for evidence: DistributedDataParallel would synchronize buffers in every run, on all processes."""
    from torch.nn.parallel import DistributedDataParallel

    return model.module if isinstance(model, DistributedDataParallel) else model
