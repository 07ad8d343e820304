"""Collects evidence about each tensor, such as gradients and input norms, in one pass over the data.

Collecting restores the model's mode, gradients, buffers and hooks. If evidence is missing, the error names the argument to
pass.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ._dist import Comm, DataRanks, data_ranks_of, local_as, run_of, together
from ._layers import Layout, layout_of
from ._tree import Loose
from .edit import batch_error, eager_experts, eval_mode, no_mha_fastpath, raised_outside
from .input_squares import InputSquares, Table
from .losses import PASS_LOSS, Loss, check_loss, loss_of, may_give_a_loss
from .padding import check_mask, included
from .progress import track
from .reads import listen
from .targeting import Target

NO_BATCH = "data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)"


def collect(
    model: nn.Module,
    targets: Sequence[Target],
    needs: Iterable[str],
    data: Iterable[Any] | None,
    loss: Loss | None,
    *,
    unread: bool = False,
) -> Table:
    """Collects evidence as a table: target name, then kind of evidence, then a matrix.

    A target that no input is multiplied with has no input norm. That raises, or with `unread` its entry has none.

    A batch of `data` is a tensor (`model(batch)`), a mapping (`model(**batch)`) or a pair (inputs, target); `loss` is called
    with the model's output and the target, or the batch itself when it is not a pair. Without `loss`, the model's output holds
    it (`output.loss`). Gradients are averaged over batches.
    """
    needs = frozenset(needs)
    table: Table = {target.name: {} for target in targets}
    if not needs:
        return table
    check_evidence(needs, data, loss)
    assert data is not None
    if isinstance(model, Loose):
        raise TypeError(f"{_list(needs)} is collected by running a model, and these are tensors without one")
    if needs & {"grad", "grad_square"}:
        check_gradients(model)
    ranks = data_ranks_of(model, {target.name: target.tensor for target in targets}, _list(needs))
    model = run_of(model)
    with torch.inference_mode(False), as_it_was(model):
        if "linear_grad" in needs:
            if ranks.steps_together:
                raise NotImplementedError("linear_grad cannot be collected from a sharded model; prune before sharding it")
            data = iter(data)
            batch = next(data, None)
            if not all(ranks.flags(batch is not None)):
                raise ValueError("data= gave no batch; one is needed for the shape of the model's input")
            with together(ranks.comm, "run on its batch of data="):
                _linearised(model, targets, batch, table)
            data = itertools.chain([batch], data)
        if needs - {"linear_grad"}:
            _one_pass(model, [Target(t.slot, t.share.layout) for t in targets], needs, data, loss, table, unread, ranks)
    return table


def check_evidence(needs: frozenset[str], data: object, loss: object, of: str = "this criterion") -> None:
    """Raises an error that names the argument to pass, unless this data and loss provide the evidence."""
    if data is None:
        raise ValueError(f"{of} needs {_list(needs)}, so pass data= (an iterable of batches)")
    if isinstance(data, Tensor | Mapping | str):
        wanted = "tokenize the text, and pass [batch]" if isinstance(data, str) else "pass [batch]"
        raise TypeError(f"data= is an iterable of batches, not one {type(data).__name__}; {wanted}")
    if not isinstance(data, Iterable) and hasattr(data, "__getitem__"):
        raise TypeError(
            f"data= is an iterable of batches, and {type(data).__name__} gives single samples; pass "
            "torch.utils.data.DataLoader(dataset, batch_size=32)"
        )
    if not isinstance(data, Iterable):
        call = "; call it and pass what it returns" if callable(data) else ""
        raise TypeError(f"data= is an iterable of batches, not {type(data).__name__}{call}")
    if isinstance(data, tuple | list) and _is_one_pair(data):
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in data)
        raise TypeError(
            f"data= is an iterable of batches, and these two tensors of shapes {shapes} would be two batches of inputs; pass "
            "inputs and target as one batch: data=[(inputs, target)]"
        )
    if needs & {"grad", "grad_square"} and loss is None and not may_give_a_loss(data):
        raise ValueError(f"{of} needs {_list(needs)}, so pass {PASS_LOSS}")
    if loss is not None:
        check_loss(loss)


def _is_one_pair(data: Sequence[Any]) -> bool:
    """Whether data= is a pair (inputs, target): two tensors that cannot both be inputs of one model."""
    if len(data) != 2 or not all(isinstance(each, Tensor) for each in data):
        return False
    return data[0].ndim != data[1].ndim or data[0].dtype != data[1].dtype


def batches_of(data: Iterable[Any] | None) -> list[Any]:
    """The batches as a list. Raises ValueError if there are none."""
    if not (batches := list(data or ())):
        raise ValueError(NO_BATCH)
    return batches


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """A batch as (positional inputs, keyword inputs, target)."""
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return (), dict(inputs), target
        return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, target
    if isinstance(batch, tuple | list) and len(batch) == 1:  # a DataLoader over inputs alone yields these
        batch = batch[0]
    if isinstance(batch, Tensor):
        return (batch,), {}, batch
    given = f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
    raise TypeError(
        f"a batch is a tensor, a mapping or a pair (inputs, target), not {given}. For several inputs pass "
        "a mapping, or a pair ((first, second), target); tokenize texts first, and convert arrays to tensors"
    )


def check_values(batch: tuple[tuple[Any, ...], dict[str, Any], Any], number: int) -> None:
    """Raises ValueError for tokens on the meta device, with which statistics would be zeros, and for masks that do not fit."""
    args, kwargs, _ = batch
    if any(
        isinstance(value, Tensor) and value.is_meta and not value.is_floating_point() for value in (*args, *kwargs.values())
    ):
        raise ValueError(f"batch {number} of data= (counted from 1) is on the meta device, so it holds no values")

    check_mask(kwargs, number)


def valid_positions(batch: Any) -> Tensor | None:
    """True for the positions (batch, position) that are not padding; None if there is no padding or no mask."""
    valid = included(split_batch(batch)[1])
    return None if valid is None or bool(valid.all()) else valid


def warn_of_unused_input(model: nn.Module, batch: Any) -> None:
    """Warns where the second element of a pair may be an input that is taken for a target, and no loss uses targets."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(each, Tensor) for each in batch):
        return
    first, second = batch
    taken = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if second.ndim >= 2 and first.shape[:2] == second.shape[:2] and len(taken) >= 2:
        warnings.warn(
            f"a batch of data= is a pair, so its second element is taken for a target and is not passed to the model, and "
            f"{type(model).__name__} also takes {taken[1]!r}. If it is an input, pass mappings "
            f"({{{taken[0]!r}: ..., {taken[1]!r}: ...}}); if it is a target, leave it out, because nothing uses it here",
            stacklevel=frames_inside(),
        )


