"""`prune_`: pruning in place, once. `Pruner`, in `pruner`, prunes while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

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
) -> Plan:
    """Prunes a model in place, once, and returns the plan that was carried out. `print(plan)` shows a table of its layers.

    Tensors that are in no module are pruned as a mapping: `prune_({"codebook": tensor}, sparsity=0.5)`.

    `criterion` scores every element, and the lowest scores are pruned: an expression (`sc.wanda`), its text ("wanda",
    "abs(weight*grad)") or a function. `sparsity` is the fraction of the original weights to prune,
    `count` the number of units to prune in each pool. `pattern` says what is pruned together ("unstructured", "2:4", "16x1",
    "out", ...) and `scope` which units compete: those of a "tensor" (the default), of a "row", or of all tensors ("global").
    `include`, `exclude` and `types` choose tensors. `data` and `loss` feed criteria and methods that need inputs or gradients.
    `spread` gives each tensor its own sparsity. `floor` is the fraction of each tensor that stays at least: with
    `scope="global"` or a spread the other tensors lose more instead, so that the total is still exact. `method` is how the
    weights answer: `sc.methods.rank()` (the default) prunes the lowest scores, `sc.methods.sparsegpt()` also corrects the
    weights that stay. `keep_dense=True` remembers what was replaced, so that `plan.undo_(model)` restores it.

    When anything raises, the model is unchanged.
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
    )
    return made.apply_(model, keep_dense=keep_dense)
