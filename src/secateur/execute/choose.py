"""`compress_`: measures the sparse formats on the inputs that each layer receives and replaces layers where one pays off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._dist import sharded
from .._hints import hints
from .._layers import DEFAULT_TYPES, is_kind, layout_of
from .._tree import nearest, slots
from ..arguments import plain_arguments
from ..edit import all_or_nothing, record_
from ..progress import track
from ..values import Values, requested
from .find import Zeros, zeros_of
from .formats import FORMATS, PLAIN, Format, Use, as_matrix, with_values
from .gpu.cusparselt import why_not_float8
from .gpu.present import why_none
from .layers import KINDS, Compressed, arguments_of, why_not
from .restore import ties
from .result import Compression, LayerResult
from .swap import swap_
from .timing import call, check_threads, cold_for, for_inference, in_graphs, time_runs

MARGIN = 0.95  # a format is used only if it takes at most this fraction of the dense time (or bytes)
SHAPES = 4  # distinct input shapes of one layer that are measured
LARGE = 24 << 20  # bytes of weights above which layers read their weights from memory, not from the cache
# By what the kernels of rounded weights round inputs to: how far an output may move, as a fraction of the largest output.
_MOVES: dict[str | None, float] = {None: 1e-3, "int8": 3e-2, "float8_e4m3fn": 2.0**-4}
_PRUNED = 0.1  # tensors of other types with this fraction of zeros are listed in the table


@dataclass
class RecordedInputs:
    """The inputs that a layer received: one tensor for each shape and dtype, and how often each occurred."""

    inputs: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    calls: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def add(self, x: Tensor) -> None:
        key = (tuple(x.shape), x.dtype)
        self.calls[key] += 1
        if key not in self.inputs and len(self.inputs) < SHAPES:
            self.inputs[key] = x.detach().clone()


@dataclass(frozen=True)
class FormatChoice:
    """The decision for one layer. `form` is None if the layer stays dense."""

    row: LayerResult
    form: Format | None = None
    options: tuple[int, ...] = ()


@dataclass
class Request:
    """The arguments of one `compress_` call, and the choices made so far, which layers of equal shape and pattern share."""

    objective: str
    store: torch.dtype | None
    values: Values | None
    inputs: str | None
    cold: Tensor | None
    twins: dict[Any, FormatChoice] = field(default_factory=dict)


@hints
def compress_(
    model: nn.Module,
    example_inputs: Any,
    *,
    objective: Literal["speed", "size"] = "speed",
    threads: int | None = None,
    store: torch.dtype | None = None,
    values: Literal["int8", "int4", "float8_e4m3fn"] | None = None,
    group: Literal[64, 128] | None = None,
    inputs: Literal["int8", "float8_e4m3fn"] | None = None,
) -> Compression:
    """Replaces pruned layers, in place, by layers in the sparse format that measures fastest (or smallest) on these inputs.

    Args:
        model: a model with pruned `Linear`, `Conv1d`, `Conv2d` or `Embedding` layers. Other layers stay as they are, and the
            table says why.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments. Formats are timed at the shapes
            that these produce in each layer, in alternation with the dense layer.
        objective: "speed" takes the fastest format, "size" the one with the fewest bytes. A layer stays dense if no format
            saves at least 5 %. On a GPU, layers are timed in CUDA graphs, and the result also says what one call of the
            model took before and after without a graph.
        threads: the number of CPU threads to measure with. Default: torch's current number.
        store: `torch.bfloat16` or `torch.float16` stores float32 weights in half the bytes, rounded. Default: the weight's
            own dtype.
        values: "int8", "int4" or "float8_e4m3fn" also measures formats that store the weights of linear layers in these
            numbers, rounded, with scales. The table shows the relative error of each such layer's output on the example
            inputs. Layers without zeros are candidates too. Default: weights are not rounded.
        group: the number of columns that share a scale, 64 or 128. Default: one scale for each row.
        inputs: "int8", together with `values="int8"`, also measures the format `quads8` on a CPU, which rounds the inputs of
            linear layers to 8 bits at each call, with one scale for each input row. "float8_e4m3fn", together with
            `values="float8_e4m3fn"`, also measures `cusparselt8` on a GPU, for 2:4 and many input rows, which rounds them to
            float8, with one scale for each input row. Default: only formats that keep at least 14 bits of each input.

    Returns:
        A `Compression` with one row per layer: `print` it, or read `metrics()`. `undo_()` puts the dense layers back.

    The model keeps its mode. Compressed layers run in eval mode only; in train mode their call raises, and the printed result
    says so. If anything raises, the model is left unchanged.
    """
    _check(model, objective, threads, store)
    _check_inputs(inputs, values)
    small = requested(values, group, store)
    layers = {name: module for name, module in model.named_modules() if _has_row(module)}
    modes = {name: layer.training for name, layer in layers.items()}
    with for_inference(model, threads):
        seen = _record(model, example_inputs, layers)
        large = sum(parameter.nbytes for parameter in model.parameters()) > LARGE
        request = Request(objective, store, small, inputs, cold_for(model) if large else None)
        choices, built = _choose_all(layers, seen, ties(model), request)
        on_gpu = any(layers[name].weight.is_cuda for name in built)
        dense = _call_seconds(model, example_inputs) if on_gpu else None
        with all_or_nothing(model):
            ignored = swap_(model, {id(layers[name]): new for name, new in built.items()}, example_inputs)
            calls = None if dense is None else (dense, _call_seconds(model, example_inputs))
    for name, new in built.items():
        new.train(modes[name])
        if id(new) in ignored:
            choices[name] = FormatChoice(choices[name].row.left("the model reads its weight without calling the layer"))
    used = {name: new for name, new in built.items() if id(new) not in ignored}
    given = {"objective": objective, "threads": threads, "store": store, "values": values, "group": group, "inputs": inputs}
    text = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    record_(model, ("compress", text), plain_arguments(compress_, given))
    return replace(_result(model, layers, choices, used, objective, threads or torch.get_num_threads()), calls=calls)


def _has_row(module: nn.Module) -> bool:
    """Whether the table has a row for a layer. Layers that are pruned by default and cannot be compressed have one too."""
    return is_kind(module, KINDS) or ("weight" in module._parameters and is_kind(module, DEFAULT_TYPES))


def _choose_all(
    layers: dict[str, Any], seen: dict[str, RecordedInputs], tied: dict[int, tuple[str, ...]], request: Request
) -> tuple[dict[str, FormatChoice], dict[str, Compressed]]:
    """Returns the choice for each layer, and the compressed layers for those that get a format."""
    names = {name: tied.get(id(layer.weight), ()) for name, layer in layers.items()}
    items = track(layers.items(), "compress_", lambda item: item[0])
    choices = {name: _choose(name, layer, seen[name], names[name], request) for name, layer in items}
    built: dict[str, Compressed] = {}
    for name, choice in choices.items():
        if choice.form is None:
            continue
        new = _built(layers[name], choice.form, choice.options, seen[name], names[name], request.store)
        if new is None:
            choices[name] = FormatChoice(choice.row.left("the format cannot hold its values"))
        else:
            error = None if choice.form.values is None else _error(layers[name], new, seen[name])
            built[name], choices[name] = new, replace(choice, row=replace(choice.row, after=new.bytes(), error=error))
    return choices, built


def _result(
    model: nn.Module,
    layers: dict[str, nn.Module],
    choices: dict[str, FormatChoice],
    used: dict[str, Compressed],
    objective: str,
    threads: int,
) -> Compression:
    """Returns the table of all layers, those that were compressed by an earlier call included."""
    earlier = [
        _earlier_row(name, layer) for name, layer in model.named_modules() if isinstance(layer, Compressed) and name not in used
    ]
    other = list(_other_rows(model, layers.values()))
    kept = sum(row.after for row in (*earlier, *other))
    before = _bytes(layers.values()) + kept
    after = _bytes(layers.values(), model) + sum(new.bytes() for new in used.values()) + kept
    rows = [*earlier, *(choice.row for choice in choices.values()), *other]
    return Compression(rows, objective, threads, before, after, tuple(used), model)


def _other_rows(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[LayerResult]:
    """Rows for pruned tensors that are the weight of no layer in the table, such as matrices of experts: they stay dense."""
    known = {id(layer._parameters.get("weight")) for layer in layers}
    for slot in slots(model):
        tensor = slot.tensor.detach()
        if id(slot.tensor) in known or tensor.squeeze().ndim < 2 or float((tensor == 0).float().mean()) < _PRUNED:
            continue
        kind, layout = type(slot.module).__name__, layout_of(slot.module, tuple(tensor.shape), slot.attribute)
        row = LayerResult(slot.name, kind, before=tensor.nbytes).found(zeros_of(layout.matrix(tensor)))
        yield row.left(f"{kind} is not a layer type that can be compressed")


def _check(model: Any, objective: str, threads: Any, store: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_ takes a torch.nn.Module, not {type(model).__name__}")
    if objective not in ("speed", "size"):
        raise ValueError(f"objective={objective!r} must be 'speed' or 'size'.{nearest(str(objective), ['speed', 'size'])}")
    check_threads(threads)
    if store not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"store={store!r} must be torch.bfloat16 or torch.float16, or None to keep the dtype of the weights")
    if name := next((n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta), None):
        raise ValueError(f"{name!r} is on the meta device and has no values to pack or to measure with; load its values first")
    if name := next((name for name, parameter in model.named_parameters() if sharded(parameter)), None):
        raise NotImplementedError(
            f"parameter {name!r} is sharded over processes, which would each choose formats; compress the whole model"
        )
    if type(model) in KINDS:
        raise ValueError(
            f"the model is a single {type(model).__name__}, which cannot be replaced in place; wrap it in nn.Sequential"
        )


def _check_inputs(inputs: Any, values: Any) -> None:
    kinds = [kind for kind in _MOVES if kind is not None]
    if inputs not in (None, *kinds):
        names, hint = " or ".join(map(repr, kinds)), nearest(str(inputs), kinds)
        raise ValueError(f"inputs must be {names}, or None to keep the precision of the inputs, not {inputs!r}.{hint}")
    if inputs is not None and values != inputs:
        raise ValueError(f"inputs={inputs!r} multiplies inputs and weights in the same 8 bits; give values={inputs!r} as well")


def _record(model: nn.Module, example_inputs: Any, layers: dict[str, nn.Module]) -> dict[str, RecordedInputs]:
    """Runs the model once and records what each layer receives after its own pre-hooks (such as gates)."""
    seen = {name: RecordedInputs() for name in layers}
    handles = []
    try:
        for name, layer in layers.items():

            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], to: RecordedInputs = seen[name]) -> None:
                x = args[0] if args else next(iter(kwargs.values()), None)
                if isinstance(x, Tensor):
                    to.add(x)

            handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
        call(model, example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _use_of(layer: Any, seen: RecordedInputs) -> Use:
    kind = KINDS[type(layer)]
    rows = tuple(_input_rows(kind, layer.weight.dim(), torch.Size(shape)) for shape, _ in seen.inputs)
    zeros = [float((x == 0).float().mean()) for x in seen.inputs.values() if x.numel()]
    return Use(kind, layer.weight.device.type, rows, min(zeros, default=0.0))


def _input_rows(kind: str, weight_dims: int, shape: torch.Size) -> int:
    """Returns the number of input rows in an input of this shape (positions, for a convolution)."""
    if kind == "linear":
        return torch.Size(shape[:-1]).numel()
    if kind == "embedding":
        return shape.numel()
    batch = shape[0] if len(shape) == weight_dims else 1
    return batch * torch.Size(shape[-(weight_dims - 2) :]).numel()


def _choose(name: str, layer: Any, seen: RecordedInputs, tied: tuple[str, ...], request: Request) -> FormatChoice:
    """Returns the choice for one layer, measured or taken from a layer of equal shape, pattern and inputs."""
    before = layer.weight.nbytes if "weight" in layer._parameters else 0
    row = LayerResult(name, type(layer).__name__, before=before, after=before)
    if reason := why_not(layer):
        return FormatChoice((row if type(layer) in KINDS else _with_zeros(row, layer)).left(reason))
    weight = layer.weight.detach()
    matrix = as_matrix(weight, getattr(layer, "groups", 1))
    found = zeros_of(weight.flatten(1))
    row = row.found(found)
    if not seen.inputs:
        return FormatChoice(row.left("the model does not call it with these example inputs"))
    if request.objective == "size" and tied:
        return FormatChoice(row.left(f"it shares its weight ({', '.join(tied)}), which stays in memory for the other layers"))
    use = _use_of(layer, seen)
    if found.sparsity == 0 and use.input_zeros < 0.25 and (request.values is None or use.kind != "linear"):
        return FormatChoice(row.left("no weight is zero"))
    like = (type(layer), str(arguments_of(layer)), weight.dtype, weight.device, tuple(seen.inputs))
    key = (*like, found.pattern, round(found.sparsity, 2), round(use.input_zeros, 1))
    if (twin := request.twins.get(key)) is not None:
        return FormatChoice(twin.row.as_twin(row), twin.form, twin.options)
    request.twins[key] = choice = _measure(row, layer, matrix, found, use, seen, request)
    return choice


def _with_zeros(row: LayerResult, layer: Any) -> LayerResult:
    """The row with the zeros of a layer of another type, where they can be counted."""
    weight = layer._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or weight.layout != torch.strided or not weight.numel():
        return row
    return row.found(zeros_of(layout_of(layer, tuple(weight.shape)).matrix(weight.detach())))


def _measure(
    row: LayerResult, layer: Any, matrix: Tensor, found: Zeros, use: Use, seen: RecordedInputs, request: Request
) -> FormatChoice:
    """Times the candidates in alternation with the dense layer and chooses the best."""
    candidates = _candidates(layer, matrix, found, use, seen, request)
    lacks = why_not_float8(matrix, found, replace(use, values=request.values)) if request.inputs == "float8_e4m3fn" else None
    if not candidates:
        why = f": {lacks}" if lacks else why_none(matrix.dtype) if use.device == "cuda" else ""
        return FormatChoice(row.left("no format fits" + why))
    fast = request.objective == "speed"
    if fast and len(candidates) > 2:
        candidates = _without_slow(layer, candidates, seen, request.cold)
    dense, *times = _seconds([layer, *candidates], seen, request.cold, seconds=0.15)
    sizes = [each.bytes() for each in candidates]
    best = min(range(len(candidates)), key=lambda i: times[i] if fast else sizes[i])
    form, options = FORMATS[candidates[best].form], candidates[best].options
    row = row.timed(form.name, options, dense, times[best], sizes[best])
    if form.values is not None:
        row = replace(row, error=_error(layer, candidates[best], seen))
    if fast and times[best] > MARGIN * dense:
        why = "dense is faster here" if times[best] >= dense else f"no format is {1 - MARGIN:.0%} faster here"
        return FormatChoice(row.left(why + (f"; {lacks}" if lacks else "")))
    if not fast and sizes[best] > MARGIN * row.before:
        return FormatChoice(row.left("dense is smaller here" + (f"; {lacks}" if lacks else "")))
    return FormatChoice(row, form, options)


def _candidates(layer: Any, matrix: Tensor, found: Zeros, use: Use, seen: RecordedInputs, request: Request) -> list[Compressed]:
    """Returns the layer in every format that fits and gives the same outputs, with rounded weights if they were asked for."""
    forms = [(form, use) for form in FORMATS.values() if PLAIN in form.takes]
    if (values := request.values) is not None and use.kind == "linear" and bool(matrix.isfinite().all()):
        small = replace(use, values=values)
        fits = [form for form in FORMATS.values() if str(values) in form.takes and form.inputs in (None, request.inputs)]
        forms += [(with_values(form, values), small) for form in fits]
    built = (
        Compressed(layer, form, options, store=request.store).eval()
        for form, use in forms
        for options in form.fits(matrix, found, use)
    )
    return [candidate for candidate in built if _agrees(layer, candidate, seen, request.store)]


def _without_slow(
    layer: nn.Module, candidates: list[Compressed], seen: RecordedInputs, cold: Tensor | None
) -> list[Compressed]:
    """Drops the candidates that a short measurement finds more than 1.5 times slower than the fastest."""
    quick = [_seconds([layer, each], seen, cold, seconds=0.0)[1] for each in candidates]
    return [each for each, took in zip(candidates, quick) if took < 1.5 * min(quick)]


def _built(
    layer: Any, form: Format, options: tuple[int, ...], seen: RecordedInputs, tied: tuple[str, ...], store: torch.dtype | None
) -> Compressed | None:
    """Returns the compressed layer, or None if the format, which was measured on another layer, cannot hold this one."""
    try:
        new = Compressed(layer, form, options, tied, store)
    except ValueError:
        return None
    return new if _agrees(layer, new, seen, store) else None


def _bytes(layers: Iterable[nn.Module], still_in: nn.Module | None = None) -> int:
    """Returns the bytes of the dense weights of these layers, each counted once.

    With `still_in`, only weights that this model still holds are counted.
    """
    weights = {id(w): w.nbytes for layer in layers if (w := layer._parameters.get("weight")) is not None}
    there = weights.keys() if still_in is None else {id(parameter) for parameter in still_in.parameters()}
    return sum(size for key, size in weights.items() if key in there)


def _earlier_row(name: str, layer: Compressed) -> LayerResult:
    """Returns the row of a layer that an earlier call compressed and that stays as it is."""
    weight = layer.weight
    row = LayerResult(name, layer.stood.__name__, before=weight.numel() * layer.dtype.itemsize, reason="compressed before")
    return row.found(zeros_of(weight.flatten(1))).timed(layer.form, layer.options, None, None, layer.bytes())


def _without_hooks(layer: nn.Module, x: Tensor) -> Tensor:
    """Runs the layer without its hooks, which the recorded inputs have passed already."""
    return layer.forward(x)


def _agrees(layer: nn.Module, candidate: Compressed, seen: RecordedInputs, store: torch.dtype | None) -> bool:
    """Returns True if the candidate's outputs equal the layer's within the precision of its dtype.

    Rounded weights (`values=`) are compared with a dense layer of the same rounded weights. Their kernels may round the inputs,
    which moves outputs by less than the rounding of the weights does, unless some inputs are much larger than the others.
    Inputs in 8 bits (`inputs=`) may move outputs further: float8 may change each input by a sixteenth.
    """
    allowed = 3e-2 if store is not None or candidate.dtype != torch.float32 else 1e-4
    form = FORMATS[candidate.form]
    if form.values is not None:
        layer, allowed = candidate.restored().eval(), max(allowed, _MOVES[form.inputs])
    for x in seen.inputs.values():
        expected, got = _without_hooks(layer, x).float(), _without_hooks(candidate, x).float()
        if expected.shape != got.shape:
            return False
        scale = float(expected.abs().nan_to_num(0, 0, 0).max()) if expected.numel() else 0.0
        near = (expected - got).abs() <= allowed * scale + 1e-30
        if not bool((near | (expected == got) | (expected.isnan() & got.isnan())).all()):
            return False
    return True


def _error(layer: nn.Module, candidate: Compressed, seen: RecordedInputs) -> float:
    """Returns the norm of the change of the outputs over the norm of the outputs, for all recorded inputs together."""
    change = size = 0.0
    for x in seen.inputs.values():
        expected, got = _without_hooks(layer, x).double(), _without_hooks(candidate, x).double()
        change, size = change + float((got - expected).square().sum()), size + float(expected.square().sum())
    return (change / size) ** 0.5 if size else 0.0


def _call_seconds(model: nn.Module, example_inputs: Any) -> float:
    """Returns the seconds of one call of the model, the best of ten.

    The number of calls does not depend on their time, because those of several processes may wait for each other.
    """
    return time_runs([lambda: call(model, example_inputs)], rounds=(10, 10))[0].best


def _seconds(layers: list[nn.Module], seen: RecordedInputs, cold: Tensor | None, seconds: float) -> list[float]:
    """Returns the seconds that each layer takes during one call of the model, over all recorded inputs.

    The best round counts, because other programs can only make a round slower.
    """
    total = [0.0] * len(layers)
    for key, x in seen.inputs.items():
        runs = [lambda layer=layer, x=x: _without_hooks(layer, x) for layer in layers]
        clock, rounds = in_graphs if x.is_cuda else time_runs, (3, 100) if not seconds else (7, 200)
        for i, times in enumerate(clock(runs, seconds=seconds, rounds=rounds, cold=cold)):
            total[i] += times.best * seen.calls[key]
    return total
