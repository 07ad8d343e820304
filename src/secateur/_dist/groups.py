"""How processes agree: the group of a set of tensors, sums of counts, digests, and parts of tensors that are moved."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._layers import Layout
from .guards import instances, reshard_
from .shares import Share, local, ranks_of, sharded, share_of

Group = dist.ProcessGroup

_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def group_of_ranks(ranks: Sequence[int]) -> Any:
    """The process group of these ranks, made at the first call. All of them have to call."""
    world = dist.group.WORLD
    if list(ranks) == dist.get_process_group_ranks(world):
        return world
    made = _made.setdefault(world, {})
    if tuple(ranks) not in made:
        made[tuple(ranks)] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[tuple(ranks)]


def group_of(share: Share) -> Any:
    """The process group of the ranks of a share, in which positions are those of `share.ranks`."""
    if len(share.axes) == 1:
        group = share.mesh.get_group(share.axes[0])
        if dist.get_process_group_ranks(group) == list(share.ranks):
            return group
    return group_of_ranks(share.ranks)


class Comm:
    """How the processes that share a set of tensors agree. Alone, every method gives back what it was given.

    `groups` are summed over one after the other: the processes over which tensors are sharded, and those of `group=`, which
    hold different tensors. Of several replicas of a tensor, that on `first` is counted.
    """

    def __init__(self, groups: Sequence[Any] = (), first: int | None = None, stages: Any = None):
        self.groups, self.first, self.stages = list(groups), first, stages

    @property
    def alone(self) -> bool:
        return not self.groups

    @property
    def size(self) -> int:
        return math.prod(dist.get_world_size(group) for group in self.groups)

    @property
    def ranks(self) -> set[int]:
        """The processes of all groups."""
        return {rank for group in self.groups for rank in dist.get_process_group_ranks(group)}

    @property
    def rank(self) -> int:
        """The position of this process among `size` of them."""
        place = 0
        for group in self.groups:
            place = place * dist.get_world_size(group) + dist.get_rank(group)
        return place

    def counted(self, share: Share | None) -> bool:
        """Whether this process counts its part of a tensor, or leaves that to the process of another replica."""
        if self.first is None:
            return True
        return self.first in share.ranks if share is not None and share.ranks else dist.get_rank() == self.first

    def add_(self, counts: Tensor) -> Tensor:
        """Adds integers up over the processes, in place where the device of the tensor allows it."""
        for group in self.groups:
            kinds = [device.type for device in group._device_types]  # backends have names such as "cpu:gloo,cuda:nccl"
            there = counts if counts.device.type in kinds else counts.to(kinds[0])
            dist.all_reduce(there, group=group)
            counts = there if there is counts else counts.copy_(there)
        return counts

    def sum(self, *counts: int) -> tuple[int, ...]:
        """Each count added up over the processes."""
        if not self.groups or not counts:
            return counts
        return tuple(self.add_(torch.tensor(counts, dtype=torch.int64)).tolist())

    @property
    def within(self) -> Comm:
        """The processes that hold parts of the same tensors, without those of `group=`."""
        return self if self.stages is None else Comm([group for group in self.groups if group is not self.stages], self.first)

    @property
    def stage(self) -> int:
        """The position of this process in `group=`."""
        return 0 if self.stages is None else dist.get_rank(self.stages)

    def over_stages(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all processes of `group=`, in order."""
        if self.stages is None:
            return [list(row)]
        table = torch.zeros(dist.get_world_size(self.stages), len(row), dtype=torch.int64)
        table[self.stage] = torch.tensor(row)
        return Comm([self.stages]).add_(table).tolist()

    def gather_stages(self, value: Any) -> list[Any]:
        """The values (names, shapes, numbers) of all processes of `group=`, in order."""
        return [value] if self.stages is None else Comm([self.stages]).gather(value)

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all processes of a comm of one group, in order."""
        if not self.groups:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.groups[0])
        return found

    def same(self, values: Sequence[int]) -> list[bool]:
        """For each integer, whether all processes gave the same. All processes find the same answer."""
        return [True] * len(values) if not self.groups else self.equal(self.add_(_parts(values)))

    def equal(self, sums: Tensor) -> list[bool]:
        """For each integer, whether all processes gave the same, by the sums of its `_parts` over them."""
        total, squares = sums.view(2, 4, -1)
        return (total * total == squares * self.size).all(0).tolist()  # by Cauchy and Schwarz only if all are equal

    def check_same(self, text: str) -> None:
        """Raises ValueError on every process unless all of them gave the same text."""
        if not all(self.same([digest(text.encode())])):
            raise ValueError(
                "the processes that share this model do not do the same: their tensors, recipes or steps differ. This one has: "
                f"{text[:400]}"
            )


def _parts(values: Sequence[int]) -> Tensor:
    """Integers in parts of 16 bits, and the squares of these. Their sums over processes tell whether all have the same."""
    own = torch.tensor(values, dtype=torch.int64)
    parts = torch.stack([(own >> shift) & 0xFFFF for shift in (0, 16, 32, 48)])
    return torch.cat([parts, parts * parts]).view(-1)


@dataclass
class Meeting:
    """What a block of `together` compares at its end: whether all processes have the `same` text, if they set one."""

    comm: Comm
    text: str = ""
    same: bool = False

    def agreed(self, comm: Comm) -> bool:
        """Whether the processes of this comm are known to have the same text."""
        return self.same and comm.ranks <= self.comm.ranks


@contextmanager
def together(comm: Comm, what: str) -> Iterator[Meeting]:
    """Raises on all processes if the block raises on one, so that none waits for another. The block has no collectives."""
    error: Exception | None = None
    meeting, failed = Meeting(comm), 0
    try:
        yield meeting
    except Exception as found:
        error = found
    if not comm.alone:
        sums = comm.add_(torch.cat([_parts([digest(meeting.text.encode())]), torch.tensor([int(error is not None)])]))
        failed, meeting.same = int(sums[-1]), bool(meeting.text) and all(comm.equal(sums[:-1]))
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"another process could not {what}, and says why; this one changed nothing")


def digest(data: bytes) -> int:
    """Eight bytes that tell contents apart, as an integer."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def comm_of(shares: Mapping[str, Share], group: Any = None) -> Comm:
    """How the processes that hold parts of these tensors agree. `group`: processes that hold other tensors of the model."""
    spread = {name: share for name, share in shares.items() if share.mesh is not None}
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError("this process is not in group=; only the processes of the group make the call")
    stages = [] if group is None or dist.get_world_size(group) == 1 else [group]
    ranks: set[int] = set()
    meshes = [(mesh, ranks_of(mesh)) for mesh in {id(share.mesh): share.mesh for share in spread.values()}.values()]
    for mesh, every in meshes:
        axes = {axis for share in spread.values() if share.mesh is mesh for axis in share.axes}
        place = tuple(slice(None) if axis in axes else at for axis, at in enumerate(mesh.get_coordinate()))
        ranks |= set(every[place].reshape(-1).tolist())
    if len(ranks) < 2:
        return Comm(stages, None, *stages)
    largest, every = max(meshes, key=lambda pair: pair[1].numel())
    if not ranks <= set(every.reshape(-1).tolist()):
        raise ValueError(
            f"{list(spread)[:3]} are sharded over processes that no mesh has together; prune them in separate calls "
            "(include=...), or shard all of them over parts of one mesh"
        )
    ranks = _closed(largest, ranks)
    if stages and len(ranks & set(dist.get_process_group_ranks(group))) > 1:
        raise ValueError(
            f"{list(spread)[:3]} are sharded over processes of group=, and group= is for processes that hold other tensors of "
            "the model (stages of a pipeline). Sharded tensors need no group="
        )
    one = next((share for share in spread.values() if set(share.ranks) == ranks), None)
    return Comm([group_of_ranks(sorted(ranks)) if one is None else group_of(one), *stages], min(ranks), *stages)


