"""Curvature: how much the loss reacts to each output of a layer, from backward passes of the model as it is.

For a layer that maps x to W x, with g the gradient of the loss with respect to W x, G = E[g g'] and H = E[x x'] are the two
Kronecker factors of the layer's Fisher matrix (K-FAC, Martens & Grosse, 2015): a change D of its weights costs the loss about
tr(G D H D') / 2 per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._dist import sharded
from ._tree import Loose
from .edit import half_products, preserve_rng
from .input_squares import is_float
from .logits import logits_of, parts_of
from .moments import linear_inputs
from .products import matmul, rough_matmul
from .progress import Progress
from .reads import listen
from .stats import (
    Loss,
    as_it_was,
    backward_of,
    check_evidence,
    check_gradients,
    check_values,
    on_batch,
    split_batch,
    valid_positions,
)
from .targeting import Target

KINDS = ("none", "diag", "fisher")  # each knows more than the one before
_WIDEST = 8192  # with more outputs, only the diagonal of G is kept
_ENOUGH = 10  # tokens per output; with fewer, G is shrunk towards its diagonal
_DRAWS = 2  # random vectors for each token; each takes a backward pass
_PLACES = 1 << 16  # of a list of random signs, at which those of a token may begin


@dataclass(frozen=True)
class Curvature:
    """The factors of each layer's Fisher matrix, by the name of its weight.

    `G` holds a matrix (outputs, outputs), or a vector where only the diagonal is kept. `H` holds a matrix (inputs, inputs), or
    a vector of the diagonal, with a leading axis for layers whose groups of rows read different inputs; layers that read the
    same tensor share one. Both are means over `tokens` (positions, for a convolution). `notes` says what was done differently
    for a layer, and why. Of kind "inputs", `G` holds W'GW (inputs, inputs) instead, the covariance of the gradients that reach
    the inputs of the layer through its weight W.
    """

    G: dict[str, Tensor]
    H: dict[str, Tensor]
    tokens: dict[str, int]
    notes: dict[str, str] = field(default_factory=dict)


def curvature(
    model: nn.Module,
    targets: Sequence[Target],
    batches: Iterable[Any],
    *,
    kind: str = "fisher",
    gram: str = "full",
    loss: Loss | None = None,
    seed: int = 0,
) -> Curvature:
    """Runs the model on every batch, forward once and backward twice, and returns G and H of the targets.

    The model is unchanged. `kind="diag"` keeps the diagonal of G only, `kind="inputs"` returns W'GW, which is smaller than G
    for layers with many outputs, and `kind="none"` computes no G and takes no backward pass. `gram` is "full", "diag" or
    "none", for H. Without `loss`, the output of the model must hold logits on its last axis (a tensor, or the `logits` of a
    mapping or an output object); G is then that of the cross-entropy for labels from the model's own distribution, the true
    Fisher matrix. With `loss`, a function of the output and the target, its gradients are used, in one backward pass. Positions
    that a two-dimensional `attention_mask` of the batch excludes count nowhere.
    """
    if kind not in (*KINDS, "inputs"):
        raise ValueError(f"curvature is one of {', '.join(map(repr, KINDS))}, not {kind!r}")
    check_evidence(frozenset({"curvature"}), batches, loss, of="this method")
    if isinstance(model, Loose):
        raise TypeError("curvature is measured by running a model, and these are tensors without one")
    if any(sharded(target.tensor) for target in targets):
        raise NotImplementedError("curvature cannot be measured on a sharded model; prune before sharding it")
    sums, ran, draw = _Sums(kind, gram), 0, torch.Generator().manual_seed(seed)
    if backward := kind != "none":
        check_gradients(model)
    fixed = _frozen(model) if backward else contextlib.nullcontext()
    with torch.inference_mode(False), torch.set_grad_enabled(backward), preserve_rng(), as_it_was(model), fixed:
        progress = Progress("curvature", len(batches) if isinstance(batches, Sequence) else None)
        for number, batch in enumerate(batches, 1):
            progress(f"batch {number}")
            check_values(split := split_batch(batch), number)
            args, kwargs, wanted = split
            if any(isinstance(value, Tensor) and not value.numel() for value in (*args, *kwargs.values())):
                continue
            ran += 1
            with listen(targets, sums.called, sums.passed, sums.returned):
                with sums.forward(valid_positions(batch)), half_products(model), on_batch(model, args, kwargs):
                    output = model(*args, **kwargs)
                if not backward:
                    continue
                value = loss(output, wanted) if loss else logits_of(output)
                if not value.requires_grad:
                    raise ValueError("the output of the model does not depend on any of the layers to prune")
                gradients = [None] if loss else _sampled(value.detach(), sums.valid, draw, number)
                for left, gradient in zip(range(len(gradients))[::-1], gradients, strict=True):
                    with backward_of(model):
                        torch.autograd.grad(value, sums.anchors, gradient, allow_unused=True, retain_graph=left > 0)
                sums.draws = len(gradients)
    if not ran:
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    return sums.means(targets)


def _sampled(logits: Tensor, valid: Tensor | None, draw: torch.Generator, number: int) -> list[Tensor]:
    """Random vectors for each token, with the covariance that the gradient of its cross-entropy by the logits has.

    With p the probabilities and e random signs, r - p sum(r) with r = sqrt(p) e has the covariance diag(p) - p p', as the
    gradient for a label drawn from p has. But where p has one large element, that gradient is nearly always tiny and rarely
    large, while these vectors have about the same length for all signs: they take fewer tokens for the same precision.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    classes, wide = flat.shape[1], torch.promote_types(flat.dtype, torch.float32)
    signs = torch.randint(2, (classes + _PLACES,), generator=draw).mul_(2).sub_(1).to(flat.device, wide).unfold(0, classes, 1)
    places = torch.randint(_PLACES, (len(flat), _DRAWS), generator=draw).to(flat.device)
    vectors = [torch.empty_like(flat) for _ in range(_DRAWS)]
    there, finite = None, torch.ones((), dtype=torch.bool, device=flat.device)
    if valid is not None and valid.shape == logits.shape[:-1]:
        there = valid.flatten().to(flat.device)
    for part in parts_of(flat):
        p = torch.softmax(flat[part], -1, dtype=wide)
        root = p.sqrt() if there is None else p.sqrt().mul_(there[part, None])
        for vector, place in zip(vectors, places[part].mT, strict=True):
            r = signs[place].mul_(root)
            total = r.sum(-1, keepdim=True)
            finite &= total.isfinite().all()
            vector[part] = r.addcmul_(p, total, value=-1)
    if not finite:
        raise ValueError(f"the logits of batch {number} of data= are NaN; look at that batch and at the weights")
    return [vector.view(logits.shape) for vector in vectors]


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient inside, so that the backward pass computes those of layer outputs only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