def frames_inside() -> int:
    """The `stacklevel` with which a warning of the caller points at the code that called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    return level


@contextlib.contextmanager
def on_batch(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    unchanged: tuple[type[Exception], ...] = (ValueError,),
) -> Iterator[None]:
    """Wraps errors of a run on data with the shapes of the batch, except a ValueError of this package."""
    try:
        yield
    except Exception as error:
        if isinstance(error, unchanged) and not raised_outside(error):
            raise
        raise batch_error(error, model, args, kwargs) from error


def check_gradients(model: nn.Module) -> None:
    """Raises ValueError for a model that was made in inference mode: torch computes no gradients with its tensors."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    if name := next((name for name, tensor in named if tensor.is_inference()), None):
        raise ValueError(
            f"{name!r} was made in inference mode, so torch computes no gradients with it; create the model outside of it, or "
            "pass a copy.deepcopy of it that is made outside. The model is unchanged."
        )


@contextlib.contextmanager
def backward_of(model: nn.Module) -> Iterator[None]:
    """Raises ValueError for a model through which torch computes no gradients, as where it writes to its states in place."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"the backward pass of {type(model).__name__} failed: {error}. If it writes to a cache in place, pass batches that "
            "turn it off, such as {'input_ids': ..., 'use_cache': False}. prune_(method='flow') needs no gradients. The model "
            "is unchanged."
        ) from error


def _list(needs: Iterable[str]) -> str:
    """The evidence in words. Moments of inputs and outputs (gram, cross, residual) are all taken from inputs."""
    return " and ".join(sorted({"inputs" if kind in ("gram", "cross", "residual") else kind for kind in needs}))


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode inside, without fused kernels that hide weights, and restores mode and buffers afterwards."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with eval_mode(model), no_mha_fastpath(), eager_experts(model):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                with torch.inference_mode(buffer.is_inference()):  # one that was made in it is written only there
                    module._buffers[name] = buffer.copy_(before)


def _one_pass(
    model: nn.Module,
    targets: Sequence[Target],
    needs: frozenset[str],
    data: Iterable[Any],
    loss: Loss | None,
    table: Table,
    unread: bool,
    ranks: DataRanks,
) -> None:
    """Runs the model on all batches, and sums the results over processes. The layouts are those of whole tensors."""
    gradients = needs & {"grad", "grad_square"}
    batches, listening = 0, Event()
    own = Comm() if ranks.steps_together else ranks.comm  # FSDP2 sends and receives in every run
    with contextlib.ExitStack() as stack:
        stack.enter_context(together(own, "run on its batches of data="))
        differentiate = stack.enter_context(_gradients_of(model, targets, ranks)) if gradients else None
        sums = InputSquares(table, listening)
        if "input_norm" in needs:
            stack.enter_context(listen(targets, sums.called, sums.passed))
        stack.enter_context(torch.enable_grad() if gradients else torch.no_grad())
        for batch, counts in ranks.batches(_checked(track(data, "scores from data"))):
            batches += counts
            if batches == 1 and loss is None:
                warn_of_unused_input(model, batch)
            # FSDP2 averages gradients over processes, so squares are taken of one process's batch at a time.
            sums.valid = valid_positions(batch)
            turns = range(ranks.size) if ranks.steps_together and "grad_square" in needs else [ranks.rank]
            for turn in turns:
                mine = counts and turn == ranks.rank
                output = _output(model, batch, listening if mine else Event())
                if differentiate is not None:
                    with together(ranks.comm if ranks.steps_together else Comm(), "compute its loss"):
                        value = loss_of(model, output, batch, split_batch(batch)[2], loss)
                    for one, gradient in zip(targets, differentiate(value * mine), strict=True):
                        add_gradient(Target(one.slot, _part(one)), gradient, gradients, table[one.name])
    (total,) = ranks.comm.sum(batches)
    if not total:
        raise ValueError(NO_BATCH)
    _add_up(targets, needs, table, ranks)
    for target in targets:
        _finish(target, needs, total, table[target.name], unread)


def _checked(data: Iterable[Any]) -> Iterator[Any]:
    for number, batch in enumerate(data, 1):
        check_values(split_batch(batch), number)
        yield batch


def _part(target: Target) -> Layout:
    """The layout of the part of a target that this process holds."""
    return layout_of(target.slot.module, tuple(target.weight.shape), target.slot.attribute)


def _output(model: nn.Module, batch: Any, listening: Event) -> Any:
    args, kwargs, _ = split_batch(batch)
    listening.set()
    with on_batch(model, args, kwargs):
        output = model(*args, **kwargs)
    listening.clear()  # checkpointed layers run again in the backward pass
    return output


@contextlib.contextmanager
def _gradients_of(model: nn.Module, targets: Sequence[Target], ranks: DataRanks) -> Iterator[Callable[[Tensor], list[Tensor]]]:
    """A function that gives the gradients of a loss by the targets: of this process's loss, or the sum over processes.

    FSDP2 reduces gradients only in `backward()`. Those that the model has are put back afterwards.
    """
    parameters, every = [target.tensor for target in targets], list(model.parameters())
    frozen, before = [p for p in parameters if not p.requires_grad], [p.grad for p in every]

    def by_autograd(value: Tensor) -> list[Tensor]:
        return checked(torch.autograd.grad(value, parameters, allow_unused=True))

    def by_backward(value: Tensor) -> list[Tensor]:
        for parameter in every:
            parameter.grad = None
        value.backward()
        return [gradient * ranks.size for gradient in checked([target.tensor.grad for target in targets])]

    def checked(found: Sequence[Tensor | None]) -> list[Tensor]:
        for target, gradient in zip(targets, found, strict=True):
            if gradient is None:
                hint = "exclude it, or use a criterion without gradients"
                raise ValueError(f"the loss does not depend on {target.name!r}; {hint}")
        return [gradient for gradient in found if gradient is not None]

    if frozen and ranks.steps_together:
        names = [target.name for target in targets if not target.tensor.requires_grad]
        raise ValueError(f"{names[:3]} are frozen, so FSDP2 gives no gradients for them; exclude them, or unfreeze them")
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield by_backward if ranks.steps_together else by_autograd
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for parameter, gradient in zip(every, before, strict=True) if ranks.steps_together else ():
            parameter.grad = gradient


def _add_up(targets: Sequence[Target], needs: frozenset[str], table: Table, ranks: DataRanks) -> None:
    """Adds the sums of all processes up. FSDP2 has added the gradients up already."""
    if ranks.size == 1:
        return
    if "input_norm" in needs:
        seen = ranks.comm.sum(*("input_norm" in table[target.name] for target in targets))
        for target, number in zip(targets, seen, strict=True):
            if number:
                zeros = torch.zeros(target.layout.groups, target.layout.cols, device=target.weight.device)
                table[target.name]["input_norm"] = table[target.name].get("input_norm", zeros).double()
        found = [table[target.name] for target, number in zip(targets, seen, strict=True) if number]
        ranks.add_([entry["input_norm"] for entry in found])
        for entry in found:
            entry["input_norm"] = entry["input_norm"].float()
    for kind in sorted(needs & {"grad", "grad_square"} if not ranks.steps_together else ()):
        for target in targets:
            zeros = torch.zeros(target.layout.rows, target.layout.cols, device=target.weight.device)
            table[target.name].setdefault(kind, zeros)
        ranks.add_([table[target.name][kind] for target in targets])


def add_gradient(target: Target, gradient: Tensor, kinds: Iterable[str], entry: dict[str, Tensor]) -> None:
    """Adds a gradient of a target to the sums from which its evidence is computed."""
    whole = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    matrix = target.layout.matrix(local_as(whole, target.tensor)).float()
    for kind, value in (("grad", matrix), ("grad_square", matrix**2 if "grad_square" in kinds else matrix)):
        if kind in kinds:
            entry[kind] = entry[kind].add_(value) if kind in entry else value.clone()


def _finish(target: Target, needs: frozenset[str], batches: int, entry: dict[str, Tensor], unread: bool) -> None:
    """Turns the sums of a target into means and norms."""
    for kind in needs & {"grad", "grad_square"}:
        entry[kind] /= batches
    if "input_norm" in entry:
        entry["input_norm"] = entry["input_norm"].sqrt_()
    elif "input_norm" in needs and not unread:
        raise ValueError(f"{target.name!r} saw no input while the data ran through; exclude it, or use another criterion")


def _linearised(model: nn.Module, targets: Sequence[Target], batch: Any, table: Table) -> None:
    """SynFlow's pass (Tanaka et al., 2020): absolute weights, an input of ones, the gradient of the summed output."""

    def positive(tensor: Tensor) -> Tensor:
        return tensor.detach().abs().double() if tensor.is_floating_point() else tensor.detach()

    def ones(value: Any) -> Any:
        return (
            torch.ones_like(value[:1], dtype=torch.float64)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
        )

    state = {name: positive(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    leaves = [state[names[id(target.tensor)]].requires_grad_() for target in targets]
    args, kwargs, _ = split_batch(batch)
    with on_batch(model, args, kwargs):
        try:
            with torch.enable_grad():
                output = functional_call(model, state, tuple(map(ones, args)), {k: ones(value) for k, value in kwargs.items()})
                gradients = torch.autograd.grad(_total(output), leaves, allow_unused=True)
        except Exception:
            with torch.no_grad():
                model(*args, **kwargs)  # if the batch is the reason, this error names its shape and not that of the ones
            raise
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is None:
            raise ValueError(f"the output does not depend on {target.name!r}; exclude it")
        table[target.name]["linear_grad"] = target.layout.matrix(gradient)


def _total(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.sum()
    values = output.values() if isinstance(output, Mapping) else output
    return torch.stack([_total(v) for v in values if isinstance(v, Tensor | tuple | list | Mapping)]).sum()
