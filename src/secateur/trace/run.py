"""Runs a model once on example inputs and returns its `Trace`.

    traced = trace(model, torch.randn(1, 3, 32, 32))
    traced.prunable[0]        # Group(64 units: conv1.weight[0], bn1.weight[0], bn1.bias[0], ...)

The first attempt answers heavy operators by their shape alone. If the model reads values, or that fails, real or fake tensors
follow; models on the meta device run on fake tensors only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .. import _dist
from .._arguments import fresh
from ..axes import atoms, bound_axes, build_groups, closed, constraints, flag_sizes_in_formulas, freeze, is_literal
from ..edit import (
    Slot,
    StandIns,
    inputs_error,
    owned_tensors,
    plain_kernels,
    preserve_rng,
    split_inputs,
    states,
    tensors_inside,
)
from ..ops import Axes
from .constructor import blueprint, uses_of_compared_attributes
from .layer_sizes import replace_size_attributes_
from .outline import Outlined, ValueRead
from .outputs import Outputs, fields_of, main_outputs, output_shapes
from .provenance import Journal, Tagging
from .result import Trace
from .run_context import module_names, script_functions, without_fake_tensor_log
from .size_uses import SizeUseMode
from .tracer import Tracer
from .untraced import adopt_unused

GIVEN = "given by the inputs"
RETURNED = "the model returns it"
_LARGE = 1_000_000_000  # elements; a model from this size on is tried on fake tensors before real ones, which would be slow


class _Attempt(NamedTuple):
    """How to run: on fake tensors or real ones, with tagged integers or plain ones, with heavy operators or by shape alone."""

    fake: bool
    tags: bool = True
    outlined: Outlined | None = None


def trace(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None, *, outputs: Outputs | None = None) -> Trace:
    """Runs the model once, in evaluation mode, and follows every axis. The model is left as it was, also after an error.

    `args`: a tensor, a tuple of arguments, or a mapping of keyword arguments. `outputs` selects from the result what must keep
    its shape. The default is `main_outputs`, and in addition tensors beside it that no weight reads.
    """
    _check_model(model)
    given, named = split_inputs(args, kwargs)
    tensors = [t for _, t in owned_tensors(model).values()]
    on_meta, large = any(t.is_meta for t in tensors), sum(t.numel() for t in tensors) > _LARGE
    attempts = (
        [_Attempt(fake=True)]
        if on_meta
        else [_Attempt(False, outlined=Outlined()), _Attempt(large), _Attempt(not large), _Attempt(False, tags=False)]
    )
    first: Exception | None = None
    inputs_checked = on_meta
    for attempt in attempts:
        if first is not None and not inputs_checked:  # did the tracing fail, or does the model not run on these inputs?
            _plain_run(model, *_own(given, named))
            inputs_checked = True
        try:
            args, kwargs = _own(given, named)
            return _run(model, args, kwargs, outputs or main_outputs, *attempt)
        except ValueRead:  # the run depends on values, which the first attempt does not compute
            continue
        except Exception as error:
            first = first or error
    raise RuntimeError(
        f"{type(model).__name__} cannot be traced: {type(first).__name__}: {first}. The model is as it was."
    ) from first


def _check_model(model: nn.Module) -> None:
    """Raises for what cannot be traced: no module, parallel wrappers, compiled modules, sharded parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace() expects a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{where} is wrapped in {type(module).__name__}, which keeps buckets and hooks for the tensors as they are; "
                "cut the module under it (.module), and wrap the result"
            )
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{where} is compiled; trace the model before torch.compile, or pass the module under it (_orig_mod)"
            )
    for name, parameter in model.named_parameters():
        if _dist.sharded(parameter):
            raise ValueError(f"parameter {name!r} is sharded over processes; cut the whole model first and shard it afterwards")


def _plain_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the model without tracing. Raises ValueError if it does not run on the example inputs."""
    with torch.no_grad(), preserve_rng(), StandIns(model, lambda _, tensor: tensor.detach().clone()):
        try:
            model(*_cloned(args), **_cloned(kwargs))
        except Exception as error:
            raise inputs_error(error, model, args, kwargs) from error


def _own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with copies of objects that a run may write to, such as a cache; a later attempt needs them again."""
    try:
        return fresh((args, kwargs))
    except TypeError:  # some object cannot be copied, such as a generator of random numbers
        return args, kwargs


