"""The problem of a layer in scaled coordinates, masked least squares in them, and the factors that layers share.

Columns are multiplied by the root of diag H and rows by the root of diag G, so that both matrices have unit diagonals. Then the
magnitude of a weight is its score in units of the objective (Wanda's score when there is no G), conjugate gradients are
preconditioned by the diagonal, and one penalty schedule fits every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..patterns import Pattern
from ..products import matmul, rough_matmul
from ..scores import Scores
from .seam import Amount, LayerProblem, Solution, diagonal_blocks

RIDGE = 1e-4  # of the scaled Gram matrix; it pulls towards the weights there are, never towards zero
_ROWS_RIDGE = 1e-2  # of the scaled G, which is estimated from few tokens
_RARE = 1e-6  # an input that is smaller than this part of the largest one counts as so large
_TINY = 1e-30
_LEAF = 2048  # on a GPU, larger matrices are inverted by halves
_CLOSE = 0.1  # how far the product of a matrix and its inverse may be from the identity, relative to that
Product = Callable[[Tensor, Tensor], Tensor]


class Factor:
    """A symmetric matrix (groups, size, size) scaled to a unit diagonal, and what is computed from it once."""

    def __init__(self, name: str, what: str, matrix: Tensor, dtype: torch.dtype, ridge: float):
        _check_finite(name, what, matrix)
        scale = _root(matrix.diagonal(dim1=-2, dim2=-1))
        self.scale = scale.to(dtype)
        self.matrix = (matrix / scale[:, :, None]).div_(scale[:, None, :]).to(dtype)
        self.matrix.diagonal(dim1=-2, dim2=-1).add_(ridge)
        self._inverses: dict[float, Tensor] = {}

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, without rounding below zero, and eigenvectors."""
        try:
            values, vectors = torch.linalg.eigh(self.matrix)
        except torch.linalg.LinAlgError:  # float32 did not converge
            values, vectors = (part.to(self.matrix.dtype) for part in torch.linalg.eigh(self.matrix.double()))
        return values.clamp_(min=0), vectors

    @property
    def decomposed(self) -> bool:
        """Whether the eigendecomposition was made."""
        return "eigen" in vars(self)

    def inverse(self, shift: float) -> Tensor:
        """The inverse of the matrix plus `shift` times the identity."""
        if shift not in self._inverses:
            shifted = self.matrix.clone()
            shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
            self._inverses[shift] = checked_inverse(shifted, _LEAF if shifted.is_cuda else shifted.shape[-1])
        return self._inverses[shift]


