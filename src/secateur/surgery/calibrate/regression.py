"""Linear regression of the outputs of a layer on its inputs, and the rows of data that it is taken over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...input_squares import flat_places

_ROWS = 1 << 22  # elements in one block of input patches
_EACH, _LEAST = 128, 64  # rows that a fit uses: for each column of a weight, and at least in each batch
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Regression:
    """A linear regression: means and covariances of inputs x and targets y over rows, in float64, and its solution.

    Each block of rows is centred on its own mean before it is multiplied, and blocks are merged without loss (Chan et al.,
    1979). Products of values that are not centred would lose the variance of inputs with a large mean, such as images from 0
    to 255.
    """

    def __init__(self) -> None:
        self.count = 0
        self.means: list[Tensor] = []  # of x and, where there are targets, of y
        self.products: list[Tensor] = []  # sums of x x' and x y', of deviations from the means

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        number, parts = len(x), [x] if y is None else [x, y]
        if not number:
            return
        rough = [part.mean(0) for part in parts]
        parts = [part - mean for part, mean in zip(parts, rough)]
        rest = [part.sum(0, dtype=torch.float64) / number for part in parts]  # what rounding left of the means
        with torch.autocast(x.device.type, enabled=False):
            products = [(parts[0].T @ part).double() - number * torch.outer(rest[0], r) for part, r in zip(parts, rest)]
        means = [mean.double() + r for mean, r in zip(rough, rest)]
        if self.count:
            total = self.count + number
            shifts = [new - old for new, old in zip(means, self.means)]
            share = self.count * number / total
            products = [p + q + share * torch.outer(shifts[0], s) for p, q, s in zip(products, self.products, shifts)]
            means = [old + shift * (number / total) for old, shift in zip(self.means, shifts)]
        self.count, self.means, self.products = self.count + number, means, products

    def moments(self) -> tuple[Tensor, Tensor]:
        """The mean and the covariance of the inputs."""
        return self.means[0], self.products[0] / self.count

    @property
    def finite(self) -> bool:
        return all(bool(part.isfinite().all()) for part in (*self.means, *self.products))

    def solve(self, now: Tensor, ridge: float, bias: bool) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias with the least squared error, near the weight `now`. Without `bias`, the weight alone."""
        (x, y), (gram, cross) = self.means, (part / self.count for part in self.products)
        if not bias:
            gram, cross = gram + torch.outer(x, x), cross + torch.outer(x, y)
        lift = ridge * float(gram.diagonal().mean()) or 1.0  # constant inputs: any positive number keeps the weights
        new = now + _solved(gram, cross - gram @ now.T, lift).T
        return new, y - new @ x if bias else None


def _solved(gram: Tensor, right: Tensor, lift: float) -> Tensor:
    """Solves (gram + lift) z = right. A gram matrix that rounding made indefinite gets a larger lift."""
    for factor in (1.0, 1e1, 1e2, 1e3, 1e4):
        lower, failed = torch.linalg.cholesky_ex(gram + factor * lift * torch.eye(len(gram)).to(gram))
        if not bool(failed):
            return torch.cholesky_solve(right, lower)
    return torch.linalg.lstsq(gram.cpu(), right.cpu(), driver="gelsd").solution.to(gram)


def rows_for(module: Any, batches: int) -> int:
    """The number of rows of each batch that a fit of this layer uses: neighbouring positions of an image are much alike."""
    columns = module.weight[0].numel() if isinstance(module, CONVS) else max(module.weight.shape)
    return max(_LEAST, _EACH * columns // batches + 1)


def samples(
    module: Any, x: Tensor, y: Tensor | None, most: int, draw: torch.Generator, valid: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Blocks of rows that the layer multiplies with its weight, with the outputs `y` there; at most `most`, drawn at random.

    `valid`, a matrix (batch, position) of bool, leaves positions out, such as padding, of layers that have a row for each.
    """
    if isinstance(module, CONVS):
        rank = module.weight.dim() - 2
        single = x.dim() == rank + 1
        places = patches(module, x[None] if single else x)
        y = None if y is None else (y[None] if single else y).movedim(1, -1)
    else:
        places, y, rank = x.reshape(-1, x.shape[-1]), None if y is None else y.reshape(-1, y.shape[-1]), 0
    shape = places.shape[: 1 + rank]
    there = None if valid is None or isinstance(module, CONVS) else flat_places(x, valid)
    total = math.prod(shape) if there is None else len(there)
    picked = torch.arange(total) if total <= most else torch.randint(total, (most,), generator=draw)
    picked = picked if there is None else there.cpu()[picked]
    wide = math.prod(places.shape[1 + rank :])
    for part in picked.split(max(1, _ROWS // max(1, wide))) if total else ():
        at = torch.unravel_index(part.to(x.device), shape)
        rows, goal = places[at].flatten(1), None if y is None else y[at]
        yield tuple(t if t is None or t.dtype in (torch.float32, torch.float64) else t.float() for t in (rows, goal))  # type: ignore[misc]


def patches(conv: Any, x: Tensor) -> Tensor:
    """The patches that a convolution multiplies with its weight, as a view: (n, output positions, channel, kernel)."""
    rank = x.dim() - 2
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    for i in range(rank):
        x = x.unfold(2 + i, conv.dilation[i] * (conv.kernel_size[i] - 1) + 1, conv.stride[i])[..., :: conv.dilation[i]]
    return x.movedim(1, 1 + rank)
