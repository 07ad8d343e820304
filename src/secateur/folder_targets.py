"""Which tensors of a folder of safetensors files `prune_folder` prunes, and why it skips others."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from ._layers import Layout
from ._tree import nearest_glob
from .io import Folder
from .scores import RANKED
from .targeting import Globs, Target, globs_of, targets


def choose(
    folder: Folder, model: nn.Module | None, include: Globs, exclude: Globs, types: Sequence[type[nn.Module]] | None
) -> tuple[dict[str, Layout], list[Target], dict[str, str]]:
    """The layouts of the tensors to prune, by their names in the folder and in the order of the model; and why not others."""
    if model is None:
        named, without = globs_of("include", include), globs_of("exclude", exclude)
        if not named:
            raise ValueError("say which tensors are pruned: into= builds the model, or include= names them")
        for argument, globs in (("include", named), ("exclude", without)):
            for glob in globs:
                if not any(_any(name, [glob]) for name in folder.entries):
                    near = nearest_glob(glob, list(folder.entries))
                    raise ValueError(f"{argument}={glob!r} matches no tensor of {folder.path}.{near}")
        found = {n: e for n, e in folder.entries.items() if _any(n, named) and not _any(n, without)}
        reasons = {name: _reason(name, *entry, named) for name, entry in found.items()}
        layouts = {name: Layout(shape) for name, (_, shape) in found.items() if reasons[name] is None}
        return layouts, [], {name: why for name, why in reasons.items() if why is not None}
    wanted, skipped = targets(model, include=include, exclude=exclude, types=types, meta=True)
    chosen: dict[str, Layout] = {}
    for one in wanted:
        if not (names := [name for name in one.names if name in folder.entries]):
            raise ValueError(
                f"{folder.path} has no tensor {one.name!r}; into= must build the model that was saved there, with the names of "
                "the files. transformers renames some tensors when it loads them, such as those of experts: load such a model "
                "with from_pretrained and use prune_"
            )
        dtype, shape = folder.entries[names[0]]
        if shape != one.layout.shape:
            raise ValueError(f"{names[0]!r} is {shape} in the folder and {one.layout.shape} in the model")
        if dtype not in RANKED:
            raise ValueError(
                f"{names[0]!r} is stored as {dtype} in {folder.path}, and such values cannot be ranked; exclude it, or load "
                "the model with its weights in bfloat16 or float32, and use prune_"
            )
        if one.layout.flip and one.layout.groups > 1 and not one.layout.stacked:
            raise NotImplementedError(f"{names[0]!r} belongs to a transposed convolution in groups; exclude it")
        chosen[names[0]] = one.layout
    return chosen, wanted, skipped


def _reason(name: str, dtype: torch.dtype, shape: tuple[int, ...], named: Sequence[str]) -> str | None:
    """Why a tensor that globs match is skipped, or None."""
    if dtype not in RANKED:
        return f"{dtype} values cannot be ranked"
    return "a vector" if len(shape) < 2 and name not in named else None


def _any(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob) for glob in globs)
