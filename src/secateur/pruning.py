"""`prune_`: prunes a model once, in place. `Pruner`, in `pruner`, prunes a model while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ._dist import Group
from ._hints import hints
from ._tree import Prunable
from .budgets import Spread
from .criteria import Criterion, magnitude
from .methods import Method
from .patterns import Pattern
from .plans import Plan, plan
from .schedules import Number
from .stats import Loss
from .targeting import Globs


@hints
def prune_(
    model: Prunable,
    criterion: Criterion | Callable[..., Tensor] | str = magnitude,
    *,
    sparsity: float | None = None,
    count: int | None = None,
    pattern: str | Pattern = "unstructured",
    scope: str | None = None,
    include: Globs = (),
    exclude: Globs = (),
    types: Sequence[type[nn.Module]] | None = None,
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    spread: Spread | Mapping[str, Number] | str | None = None,
    method: Method | str | None = None,
    floor: float = 0.0,
    keep_dense: bool = False,
    group: Group | None = None,
) -> Plan:
    """Prunes a model once, in place, and returns the plan. `print(plan)` shows a table of its layers.

    Args:
        model: a module. Tensors that are in no module can be given as a mapping: `prune_({"codebook": tensor}, sparsity=0.5)`.
        criterion: scores every element; the lowest scores are pruned. An expression (`sc.wanda`), its text ("wanda",
            "abs(weight*grad)"), or a function whose arguments are named after the evidence that it needs.
        sparsity: the fraction of the original weights to prune.
        count: the number of units to prune in each pool, instead of `sparsity`.
        pattern: what is pruned together: "unstructured", "2:4" (keeps 2 of 4), "16x1", "out", ...
        scope: which units are ranked together: those of a "tensor" (the default), of a "row", or of all tensors ("global").
        include, exclude: globs over names of parameters and modules ("encoder.*", "lm_head"). By default the weights of linear
            layers, convolutions and attention are pruned.
        types: the layer types whose weights are pruned, in place of the default ones.
        data: batches for criteria and methods that need inputs or gradients. A batch is a tensor, a mapping of keyword
            arguments or a pair (inputs, target).
        loss: a function of the output and the target (or the batch), for criteria that need gradients.
        spread: gives each tensor its own sparsity: `sc.erk`, `sc.owl()`, or a mapping of globs to numbers.
        method: computes the masks and, for some methods, new values of the remaining weights. `sc.methods.rank()` (the
            default) does not change the remaining weights, `sc.methods.sparsegpt()` does.
        floor: the smallest fraction of each tensor that is kept. With `scope="global"` or a spread, other tensors lose more
            instead, so that the total is still exact.
        keep_dense: keeps the values that were replaced, so that `plan.undo_(model)` can restore them.
        group: a process group whose processes hold different tensors of one model (stages of a pipeline, experts), so that
            `scope="global"` ranks them together. Sharded tensors (FSDP2, tensor parallel) need none.

    If an error is raised, the model is unchanged.
    """
    made = plan(
        model,
        criterion,
        sparsity=sparsity,
        count=count,
        pattern=pattern,
        scope=scope,
        include=include,
        exclude=exclude,
        types=types,
        data=data,
        loss=loss,
        spread=spread,
        method=method,
        floor=floor,
        group=group,
    )
    return made.apply_(model, keep_dense=keep_dense)