def mesh_comm(tensors: Iterable[Tensor]) -> Comm:
    """All processes of the mesh over which these tensors are sharded or replicated. Alone if none of them is a DTensor."""
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors if sharded(tensor)}  # type: ignore[attr-defined]
    if not meshes:
        return Comm()
    ranks = [set(ranks_of(mesh).reshape(-1).tolist()) for mesh in meshes.values()]
    largest = max(ranks, key=len)
    if not all(each <= largest for each in ranks):
        raise ValueError("the tensors of this model are sharded over processes that no mesh has together")
    return Comm([group_of_ranks(sorted(largest))], min(largest))


def model_comm(model: nn.Module) -> Comm:
    """The processes that all have to make a call for this model: those of its mesh. Alone if no mesh has all of them."""
    reshard_(model)
    try:
        return mesh_comm(model.parameters())
    except ValueError:
        return Comm()


def _closed(mesh: Any, ranks: set[int]) -> set[int]:
    """The ranks along all axes of the mesh that these ranks go along, so that all processes find the same set."""
    here, every = mesh.get_coordinate(), ranks_of(mesh)
    places = torch.isin(every, torch.tensor(sorted(ranks))).nonzero()
    axes = (places != torch.tensor(here)).any(0).tolist()
    place = tuple(slice(None) if along else at for along, at in zip(axes, here, strict=True))
    return set(every[place].reshape(-1).tolist())


