"""Processes that each run a model on their own share of the data, and add up what they find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._arguments import tensors_of
from .groups import Comm, digest, group_of_ranks, model_comm, replicas_of, together
from .shares import sharded

_BUCKET = 1 << 24  # bytes that are added up at once


class DataRanks:
    """The processes of a model that each get their own batches. `steps_together`: each run of the model needs all of them."""

    def __init__(self, group: Any = None, steps_together: bool = False):
        self.group, self.steps_together = group, steps_together
        self.comm = Comm() if group is None else Comm([group])
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def flags(self, here: bool) -> list[bool]:
        """The answers of all processes, in order."""
        each = torch.zeros(self.size, dtype=torch.int64)
        each[self.rank] = here
        return [bool(flag) for flag in self.comm.add_(each).tolist()]

    def add_(self, tensors: Sequence[Tensor]) -> None:
        """Adds tensors of one dtype up over the processes, in place, in buckets."""
        bucket: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            bucket.append(tensor)
            if i + 1 == len(tensors) or sum(one.numel() * one.element_size() for one in bucket) >= _BUCKET:
                flat = self.comm.add_(torch.cat([one.reshape(-1) for one in bucket]))
                for one, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                    one.copy_(part.view(one.shape))
                bucket = []

    def filled(self, batches: list[Any]) -> tuple[list[Any], bool]:
        """The batches of this process, and True. A process without any gets the first batch of another, and False."""
        have = self.flags(bool(batches))
        if all(have) or not any(have):
            return batches, bool(batches)
        batch = self._from_first(batches[0] if batches else None, have)
        return (batches, True) if batches else ([batch], False)

    def _from_first(self, value: Any, have: list[bool]) -> Any:
        """The value of the first process that has one."""
        first = have.index(True)
        box = [value if self.rank == first else None]
        dist.broadcast_object_list(box, dist.get_global_rank(self.group, first), group=self.group)
        return box[0]

    def batches(self, data: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """The batches of this process, and whether each counts.

        Where processes step together, one that has no batch left gets its first one again, or that of another process, which
        does not count.
        """
        if not self.steps_together:
            yield from ((batch, True) for batch in data)
            return
        given, none = iter(data), object()
        filler: Any = none
        while True:
            with together(self.comm, "get its next batch of data="):
                batch = next(given, none)
            have = self.flags(batch is not none)
            if not any(have):
                return
            filler = batch if filler is none else filler
            if not all(self.flags(filler is not none)):
                given_first = self._from_first(filler, have)
                filler = given_first if filler is none else filler
            yield (filler, False) if batch is none else (batch, True)


def same_batches(model: nn.Module, data: Iterable[Any], what: str) -> Iterator[Any]:
    """The batches of `data`. Raises ValueError on all processes of the model unless all of them have the same."""
    comm = model_comm(model)
    comm = replicas_of(model) if comm.alone else comm
    if comm.alone:
        yield from data
        return
    given, none, number = iter(data), object(), 0
    while True:
        number += 1
        with together(comm, "get its next batch of data=") as meeting:
            batch = next(given, none)
            meeting.text = "no batch" if batch is none else str([digest(_bytes(tensor)) for tensor in tensors_of(batch)])
        if not meeting.same:
            raise ValueError(
                f"batch {number} of data= is not the same on all processes that share this model, so that each would make its "
                f"own {what}; pass all batches on every process"
            )
        if batch is none:
            return
        yield batch


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def data_ranks_of(model: nn.Module, tensors: dict[str, Tensor], what: str) -> DataRanks:
    """The processes that share the data of a model: those of DistributedDataParallel, or those of FSDP2."""
    split = {name: tensor for name, tensor in tensors.items() if sharded(tensor)}
    if not split:
        found = replicas_of(model)
        return DataRanks(*found.groups)
    from torch.distributed.fsdp import FSDPModule

    held = {id(p) for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    meshes = {tuple(t.device_mesh.mesh.reshape(-1).tolist()) for t in split.values()}  # type: ignore[attr-defined]
    if len(split) != len(tensors) or len(meshes) != 1 or any(id(tensor) not in held for tensor in split.values()):
        raise NotImplementedError(
            f"{what} cannot be collected from data= where layers are sharded by other means than FSDP2 over one mesh; prune "
            "before sharding, use a criterion without data, or let a Pruner take the gradients of the training"
        )
    if any(sum(not place.is_replicate() for place in tensor.placements) != 1 for tensor in split.values()):  # type: ignore
        raise NotImplementedError(
            f"{what} cannot be collected from data= of a model that is tensor parallel; prune before that"
        )
    return DataRanks(group_of_ranks(sorted(*meshes)), steps_together=True)
