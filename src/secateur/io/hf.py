"""Models of Hugging Face transformers: finds a config that describes the small model, by building models from configs.

No model is known by name. A config fits if the model that its class builds from it has the names, shapes and numbers of the
model that is saved. If it does not fit, its numbers are changed one at a time until it does, or until no change helps.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import class_of
from ..edit import Place, built_from, eval_mode, history, number_at, numbers_of, tensors_inside, with_numbers
from ..trace import main_outputs

Key = tuple[str, ...]
Profile = dict[Key, Any]


def is_hf(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return hasattr(model, "save_pretrained") and hasattr(config, "to_dict") and hasattr(config, "save_pretrained")


def is_tied_copy(model: nn.Module, name: str) -> bool:
    """True if transformers leaves this name out of its files and ties it to another tensor when it loads."""
    keys = getattr(model, "_tied_weights_keys", None) or () if is_hf(model) else ()
    return any(re.fullmatch(key, name) or name == key for key in keys)


def files(model: nn.Module, against: str | None = None) -> tuple[dict[str, str], bool | str | None]:
    """The other files of the folder, by name, and True if `from_pretrained` will load it, the reason if not.

    The second is None for a model that is not of transformers. `against`: a reason that is known already.
    """
    if not is_hf(model):
        return {}, None
    against = against or _several_dtypes(model)
    config, wrong = (model.config, against) if against else fitting_config(model)
    made = {} if wrong else _written(model, config)
    wrong = wrong or made.pop("error", None)
    return ({}, f"no, only sc.load: the model {wrong}") if wrong else (made, True)


def _dtype(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _several_dtypes(model: nn.Module) -> str | None:
    """Names a tensor that transformers would cast: a config has one dtype. It keeps some modules in float32 by name."""
    one: Any = _dtype(model)
    kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    kept += [*(getattr(model, "_keep_in_fp32_modules", None) or ())] if one == torch.float16 else []
    for name, tensor in model.state_dict().items():
        stays = tensor.dtype == torch.float32 and any(word in name for word in kept)  # by substring, as transformers does
        if tensor.is_floating_point() and tensor.dtype != one and not stays:
            return f"holds {name} in {tensor.dtype} and other tensors in {one}, and a config has one dtype for all"
    return None


def _written(model: nn.Module, config: Any) -> dict[str, str]:
    """The files that transformers writes beside the tensors, as text; under "error" the reason if it refuses."""
    config.architectures = [class_of(model).__name__]
    config.dtype = _dtype(model)
    said = getattr(model, "generation_config", None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config.save_pretrained(folder)
            if said is not None and getattr(model, "can_generate", lambda: False)():
                said.save_pretrained(folder)
        except Exception as error:  # transformers validates configs before it writes them
            return {"error": f"has a config that transformers refuses ({' '.join(str(error).split())})"}
        return {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir() if file.suffix == ".json"}


def fitting_config(model: nn.Module) -> tuple[Any, str | None]:
    """Returns a config from which the model's class builds such a model, and None; or its own config and what differs."""
    target, own = _profile(model, _changed(model)), copy.deepcopy(model.config)
    best: Any = own
    places = numbers_of(best)
    found = _built(model, best)
    while (wrong := _differences(found, target)) and all(key[0] in ("shape", "number") for key in wrong):
        moved = {place: _moved(model, best, place, found, wrong, target) for place in places}
        places = [place for place, values in moved.items() if values]  # the others have no influence on what is wrong
        movers = Counter(key for values in moved.values() for key in values)
        if any(movers[key] == 0 for key in wrong):
            break  # no number of the config influences it
        alone = {p: [v for key, v in moved[p].items() if movers[key] == 1] for p in places}
        trials = [{p: _most(values) for p, values in alone.items() if values}]  # values that only this number influences
        trials += [{p: value} for p in places for value in _votes(moved[p].values())]  # several numbers could: try each
        for changes in trials:
            trial = with_numbers(best, {place: value for place, value in changes.items() if value})
            result = _built(model, trial)
            if len(_differences(result, target)) < len(wrong):
                best, found = trial, result
                places = [place for place in places if place not in changes]
                break
        else:
            break
    if not wrong or _unused(model, {key: found.get(key) for key in wrong}):
        return best, None
    return own, _words(wrong, cut=bool(history(model)))


