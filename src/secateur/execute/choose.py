"""Compression: which layers, in which format, decided by the clock on the inputs that the layers really get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._tree import nearest, slots
from .find import Zeros, zeros_of
from .formats import FORMATS, Format, Use, as_matrix
from .gpu.present import why_none
from .layers import KINDS, Compressed, arguments_of, why_not
from .result import Compression, Row
from .timing import call, cold_for, for_inference, in_graphs, interleaved

MARGIN = 0.95  # a format must take at most this part of the dense time, or it is not worth the change
SHAPES = 4  # distinct input shapes of one layer that are measured
LARGE = 24 << 20  # bytes of weights from which on a model's layers find their weights in memory, not in cache


@dataclass
class Seen:
    """The inputs that a layer got: one of each shape, and how often."""

    inputs: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    calls: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def note(self, x: Tensor) -> None:
        key = (tuple(x.shape), x.dtype)
        self.calls[key] += 1
        if key not in self.inputs and len(self.inputs) < SHAPES:
            self.inputs[key] = x.detach().clone()


@dataclass(frozen=True)
class Choice:
    """What was found out about one layer; `form` is None where it stays dense."""

    row: Row
    form: Format | None = None
    options: tuple[int, ...] = ()


def compress_(
    model: nn.Module,
    example_inputs: Any,
    *,
    objective: Literal["speed", "size"] = "speed",
    threads: int | None = None,
    store: torch.dtype | None = None,
) -> Compression:
    """Put pruned layers into the sparse format that runs fastest (or is smallest) on these inputs; the others stay dense.

    Every candidate is timed against the dense layer, in turns, at the shapes that `example_inputs` produce, with `threads`
    threads (as many as torch has, if not given). `store=torch.bfloat16` lets float32 weights be stored in half the bytes;
    they are then rounded. The result prints as a table. When anything raises, the model is as it was.
    """
    _check(model, objective, threads, store)
    kinds = tuple(KINDS)  # layers of a kind derived from these have a line in the table, and stay
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    tied, modes = ties(model), {name: layer.training for name, layer in layers.items()}
    with for_inference(model, threads):
        seen = _record(model, example_inputs, layers)
        large = sum(parameter.nbytes for parameter in model.parameters()) > LARGE
        cold = cold_for(model) if large else None
        twins: dict[Any, Choice] = {}
        choices = {
            name: _choose(name, layer, seen[name], tied.get(id(layer.weight), ()), twins, objective, cold, store)
            for name, layer in layers.items()
        }
        built: dict[str, Compressed] = {}
        for name, choice in choices.items():
            if choice.form is None:
                continue
            new = _built(layers[name], choice, seen[name], tied.get(id(layers[name].weight), ()), store)
            if new is not None:
                built[name], choices[name] = new, replace(choice, row=replace(choice.row, after=new.bytes()))
            else:
                choices[name] = Choice(choice.row.left("the format cannot hold its numbers"))
        ignored = _swap(model, {id(layers[name]): new for name, new in built.items()}, example_inputs)
    for name, new in built.items():
        new.train(modes[name])
        if id(new) in ignored:
            choices[name] = Choice(choices[name].row.left("the model reads its weight without calling it"))
    held = [_held(name, layer) for name, layer in model.named_modules() if isinstance(layer, Compressed) and name not in built]
    kept = sum(row.after for row in held)
    before = _bytes(layers.values()) + kept
    after = _bytes(layers.values(), model) + sum(new.bytes() for new in built.values() if id(new) not in ignored) + kept
    rows = [*held, *(choice.row for choice in choices.values())]
    return Compression(rows, objective, threads or torch.get_num_threads(), before, after)


def decompress_(model: nn.Module) -> nn.Module:
    """Put the dense layers back, with the weights that they had, bit for bit; tied weights are tied again. Gives the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"decompress_ takes a torch.nn.Module, not {type(model).__name__}")
    dense = dict(model.named_parameters(remove_duplicate=False))
    shared: dict[tuple[str, ...], list[nn.Parameter]] = {}
    restored: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, Compressed):
            others = [dense[name] for name in module.tied if name in dense] + shared.setdefault(module.tied, [])
            same = next((each for each in others if same_bits(each, module.weight.to(module.dtype))), None)
            restored[id(module)] = layer = module.restored(same)
            if module.tied:
                shared[module.tied].append(layer.weight)  # type: ignore[arg-type]
    if id(model) in restored:
        raise ValueError("this is a compressed layer by itself; decompress_ takes the model that holds it")
    for parent, attribute, child in places(model):
        if id(child) in restored:
            parent._modules[attribute] = restored[id(child)]
    return model


