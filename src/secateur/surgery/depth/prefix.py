"""Skips the blocks in front of a removed one: the model without it starts from what they returned.

`stream` gives the inputs of each block in turn, so that it is enough to run the blocks behind the removed one, half of them on
average. It runs every block twice for that, which pays from about eight blocks on. Where skipping does not give the same output
(`can_skip`), whole models are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks import Drop, main_tensor
from ...edit import Inputs, StandIns, preserve_rng, run
from ...stream import Replay, stream
from ..compare import tensors_of

_FEW = 8  # with fewer blocks, running whole models takes less time


class Prefixes:
    """The inputs of the blocks of one list, block by block, while the blocks in `gone` are removed.

    `removed` makes a context in which the model is without them. `start` has to be called for every block that is left, in
    order; it returns a context in which the blocks in front of it are skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        gone: Sequence[int],
        batches: Sequence[Inputs],
        removed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        blocks = list(model.get_submodule(path)._modules.values())
        self.model, self.removed = model, removed
        self.left: list[Any] = [block for i, block in enumerate(blocks) if i not in set(gone)]
        self.replays = stream(model, self.left, [kwargs or (args, None) for args, kwargs in batches])
        self.at = 0

    def start(self) -> AbstractContextManager[None]:
        """Goes on to the next block. The blocks in front of it are skipped inside the returned context."""
        with torch.no_grad(), preserve_rng(), self.removed(), StandIns(self.model, _copied_buffer):
            replay = next(self.replays)
        self.at += 1
        return _skipped(self.left[: self.at - 1], replay)


def _copied_buffer(_: str, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


@contextmanager
def _skipped(blocks: Sequence[Any], replay: Replay) -> Iterator[None]:
    """Lets these blocks return what they receive, and the last of them what the next block received, batch by batch."""
    received = iter([main_tensor((*args, *kwargs.values())) for args, kwargs in replay.calls])

    def as_given(*args: Any, **kwargs: Any) -> Any:
        return main_tensor((*args, *kwargs.values()))

    def as_recorded(*args: Any, **kwargs: Any) -> Any:
        tensor = next(received)
        return None if tensor is None else tensor.clone()

    own = [(vars(block), vars(block).get("forward")) for block in blocks]
    for block in blocks:
        vars(block)["forward"] = as_recorded if block is blocks[-1] else as_given
    try:
        yield
    finally:
        for space, forward in own:
            if forward is None:
                del space["forward"]
            else:
                space["forward"] = forward


def can_skip(model: nn.Module, blocks: Drop, batches: Sequence[Inputs]) -> bool:
    """True if skipping all blocks of the model's one list but the last leaves the output as it is.

    It does not where blocks return more than one tensor, or where the model reads what they return elsewhere too.
    """
    if len(blocks) != 1 or min(map(len, blocks.values())) < _FEW or any(bool(args) == bool(kwargs) for args, kwargs in batches):
        return False
    (path, places) = next(iter(blocks.items()))
    holder = model.get_submodule(path)
    if not isinstance(holder, nn.ModuleList | nn.Sequential) or len(places) != len(holder):
        return False
    try:
        prefixes = Prefixes(model, path, (), batches[:1], nullcontext)
        last = [prefixes.start() for _ in holder][-1]
        with last:
            short = tensors_of(run(model, *batches[0]))
    except Exception:
        return False
    whole = tensors_of(run(model, *batches[0]))
    return len(short) == len(whole) and all(map(torch.equal, short, whole))