def _cloned(values: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, values)


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Outputs,
    fake: bool,
    tags: bool,
    outlined: Outlined | None = None,
) -> Trace:
    """One attempt: runs the model under the tracer, and builds the trace from what was recorded."""
    journal = Journal()
    tracer = Tracer(journal, outlined)
    names, before = {id(module): name for name, module in model.named_modules()}, states(model)
    mode = _fake_mode() if fake else None

    def stand_in(name: str, tensor: Tensor) -> Tensor:
        made = _copied_buffer(tensor) if mode is None else mode.from_tensor(tensor)
        tracer.own(name, made)
        return made

    try:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(torch.no_grad())
            enter(preserve_rng())
            enter(plain_kernels())
            enter(module_names(journal, names))
            enter(without_fake_tensor_log())
            standing = enter(StandIns(model, stand_in))
            given, named = _cloned((args, kwargs)) if mode is None else _converted(mode, (args, kwargs))
            for tensor in tensors_inside((given, named)):
                tracer.fix(tensor, GIVEN)
            if tags:
                enter(Tagging(model, journal))
            enter(mode or contextlib.nullcontext())
            enter(script_functions(tracer))
            enter(tracer)
            enter(SizeUseMode(tracer))
            spaces = {name: dict(vars(module)) for name, module in model.named_modules()}
            result = model(*given, **named)
            after = states(model) if before else {}
            held = owned_tensors(model)
            tracer.record.dropped = {info.number for key, info in tracer.owned.items() if key not in held}
            tracer.record.changed |= tracer.record.dropped
            tracer.record.counters = _changed_numbers(model, spaces)
            stack.pop_all().close()
        tracer.record.replaced = _replaced_states(tracer, before, after) if before else {}
        _record_outputs(tracer, result, outputs)
    finally:
        journal.open = False
    return _finish(model, tracer, journal, standing.owned, fake)


def _changed_numbers(model: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of numbers that a run changed. Compares them as plain numbers, which records no comparison of sizes."""
    found = []
    for path, module in model.named_modules():
        space = before.get(path, {})
        for name, new in vars(module).items():
            old = space.get(name)
            if new is old or name == "training" or not isinstance(new, int | float) or not isinstance(old, int | float):
                continue
            if _plain(new) != _plain(old):
                found.append(f"{path}.{name}".removeprefix("."))
    return found


def _plain(number: float) -> float:
    return int.__add__(number, 0) if isinstance(number, int) else number


def _copied_buffer(tensor: Tensor) -> Tensor:
    """Returns a parameter itself, because it is only read, and a copy of a buffer, because the run may write to it."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # creating one imports torch._dynamo, which takes seconds

    return FakeTensorMode(allow_non_fake_inputs=True)


def _converted(mode: Any, values: Any) -> Any:
    return tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, values)


def _record_outputs(tracer: Tracer, result: Any, outputs: Outputs) -> None:
    """Records the returned tensors, and freezes the axes of those that must keep their shape."""
    tracer.record.output_shapes = output_shapes(result, outputs)
    tracer.record.returned = {tracer.info(t).number for t in tensors_inside(result)}
    for tensor in tensors_inside(outputs(result)):
        info = tracer.info(tensor)
        info.read()
        for e in info.axes:
            freeze(e, RETURNED)
    if outputs is main_outputs:
        _freeze_unread_outputs(tracer, result)


def _freeze_unread_outputs(tracer: Tracer, result: Any) -> None:
    """Freezes atoms of other returned tensors that no weight consumes: boxes beside classes are a result of their own."""
    record = tracer.record
    places = [
        (n, d)
        for n, name in record.names.items()
        for d in range(len(record.axes[n]))
        if "consume" in record.roles.get((name, d), ())
    ]
    read = {a for n, d in places for a in atoms(record.axes[n][d])}
    for tensor in (v for v in fields_of(result).values() if isinstance(v, Tensor)):
        for e in tracer.info(tensor).axes:
            for atom in set(atoms(e)) - read:
                freeze(atom, RETURNED)


def _replaced_states(tracer: Tracer, before: Mapping[Slot, Tensor], after: Mapping[Slot, Tensor]) -> dict[Slot, Axes | None]:
    """Returns the tensors left in the model by an earlier run that this run replaced or removed without reading them.

    The value holds the axes of the new tensor, or None if there is none.
    """
    used = {tracer.record.names[n] for step in tracer.record.steps for n in step.inputs if n in tracer.record.names}
    found: dict[Slot, Axes | None] = {}
    for (path, name), old in before.items():
        new = after.get((path, name))
        if f"{path}.{name}".removeprefix(".") not in used and (new is None or id(new) not in tracer.owned):
            axes = None if new is None else tracer.info(new).axes
            if axes is None or [e.size for e in axes] == list(old.shape):
                found[path, name] = axes
    return found


def _finish(model: nn.Module, tracer: Tracer, journal: Journal, owned: dict[int, tuple[str, Tensor]], fake: bool) -> Trace:
    """Builds the trace: axes of unused modules, literal sizes, attributes that were only compared, groups, constraints."""
    record = tracer.record
    adopt_unused(model, record)
    dims = {name: [closed(e) for e in record.axes[number]] for number, name in record.names.items()}
    for use in record.size_uses:
        if is_literal(use.source):
            where = use.module or "the model"
            freeze(
                use.axis,
                f"fixed by the number {use.value} in {where} ({use.call}); make it an attribute of the module to prune it",
            )
    plan = blueprint(model)
    if plan is not None:
        record.size_uses += uses_of_compared_attributes(model, dims, record.size_uses, journal.guards, plan)
    replace_size_attributes_({key: name for key, (name, _) in owned.items()}, dims, record.size_uses, journal)
    flag_sizes_in_formulas(journal.formula_uses, bound_axes(record.size_uses, journal.guards))
    buffers = {name for name, tensor in owned.values() if not isinstance(tensor, nn.Parameter)}
    groups = build_groups(dims, record.roles, buffers)
    demands = constraints(record.size_uses, journal.guards, record.equal.values())
    return Trace(model, dims, groups, record, journal.guards, journal.formula_uses, demands, fake, plan)