def _check(model: Any, objective: str, threads: Any, store: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_ takes a torch.nn.Module, not {type(model).__name__}")
    if objective not in ("speed", "size"):
        raise ValueError(f"objective is 'speed' or 'size', not {objective!r}.{nearest(str(objective), ['speed', 'size'])}")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ValueError(f"threads is a whole number from 1 on, not {threads!r}")
    if store not in (None, torch.bfloat16, torch.float16):
        raise ValueError(
            f"store is torch.bfloat16 or torch.float16, or nothing to keep the dtype of the weights, not {store!r}"
        )
    if name := next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta), None):
        raise ValueError(f"{name!r} is on the meta device: it has no values to pack or to measure with; load its values first")
    if type(model) in KINDS:
        raise ValueError(
            f"this {type(model).__name__} is the model itself, so nothing can be put in its place: wrap it in nn.Sequential"
        )


def same_bits(parameter: Tensor, weight: Tensor) -> bool:
    """Equal bit for bit, so that -0.0 is not 0.0 and NaN is itself."""
    if parameter.shape != weight.shape or parameter.dtype != weight.dtype:
        return False
    kind = torch.int32 if weight.dtype == torch.float32 else torch.int16
    return torch.equal(parameter.detach().contiguous().view(kind), weight.to(parameter.device).contiguous().view(kind))


