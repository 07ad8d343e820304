"""From a model and example inputs to a `Trace`: one run, on fake tensors for models that are large or on the meta device."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .. import _dist
from ..axes import Atom, Expr, Group, atoms, build_groups, closed, freeze, skipped
from ..edit import Slot, StandIns, owned_tensors, plain_kernels, preserve_rng, split_inputs, states, tensors_inside
from ..ops import Axes
from .constructor import Blueprint, blueprint, compared_only
from .equations import Constraint, constraints, flag_sizes_in_formulas
from .layer_sizes import sizes_for_attributes_
from .outline import Outlined, ValueRead
from .provenance import Guard, Journal, SizeUse, Tagging, is_literal
from .run_context import module_names, quiet, script_functions
from .size_uses import Sites
from .tracer import Record, Site, Step, Tracer
from .untraced import adopt_unused

Outputs = Callable[[Any], Any]
GIVEN = "given by the inputs"
_LARGE = 1_000_000_000  # elements; from here on fake tensors first: the run itself would be slow


@dataclass(eq=False)
class Trace:
    """What one run says about a model: axes of its tensors, coupled groups, size equations, and the run itself.

    `dims[name]`: an expression for each dim of a tensor. `groups`: units that go together; `prunable`: those that may go.
    `skipped`: the axes that stay, and why. `constraints`: what counts must satisfy. `steps`: every operator, in order, with the
    axes of tensor number n in `axes[n]` and the names of the model's own tensors in `names`. `uses`: sizes in formulas.
    """

    model: nn.Module
    dims: dict[str, list[Expr]]
    groups: list[Group]
    record: Record
    guards: list[Guard]
    uses: list[SizeUse]
    constraints: list[Constraint]
    fake: bool
    blueprint: Blueprint | None = None  # how the constructor made sizes and attributes, where the model has a config
    _atoms: dict[int, frozenset[Atom]] = field(default_factory=dict, repr=False)

    @cached_property
    def skipped(self) -> dict[str, str]:
        return skipped(self.dims)

    @property
    def prunable(self) -> list[Group]:
        return [g for g in self.groups if not g.frozen]

    @cached_property
    def by_atom(self) -> dict[Atom, Group]:
        return {g.atom: g for g in self.groups}

    def atoms_of(self, number: int) -> frozenset[Atom]:
        """The atoms of a tensor of the run."""
        if number not in self._atoms:
            self._atoms[number] = frozenset(a for e in self.axes[number] for a in atoms(e))
        return self._atoms[number]

    @property
    def steps(self) -> list[Step]:
        return self.record.steps

    @property
    def axes(self) -> list[list[Expr]]:
        return self.record.axes

    @property
    def names(self) -> dict[int, str]:
        return self.record.names

    @property
    def sites(self) -> list[Site]:
        return self.record.sites

    @property
    def unknown(self) -> dict[str, int]:
        """Operators without a rule, and how often they were called."""
        return dict(self.record.unknown)


def trace(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None, *, outputs: Outputs | None = None) -> Trace:
    """Run the model once, in evaluation mode, and follow every axis. The model is left as it was, whatever happens.

    `args`: a tensor, a tuple of arguments, or a mapping of keyword arguments. `outputs` picks from the result what must keep
    its shape; by default the "logits" of a mapping that has them (and what no weight reads), else all it returns, of
    records of other types than dict only the tensors they hold directly.
    """
    _refuse(model)
    given, named = split_inputs(args, kwargs)
    outputs = outputs or main_outputs
    tensors = [t for _, t in owned_tensors(model).values()]
    meta, large = any(t.is_meta for t in tensors), sum(t.numel() for t in tensors) > _LARGE
    ladder = (
        [(True, True, None)]
        if meta
        else [(False, True, Outlined()), (large, True, None), (not large, True, None), (False, False, None)]
    )
    first: Exception | None = None
    ran = meta
    for fake, tags, outlined in ladder:
        if first is not None and not ran:  # is it the tracing, or do the inputs not run at all?
            _plain_run(model, given, named)
            ran = True
        try:
            return _run(model, given, named, outputs, fake, tags, outlined)
        except ValueRead:  # the way through the model depends on values: they have to be there
            continue
        except Exception as error:
            first = first or error
    raise RuntimeError(
        f"{type(model).__name__} cannot be traced: {type(first).__name__}: {first}. The model is as it was."
    ) from first


def main_outputs(result: Any) -> Any:
    """What must keep its shape: the logits of a mapping (or dataclass) that has them, else everything.

    A record (any such type but a plain dict) without logits: the tensors it holds directly, not caches and lists of states.
    """
    fields = _fields(result)
    if isinstance(fields.get("logits"), Tensor):
        return fields["logits"]
    if not fields or type(result) in (dict, OrderedDict):
        return result
    direct = [v for v in fields.values() if isinstance(v, Tensor)]
    return direct or list(fields.values())


def _fields(result: Any) -> Mapping[Any, Any]:
    """What a mapping or a dataclass holds."""
    if is_dataclass(result) and not isinstance(result, type | Mapping):
        return vars(result)
    return result if isinstance(result, Mapping) else {}


def answers(result: Any, outputs: Outputs = main_outputs) -> list[tuple[int, ...]]:
    """The shapes of what must keep its shape."""
    return [tuple(t.shape) for t in tensors_inside(outputs(result))]


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace() wants a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{where} is wrapped in {type(module).__name__}, which keeps buckets and hooks for the tensors as they are; "
                "cut the module under it (.module), and wrap what comes out"
            )
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"{where} is compiled; trace the model before torch.compile, or pass the module under it (_orig_mod)"
            )
    for name, parameter in model.named_parameters():
        if _dist.sharded(parameter):
            raise ValueError(f"parameter {name!r} is sharded over processes; cut the whole model first and shard it afterwards")


def _plain_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The run without any tracing: when it fails, the example inputs are at fault."""
    with torch.no_grad(), preserve_rng(), StandIns(model, lambda _, tensor: tensor.detach().clone()):
        try:
            model(*_cloned(args), **_cloned(kwargs))
        except Exception as error:
            shapes = [tuple(t.shape) for t in tensors_inside((args, kwargs))]
            raise ValueError(
                f"{type(model).__name__} does not run on the example inputs (tensors of shape {shapes}): "
                f"{type(error).__name__}: {error}. The model is as it was."
            ) from error


