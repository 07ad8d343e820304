"""Sharded tensors: the only file that knows torch.distributed.

A sharded weight is ranked where it lies. Each process looks at its own rows; what has to be agreed on (counts, a small
sample, the few candidates near the threshold) goes through `Comm`.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and nobody has a DTensor without it
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this process holds: the tensor itself unless it is sharded."""
    return tensor.to_local() if _is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """`part`, this process's share, as a tensor that is sharded as `tensor` is."""
    if not _is_dtensor(tensor):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def sharded(tensor: Tensor) -> bool:
    """Whether other processes hold parts of this tensor."""
    return _is_dtensor(tensor)


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


def refuse_stage(model: nn.Module) -> None:
    """Raises for a stage of a pipeline, because a pool of all tensors would end at this process."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None or not dist.is_initialized():
        return
    stages = [stage for stage in _instances(pipelining._PipelineStageBase) if stage.num_stages > 1]
    if any(model is stage.submod for stage in stages):
        raise NotImplementedError(
            "this model is one stage of a pipeline, and scope='global' would rank its weights apart from those of the other "
            "stages. Prune the model before it is split into stages, or use scope='tensor'."
        )


def _instances(kind: type[Any]) -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def _replicas(model: nn.Module) -> dist.ProcessGroup | None:
    """The group of a model in DistributedDataParallel: around it, in it, or the model itself. None if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.nn.parallel import DistributedDataParallel as Wrapper

    found = next((module for module in model.modules() if isinstance(module, Wrapper)), None)
    found = found or next((one for one in _instances(Wrapper) if "module" in one._modules and one.module is model), None)
    return None if found is None else found.process_group


def check_replicas(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raises on every process unless all replicas of a model in DistributedDataParallel have the same masks."""
    group = _replicas(model)
    if group is None or dist.get_world_size(group) == 1 or any(_is_dtensor(mask) for mask in masks.values()):
        return
    digests = [_digest(mask) for mask in masks.values()]
    each = Comm(group)._gather(torch.tensor(digests, dtype=torch.int64))
    if odd := [name for name, same in zip(masks, (each == each[0]).all(0).tolist(), strict=True) if not same]:
        raise ValueError(
            f"the processes of DistributedDataParallel made different masks for {odd[:3]}, because each of them gave its own "
            "data=. Give all of them the same batches. The model is unchanged."
        )


def _digest(mask: Tensor) -> int:
    found = hashlib.blake2b(mask.cpu().contiguous().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def place_of(tensors: Mapping[str, Tensor]) -> str:
    """Which part of sharded tensors this process holds, in words; an empty text if none is sharded."""
    for tensor in tensors.values():
        if _is_dtensor(tensor):
            mesh = tensor.device_mesh  # type: ignore[attr-defined]
            return f"coordinate {tuple(mesh.get_coordinate() or ())} in a mesh of {tuple(mesh.mesh.shape)} processes"
    return ""


def check_everywhere(tensors: Mapping[str, Tensor], wrong: str) -> None:
    """Raises ValueError on every process that shares these tensors if `wrong` is not empty on any of them."""
    comm = comm_of((name, tensor) for name, tensor in tensors.items())
    (bad,) = comm.sum(bool(wrong))
    if bad:
        raise ValueError(wrong or f"{bad} of the processes that share this model cannot load this state. Nothing has changed.")


def row_offset(tensor: Tensor) -> int:
    """The row of the whole tensor at which this process's share begins (shares are those of `torch.chunk`)."""
    if not _is_dtensor(tensor):
        return 0
    comm = comm_of([("tensor", tensor)])
    if comm.group is None:
        return 0
    share = -(-tensor.shape[0] // dist.get_world_size(comm.group))
    return min(comm.rank * share, tensor.shape[0])


def _count(mask: Tensor) -> int:
    if mask.device.type == "cpu":
        return int(np.count_nonzero(mask.numpy()))
    return int(mask.sum())  # count_nonzero would take eight bytes an element there


def count(mask: Tensor) -> int:
    """How many elements are true, over every process that holds a part (which then must all ask)."""
    (total,) = comm_of([("mask", mask)]).sum(_count(local(mask)))
    return total


class Comm:
    """How the processes that share a set of tensors agree. Alone, every method gives back what it was given."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0

    @property
    def alone(self) -> bool:
        return self.group is None

    def sum(self, *counts: int) -> tuple[int, ...]:
        """Each count added up over the processes."""
        if self.group is None:
            return counts
        return tuple(int(total) for total in self._gather(torch.tensor(counts, dtype=torch.int64)).sum(0))

    def cat(self, values: Tensor) -> Tensor:
        """The 1-D values of every process, one after the other in rank order; float64 if any of them brings that."""
        if self.group is None:
            return values
        # A process without rows does not know the dtype of the others, and gloo needs the same bytes from all.
        about = torch.tensor([values.numel(), values.dtype == torch.float64], dtype=torch.int64)
        sizes, wide = self._gather(about).unbind(1)
        sizes, values = sizes.tolist(), values.double() if wide.any() else values
        padded = values.new_zeros(max(sizes))
        padded[: values.numel()] = values
        return torch.cat([row[:size] for row, size in zip(self._gather(padded), sizes, strict=True)])

    def before(self, counts: list[int]) -> list[int]:
        """For entry i: the sum of the entries before i on all processes, and of entry i on the earlier ranks."""
        table = self._gather(torch.tensor(counts, dtype=torch.int64)) if self.group is not None else torch.tensor([counts])
        earlier = table.sum(0).cumsum(0) - table.sum(0)
        return (earlier + table[: self.rank].sum(0)).tolist()

    def _gather(self, tensor: Tensor) -> Tensor:
        assert self.group is not None
        kinds = [device.type for device in self.group._device_types]  # backends have names such as "cpu:gloo,cuda:nccl"
        mine = tensor.to(tensor.device if tensor.device.type in kinds else kinds[0]).contiguous()
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts).to(tensor.device)


def comm_of(tensors: Iterable[tuple[str, Tensor]]) -> Comm:
    """The group over which these named tensors are sharded. They must agree, and be sharded by rows (as FSDP2 does)."""
    groups: dict[int, tuple[Any, str]] = {}
    whole: list[str] = []
    for name, tensor in tensors:
        if not _is_dtensor(tensor):
            whole.append(name)
            continue
        from torch.distributed.tensor import Replicate, Shard

        mesh, places = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
        sharded = [axis for axis, place in enumerate(places) if not isinstance(place, Replicate)]
        if len(sharded) != 1 or not (type(places[sharded[0]]) is Shard and places[sharded[0]].dim == 0):
            raise NotImplementedError(
                f"{name!r} is laid out as {tuple(places)}; only tensors sharded once, by rows (as fully_shard does), can be "
                "pruned in place. Prune before sharding it this way, or exclude it."
            )
        group = mesh.get_group(sharded[0])
        groups[id(group)] = (group, name)
    if not groups:
        return Comm()
    if len(groups) > 1 or whole:
        raise ValueError(
            f"{[name for _, name in groups.values()]} and {whole[:3]} are not sharded over the same processes; "
            "prune them in separate calls (include=...)."
        )
    return Comm(next(iter(groups.values()))[0])