Part = tuple[str, int, int]  # a weight, and the groups of its rows (first, last) that read an input


@dataclass
class _Read:
    """An input of one batch, the sum of its products, and the weights that it was multiplied with."""

    input: Tensor  # held, so that no other tensor gets its id before the batch ends
    product: Tensor
    parts: list[Part] = field(default_factory=list)


class _Sums:
    """Adds up the products of inputs and of output gradients while the model runs."""

    def __init__(self, kind: str, gram: str) -> None:
        self.kind, self.gram = kind, gram
        self.draws = 1
        self.valid: Tensor | None = None
        self.anchors: list[Tensor] = []
        self._anchor_all = False
        self._forward = False
        self._reads: dict[Any, _Read] = {}  # of one batch
        self._H: dict[tuple[Part, ...], Tensor] = {}  # one sum for weights that always read the same inputs
        self._G: dict[str, Tensor] = {}
        self._fourth: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._of_experts: dict[str, Tensor] = {}  # the same for each expert of a stacked tensor

    @contextlib.contextmanager
    def forward(self, valid: Tensor | None) -> Iterator[None]:
        """Around the forward pass of one batch. Checkpointed layers run again in the backward pass, and are not counted."""
        self.valid, self.anchors, self._anchor_all, self._forward = valid, [], False, True
        try:
            yield
        finally:
            self._forward = False
        for read in self._reads.values():
            key = tuple(read.parts)
            self._H[key] = self._H[key].add_(read.product) if key in self._H else read.product
        self._reads = {}

    def called(self, target: Target, attribute: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs, layout = [value for value in (*args, *kwargs.values()) if is_float(value)], target.layout
        if not self._forward or self.gram == "none" or not inputs:
            return
        if len(inputs) == 1 and len(layout.shape) == 2 and (layout.product or isinstance(module, nn.Linear)):
            self.passed(target, slice(None), inputs[0])
        else:
            self._read(target, slice(None), object(), inputs[0], lambda: linear_inputs(target, attribute, module, args, kwargs))

    def passed(self, target: Target, groups: slice, x: Tensor) -> None:
        if self._forward and self.gram != "none":
            version = None if x.is_inference() else x._version
            self._read(target, groups, (id(x), version), x, lambda: _wide(self._rows(x, -1))[None])

    def returned(self, target: Target, groups: slice, output: Tensor) -> Tensor:
        layout = target.layout
        axis, height = -1 if layout.stacked else 1 - max(len(layout.shape), 2), layout.rows // layout.groups
        first, last, _ = groups.indices(layout.groups)
        rows = slice(first * height, last * height)
        if not self._forward or not is_float(output) or output.shape[axis] != rows.stop - rows.start:
            return output
        number = self._count(output, axis)
        if layout.stacked:
            self._of_experts.setdefault(target.name, torch.zeros(layout.groups))[first] += number
        if layout.stacked or first == 0:
            self._tokens[target.name] = self._tokens.get(target.name, 0) + number
        if self.kind == "none" or not torch.is_grad_enabled():  # the model may choose tokens or experts without gradients
            return output
        # Where something else requires a gradient, as embeddings under gradient checkpointing do, each output gets an anchor.
        self._anchor_all = self._anchor_all or (output.requires_grad and not self.anchors)
        if self._anchor_all or not output.requires_grad:  # nothing before it does: the backward pass ends here
            anchor = output.new_zeros((), requires_grad=True)
            self.anchors.append(anchor)
            output = output + anchor
        output.register_hook(lambda g: self._gradient(target, rows, g.detach().movedim(axis, -1)))
        return output

    def _count(self, x: Tensor, axis: int) -> int:
        """The number of vectors along an axis, without those at padded positions."""
        positions, valid = x.movedim(axis, -1).shape[:-1], self.valid
        if valid is not None and positions in (valid.shape, (valid.numel(),)):
            return int(valid.sum())
        return positions.numel()

    def _rows(self, x: Tensor, axis: int) -> Tensor:
        """The vectors along an axis, as a matrix, without those at padded positions."""
        x, valid = x.detach().movedim(axis, -1), self.valid
        if valid is not None and x.shape[:-1] == valid.shape:
            return x[valid.to(x.device)]
        if valid is not None and x.shape[:-1] == (valid.numel(),):
            return x[valid.to(x.device).flatten()]
        return x.reshape(-1, x.shape[-1])

    def _read(self, target: Target, groups: slice, key: Any, x: Tensor, inputs: Callable[[], Tensor]) -> None:
        if key not in self._reads:
            read = inputs()
            with torch.autocast(read.device.type, enabled=False):  # the model may run in bfloat16, its sums must not
                product = matmul(read.mT, read) if self.gram == "full" else read.square().sum(1)
            self._reads[key] = _Read(x, product)
        first, last, _ = groups.indices(target.layout.groups)
        self._reads[key].parts.append((target.name, first, last))

    def _gradient(self, target: Target, rows: slice, g: Tensor) -> None:
        g, name, height = self._rows(g, -1), target.name, target.layout.rows
        product = rough_matmul if g.dtype == torch.bfloat16 else matmul  # it was rounded before
        g = _wide(g)
        if self.kind == "inputs":
            matrix = _wide(target.layout.matrix(target.weight))[rows]
            g, rows, height = matmul(g, matrix), slice(None), matrix.shape[1]
        whole = self.kind == "inputs" or (self.kind == "fisher" and height <= _WIDEST and not target.layout.stacked)
        if name not in self._G:
            self._G[name] = g.new_zeros((height, height) if whole else (height,))
            self._fourth[name] = g.new_zeros(2, dtype=torch.float64)
        squares = g.square()
        if whole:
            self._G[name][rows, rows].add_(product(g.mT, g))
            each = squares.sum(1)
            self._fourth[name] += torch.stack([each @ each, squares.flatten() @ squares.flatten()])
        else:
            self._G[name][rows] += squares.sum(0)

    def means(self, targets: Sequence[Target]) -> Curvature:
        """The sums over the numbers of tokens."""
        G, notes = {}, {}
        for target in targets:
            name, n = target.name, self._tokens.get(target.name, 0)
            if not n or (self.kind != "none" and name not in self._G):
                which = "gradient of the loss" if n else "token"
                notes[name] = f"no {which} reached it, so it has no curvature and its outputs are weighed alike"
            if name not in self._G:
                continue
            G[name] = self._G.pop(name)
            if target.layout.stacked and self.kind != "inputs":
                G[name].view(target.layout.groups, -1).div_(
                    self._of_experts[name].clamp(min=1).to(G[name])[:, None] * self.draws
                )
            else:
                G[name].div_(n * self.draws)
            if self.kind == "fisher" and (target.layout.rows > _WIDEST or target.layout.stacked):
                notes[name] = f"of its curvature only the diagonal was kept ({target.layout.rows:,} outputs)"
            elif self.kind == "fisher" and n < _ENOUGH * target.layout.rows:
                share = _shrink_(G[name], self._fourth[name] / (n * self.draws), n * self.draws)
                notes[name] = (
                    f"its curvature comes from {n:,} tokens for {target.layout.rows:,} outputs and was shrunk towards its "
                    f"diagonal by {share:.0%}; {_ENOUGH * target.layout.rows:,} tokens are enough"
                )
        if not G and (self.kind != "none" or not self._tokens):
            raise ValueError("the data reached none of the layers to prune, so there is no curvature to measure")
        return Curvature(G, self._grams(targets), {name: n for name, n in self._tokens.items() if n}, notes)

    def _grams(self, targets: Sequence[Target]) -> dict[str, Tensor]:
        parts: dict[str, list[tuple[tuple[Part, ...], int, int]]] = {}
        for key in self._H:
            for name, first, last in key:
                parts.setdefault(name, []).append((key, first, last))
        means: dict[tuple[Part, ...], Tensor] = {}
        found = {}
        for target in targets:
            name, groups, own = target.name, target.layout.groups, parts.get(target.name, [])
            n = self._tokens.get(name, 0)
            if not own or not n:
                continue
            if len(own) == 1 and groups == 1:
                key = own[0][0]
                means.setdefault(key, self._H[key][0] / n)
                found[name] = means[key]
                continue
            whole = self._H[own[0][0]].new_zeros(groups, *self._H[own[0][0]].shape[1:])
            for key, first, last in own:
                whole[first:last] += self._H[key] / n
            found[name] = whole if groups > 1 else whole[0]
        return found


def _shrink_(G: Tensor, fourth: Tensor, tokens: int) -> float:
    """Moves G towards its diagonal by the share that minimises the expected squared error, and returns the share.

    The share is the summed variance of the off-diagonal means over their summed squares (Ledoit & Wolf, 2004, with the
    diagonal as the target). `fourth` holds E[|g|^4] and E[sum of g_i^4].
    """
    diagonal = G.diagonal().clone()
    off = float(G.double().square().sum() - diagonal.double().square().sum())
    spread = float(fourth[0] - fourth[1]) - off
    share = min(max(spread / tokens / max(off, 1e-300), 0.0), 1.0)
    G.mul_(1 - share).diagonal().copy_(diagonal)
    return share


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
