"""The batches that a model is solved with: checked, and on every process of those that share the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._arguments import tensors_of
from .._dist import DataRanks, together
from ..stats import check_values, split_batch


def usable(data: Iterable[Any], notes: dict[str, str], ranks: DataRanks) -> tuple[list[Any], bool]:
    """The batches that are not empty, and whether they count. Raises on all processes where one holds NaN, or none has any.

    A process without a batch gets one of another, which does not count: it has to run the blocks with the others.
    """
    batches: list[Any] = []
    with together(ranks.comm, "use its batches of data="):
        number = _read(data, notes, batches)
    batches, counts = ranks.filled(batches)
    if not batches:
        if number:
            raise ValueError(f"all {number} batches of data= are empty")
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    return batches, counts


def _read(data: Iterable[Any], notes: dict[str, str], batches: list[Any]) -> int:
    """Puts the batches that are not empty into a list, and returns the number of all."""
    empty, number = [], 0
    for number, batch in enumerate(data, 1):
        args, kwargs, _ = found = split_batch(batch)
        check_values(found, number)
        tensors = tensors_of((args, kwargs))
        if tensors and not all(tensor.numel() for tensor in tensors):
            empty.append(number)
            continue
        if any(bool(tensor.isnan().any()) for tensor in tensors if tensor.is_floating_point()):
            raise ValueError(f"batch {number} of data= (counted from 1) holds NaN; remove it or repair it")
        batches.append(batch)
    if empty:
        notes["data"] = f"skipped empty batches of data=: {', '.join(map(str, empty))} (counted from 1)"
    return number
