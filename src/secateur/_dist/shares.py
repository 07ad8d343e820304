"""Which part of a tensor this process holds, which parts the others hold, and parts as sharded tensors."""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from .._layers import Layout

Range = tuple[int, int]


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and there is no DTensor without it
    return module is not None and isinstance(tensor, module.DTensor)


def sharded(tensor: Tensor) -> bool:
    """Whether other processes hold parts or copies of this tensor, as a DTensor."""
    return _is_dtensor(tensor)


def local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this process holds, for no gradients: the tensor itself unless it is sharded."""
    if not _is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # with gradients, torch makes a node of the graph first, which takes longer than all else here
        return tensor.to_local()  # type: ignore[attr-defined]


_meshes: weakref.WeakKeyDictionary[Any, tuple[int, Tensor, dict[Any, Any]]] = weakref.WeakKeyDictionary()


def ranks_of(mesh: Any) -> Tensor:
    """The ranks of a mesh, as `mesh.mesh`, which torch computes anew at each access."""
    return _remembered(mesh)[1]


def _remembered(mesh: Any) -> tuple[int, Tensor, dict[Any, Any]]:
    """The rank of this process, the ranks of a mesh, and what `share_of` found for it."""
    rank = mesh.get_rank()
    if (found := _meshes.get(mesh)) is None or found[0] != rank:
        found = _meshes[mesh] = rank, mesh.mesh, {}
    return found


def local_as(value: Tensor, tensor: Tensor) -> Tensor:
    """The part of a gradient or mask that belongs to the part of the tensor that this process holds."""
    if _is_dtensor(value) and value.placements != tensor.placements:  # type: ignore[attr-defined]
        value = value.redistribute(placements=tensor.placements)  # type: ignore[attr-defined]
    return local(value)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """`part`, this process's share, as a tensor that is sharded as `tensor` is."""
    if not _is_dtensor(tensor):
        return part
    return _as_sharded(part, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())  # type: ignore


