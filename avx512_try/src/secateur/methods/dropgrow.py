"""Drop and grow: swap the least important kept units for the most promising pruned ones, at constant sparsity."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .._dist import Comm
from ..patterns import Pattern
from ..scores import Scores
from ..select import select


def drop_and_grow(
    drop_by: Mapping[str, Scores],
    grow_by: Mapping[str, Scores],
    kept: Mapping[str, Tensor],
    pattern: Pattern,
    swap: float,
    comm: Comm,
) -> dict[str, Tensor]:
    """New bool matrices with as many units kept as before, tensor by tensor.

    The fraction `swap` of the kept units with the lowest `drop_by` goes, and as many of those outside with the highest
    `grow_by` come in. Growing by gradient magnitude is RigL (Evci et al., 2020), growing at random SET (Mocanu et al., 2018).
    A unit that was dropped in the same update may come straight back.
    """
    result = {}
    for name, matrix in kept.items():
        layout = drop_by[name].layout
        height, width = pattern.block(layout)
        units = matrix[::height, ::width]
        total, alive = comm.sum(units.numel(), int(units.sum()))
        swapped = round(swap * alive)
        gone = total - alive + swapped
        (stay,) = select({name: drop_by[name]}, pattern, count=gone, previous={name: matrix}, comm=comm).values()
        # Among what is outside now, the best `swapped` come in: everything else is "pruned" from the ranking.
        others = {name: ~stay}
        (grown,) = select({name: grow_by[name]}, pattern, count=total - swapped, previous=others, comm=comm).values()
        result[name] = stay | grown
    return result