def ties(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """For each weight that several modules own, or owned before some of them were compressed, all of its names."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    before = {layer.tied for layer in model.modules() if isinstance(layer, Compressed)}
    found = {id(weights[name]): names for names in before for name in names if name in weights}
    return {id(slot.tensor): (slot.name, *slot.also) for slot in slots(model) if len(slot.owners) > 1} | found


def _record(model: nn.Module, example_inputs: Any, layers: dict[str, nn.Module]) -> dict[str, Seen]:
    """Run the model once and note what each layer gets, after the hooks that it has (gates) have had their say."""
    seen = {name: Seen() for name in layers}
    handles = []
    try:
        for name, layer in layers.items():

            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], notes: Seen = seen[name]) -> None:
                x = args[0] if args else next(iter(kwargs.values()), None)
                if isinstance(x, Tensor):
                    notes.note(x)

            handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
        call(model, example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _use_of(layer: Any, seen: Seen) -> Use:
    kind = KINDS[type(layer)]
    rows = []
    for shape, _ in seen.inputs:
        places = shape[0] if kind == "conv" and len(shape) == len(layer.weight.shape) else 1
        if kind == "linear":
            places = torch.Size(shape[:-1]).numel()
        elif kind == "embedding":
            places = torch.Size(shape).numel()
        else:
            places *= torch.Size(shape[-(layer.weight.dim() - 2) :]).numel()
        rows.append(places)
    zeros = [float((x == 0).float().mean()) for x in seen.inputs.values() if x.numel()]
    return Use(kind, layer.weight.device.type, tuple(rows), min(zeros, default=0.0))


def _choose(
    name: str, layer: Any, seen: Seen, tied: tuple[str, ...], twins: dict[Any, Choice], objective: str, cold: Tensor | None,
    store: torch.dtype | None,
) -> Choice:  # fmt: skip
    before = layer.weight.nbytes if "weight" in layer._parameters else 0
    row = Row(name, type(layer).__name__, before=before, after=before)
    if reason := why_not(layer):
        return Choice(row.left(reason))
    weight = layer.weight.detach()
    matrix = as_matrix(weight, getattr(layer, "groups", 1))
    found = zeros_of(weight.flatten(1))
    row = row.found(found)
    if not seen.inputs:
        return Choice(row.left("the example inputs never reach it"))
    if objective == "size" and tied:
        return Choice(row.left(f"it shares its weight ({', '.join(tied)}), which stays dense for the others"))
    use = _use_of(layer, seen)
    if found.sparsity == 0 and use.input_zeros < 0.25:
        return Choice(row.left("no weight is zero"))
    like = (type(layer), str(arguments_of(layer)), weight.dtype, weight.device, tuple(seen.inputs))
    key = (*like, found.pattern, round(found.sparsity, 2), round(use.input_zeros, 1))
    if (twin := twins.get(key)) is not None:
        return Choice(twin.row.as_twin(row), twin.form, twin.options)
    twins[key] = choice = _measure(row, layer, matrix, found, use, seen, objective, cold, store)
    return choice


def _measure(
    row: Row, layer: Any, matrix: Tensor, found: Zeros, use: Use, seen: Seen, objective: str, cold: Tensor | None,
    store: torch.dtype | None,
) -> Choice:  # fmt: skip
    """Build each candidate, drop those that are wrong or far off, time the rest in turns with the dense layer."""
    kept: list[tuple[Format, tuple[int, ...], Compressed]] = []
    for form in FORMATS.values():
        for options in form.fits(matrix, found, use):
            candidate = Compressed(layer, form, options, store=store).eval()
            if _agrees(layer, candidate, seen, store):
                kept.append((form, options, candidate))
    if not kept:
        return Choice(row.left("no format fits here" + (why_none(matrix.dtype) if use.device == "cuda" else "")))
    quick = [_seconds([layer, each], seen, cold, seconds=0.0)[1] for _, _, each in kept] if len(kept) > 2 else []
    if objective == "speed" and quick:
        kept = [each for each, took in zip(kept, quick) if took < 1.5 * min(quick)]
    dense, *times = _seconds([layer, *(each for _, _, each in kept)], seen, cold, seconds=0.15)
    sizes = [each.bytes() for _, _, each in kept]
    best = min(range(len(kept)), key=lambda i: sizes[i] if objective == "size" else times[i])
    form, options, _ = kept[best]
    row = row.timed(form.name, options, dense, times[best], sizes[best])
    if objective == "speed" and times[best] > MARGIN * dense:
        return Choice(row.left("dense is faster here"))
    if objective == "size" and sizes[best] > MARGIN * row.before:
        return Choice(row.left("dense is smaller here"))
    return Choice(row, form, options)


def _built(layer: Any, choice: Choice, seen: Seen, tied: tuple[str, ...], store: torch.dtype | None) -> Compressed | None:
    """The new layer. A format that was chosen on a twin may not hold this one's numbers: None then."""
    assert choice.form is not None
    try:
        new = Compressed(layer, choice.form, choice.options, tied, store)
    except ValueError:
        return None
    return new if _agrees(layer, new, seen, store) else None


def _bytes(layers: Iterable[nn.Module], still_in: nn.Module | None = None) -> int:
    """Bytes of the dense weights of these layers, each once; only of those that the model holds, if one is given."""
    weights = {id(w): w.nbytes for layer in layers if (w := layer._parameters.get("weight")) is not None}
    there = weights.keys() if still_in is None else {id(parameter) for parameter in still_in.parameters()}
    return sum(size for key, size in weights.items() if key in there)


def _held(name: str, layer: Compressed) -> Row:
    """The row of a layer that was compressed before, which stays as it is."""
    weight = layer.weight
    row = Row(name, layer.stood.__name__, before=weight.numel() * layer.dtype.itemsize, reason="compressed before")
    return row.found(zeros_of(weight.flatten(1))).timed(layer.form, layer.options, None, None, layer.bytes())


def _plain(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer without its hooks, which the inputs have been through already."""
    return layer.forward(x)


def _agrees(layer: nn.Module, candidate: Compressed, seen: Seen, store: torch.dtype | None) -> bool:
    """Whether the candidate computes what the layer does, as far as its dtype can say."""
    half = store is not None or candidate.dtype != torch.float32
    for x in seen.inputs.values():
        expected, got = _plain(layer, x).float(), _plain(candidate, x).float()
        if expected.shape != got.shape:
            return False
        scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
        near = (expected - got).abs() <= (3e-2 if half else 1e-4) * scale + 1e-30
        if not bool((near | (expected == got) | (expected.isnan() & got.isnan())).all()):
            return False
    return True


def _seconds(layers: list[nn.Module], seen: Seen, cold: Tensor | None, seconds: float) -> list[float]:
    """Seconds of each layer, over all that it got in one call of the model. The best round counts: the rest is noise."""
    total = [0.0] * len(layers)
    for key, x in seen.inputs.items():
        runs = [lambda layer=layer, x=x: _plain(layer, x) for layer in layers]
        clock, rounds = in_graphs if x.is_cuda else interleaved, (3, 100) if not seconds else (7, 200)
        for i, timing in enumerate(clock(runs, seconds=seconds, rounds=rounds, cold=cold)):
            total[i] += timing.best * seen.calls[key]
    return total


# ---------------------------------------------------------------- the change


def places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every module but the model itself: what holds it, under which name, and the module."""
    parents = {id(module): module for module in model.modules()}.values()
    return [(parent, name, child) for parent in parents for name, child in parent._modules.items() if child is not None]


def _swap(model: nn.Module, new: dict[int, Compressed], example_inputs: Any) -> set[int]:
    """Put the new layers in, everywhere; those that the model then does not call go out again (their ids are returned).

    Some containers read the weights of their layers and compute with those. If the model does not run, all is undone.
    """
    spots = [(parent, name, child) for parent, name, child in places(model) if id(child) in new]
    try:
        for parent, name, child in spots:
            parent._modules[name] = new[id(child)]
        with _watched(list(new.values())) as called:
            call(model, example_inputs)
    except BaseException:
        for parent, name, child in spots:
            parent._modules[name] = child
        raise
    ignored = {id(each) for each in new.values()} - called
    for parent, name, child in spots:
        if id(new[id(child)]) in ignored:
            parent._modules[name] = child
    return ignored


@contextmanager
def _watched(layers: list[Compressed]) -> Iterator[set[int]]:
    """The ids of those that are called meanwhile. No hooks, since containers look for hooks and change their ways."""
    called: set[int] = set()
    try:
        for layer in layers:

            def forward(input: Tensor, layer: Compressed = layer) -> Tensor:
                called.add(id(layer))
                return Compressed.forward(layer, input)

            layer.__dict__["forward"] = forward
        yield called
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