def _as_sharded(part: Tensor, mesh: Any, placements: Sequence[Any], shape: Size, stride: tuple[int, ...]) -> Tensor:
    """This process's part of a sharded tensor as that tensor. It stays on its device, as weights that FSDP2 offloads do."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, part.dtype))
    return DTensor(part, spec, requires_grad=False)  # `from_local` would move it to the device of the mesh


def check_alike(name: str, tensor: Tensor, mask: Tensor) -> None:
    """Raises ValueError unless each process holds the same part of a tensor and of its mask."""
    if _places(tensor) != _places(mask):
        raise ValueError(f"{name!r} is sharded in one way in the model and in another in the plan; make a plan from this model")


def _places(tensor: Tensor) -> Any:
    """Where the parts of a sharded tensor lie; None if every process has all of it."""
    if not _is_dtensor(tensor) or all(place.is_replicate() for place in tensor.placements):  # type: ignore[attr-defined]
        return None
    ranks = ranks_of(tensor.device_mesh)  # type: ignore[attr-defined]
    return (ranks.tolist(), tuple(tensor.placements)) if ranks.numel() > 1 else None  # type: ignore[attr-defined]


class Box(NamedTuple):
    """A part of a matrix: a range of rows and a range of columns."""

    rows: Range
    cols: Range

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    def meet(self, other: Box) -> Box:
        """The part that both cover, which may be empty."""
        return Box(*(_meet(one, two) for one, two in zip(self, other, strict=True)))

    def within(self, outer: Box) -> tuple[slice, slice]:
        """The place of this box in a matrix that holds `outer`."""
        (r, _), (c, _) = outer
        return slice(self.rows[0] - r, self.rows[1] - r), slice(self.cols[0] - c, self.cols[1] - c)


def _meet(one: Range, two: Range) -> Range:
    first = max(one[0], two[0])
    return first, max(min(one[1], two[1]), first)


@dataclass(frozen=True, eq=False)
class Share:
    """Which part of a tensor this process holds, with the tensor read as the matrix of `layout` (that of the whole tensor).

    `ranks` are the processes that together hold the tensor once, in ascending order, and `me` the position of this process
    among them; replicas of the tensor lie on other ranks. All three are empty for a tensor that is not sharded.
    """

    layout: Layout
    box: Box
    ranks: tuple[int, ...] = ()
    me: int = 0
    mesh: Any = None
    axes: tuple[int, ...] = ()  # of the mesh, over which the tensor is sharded
    places: tuple[tuple[int, ...], ...] = ()  # the coordinates of `ranks` in the mesh
    placements: tuple[Any, ...] = ()

    @cached_property
    def boxes(self) -> list[Box]:
        """The parts of all `ranks`."""
        if not self.ranks:
            return [self.box]
        sizes = tuple(ranks_of(self.mesh).shape)
        return [_box(self.layout, _ranges(self.layout.shape, sizes, self.placements, place)) for place in self.places]

    @property
    def whole(self) -> Box:
        return Box((0, self.layout.rows), (0, self.layout.cols))

    def holds(self, height: int, width: int) -> bool:
        """Whether no block of this height and width lies on two processes."""
        rows, cols = self.layout.rows, self.layout.cols
        return all(
            (first % step == 0 and (last % step == 0 or last == size)) or first == last
            for box in self.boxes
            for (first, last), step, size in ((box.rows, height, rows), (box.cols, width, cols))
        )


def stripes(layout: Layout, ranks: int, height: int, width: int) -> list[Box]:
    """A matrix cut into one part for each rank: rows in multiples of `height`, or columns if a block has all rows."""
    rows, cols = layout.rows, layout.cols
    if height < rows:
        return [Box(part, (0, cols)) for part in _parts(rows, ranks, height)]
    return [Box((0, rows), part) for part in _parts(cols, ranks, width)]


def _parts(size: int, ranks: int, multiple: int) -> list[Range]:
    blocks = -(-size // multiple)
    step = -(-blocks // ranks) * multiple
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(ranks)]


def share_of(name: str, tensor: Tensor, layout: Layout) -> Share:
    """The share of this process in a tensor of this layout; all of it if the tensor is not sharded."""
    if not _is_dtensor(tensor):
        return Share(layout, Box((0, layout.rows), (0, layout.cols)))
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
    _, every, known = _remembered(mesh)
    if (layout, placements) not in known:
        known[layout, placements] = _where(name, tensor, layout, every)
    box, ranks, me, axes, places = known[layout, placements]
    return Share(layout, box, ranks, me, mesh, axes, places, placements)


def _where(name: str, tensor: Tensor, layout: Layout, every: Tensor) -> tuple[Any, ...]:
    """The attributes of a share that do not refer to its mesh, which therefore may be remembered with the mesh."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
    axes, sizes = sharded_axes(name, tensor), tuple(every.shape)
    if axes and (max(placements[axis].dim for axis in axes) > 1 or (layout.flip and layout.groups > 1)):
        raise NotImplementedError(
            f"{name!r} is sharded along the axes of its kernel, or is a transposed convolution in groups, so that a process "
            "holds no range of its rows and columns; exclude it, or prune before sharding"
        )
    here = tuple(mesh.get_coordinate())
    along = [range(size) if axis in axes else [here[axis]] for axis, size in enumerate(sizes)]
    by_rank = {int(every[place]): place for place in itertools.product(*along)}
    ranks = sorted(by_rank)
    box = _box(layout, _ranges(layout.shape, sizes, placements, here))
    me = next(i for i, rank in enumerate(ranks) if by_rank[rank] == here)
    return box, tuple(ranks), me, tuple(axes), tuple(by_rank[rank] for rank in ranks)


def held(name: str, tensor: Tensor, first: int | None = None) -> tuple[list[Range], bool]:
    """The range of each axis that this process holds of a sharded tensor, and whether it is the first of its replicas.

    Where a tensor lies on a part of the mesh of its model, the other parts hold replicas of it. The first is that with the rank
    `first`.
    """
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
    axes, here = sharded_axes(name, tensor), tuple(mesh.get_coordinate())
    ranges = _ranges(tuple(tensor.shape), tuple(ranks_of(mesh).shape), placements, here)
    chosen = first is None or bool((ranks_of(mesh) == first).any())
    return ranges, chosen and all(at == 0 for axis, at in enumerate(here) if axis not in axes)