def _copied(name: str, tensor: Tensor) -> Tensor:
    """Weights are only read, so they stand for themselves; a buffer may be written to."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


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
    journal = Journal()
    tracer = Tracer(journal, outlined)
    names = {id(module): name for name, module in model.named_modules()}
    mode = _fake_mode() if fake else None

    def stand_in(name: str, tensor: Tensor) -> Tensor:
        made = _copied(name, tensor) if mode is None else mode.from_tensor(tensor)
        tracer.own(name, made)
        return made

    try:
        with contextlib.ExitStack() as stack:
            for context in (
                torch.no_grad(),
                preserve_rng(),
                plain_kernels(),
                module_names(journal, names),
            ):
                stack.enter_context(context)
            stack.enter_context(quiet())
            standing = stack.enter_context(StandIns(model, stand_in))
            given, named = _cloned((args, kwargs)) if mode is None else _converted(mode, (args, kwargs))
            for tensor in tensors_inside((given, named)):
                tracer.fix(tensor, GIVEN)
            if tags:
                stack.enter_context(Tagging(model, journal))
            stack.enter_context(mode or contextlib.nullcontext())
            stack.enter_context(script_functions(tracer))
            stack.enter_context(tracer)
            stack.enter_context(Sites(tracer))
            result = model(*given, **named)
            left = states(model)
            stack.pop_all().close()
        tracer.record.left = _written(tracer, states(model), left)
        tracer.record.answers = answers(result, outputs)
        tracer.record.returned = {tracer.info(t).number for t in tensors_inside(result)}
        for tensor in tensors_inside(outputs(result)):
            info = tracer.info(tensor)
            info.read()
            for e in info.axes:
                freeze(e, "the model returns it")
        if outputs is main_outputs:
            _keep_answers(tracer, result)
    finally:
        journal.open = False
    buffers = {name for name, tensor in standing.owned.values() if not isinstance(tensor, nn.Parameter)}
    return _finish(model, tracer, journal, buffers, fake)


def _keep_answers(tracer: Tracer, result: Any) -> None:
    """A second answer, boxes beside classes, keeps its units: no weight reads them, so they are there to be returned."""
    record = tracer.record
    places = [
        (n, d)
        for n, name in record.names.items()
        for d in range(len(record.axes[n]))
        if "consume" in record.roles.get((name, d), ())
    ]
    read = {a for n, d in places for a in atoms(record.axes[n][d])}
    for tensor in (v for v in _fields(result).values() if isinstance(v, Tensor)):
        for e in tracer.info(tensor).axes:
            for atom in set(atoms(e)) - read:
                freeze(atom, "the model returns it")


def _written(tracer: Tracer, before: Mapping[Slot, Tensor], after: Mapping[Slot, Tensor]) -> dict[Slot, Axes | None]:
    """Tensors of an earlier run that this one put others for (their axes; None: nothing) without having read them."""
    used = {tracer.record.names[n] for step in tracer.record.steps for n in step.inputs if n in tracer.record.names}
    found: dict[Slot, Axes | None] = {}
    for (path, name), old in before.items():
        new = after.get((path, name))
        if f"{path}.{name}".removeprefix(".") not in used and (new is None or id(new) not in tracer.owned):
            axes = None if new is None else tracer.info(new).axes
            if axes is None or [e.size for e in axes] == list(old.shape):
                found[path, name] = axes
    return found


def _finish(model: nn.Module, tracer: Tracer, journal: Journal, buffers: set[str], fake: bool) -> Trace:
    record = tracer.record
    numbers = {name: number for number, name in record.names.items()}
    adopt_unused(model, record)
    dims = {name: [closed(e) for e in record.axes[number]] for name, number in numbers.items()}
    for site in record.sites:
        if is_literal(site.source):
            where = site.module or "the model"
            freeze(
                site.axis,
                f"fixed by the number {site.value} in {where} ({site.call}); make it an attribute of the module to prune it",
            )
    plan = blueprint(model)
    if plan is not None:
        record.sites += compared_only(model, dims, record.sites, journal.guards, plan)
    sizes_for_attributes_(model, dims, record.sites, journal)
    flag_sizes_in_formulas(record.sites, journal.guards, journal.uses)
    groups = build_groups(dims, record.roles, buffers)
    rules = constraints(record, journal.guards)
    return Trace(model, dims, groups, record, journal.guards, journal.uses, rules, fake, plan)


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # making one loads all of torch._dynamo: seconds

    return FakeTensorMode(allow_non_fake_inputs=True)


def _converted(mode: Any, values: Any) -> Any:
    return tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, values)