def checked_inverse(matrix: Tensor, leaf: int) -> Tensor:
    """The inverse by halves if rounded products are exact enough for that, else by a Cholesky factor.

    Strongly correlated inputs make small differences of large numbers. The matrix may then lose its positive eigenvalues, or
    keep them and be far off, which is seen in a product of both matrices with a few vectors.
    """
    size = matrix.shape[-1]
    if size <= leaf:
        return inverted(matrix, size)
    try:
        found = inverted(matrix, leaf)
    except torch.linalg.LinAlgError:
        return inverted(matrix, size)
    probe = torch.randn(size, 4, generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(matrix)
    with fast_products(matrix.device, "highest"):
        away = matrix @ (found @ probe) - probe
    exact = bool((torch.linalg.vector_norm(away, dim=(-2, -1)) <= _CLOSE * torch.linalg.vector_norm(probe)).all())  # not if NaN
    return found if exact else inverted(matrix, size)


def inverted(matrix: Tensor, leaf: int) -> Tensor:
    """The inverse of symmetric positive definite matrices, by halves: matrix products do the work of the larger sizes.

    A GPU multiplies matrices many times faster than it factorizes them. Up to the size `leaf`, a Cholesky factor is inverted.
    """
    size = matrix.shape[-1]
    if size <= leaf:
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    half = -(-size // 2)
    corner, first = matrix[..., :half, half:], inverted(matrix[..., :half, :half], leaf)
    across = first @ corner
    second = inverted(torch.baddbmm(matrix[..., half:, half:], corner.mT, across, alpha=-1), leaf)  # Schur complement
    found = torch.empty_like(matrix)
    found[..., half:, half:] = second
    found[..., :half, half:] = side = (across @ second).neg_()
    found[..., half:, :half] = side.mT
    found[..., :half, :half] = torch.baddbmm(first, side, across.mT, alpha=-1)
    return found


def _check_finite(name: str, what: str, matrix: Tensor) -> None:
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{what} of {name!r} is NaN or infinite; look for NaN in the data and in the weights")


def _root(diagonal: Tensor) -> Tensor:
    """The roots of a diagonal, as divisors: none is zero, so inputs that are always or nearly zero stay finite."""
    root = diagonal.clamp(min=0).sqrt()
    largest = root.amax(-1, keepdim=True)
    return torch.where(largest > 0, root.maximum(_RARE * largest), torch.ones_like(root))


_FACTORS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # layers that read the same input have one Gram matrix


def factor(name: str, what: str, matrix: Tensor, dtype: torch.dtype, groups: int = 1, ridge: float = 0.0) -> Factor:
    """The factor of a matrix, made once for each tensor: it lives as long as the tensor and has the same values."""
    key = dtype, groups, ridge, None if matrix.is_inference() else matrix._version
    known: tuple[object, Factor] | None = _FACTORS.get(matrix)
    if known is None or known[0] != key:
        blocks = matrix if matrix.ndim == 3 else diagonal_blocks(matrix, groups)
        known = _FACTORS[matrix] = key, Factor(name, what, blocks, dtype, ridge)
    return known[1]


@dataclass(frozen=True, eq=False)
class ScaledProblem:
    """Minimises tr(G U H U') - 2 tr(G U E') + ridge |U|^2 with U = V - W, in scaled coordinates.

    Matrices are (groups, rows, columns). `E` is the shift of the target, or None. `right` is the factor of H and `left` that of
    G. Weights times `scale` are scaled weights.
    """

    W: Tensor
    E: Tensor | None
    right: Factor
    left: Factor | None
    scale: Tensor
    ridge: float

    @staticmethod
    def of(problem: LayerProblem, ridge: float = RIDGE) -> ScaledProblem:
        assert problem.H is not None
        name, dtype, G = problem.name, problem.dtype, problem.G
        right = factor(name, "the Gram matrix of the inputs", problem.H, dtype)
        groups, columns = right.scale.shape
        W, E, left, scale = problem.W.to(dtype).reshape(groups, -1, columns), problem.aim(), None, right.scale[:, None]
        if G is not None and G.ndim == 1:
            _check_finite(name, "the curvature of the outputs", G)
            scale = scale * _root(G.reshape(groups, -1)).to(dtype)[:, :, None]
        elif G is not None:
            left = factor(name, "the curvature of the outputs", G, dtype, groups, _ROWS_RIDGE)
            scale = scale * left.scale[:, :, None]
        if E is not None:
            _check_finite(name, "the target", E)
            E = E.reshape(W.shape).to(dtype) / right.scale[:, None] * (scale / right.scale[:, None])
        return ScaledProblem(W * scale, E, right, left, scale, ridge)

    @cached_property
    def pull(self) -> Tensor | None:
        """G E."""
        return self.E if self.E is None or self.left is None else matmul(self.left.matrix, self.E)

    def apply(self, U: Tensor) -> Tensor:
        """G U H + ridge U."""
        weighed = U if self.left is None else matmul(self.left.matrix, U)
        return matmul(weighed, self.right.matrix).add_(U, alpha=self.ridge)

    def shifted_solve(self, R: Tensor, rho: float, matmul: Product = rough_matmul) -> Tensor:
        """The U with G U H + (ridge + rho) U = R.

        It takes two products, or four with G: a Sylvester equation, which is diagonal in the two eigenbases.
        """
        values, Q = self.right.eigen
        values = values[:, None]
        if self.left is None:
            return matmul(matmul(R, Q).div_(values + (self.ridge + rho)), Q.mT)
        rows, P = self.left.eigen
        inner = matmul(matmul(P.mT, R), Q).div_((rows[:, :, None] * values).add_(self.ridge + rho))
        return matmul(matmul(P, inner), Q.mT)

    def fixed_solve(self, R: Tensor, rho: float) -> Tensor:
        """The U with U H + (ridge + rho) U = R: one product with an inverse that is kept. G does not take part."""
        return rough_matmul(R, self.right.inverse(self.ridge + rho))

    def errors(self, V: Tensor) -> Tensor:
        """The objective at V, up to a constant: one number for each row, or one for each group with G."""
        U = V - self.W
        products = self.apply(U)
        if self.pull is not None:
            products = products.sub_(self.pull, alpha=2)
        return self.dot(products, U)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """Inner products of what forms one least-squares problem: each row, or with G all rows of a group."""
        return (a * b).sum(-1 if self.left is None else (-2, -1), keepdim=True)


def refit(problem: ScaledProblem, V: Tensor, mask: Tensor, steps: int) -> Tensor:
    """Masked least squares, each row on its own support, from V on: conjugate gradients on all rows at once.

    With G all rows of a group form one system, which takes twice as many steps.
    """
    kept = mask.view_as(problem.W).to(V.dtype)
    V = V * kept
    with fast_products(V.device, "highest"):  # later steps only add small corrections to this residual
        R = -problem.apply(V - problem.W)
    R = (R if problem.pull is None else R.add_(problem.pull)).mul_(kept)
    P, length = R.clone(), problem.dot(R, R)
    for _ in range(steps if problem.left is None else 2 * steps):
        Q = problem.apply(P)
        step = length / problem.dot(P, Q).clamp_(min=_TINY)
        V = V.addcmul_(step, P)
        R = R.addcmul_(step, Q, value=-1).mul_(kept)
        before, length = length, problem.dot(R, R)
        P = P.mul_(length / before.clamp(min=_TINY)).add_(R)
    return V


def finish(problem: LayerProblem, scaled: ScaledProblem, V: Tensor, mask: Tensor, steps: int) -> Solution:
    """The solution for a mask: re-solves the weights from V on, and keeps the weights as they are where that is not better."""
    kept = mask.view_as(scaled.W)
    found = refit(scaled, V, mask, steps)
    masked, solved = scaled.errors(scaled.W * kept), scaled.errors(found)
    better = solved < masked
    if scaled.E is None:  # where nothing is pruned, the weights are at their optimum
        better &= ~kept.all(-1, keepdim=True) if scaled.left is None else ~kept.all()
    # The change is added to the weights there are, so that weights that need no change keep every bit.
    change = torch.where(better, found - scaled.W, 0).div_(scaled.scale).view_as(problem.W)
    weight = (problem.W.to(problem.dtype) + change) * mask
    return Solution(mask, weight, *relative(scaled, masked, torch.where(better, solved, masked)))


def relative(scaled: ScaledProblem, *errors: Tensor) -> list[float]:
    """Errors relative to the squared outputs of the layer as it is. With a target, they are distances from that.

    The distance of the best weights from the target belongs to each error. Without an eigendecomposition, which wide inputs
    do not get, it is not known, and the list is empty.
    """
    rest = 0.0
    if scaled.pull is not None:
        if not scaled.right.decomposed:
            return []
        rest = float((scaled.shifted_solve(scaled.pull, 0.0, matmul) * scaled.pull).sum())
    whole = float(scaled.dot(scaled.apply(scaled.W), scaled.W).sum())
    return [max(float(each.sum()) + rest, 0.0) / max(whole, _TINY) for each in errors]


def keep_largest(problem: LayerProblem, V: Tensor, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Tensor:
    """The mask in the pattern that is nearest to V: it keeps the largest elements, or the units with the largest squares."""
    matrix = V.reshape(problem.W.shape)
    scores = Scores.magnitude(matrix, problem.layout, power=1 if pattern.elementwise else 2)
    return amount.keep(problem.name, scores, pattern, previous)


@contextlib.contextmanager
def fast_products(device: torch.device, precision: str = "high") -> Iterator[None]:
    """Lets a CUDA device multiply float32 matrices in TF32, inside the context; not with precision "highest"."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def cholesky(name: str, matrix: Tensor) -> Tensor:
    """The lower Cholesky factor of a Gram matrix of layer `name`, or of its inverse."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed.any()) or not bool(factor.isfinite().all()):
        raise ValueError(
            f"the Gram matrix of the inputs of {name!r} is singular or not finite; use more calibration data, a larger damp=, "
            "or look for NaN in the data"
        )
    return factor
