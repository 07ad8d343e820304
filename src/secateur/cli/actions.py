"""What the commands do, with torch: each function returns an `Answer`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from yaml import YAMLError

from .. import execute, io, reports
from ..display import Table, notes_by_reason
from ..folders import prune_folder
from ..recipes import BadRecipe, Recipe, read_yaml, shipped
from ..summaries import LayerSummary, summary
from ..targeting import targets
from .batches import Asked, evaluation, need_inputs, open_data, open_inputs
from .models import check_output, check_writable, imported, open_folder, open_model, open_models, save
from .running import Answer, Failure

_PACKED = "its layer is compressed; sc.decompress_ makes it dense again"
_DATA = ("inputs", "data", "batch_size", "batches", "size", "length", "tokenizer")


def _asked(options: dict[str, Any]) -> Asked:
    return Asked(**{name: options.pop(name) for name in _DATA})


# --- inspect ------------------------------------------------------------------------------------------------------------


def inspect(model: str, checkpoint: str | None, bench: bool, every: bool, **options: Any) -> Answer:
    source = open_model(model, checkpoint)
    found, reasons = summary(source.model), _why_not(source.model)
    layers = [_described(source.model, layer, reasons) for layer in found.layers]
    whole, sizes = _owned(source.model), {layer.name: layer.total for layer in found.layers if layer.format != "dense"}
    data = {
        "model": found.model if isinstance(source.model, nn.Module) else "state dict",
        "source": source.name,
        "parameters": sum(tensor.numel() for tensor in whole.values()) + sum(sizes.values()),
        "bytes": sum(tensor.nbytes for tensor in whole.values()) + _packed_bytes(source.model),
        "bytes_on_disk": _on_disk(checkpoint or model),
        **{key: found.metrics()[key] for key in ("zeros", "sparsity")},
        "layers": layers,
        "others": {name: reasons.get(name) or "" for name in whole if name not in {layer["name"] for layer in layers}},
        "history": [list(step) for step, _ in source.record()],
    }
    if bench:
        inputs = need_inputs(open_inputs(asked := _asked(options), source, open_data(asked, source)), "--bench")
        timing = execute.bench(source.module, inputs)["model"]
        data["time"] = {"median": timing.median, "best": timing.best, "rounds": len(timing.seconds), "text": str(timing)}
    return Answer(_inspection(data, every), data)


def _owned(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters, or the tensors of a mapping; one that has several names under the first of them."""
    if isinstance(model, nn.Module):
        return dict(model.named_parameters())
    first: dict[Any, str] = {}
    for name, tensor in model.items():
        first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name, name)
    return {name: model[name] for name in first.values()}


def _compressed(model: Any) -> dict[str, execute.Compressed]:
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return {name: module for name, module in modules if isinstance(module, execute.Compressed)}


def _packed_bytes(model: Any) -> int:
    """The bytes of compressed weights, which are buffers."""
    return sum(buffer.nbytes for layer in _compressed(model).values() for buffer in layer.buffers())


def _why_not(model: Any) -> dict[str, str]:
    """For each tensor that is not pruned by default, the reason."""
    if not isinstance(model, nn.Module):
        return dict.fromkeys(model, "the file does not say which layer it belongs to; name it with --include to prune it")
    packed = _compressed(model)
    try:
        reasons = targets(model, exclude=list(packed))[1]
        return {name: _PACKED if name.rpartition(".")[0] in packed else why for name, why in reasons.items()}
    except ValueError as error:
        return dict.fromkeys((name for name, _ in model.named_parameters()), str(error))


def _described(model: Any, layer: LayerSummary, reasons: Mapping[str, str]) -> dict[str, Any]:
    owner = model.get_submodule(layer.name.rpartition(".")[0]) if isinstance(model, nn.Module) else None
    kind = "" if owner is None else (owner.stood if isinstance(owner, execute.Compressed) else type(owner)).__name__
    packed = layer.format != "dense"
    reason = _PACKED if packed else reasons.get(layer.name, "")
    return {
        **{key: getattr(layer, key) for key in ("name", "total", "zeros", "sparsity", "pattern", "format")},
        **{"kind": kind, "shape": list(layer.shape), "prunable": not reason, "reason": reason},
    }


def _on_disk(path: str) -> int | None:
    place = Path(path)
    if place.is_dir():
        return sum(file.stat().st_size for file in place.iterdir() if file.is_file())
    return place.stat().st_size if place.is_file() else None


