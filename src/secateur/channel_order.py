"""The order of the columns of a matrix in which the best n of every m neighbours have the highest scores."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 1  # how often every place of the pools is filled anew; four times keep 0.1 % more of the score
_PRECISION = 0.1  # of assignments: the least bid, over the largest gain and times the root of their number
_SMALL = 512  # pools up to which bidding is done on the CPU
_BIDS = 100  # rounds of bidding; the few rows that have no column by then take what is left
_ELEMENTS = 1 << 17  # gains are computed for parts of about this size, which fit the cache; larger ones on a GPU
_MOST_ROWS = 1 << 31  # elements of all gains of a place; larger problems look at a part of the rows


def weight_scores(W: Tensor, H: Tensor | None, G: Tensor | None) -> Tensor:
    """The contribution of each weight to the outputs, or with G to the loss: W^2 diag(H) diag(G). Vectors are diagonals."""
    scores = W.float().square()
    for factor, axis in ((H, 0), (G, 1)):
        if factor is not None:
            diagonal = factor.diagonal() if factor.ndim == 2 else factor
            scores = scores * diagonal.to(scores).unsqueeze(axis)
    return scores


def kept_score(scores: Tensor, order: Tensor, n: int, m: int) -> float:
    """The sum of the scores that the best n of every m neighbours have, with the columns in this order."""
    pools = scores[:, order.to(scores.device)].view(len(scores), -1, m)
    return float(pools.topk(n, -1, sorted=False).values.sum(dtype=torch.float64))


def best_order(scores: Tensor, n: int, m: int) -> Tensor:
    """An order of the columns in which the best n of every m neighbours have a high score in all.

    Columns are first distributed over the pools by rank. Then the columns at one place of all pools are reassigned, one place
    after the other, so that the sum of their gains is large (Zhang et al., RIA, 2024, solve the same assignment).
    """
    count = scores.shape[1] // m
    if n == m or count == 1:
        return torch.arange(scores.shape[1])
    seats = scores.sum(0).argsort(descending=True, stable=True).view(m, count).T.clone()
    least = len(scores) * count * count // _MOST_ROWS + 1
    seen = scores[::least]
    for place in list(range(m)) * _ROUNDS:
        rest = seats[:, [other for other in range(m) if other != place]]
        beaten = seen[:, rest].topk(n, -1).values[..., -1]
        who = seats[:, place]
        gains = _gains(seen[:, who], beaten)
        gains = gains.cpu() if count <= _SMALL else gains  # the steps of a small auction are shorter than a launch
        seats[:, place] = who[_assigned(gains).to(who.device)]
    return seats.reshape(-1).cpu()


def _gains(own: Tensor, beaten: Tensor) -> Tensor:
    """gain[c, g]: how far the scores of column c exceed those that they would replace in pool g, summed over rows."""
    gain = own.new_empty(own.shape[1], beaten.shape[1])
    step = max((_ELEMENTS << (7 if own.is_cuda else 0)) // max(beaten.numel(), 1), 1)
    for first in range(0, len(gain), step):
        part = own[:, first : first + step]
        gain[first : first + step] = (part.T[:, :, None] - beaten[None]).clamp_min_(0).sum(1)
    return gain


def _assigned(gain: Tensor) -> Tensor:
    """Which row each column of a square matrix is assigned to, for a sum close to the largest possible.

    An auction (Bertsekas, 1988): rows without a column bid for the one that is worth most to them at its present price, the
    highest bid gets it, and the price rises by the bid. Without an end, the sum would be within `len(gain) * least` of the
    best one; the last of many rounds serve a few rows and are left out.
    """
    count = len(gain)
    least = _PRECISION * float(gain.max()) / count**0.5
    row_of = torch.full((count,), -1, device=gain.device)
    column_of, price = row_of.clone(), gain.new_zeros(count)
    if least <= 0 or count == 1:
        return torch.arange(count, device=gain.device)
    for _ in range(_BIDS):
        free = (column_of < 0).nonzero()[:, 0]
        if not len(free):
            break
        value, column = (gain[free] - price).topk(2)
        bid, column = value[:, 0] - value[:, 1] + least, column[:, 0]
        highest = torch.full_like(price, -1).scatter_reduce_(0, column, bid, "amax")
        won = bid == highest[column]
        winner = torch.full_like(row_of, -1).scatter_(0, column[won], free[won])
        sold = (winner >= 0).nonzero()[:, 0]
        before = row_of[sold]
        column_of[before[before >= 0]] = -1
        row_of[sold], column_of[winner[sold]] = winner[sold], sold
        price[sold] += highest[sold]
    row_of[row_of < 0] = (column_of < 0).nonzero()[:, 0]
    return row_of
