"""What a model learns from its teacher: the distance of its outputs from the teacher's, and text that the teacher writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .edit import half_products
from .logits import divergence, logits_of
from .stats import backward_of, on_batch, split_batch, valid_positions

Distance = Callable[[Any, Any], Tensor]
_TOGETHER = 64  # sequences that are written at once


def _outputs(model: nn.Module, teacher: nn.Module, batch: Any) -> tuple[Any, Any, Tensor | None]:
    args, kwargs, _ = split_batch(batch)
    with half_products(model):
        with torch.no_grad(), on_batch(teacher, args, kwargs):
            wanted = teacher(*args, **kwargs)
        with on_batch(model, args, kwargs):
            return model(*args, **kwargs), wanted, valid_positions(batch)


def backward(model: nn.Module, teacher: nn.Module, batch: Any, loss: Distance | None) -> float:
    """Leaves the gradients of the distance on one batch in the parameters, and returns it."""
    output, wanted, valid = _outputs(model, teacher, batch)
    if loss is not None:
        value = loss(output, wanted)
        value.backward()
        return float(value.detach())
    logits = logits_of(output)
    distance, count, gradient = divergence(logits.detach(), logits_of(wanted), valid, gradient=True)
    assert gradient is not None
    if not math.isfinite(distance):
        raise ValueError(
            "the distance from the teacher is NaN or infinite; look at the data, or lower lr=. The model is unchanged."
        )
    with backward_of(model):
        logits.backward(gradient)
    return distance / max(count, 1)


def held_out(model: nn.Module, teacher: nn.Module, batches: Sequence[Any], loss: Distance | None) -> float:
    """The mean distance over the tokens of these batches; with a loss of the user's, over the batches."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            output, wanted, valid = _outputs(model, teacher, batch)
            if loss is not None:
                distance, tokens = float(loss(output, wanted)), 1
            else:
                distance, tokens, _ = divergence(logits_of(output), logits_of(wanted), valid, gradient=False)
            total, count = total + distance, count + tokens
    return total / max(count, 1)


# --- text that the teacher writes -----------------------------------------------------------------------------------


def can_write(teacher: nn.Module, batches: Sequence[Any]) -> bool:
    """Whether the teacher has the method `generate` of Hugging Face models, and these batches are tokens it can go on from."""
    return callable(getattr(teacher, "generate", None)) and all(_sequences(batch) for batch in batches)


def _sequences(batch: Any) -> list[Tensor]:
    """The tokens of each sequence, without padding; none for a batch with inputs that a new text would not fit."""
    args, kwargs, _ = split_batch(batch)
    if set(kwargs) - {"input_ids", "attention_mask", "labels"} or len(args) + ("input_ids" in kwargs) != 1:
        return []
    ids, valid = args[0] if args else kwargs["input_ids"], valid_positions(batch)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return []
    rows = list(ids) if valid is None else [row[there.to(row.device)] for row, there in zip(ids, valid, strict=True)]
    return [row for row in rows if len(row) > 1]


def write(teacher: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """For each batch, one of text that the teacher writes, from the first tokens of its sequences on.

    Training on it needs no further text (Liu et al., LLM-QAT, 2023). Words are drawn from the teacher's own distribution.
    """
    waiting: list[list[Tensor]] = []
    for batch in batches:
        rows = _sequences(batch)
        if waiting and sum(map(len, waiting)) + len(rows) > _TOGETHER:
            yield from _continued(teacher, waiting)
            waiting = []
        waiting.append(rows)
    if waiting:
        yield from _continued(teacher, waiting)


def _continued(teacher: nn.Module, parts: Sequence[Sequence[Tensor]]) -> Iterator[dict[str, Tensor]]:
    rows = [row for part in parts for row in part]
    prompt, more = torch.stack([row[:1] for row in rows]), max(map(len, rows)) - 1
    with torch.no_grad(), half_products(teacher), on_batch(teacher, (), {"input_ids": prompt}):
        text = teacher.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=more,
            max_new_tokens=more,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    for each in text.split([len(part) for part in parts]):
        yield {"input_ids": each, "attention_mask": torch.ones_like(each)}