def _inspection(data: Mapping[str, Any], every: bool) -> str:
    packed = any(layer["format"] != "dense" for layer in data["layers"])
    rows = [
        (
            *(layer["name"], layer["kind"], "x".join(map(str, layer["shape"]))),
            *(f"{layer['sparsity']:.1%}", layer["pattern"], *([layer["format"]] if packed else ())),
            "yes" if layer["prunable"] else "no",
        )
        for layer in data["layers"]
    ]
    kept = {layer["name"]: layer["reason"] for layer in data["layers"] if not layer["prunable"]}
    disk = f", {data['bytes_on_disk']:,} bytes on disk" if data["bytes_on_disk"] is not None else ""
    notes = [
        f"{data['parameters']:,} parameters, {data['bytes']:,} bytes{disk}; {data['sparsity']:.1%} of these weights are zero",
        *([f"time of one call: {data['time']['text']}"] if "time" in data else []),
        *(f"done to it, {n}. {what}: {recipe}" for n, (what, recipe) in enumerate(data["history"], 1)),
        *notes_by_reason("not pruned by default", {**kept, **(data["others"] if every else {})}),
        *([f"{len(data['others'])} other tensors (biases, norms); --all lists them"] if data["others"] and not every else []),
    ]
    header = ("weight", "layer", "shape", "zeros", "pattern", *(["format"] if packed else []), "prunable")
    return str(Table(header, rows, right=[3], title=f"{data['source']}: {data['model']}", notes=notes))


# --- prune, shrink, compress, recipes -----------------------------------------------------------------------------------


def stage(kind: str, names: Sequence[str], options: dict[str, Any]) -> Answer:
    """Runs one stage, whose arguments are the options of these names, and saves the model."""
    arguments = _arguments(names, options)
    try:
        recipe = Recipe.of_stages([{kind: arguments}], "")
    except BadRecipe as error:
        raise click.UsageError(str(error).removeprefix(f": stages[0].{kind}").lstrip(":. ")) from None
    return _run(recipe, options, kind)


