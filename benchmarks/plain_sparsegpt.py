"""SparseGPT (Frantar and Alistarh, 2023) column by column in float32: the yardstick for the time of `method="sparsegpt"`.

Each block runs twice on all batches: with hooks that add up the Gram matrices of its linear layers, and after they were pruned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

DAMP, WIDTH = 0.01, 128


class _Reached(Exception):
    """The first block was called."""


@torch.no_grad()
def prune_(model: Any, data: list[dict[str, Tensor]], sparsity: float = 0.5, pattern: str = "") -> None:
    """Prunes the linear layers of `model.layers`. Positions that the attention mask excludes count nowhere."""
    calls = [_first_call(model, batch) for batch in data]
    valid = [batch["attention_mask"].bool() for batch in data]
    for block in model.layers:
        linears = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
        grams = {layer: layer.weight.new_zeros(layer.in_features, layer.in_features) for layer in linears}
        there = valid[0]

        def add(layer: Any, args: tuple[Tensor, ...]) -> None:
            x = args[0][there]  # noqa: B023
            grams[layer].addmm_(x.T, x)  # noqa: B023

        hooks = [layer.register_forward_pre_hook(add) for layer in linears]
        for call, there in zip(calls, valid, strict=True):  # noqa: B007
            block(*call)
        for hook in hooks:
            hook.remove()
        for layer in linears:
            _solve_(layer.weight, grams[layer], sparsity, [int(part) for part in pattern.split(":")] if pattern else None)
        calls = [(block(*call), *call[1:]) for call in calls]


def _first_call(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The arguments of the first block."""
    found: list[tuple[Tensor, ...]] = []

    def keep(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args)
        raise _Reached

    hook = model.layers[0].register_forward_pre_hook(keep)
    try:
        model(**batch)
    except _Reached:
        hook.remove()
    return found[0]


def _solve_(W: Tensor, H: Tensor, sparsity: float, keep: list[int] | None) -> None:
    dead = H.diagonal() == 0
    H.diagonal()[dead] = 1
    W[:, dead] = 0
    H.diagonal().add_(DAMP * H.diagonal().mean())
    U = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    for a in range(0, W.shape[1], WIDTH):
        b = min(a + WIDTH, W.shape[1])
        part, errors, own = W[:, a:b].clone(), torch.zeros_like(W[:, a:b]), U[a:b, a:b]
        gone = torch.zeros_like(part, dtype=torch.bool)
        if keep is None:
            scores = (part / own.diagonal()).square()
            gone = scores <= scores.flatten().sort().values[int(scores.numel() * sparsity)]
        for i in range(b - a):
            if keep is not None and i % keep[1] == 0:
                scores = (part[:, i : i + keep[1]] / own.diagonal()[i : i + keep[1]]).square()
                gone.scatter_(1, i + scores.topk(keep[1] - keep[0], largest=False).indices, True)
            column = part[:, i]
            error = column.masked_fill(~gone[:, i], 0) / own[i, i]
            part[:, i:] -= torch.outer(error, own[i, i:])
            errors[:, i] = error
        W[:, a:b] = part.masked_fill(gone, 0)
        W[:, b:] -= errors @ U[a:b, b:]
