"""Rounds the weights of a solution so that `compress_(values=...)` stores them without loss.

Each weight is rounded to make up for the errors of the others, by coordinate descent on the error of the layer's outputs. The
first sweep feeds the error of a column to the columns after it, as GPTQ does (Frantar et al., 2022), and later sweeps return to
the columns before (Behdin et al., QuantEase, 2023). Unlike a correction by the inverse of the whole Gram matrix, this never
moves an error into weights that are pruned.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..values import KINDS, Values
from .scaled import ScaledProblem, relative
from .seam import LayerProblem, Solution

_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # shares of a group's largest weight that may become the largest number
_SWEEPS = 3  # more hardly matter
_WIDTH = 128  # columns for which products are updated one by one


def on_grid(problem: LayerProblem, scaled: ScaledProblem, found: Solution, values: Values | None) -> Solution:
    """The solution with its weights rounded; as it is if `values` is None.

    The scales are fixed first, with the least error of the weights on their own, and the largest weight of a group stays the
    largest number. So `Values.quantize` finds the same scales again, also from weights that are stored in 16 bits.
    """
    if values is None:
        return found
    assert found.weight is not None
    V, c = found.weight.float(), scaled.right.scale.float()
    each = c[:, None].expand(scaled.W.shape).reshape(V.shape)
    cut = values.split(V)
    scales = _scales(values, cut, values.split(each.square()), problem.W.dtype).unsqueeze(-1)
    largest = cut.abs().amax(-1, keepdim=True)
    first = cut.abs() == largest
    top = torch.where(first & (largest > 0), cut.sign() * KINDS[values.kind], 0)
    q = torch.where(top != 0, top, values.nearest(cut / scales))
    S, Q, free = (
        part.reshape(len(V), -1)[:, : V.shape[1]] for part in (scales.expand_as(cut), q * scales, (cut != 0) & (top == 0))
    )
    H = scaled.right.matrix.float().clone()
    H.diagonal(dim1=-2, dim2=-1).add_(scaled.ridge)
    columns_first = (part.reshape(scaled.W.shape).mT.contiguous() for part in (V, Q, S, free))
    weight = _descend(values, H, c[:, :, None], *columns_first).mT.reshape(V.shape).to(found.weight.dtype)
    weight = weight.add_(0.0)  # no -0.0, which integers do not have
    (error,) = relative(scaled, scaled.errors(weight.view_as(scaled.W) * scaled.scale)) or [None]
    return replace(found, weight=weight, error=error)


def _scales(values: Values, cut: Tensor, weigh: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each group with the least squared error, weighed by the squares of the inputs."""
    largest, best, least = cut.abs().amax(-1), None, None
    for clip in _CLIPS:
        # The largest weight is stored in the dtype of the layer. Its scale has to be found again from what is stored there.
        stored = (values.scales(largest * clip).float() * KINDS[values.kind]).to(dtype).float()
        scale = values.scales(stored).float()
        away = values.nearest(cut / scale.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).sub_(cut)
        error = away.square_().mul_(weigh).sum(-1)
        best = scale if best is None or least is None else torch.where(error < least, scale, best)
        least = error if least is None else torch.minimum(error, least)
    assert best is not None
    return best


def _descend(values: Values, H: Tensor, c: Tensor, V: Tensor, Q: Tensor, S: Tensor, free: Tensor) -> Tensor:
    """Moves each free weight of Q to the best number in its place while the others stay. All are (groups, columns, rows)."""
    columns = V.shape[1]
    for _ in range(_SWEEPS):
        for a in range(0, columns, _WIDTH):
            b = min(a + _WIDTH, columns)
            products = H[:, a:b] @ ((Q - V) * c)
            for j in range(a, b):
                wanted = Q[:, j] - products[:, j - a] / (H[:, j, j, None] * c[:, j])
                q = torch.where(free[:, j], values.nearest(wanted / S[:, j]) * S[:, j], Q[:, j])
                products.addcmul_(H[:, a:b, j, None], ((q - Q[:, j]) * c[:, j])[:, None])
                Q[:, j] = q
    return Q
