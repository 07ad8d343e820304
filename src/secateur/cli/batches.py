"""Batches and example inputs that a user named: factories, folders of images, text files, shapes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from ..edit import eval_mode, split_inputs
from ..stats import split_batch
from .models import Source, called
from .running import Failure

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm"}
# Mean and standard deviation of ImageNet's channels, which most pretrained vision models expect.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Asked:
    """The options about data: see `inputs_options` in `commands`."""

    inputs: str | None
    data: str | None
    batch_size: int
    batches: int
    size: str
    length: int
    tokenizer: str | None


def open_data(asked: Asked, source: Source) -> list[Any] | None:
    """The batches of --data, or None without it. Raises if the model does not run on the first one, if it has weights."""
    if asked.data is None:
        return None
    path = Path(asked.data)
    if path.is_dir():
        found = _images(path, asked)
    elif path.is_file():
        found = _texts(path, asked, source)
    elif ":" in asked.data:
        made = called(asked.data, "batches")
        if not isinstance(made, Iterable):
            raise Failure(f"{asked.data} returned {type(made).__name__}; expected an iterable of batches")
        found = made
    else:
        raise click.UsageError(f"{asked.data}: no such file or folder, and not of the form module:factory")
    left = iter(found)
    batches = list(islice(left, asked.batches))
    if not batches:
        raise Failure(f"{asked.data} gave no batch")
    if next(left, left) is not left:
        click.echo(f"secateur: used {asked.batches} of the batches of {asked.data}; --batches takes more", err=True)
    args, kwargs, _ = split_batch(batches[0])
    if not any(parameter.is_meta for parameter in source.module.parameters()):
        _check_runs(source.module, args, kwargs, asked.data)
    return batches


def open_inputs(asked: Asked, source: Source, batches: list[Any] | None) -> Any:
    """The example inputs: those of --inputs, of the first batch, or the dummy inputs of a Hugging Face model. Else None."""
    model = source.module
    if asked.inputs is None:
        if batches is not None:
            args, kwargs, _ = split_batch(batches[0])
            return {name: value for name, value in kwargs.items() if name != "labels"} if kwargs else args
        dummy = getattr(model, "dummy_inputs", None)
        return dict(dummy) if dummy else None
    if re.fullmatch(r"\d+(x\d+)*(:int)?", asked.inputs):
        found = _random(asked.inputs, model)
    elif ":" in asked.inputs:
        found = called(asked.inputs, "inputs")
    else:
        raise click.UsageError(f"--inputs {asked.inputs}: expected a shape such as 1x3x224x224 or 1x128:int, or module:factory")
    _check_runs(model, *split_inputs(found), asked.inputs)
    return found


def need_inputs(inputs: Any, command: str) -> Any:
    """The inputs. Raises if there are none."""
    if inputs is None:
        raise click.UsageError(f"{command} runs the model: pass --inputs with a shape such as 1x3x224x224, or --data")
    return inputs


def evaluation(batches: list[Any] | None) -> tuple[Callable[[nn.Module], float] | None, str, int | None]:
    """How batches measure a model: (function, metric, number of samples).

    Pairs of inputs and whole numbers give the accuracy, mappings with labels the perplexity; other batches give nothing.
    """
    first = None if not batches else batches[0]
    if isinstance(first, Mapping) and "labels" in first:
        return lambda model: _perplexity(model, batches or []), "perplexity", None
    if (
        isinstance(first, tuple | list)
        and len(first) == 2
        and isinstance(first[1], Tensor)
        and not first[1].is_floating_point()
    ):
        return lambda model: _accuracy(model, batches or []), "accuracy", sum(len(labels) for _, labels in batches or [])
    return None, "accuracy", None


def _accuracy(model: nn.Module, batches: Sequence[Any]) -> float:
    with eval_mode(model), torch.no_grad():
        right = sum(int((model(inputs).argmax(1) == labels).sum()) for inputs, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


def _perplexity(model: nn.Module, batches: Sequence[Any]) -> float:
    with eval_mode(model), torch.no_grad():
        losses = [float(model(**batch).loss) for batch in batches]
    return math.exp(min(sum(losses) / len(losses), 700.0))


def _check_runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> None:
    try:
        with eval_mode(model), torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        given = ", ".join(map(_shape, (*args, *kwargs.values())))
        raise Failure(f"the model does not run on {where} ({given}): {str(error).partition(chr(10))[0]}") from error


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape))}"
    return type(value).__name__


def _random(text: str, model: nn.Module) -> Any:
    """Random inputs of a shape, always the same: token numbers for language models and with ":int", else normal numbers."""
    shape = [int(size) for size in text.removesuffix(":int").split("x")]
    generator = torch.Generator().manual_seed(0)
    named = getattr(model, "main_input_name", "") == "input_ids"
    if not named and not text.endswith(":int"):
        kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return torch.randn(shape, generator=generator).to(kind)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    tokens = torch.randint(max(tables, default=2), shape, generator=generator)
    return {"input_ids": tokens} if named else tokens


# --- files --------------------------------------------------------------------------------------------------------------


def _images(folder: Path, asked: Asked) -> Iterable[Any]:
    """Batches of images, resized and normalised. Images in subfolders have the number of their subfolder as label."""
    try:
        from PIL import Image
    except ImportError:
        raise Failure("a folder of images needs the package pillow (pip install pillow)") from None
    match = re.fullmatch(r"(\d+)x(\d+)", asked.size)
    if match is None:
        raise click.UsageError(f"--size {asked.size}: expected height and width such as 224x224")
    height, width = int(match[1]), int(match[2])
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)
    if not files:
        raise Failure(f"{folder} holds no image ({', '.join(sorted(IMAGES))})")
    classes = sorted({file.parent for file in files} - {folder})
    step = -(-len(files) // min(len(files), asked.batch_size * asked.batches))  # evenly over all classes
    chosen = files[::step]

    def read(file: Path) -> Tensor:
        with Image.open(file) as image:
            raw = bytearray(image.convert("RGB").resize((width, height)).tobytes())
        pixels = torch.frombuffer(raw, dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1).float() / 255
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)

    for start in range(0, len(chosen), asked.batch_size):
        part = chosen[start : start + asked.batch_size]
        images = torch.stack([read(file) for file in part])
        yield (images, torch.tensor([classes.index(file.parent) for file in part])) if classes else images


def _texts(file: Path, asked: Asked, source: Source) -> Iterable[Any]:
    """Batches of token sequences of one length, cut from a text file."""
    folder = asked.tokenizer or source.path
    if folder is None:
        raise click.UsageError("a text file needs --tokenizer (a folder with a Hugging Face tokenizer)")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise Failure("a text file needs the package transformers, for the tokenizer") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise Failure(f"{folder} holds no tokenizer that loads; name a folder that does with --tokenizer") from error
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Failure(f"{file} is not a text file in UTF-8") from None
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: asked.length * asked.batch_size * asked.batches])
    rows = tokens[: len(tokens) // asked.length * asked.length].view(-1, asked.length)
    if not len(rows):
        raise Failure(f"{file} has {len(tokens)} tokens, fewer than one sequence of --length {asked.length}")
    known = max((m.num_embeddings for m in source.module.modules() if isinstance(m, nn.Embedding)), default=None)
    if known is not None and int(rows.max()) >= known:
        raise Failure(f"the tokenizer of {folder} has more tokens than the {known:,} that the model knows; pass another one")
    labelled = "labels" in inspect.signature(source.module.forward).parameters
    for part in rows.split(asked.batch_size):
        yield {"input_ids": part, "labels": part} if labelled else {"input_ids": part}