def counts(masks: Mapping[str, Tensor]) -> list[int]:
    """How many elements of each mask are true, over every process that holds a part (which then must all ask)."""
    return add_counts(masks, count_local(masks))


def count_local(masks: Mapping[str, Tensor]) -> list[int]:
    """How many elements of each mask are true in the part that this process holds."""
    return [_count(local(mask)) for mask in masks.values()]


def add_counts(tensors: Mapping[str, Tensor], *here: Sequence[int]) -> list[int]:
    """Counts of this process's parts, one for each tensor, as those of whole tensors. Several lists give one long list."""
    shares = {name: share_of(name, tensor, Layout(tuple(tensor.shape))) for name, tensor in tensors.items()}
    comm = comm_of(shares)
    counted = [comm.counted(share) for share in shares.values()]
    return list(comm.sum(*(n * mine for each in here for n, mine in zip(each, counted, strict=True))))


def _count(mask: Tensor) -> int:
    if mask.device.type == "cpu":
        return int(np.count_nonzero(mask.numpy()))
    return int(mask.sum())  # count_nonzero would take eight bytes an element there


def check_copies(comm: Comm, parts: Comm, masks: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raises on every process of `comm` unless all copies of a tensor on them have the same masks and new weights.

    `parts` are the processes that hold the parts of one copy of a sharded tensor.
    """
    if comm.alone:
        return
    every = [*masks.items(), *weights.items()]
    own = torch.tensor([digest(local(tensor).cpu().contiguous().view(torch.uint8).numpy().tobytes()) for _, tensor in every])
    split = torch.tensor([sharded(masks[name]) for name, _ in every])
    whole = torch.where(split, parts.add_(own.clone()), own)  # the sum of the digests of all parts
    if odd := [name for (name, _), equal in zip(every, comm.same(whole.tolist()), strict=True) if not equal]:
        raise ValueError(
            f"the processes made different masks or weights for {odd[:3]}, of which each holds a copy: the copies, or the "
            "gradients and inputs behind them, are not the same. Begin with the same weights on all processes. For tensors "
            "that are to differ, such as experts, make a call of their own (include=...) with group=. Nothing has changed."
        )


def exchange(share: Share, pieces: Sequence[Tensor], sizes: Iterable[int]) -> list[Tensor]:
    """Sends the i-th piece (bytes) to the i-th rank of a share, and returns what those sent, of the given sizes."""
    group = group_of(share)
    kinds = [device.type for device in group._device_types]
    home = pieces[0].device
    sent = torch.cat(list(pieces)).to(home if home.type in kinds else kinds[0])
    into, out = list(sizes), [piece.numel() for piece in pieces]
    got = torch.empty(sum(into), dtype=torch.uint8, device=sent.device)
    dist.all_to_all_single(got, sent, into, out, group=group)
    return list(got.to(home).split(into))


def replicas_of(model: nn.Module) -> Comm:
    """The processes of a model in DistributedDataParallel: around it, in it, or the model itself."""
    if not dist.is_available() or not dist.is_initialized():
        return Comm()
    from torch.nn.parallel import DistributedDataParallel as Wrapper

    found = next((module for module in model.modules() if isinstance(module, Wrapper)), None)
    found = found or next((one for one in instances(Wrapper) if "module" in one._modules and one.module is model), None)
    if found is None or dist.get_world_size(found.process_group) == 1:
        return Comm()
    return Comm([found.process_group], None)
