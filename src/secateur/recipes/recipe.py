"""`Recipe`: stages of a file, run on a model in order, and the recipe that made a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from .._hints import hints
from .._tree import nearest
from ..edit import copied, record_of
from ..io import record_in, write_text
from ..stats import Loss, split_batch
from .ran import Ran
from .schema import KINDS, VERSION, BadRecipe, checked, fields_of, resolved
from .yaml12 import read_yaml

_SHIPPED = Path(__file__).parent


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe: its kind ("prune", "shrink", ...) and its arguments as plain data."""

    kind: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """Stages that are run on a model in order. Their fields are the arguments of `prune_`, `shrink`, `gate_`, `compress_`::

        version: 1
        stages:
          - shrink: {channels: 0.7}
          - prune: {criterion: wanda, sparsity: 0.5, scope: row}

    `Recipe.load` reads a file, `Recipe.parse` a text and `Recipe.of` the recipe that made a model. All fields are checked: an
    unknown one raises ValueError with its path and the nearest known name. `str(recipe)` is the text of the file.
    """

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.stages, tuple) or not all(isinstance(stage, Stage) for stage in self.stages):
            raise TypeError(
                "Recipe(...) takes stages that were checked; use Recipe.load(path), Recipe.parse(text) or "
                'Recipe.of_stages([{"prune": {"sparsity": 0.5}}])'
            )

    @staticmethod
    def parse(text: str, where: str = "recipe") -> Recipe:
        """The recipe in a YAML text. `where` names it in errors."""
        import yaml

        if not isinstance(text, str):
            raise TypeError(f"Recipe.parse reads a YAML text, not {type(text).__name__}; Recipe.of_stages takes plain data")
        try:
            data = read_yaml(text)
        except yaml.YAMLError as error:
            raise BadRecipe(f"{where}: not YAML: {' '.join(str(error).split())}") from None
        return Recipe(tuple(Stage(*stage) for stage in checked(data, where)))

    @staticmethod
    def of_stages(stages: Sequence[Mapping[str, Any]], where: str = "recipe") -> Recipe:
        """The recipe of stages as plain data, such as `[{"prune": {"sparsity": 0.5}}]`."""
        if isinstance(stages, Mapping | str):
            raise TypeError(f'stages are a list such as [{{"prune": {{"sparsity": 0.5}}}}], not one {type(stages).__name__}')
        return Recipe(tuple(Stage(*stage) for stage in checked({"version": VERSION, "stages": list(stages)}, where)))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Recipe:
        """The recipe in a file, the recipe that made the model in a folder of `sc.save`, or a recipe of the package by name."""
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Recipe.load takes a path or a name, not {type(path).__name__}; Recipe.of_stages takes plain data")
        file = Path(path)
        if file.is_dir():
            return _from_record(record_in(file), str(path))
        if not file.exists() and str(path) in shipped():
            file = _SHIPPED / f"{path}.yaml"
        if not file.exists():
            known = shipped()
            raise FileNotFoundError(
                f"{path} is neither a file nor a recipe of the package ({', '.join(known)}).{nearest(str(path), known)}"
            )
        return Recipe.parse(file.read_text(encoding="utf-8"), str(path))

    @staticmethod
    def of(model: nn.Module) -> Recipe:
        """The recipe that made a model, through all its stages. Raises ValueError where a stage cannot be written down."""
        _check_model(model)
        return _from_record(record_of(model), type(model).__name__)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recipe to a file."""
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Recipe.save takes the path of a file, not {type(path).__name__}")
        write_text(Path(path), str(self))

    def to_dict(self) -> dict[str, Any]:
        """The content of the file as plain values."""
        return {"version": VERSION, "stages": [{stage.kind: dict(stage.arguments)} for stage in self.stages]}

    def __str__(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    def replace(self, path: str, value: Any) -> Recipe:
        """The recipe with another value for one field: "prune.sparsity", or "stages[1].sparsity" where two stages prune."""
        place, name = self.place(path)
        stages = list(self.stages)
        stages[place] = Stage(stages[place].kind, {**stages[place].arguments, name: value})
        made = Recipe(tuple(stages))
        checked(made.to_dict())
        return made

    def place(self, path: str) -> tuple[int, str]:
        """The position of the stage and the name of the field that a path such as "prune.sparsity" means."""
        where, _, name = path.rpartition(".")
        kinds = [stage.kind for stage in self.stages]
        places = [place for place, kind in enumerate(kinds) if where in (kind, f"stages[{place}]", f"stages[{place}].{kind}")]
        if len(places) == 1 and name in fields_of(kinds[places[0]]):
            return places[0], name
        known = [f"stages[{place}].{kind}.{field}" for place, kind in enumerate(kinds) for field in fields_of(kind)]
        why = "names several stages" if len(places) > 1 else "is no field of this recipe"
        raise ValueError(f"{path!r} {why}.{nearest(path, known)}")

    @hints
    def run(
        self, model: nn.Module, *, data: Iterable[Any] | None = None, example_inputs: Any = None, loss: Loss | None = None
    ) -> Ran:
        """Runs the stages on a copy of the model, and returns the copy and the result of each stage. The model is unchanged.

        `data` (batches) goes to every stage whose function takes it, unless the stage says `data: null`; `loss` likewise.
        `example_inputs` are those of `shrink` and `compress_`; by default the inputs of the first batch. The teacher of
        `distill_` is the model as it is given.
        """
        _check_model(model)
        return self._run_(copied(model), model, data, example_inputs, loss)

    @hints
    def run_(
        self, model: nn.Module, *, data: Iterable[Any] | None = None, example_inputs: Any = None, loss: Loss | None = None
    ) -> Ran:
        """`run` in place: the model itself is changed. If a stage fails, the stages before it stay done."""
        _check_model(model)
        distills = any(stage.kind == "distill" for stage in self.stages)
        return self._run_(model, copied(model) if distills else None, data, example_inputs, loss)

    def _run_(
        self, model: nn.Module, teacher: nn.Module | None, data: Iterable[Any] | None, inputs: Any, loss: Loss | None
    ) -> Ran:
        batches = list(data) if data is not None and iter(data) is data else data
        if inputs is None and batches is not None:
            inputs = _inputs_of(batches)
        given = {"data": batches, "loss": loss, "example_inputs": inputs, "teacher": teacher}
        results, seconds = [], []
        for place, stage in enumerate(self.stages):
            begin = perf_counter()
            try:
                results.append(_run_stage(stage, model, given))
            except Exception as error:
                if len(self.stages) > 1:
                    error.add_note(f"in stages[{place}].{stage.kind} of the recipe")
                raise
            seconds.append(perf_counter() - begin)
        return Ran(model, results, tuple(stage.kind for stage in self.stages), tuple(seconds))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module | Mapping | Tensor):
        raise TypeError(f"a recipe runs on a torch.nn.Module, not {type(model).__name__}")


def shipped() -> dict[str, str]:
    """The recipes of the package: each name with the first line of its file."""
    return {file.stem: _title(file) for file in sorted(_SHIPPED.glob("*.yaml"))}


def _title(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()


def _run_stage(stage: Stage, model: nn.Module, given: Mapping[str, Any]) -> Any:
    kind = KINDS[stage.kind]
    arguments = {name: given[name] for name in kind.gets if given[name] is not None}
    if "example_inputs" in kind.gets and "example_inputs" not in arguments:
        raise ValueError(
            f"{stage.kind} runs the model, so pass example_inputs= (a tensor, a tuple or a mapping) or data= (batches)"
        )
    result = kind.call(model, **{**arguments, **resolved(stage.arguments)})
    return result[1] if isinstance(result, tuple) else result


def _inputs_of(batches: Iterable[Any]) -> Any:
    """The inputs in the first batch, without labels."""
    first = next(iter(batches), None)
    if first is None:
        raise ValueError("data= gave no batch")
    args, kwargs, _ = split_batch(first)
    return {name: value for name, value in kwargs.items() if name != "labels"} if kwargs else args


def _from_record(record: Iterable[Any], where: str) -> Recipe:
    stages = []
    for (what, text), arguments in record:
        if not isinstance(arguments, dict):
            raise BadRecipe(f"{where}: step {len(stages) + 1}, {what} ({text}), cannot be written as a stage: {arguments}")
        stages.append({what: arguments})
    if not stages:
        raise BadRecipe(f"{where}: nothing was done to the model, so there is no recipe")
    return Recipe.of_stages(stages, where)