def by_rows(share: Share, multiple: int = 1) -> tuple[list[Box], tuple[Any, ...]]:
    """The parts of a matrix if its rows were sharded, in multiples that divide them, over the same axes of the mesh.

    Also returns the placements of such a tensor.
    """
    from torch.distributed.tensor import Replicate, Shard

    placements = tuple(Shard(0) if axis in share.axes else Replicate() for axis in range(len(share.placements)))
    sizes = tuple(ranks_of(share.mesh).shape)
    rows = [_ranges((share.layout.rows // multiple,), sizes, placements, place)[0] for place in share.places]
    return [Box((first * multiple, last * multiple), (0, share.layout.cols)) for first, last in rows], placements


def as_rows(part: Tensor, share: Share, rows: int) -> Tensor:
    """Rows of this process as a sharded matrix of so many rows, laid out as `by_rows` says."""
    return _as_sharded(part, share.mesh, by_rows(share)[1], Size((rows, part.shape[1])), (part.shape[1], 1))


def sharded_axes(name: str, tensor: Tensor) -> list[int]:
    """The axes of the mesh over which a tensor is sharded. Raises where its values are not known to any process alone."""
    placements = tensor.placements  # type: ignore[attr-defined]
    if any(place.is_partial() for place in placements):
        raise NotImplementedError(
            f"{name!r} is laid out as {tuple(placements)}, as sums that are not added up yet; redistribute it first"
        )
    axes = [axis for axis, place in enumerate(placements) if not place.is_replicate()]
    for dim in {placements[axis].dim for axis in axes if hasattr(placements[axis], "split_factor")}:
        shape = ranks_of(tensor.device_mesh).shape  # type: ignore[attr-defined]
        parts = math.prod(shape[axis] for axis in axes if placements[axis].dim == dim)
        if tensor.shape[dim] % parts:
            raise NotImplementedError(
                f"{name!r} of shape {tuple(tensor.shape)} is laid out as {tuple(placements)}, and {parts} processes do not "
                f"divide its axis {dim} evenly; choose sizes that they do, or exclude it"
            )
    return axes


def _ranges(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]) -> list[Range]:
    """The range of each axis of a tensor that the process at this coordinate of the mesh holds."""
    held: dict[int, list[Range]] = {axis: [(0, size)] for axis, size in enumerate(shape)}
    for places, at, place in zip(mesh, coordinate, placements, strict=True):
        if not place.is_replicate():
            turns = getattr(place, "split_factor", 1)  # of _StridedShard: every so many parts, as often
            pieces = _chunks(held[place.dim], places * turns)
            held[place.dim] = [part for turn in range(turns) for part in pieces[turn * places + at]]
    found = []
    for ranges in held.values():
        if any(one[1] != two[0] for one, two in itertools.pairwise(ranges)):
            raise NotImplementedError(f"a process holds parts with gaps between them of a tensor laid out as {placements}")
        found.append((ranges[0][0], ranges[-1][1]) if ranges else (0, 0))
    return found


def _chunks(ranges: list[Range], number: int) -> list[list[Range]]:
    """These ranges, one after the other, in so many parts, as `torch.chunk` cuts them."""
    size = sum(last - first for first, last in ranges)
    step = -(-size // number) or 1
    parts: list[list[Range]] = [[] for _ in range(number)]
    done = 0
    for first, last in ranges:
        while first < last:
            part = done // step
            end = min(last, first + (part + 1) * step - done)
            parts[part].append((first, end))
            done, first = done + end - first, end
    return parts


def _box(layout: Layout, ranges: Sequence[Range]) -> Box:
    """The part of the matrix of a tensor that these ranges of its axes are."""
    if len(ranges) < 2:
        return Box((0, 1), ranges[0] if ranges else (0, 1))
    rows, cols = (ranges[1], ranges[0]) if layout.flip else (ranges[0], ranges[1])
    return Box(rows, (cols[0] * layout.span, cols[1] * layout.span))
