"""Opens the model that a user named, and saves it: Hugging Face folders, factories, weight files and folders of secateur."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from .. import io
from .._tree import nearest
from ..edit import Arguments, Step, built, history, record_of
from .running import Failure

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "preprocessor_config.json")


@dataclass
class Source:
    """An opened model. `model` is a mapping of names to tensors if the file does not say how to build the module.

    `config`: for a Hugging Face model, the text of the config that builds it as it was before any cut, if that is known.
    """

    name: str
    model: nn.Module | dict[str, Tensor]
    path: Path | None = None
    config: str | None = None

    @property
    def module(self) -> nn.Module:
        """The module. Raises for weights alone."""
        if isinstance(self.model, nn.Module):
            return self.model
        raise click.UsageError(
            f"{self.name} holds weights alone, and this command runs the model; give module:factory as MODEL, and this path "
            "as --checkpoint"
        )

    def record(self) -> list[tuple[Step, Arguments]]:
        """What was done to the model."""
        if isinstance(self.model, nn.Module):
            return record_of(self.model)
        return io.record_in(self.path) if self.path is not None and _is_ours(self.path) else []


def open_model(name: str, checkpoint: str | None = None) -> Source:
    """Opens what MODEL and --checkpoint name. Modules are in evaluation mode."""
    path = Path(name)
    if not path.exists():
        if ":" not in name:
            raise click.UsageError(f"{name}: no such file or folder, and not of the form module:factory")
        model = called(name, "a model")
        if not isinstance(model, nn.Module):
            raise Failure(f"{name} returned {type(model).__name__}; expected a torch.nn.Module")
        config = _config_of(model)  # before the checkpoint cuts the model
        return Source(name, _filled(model, checkpoint).eval(), config=config)
    if checkpoint is not None:
        raise click.UsageError("--checkpoint goes with module:factory; a folder or file holds its weights itself")
    if path.is_dir():
        return _folder(name, path)
    return Source(name, _tensors(path), path)


def open_models(names: Sequence[str], checkpoint: str | None = None) -> list[Source]:
    """Opens several models. Folders and files that hold weights alone are loaded into the first module:factory among them.

    `checkpoint` holds the weights of the first model.
    """
    factory = next((name for name in names if not Path(name).exists() and ":" in name), None)
    found = []
    for place, name in enumerate(names):
        source = open_model(name, checkpoint if place == 0 else None)
        if isinstance(source.model, dict) and factory is not None:
            source = Source(name, open_model(factory, name).model, source.path)
        found.append(source)
    return found


def open_folder(name: str, checkpoint: str | None = None) -> Source:
    """A model whose weights stay in a folder of safetensors files: MODEL, or --checkpoint of module:factory.

    The module is on the meta device. Where nothing says how to build it, there is none.
    """
    path = Path(name if checkpoint is None else checkpoint)
    if not path.is_dir():
        raise click.UsageError(
            f"{path} is not a folder; --from-disk prunes one with safetensors files: MODEL, or --checkpoint of module:factory"
        )
    config = path / "config.json"
    if checkpoint is None and not config.is_file():
        return Source(name, {}, path)
    described = partial(_from_transformers, path, config, empty=True)
    model = built(described if checkpoint is None else partial(called, name, "a model"))
    if not isinstance(model, nn.Module):
        raise Failure(f"{name} returned {type(model).__name__}; expected a torch.nn.Module")
    return Source(name, model, path)


# --- objects of the user's code -----------------------------------------------------------------------------------------


def called(name: str, what: str) -> Any:
    """The object that module:name means; a function or class is called without arguments."""
    found = imported(name, what)
    if isinstance(found, nn.Module) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise Failure(f"{name}() raised {type(error).__name__}: {error}") from error


def imported(name: str, what: str) -> Any:
    """The object that module:name means, as it is."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise click.UsageError(f"{name!r}: expected {what} as module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise Failure(f"the module {module} does not import: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Failure(f"{module} has no {attribute!r}.{nearest(part, [n for n in dir(found) if n[:1] != '_'])}")
        found = getattr(found, part)
    return found


# --- folders and files --------------------------------------------------------------------------------------------------


def _is_ours(path: Path) -> bool:
    return (path / io.MANIFEST).is_file()


def _is_gated(path: Path) -> bool:
    return _is_ours(path) and "gates" in json.loads((path / io.MANIFEST).read_bytes())


def _folder(name: str, path: Path) -> Source:
    config, uncut = path / "config.json", path / io.UNCUT
    if config.is_file():
        model = _from_transformers(path, config, empty=_is_ours(path))
        model = io.load(path, into=model) if _is_ours(path) else model
        return Source(name, model.eval(), path, _config_of(model))
    if _is_ours(path) and uncut.is_file():
        model = io.load(path, into=_from_transformers(path, uncut, empty=True))
        return Source(name, model.eval(), path, uncut.read_text(encoding="utf-8"))
    if _is_ours(path):
        return Source(name, io.dense_state_dict(path), path)
    raise Failure(f"{name} holds neither config.json (Hugging Face) nor {io.MANIFEST} (secateur)")


def _config_of(model: nn.Module) -> str | None:
    """The config of a Hugging Face model that was not cut, as text."""
    if history(model) or not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        return None
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return config.to_json_string()


def _from_transformers(path: Path, config: Path, *, empty: bool) -> nn.Module:
    """The model that a Hugging Face folder describes, with its weights, or with random ones if `empty`."""
    try:
        import transformers
    except ImportError:
        raise Failure(f"{path} is a Hugging Face folder; install transformers to open it") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        named = str((json.loads(config.read_text(encoding="utf-8")).get("architectures") or [""])[0])
    except (ValueError, AttributeError, LookupError) as error:
        raise Failure(f"{config} is no config of Hugging Face: {error}") from None
    kind: Any = getattr(transformers, named, None) or transformers.AutoModel
    if empty:
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            raise Failure(f"{config} names {named!r} as its architecture, which is no model of transformers")
        return kind._from_config(transformers.AutoConfig.from_pretrained(config, trust_remote_code=False))
    return kind.from_pretrained(path, local_files_only=True)


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a .safetensors file, or in a file that torch.save wrote, which is read without running code."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return io.dense_state_dict(load_file(path))
        except SafetensorError as error:
            raise Failure(f"{path} is not a safetensors file: {error}") from None
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        if not zipfile.is_zipfile(path):
            raise Failure(f"{path} is neither a .safetensors file nor a state dict that torch.save wrote") from error
        raise Failure(
            f"{path} holds Python objects, such as a whole model, and reading them would run code from the file; write the "
            "weights alone: torch.save(model.state_dict(), path)"
        ) from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
    if not isinstance(data, Mapping) or not all(isinstance(tensor, Tensor) for tensor in data.values()):
        raise Failure(f"{path} holds {type(data).__name__}; expected a mapping of names to tensors (a state dict)")
    return dict(data)


def _filled(model: nn.Module, checkpoint: str | None) -> nn.Module:
    if checkpoint is None:
        return model
    path = Path(checkpoint)
    if not path.exists():
        raise click.UsageError(f"{checkpoint}: no such file or folder")
    if path.is_dir():
        return io.load(path, into=model)
    try:
        model.load_state_dict(_tensors(path))
    except RuntimeError as error:
        first = [line.strip() for line in str(error).splitlines()[1:3]]
        raise Failure(f"{checkpoint} does not fit the model: {' '.join(first)[:300]}") from None
    return model


# --- saving -------------------------------------------------------------------------------------------------------------


def check_output(output: str | None, force: bool, source: Source, *, as_file: bool) -> Path:
    """The path to write to, a file or a folder. Raises before any work is done if it cannot be written.

    A folder that an unfinished run of `prune --from-disk` left may be written to.
    """
    if output is None:
        raise click.UsageError("--output (-o) is missing: where to write the model; or --dry-run")
    path = Path(output)
    force = force or any(path.glob(f"{io.JOURNAL}.*"))
    if path.exists() and not force and (path.is_file() or any(path.iterdir())):
        raise click.UsageError(f"{output} exists; --force replaces it")
    if source.path is not None and path.exists() and path.samefile(source.path):
        raise click.UsageError(f"{output} is the model itself; write to another place")
    if as_file and source.path is not None and _is_gated(source.path):
        raise click.UsageError(
            f"{source.name} holds a model with gates, which a .safetensors file cannot hold; give module:factory as MODEL, and "
            "this folder as --checkpoint"
        )
    if as_file != (path.suffix == ".safetensors"):
        kind = "a .safetensors file" if as_file else "a folder"
        raise click.UsageError(f"{output}: {source.name} is saved as {kind}")
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """Raises if the file or folder cannot be written, before any work is done."""
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not os.access(above, os.W_OK):
        kind = "folder" if above.is_dir() else "file"
        raise Failure(f"{above}: the {kind} is read-only" + (f", so {path} cannot be written" if above != path else ""))


def save(source: Source, model: nn.Module | dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Writes the model completely or not at all. Returns what the manifest says about it."""
    if isinstance(model, nn.Module):
        return _save_folder(source, model, path)
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with io.replaced(path) as beside:
        save_file({name: tensor.contiguous() for name, tensor in model.items()}, beside)
    return {}


def _save_folder(source: Source, model: nn.Module, path: Path) -> dict[str, Any]:
    new = not path.exists()
    try:
        said = io.save(model, path)
    except BaseException:
        if new and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        raise
    if isinstance(said.get("from_pretrained"), str) and source.config is not None:
        with io.replaced(path / io.UNCUT) as beside:
            beside.write_text(source.config, encoding="utf-8")
    if "from_pretrained" in said and source.path is not None:
        for file in {file for glob in _TOKENIZER for file in source.path.glob(glob) if file.suffix != ".safetensors"}:
            with io.replaced(path / file.name) as beside:
                shutil.copyfile(file, beside)
    return said