def _arguments(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function that were given as options of these names, and with --set."""
    given = {name: options.pop(name, None) for name in (*names, "exclude", "loss")}
    arguments = {
        name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if value not in (None, ())
    }
    for text in options.pop("others", ()):
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set {text}: expected NAME=VALUE")
        if (name := name.strip().replace("-", "_")) in arguments:
            raise click.UsageError(f"{name} is given twice, the second time with --set")
        try:
            arguments[name] = read_yaml(value)
        except YAMLError:
            raise click.UsageError(f"--set {text}: {value!r} cannot be read; write it as in YAML: 0.5, [a, b], '2:4'") from None
    return arguments


def prune_from_disk(names: Sequence[str], options: dict[str, Any]) -> Answer:
    """Prunes the files of a folder, of which only a part is in memory at a time."""
    arguments, asked = _arguments(names, options), _asked(options)
    if wrong := [name for name in ("evaluate", "dry_run") if options[name]]:
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} needs the whole model in memory; leave out --from-disk")
    source = open_folder(options["model"], options["checkpoint"])
    output = check_output(options["output"], options["force"], source, as_file=False)
    built = source.model if isinstance(source.model, nn.Module) else None
    data = open_data(asked, source)
    assert source.path is not None
    into = None if built is None else lambda: built
    # check_output has refused an output that exists, unless --force was given
    found = prune_folder(source.path, output, data=data, into=into, overwrite=True, **arguments)
    return Answer(f"{found}\nwritten to {output}, {_on_disk(str(output)):,} bytes", found.to_dict())


def run_recipe(name: str, options: dict[str, Any]) -> Answer:
    recipe = Recipe.load(name)
    if loss := options.pop("loss"):
        loss = getattr(nn.functional, loss, None) or _no_loss(loss)
    return _run(recipe, options, f"the recipe {name}", loss)


def _no_loss(name: str) -> Any:
    raise click.UsageError(f"--loss {name}: expected the name of a function in torch.nn.functional, such as cross_entropy")


def _run(recipe: Recipe, options: dict[str, Any], what: str, loss: Any = None) -> Answer:
    asked, dry = _asked(options), options["dry_run"]
    source, kinds = open_model(options["model"], options["checkpoint"]), {stage.kind for stage in recipe.stages}
    if kinds != {"prune"}:
        source.module  # noqa: B018  # raises for weights alone
    output = None if dry else check_output(options["output"], options["force"], source, as_file=isinstance(source.model, dict))
    evaluate = _evaluation(options["evaluate"])
    batches = open_data(asked, source)
    runs = {"shrink", "compress"} & kinds
    inputs = need_inputs(open_inputs(asked, source, batches), what) if runs else None
    before = evaluate(source.model)
    ran = recipe.run_(source.model, data=batches, example_inputs=inputs, loss=loss)  # type: ignore[arg-type]  # a mapping can be pruned
    after = evaluate(source.model)
    said = {} if output is None else save(source, source.model, output)
    data = {
        "model": source.name,
        "recipe": recipe.to_dict(),
        "results": [result.to_dict() for result in ran.results],
        **({} if before is None else {"evaluate": {"before": before, "after": after}}),
        **({} if output is None else {"output": str(output), "bytes_on_disk": _on_disk(str(output)), **_loads(said)}),
    }
    lines = [str(result) for result in ran.results]
    if before is not None:
        lines.append(f"{options['evaluate']}: {before:g} before, {after:g} after")
    if output is not None:
        lines.append(f"written to {output}, {_on_disk(str(output)):,} bytes")
        if isinstance(why := said.get("from_pretrained"), str):
            lines.append(f"from_pretrained does not load it, sc.load does: {why.removeprefix('no, only sc.load: ')}")
    return Answer("\n".join(lines), data)


def _loads(said: Mapping[str, Any]) -> dict[str, Any]:
    return {"from_pretrained": said["from_pretrained"]} if "from_pretrained" in said else {}


def _evaluation(name: str | None) -> Callable[[Any], float | None]:
    """The function of --evaluate; without it, one that returns None."""
    if name is None:
        return lambda model: None
    given = imported(name, "a function")
    if not callable(given):
        raise Failure(f"{name} is a {type(given).__name__}; expected a function that takes the model and returns a number")
    function: Callable[[Any], Any] = given

    def evaluate(model: Any) -> float:
        try:
            with torch.no_grad():
                found = float(function(model))
        except Exception as error:
            raise Failure(f"{name} failed: {type(error).__name__}: {error}; it takes the model and returns a number") from error
        if not math.isfinite(found):
            raise Failure(f"{name} returned {found}")
        return found

    return evaluate


def list_recipes() -> Answer:
    titles = shipped()
    return Answer(str(Table(("recipe", "what it does"), list(titles.items()))), {"recipes": titles})


def show_recipe(name: str, output: str | None) -> Answer:
    recipe = Recipe.load(name)
    if output is not None:
        io.write_text(Path(output), str(recipe))
    return Answer(str(recipe).rstrip() if output is None else f"written to {output}", recipe.to_dict())


def check_recipes(files: Sequence[str]) -> Answer:
    for name in files:
        Recipe.load(name)
    return Answer("\n".join(f"{name}: no mistakes" for name in files), {"checked": list(files)})


# --- bench --------------------------------------------------------------------------------------------------------------


def bench(models: Sequence[str], checkpoint: str | None, threads: int | None, seconds: float, **options: Any) -> Answer:
    asked = _asked(options)
    sources = open_models(models, checkpoint)
    inputs = need_inputs(open_inputs(asked, sources[0], open_data(asked, sources[0])), "bench")
    labels = {
        name if models.count(name) == 1 else f"{name} ({place})": s for place, (name, s) in enumerate(zip(models, sources), 1)
    }
    found = execute.bench({label: source.module for label, source in labels.items()}, inputs, threads=threads, seconds=seconds)
    rows = {
        name: {"median": t.median, "best": t.best, "low": t.spread[0], "high": t.spread[1], "rounds": len(t.seconds)}
        for name, t in found.timings.items()
    }
    return Answer(str(found), {"threads": threads or torch.get_num_threads(), "seconds": rows})


# --- report -------------------------------------------------------------------------------------------------------------


def report(before: str, after: str, checkpoint: str | None, output: str, seconds: float, **options: Any) -> Answer:
    asked = _asked(options)
    if Path(output).suffix not in (".html", ".json"):
        raise click.UsageError(f"--output {output}: expected a path that ends in .html or .json")
    check_writable(Path(output))
    first, second = open_models([before, after], checkpoint)
    batches = open_data(asked, first)
    inputs = open_inputs(asked, first, batches)
    measure, metric, samples = evaluation(batches)
    if options["evaluate"] is not None:
        measure, metric, samples = _evaluation(options["evaluate"]), options["metric"] or "accuracy", None
    made = reports.report(
        path=output,
        before=first.module,
        after=second.module,
        example_inputs=inputs,
        evaluate=measure,
        metric=options["metric"] or metric,
        samples=options["samples"] or samples,
        name=options["name"],
        data=asked.data or "",
        seconds=seconds,
    )
    return Answer(f"{made}\nwritten to {output}", made.to_dict())