def _unused(model: nn.Module, numbers: Mapping[Key, Any]) -> bool:
    """True if these integers, left over from before a cut, do not matter: with these values the model's output is the same."""
    changed = _changed(model)
    if any(key[0] != "number" or key[1:] in changed or type(value) is not int for key, value in numbers.items()):
        return False
    modules = dict(model.named_modules())
    before = {key: vars(modules[key[1]])[key[2]] for key in numbers}
    try:
        device = next(model.parameters()).device
        inputs: Any = {name: t.to(device) for name, t in model.dummy_inputs.items()}  # type: ignore[operator, union-attr]
        with eval_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            answer = tensors_inside(main_outputs(model(**inputs)))
            for key, value in numbers.items():
                vars(modules[key[1]])[key[2]] = value
            return all(map(torch.equal, answer, tensors_inside(main_outputs(model(**inputs)))))
    except Exception:
        return False
    finally:
        for key, value in before.items():
            vars(modules[key[1]])[key[2]] = value


def _moved(model: nn.Module, config: Any, place: Place, base: Profile, wrong: list[Key], target: Profile) -> dict[Key, Any]:
    """Doubles a number of the config. For each wrong size that changes, the value of the number that would correct it."""
    old = number_at(config, place)
    probe = 2 * old if old else 8
    moved = _built(model, with_numbers(config, {place: probe}))
    values: dict[Key, Any] = {}
    for key in wrong:
        now, then, want = (profile.get(key, "absent") for profile in (base, moved, target))
        if not all(type(value) in (int, float) for value in (now, then, want)) or now == then:
            continue
        new = want if now == old or not old else old + (want - now) * (probe - old) / (then - now)
        if not isinstance(old, float):  # a cut only makes sizes smaller; 0 stands for no value
            new = round(new) if new == round(new) and (old is None or new < old) else 0
        values[key] = max(new, 0)
    return values


def _votes(values: Iterable[Any]) -> list[Any]:
    return [value for value, _ in Counter(value for value in values if value).most_common(3)]


def _most(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


# --- what a model looks like ----------------------------------------------------------------------------------------


def _changed(model: nn.Module) -> set[tuple[str, str]]:
    return {(a.path, a.name) for cuts in history(model) for a in cuts.attributes}


def _profile(model: nn.Module, changed: set[tuple[str, str]]) -> Profile:
    """The shapes of saved tensors, the values of buffers that are not saved, and the numbers that may matter.

    Those are all floats (an epsilon, a scale), the integers that a cut changed, and integers whose names occur in code outside
    constructors. Other integers may be left over from before the cut.
    """
    state = model.state_dict()
    found: Profile = {}
    for name, tensor in state.items():
        found["tensor", name] = tensor.dim()
        found |= {("shape", name, str(d)): size for d, size in enumerate(tensor.shape)}
    found |= {("buffer", name): tensor for name, tensor in model.named_buffers() if name not in state}
    for path, module in model.named_modules():
        read = _read_names(class_of(module))
        for name, value in vars(module).items():
            if type(value) is float or (path, name) in changed or (type(value) is int and name in read):
                found["number", path, name] = value
    return found


@functools.cache
def _read_names(kind: type) -> frozenset[str]:
    """The attributes that the source file of a class uses outside constructors."""
    try:
        tree = ast.parse(Path(inspect.getfile(kind)).read_text(encoding="utf-8"))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            continue
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        waiting.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def _differences(found: Profile, target: Profile) -> list[Key]:
    def same(key: Key) -> bool:
        a, b = found.get(key), target.get(key)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and torch.equal(a.to(b), b)
        return a == b and type(a) is type(b)

    return [key for key in target.keys() | found.keys() if not same(key)]


def _words(wrong: list[Key], cut: bool) -> str | None:
    if not wrong:
        return None
    order = ("error", "tensor", "buffer", "number", "shape")
    kind, *names = min(wrong, key=lambda key: (order.index(key[0]), key))
    name = ".".join(name for name in names[: 1 if kind == "shape" else 2] if name)
    what = {"error": "cannot be built", "tensor": "has other tensors", "shape": "has other shapes"}.get(
        kind, "has other values"
    )
    than = "from any config" if kind == "error" else "than any config gives it"
    advice = (
        ". Mostly a config fits if whole layers are removed (depth=), or as many MLP channels from each layer (scope='tensor')"
    )
    return f"{what} {than} ({name}){advice if cut else ''}"


def _built(model: nn.Module, config: Any) -> Profile:
    """The profile of the model that the model's class builds from a config."""
    try:
        return _profile(built_from(class_of(model), config), _changed(model))
    except Exception as error:
        return {("error", type(error).__name__): str(error)}
