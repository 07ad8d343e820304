"""A recipe file holds arguments and nothing else, is checked whole, and makes the same model again."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import secateur as sc
from secateur.recipes import shipped


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    ).eval()


torch.manual_seed(1)
DATA = [(torch.randn(8, 3, 8, 8), torch.randint(10, (8,))) for _ in range(3)]


def recipe(*stages):
    return sc.Recipe.parse(yaml.safe_dump({"version": 1, "stages": list(stages)}))


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    one, other = state(one), state(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- running --------------------------------------------------------------------------------------------------------------


def test_stages_do_what_the_functions_do():
    model = build()
    ran = recipe({"shrink": {"channels": 0.5}}, {"prune": {"criterion": "wanda", "sparsity": 0.5, "scope": "row"}}).run(
        model, data=DATA
    )
    small, cut = sc.shrink(model, DATA[0][0], channels=0.5)
    plan = sc.prune_(small, sc.wanda, sparsity=0.5, scope="row", data=DATA)
    assert same(ran.model, small)
    assert [result.recipe for result in ran.results] == [cut.recipe, plan.recipe]


def test_run_leaves_the_model_and_run_in_place_changes_it():
    model, before = build(), build()
    made = recipe({"prune": {"sparsity": 0.5}})
    pruned = made.run(model).model
    assert same(model, before)
    assert made.run_(model).model is model
    assert same(model, pruned)


def test_an_iterator_feeds_all_stages():
    stages = {"prune": {"criterion": "wanda", "sparsity": 0.3, "scope": "row"}}
    again = {"prune": {"criterion": "wanda", "sparsity": 0.5, "scope": "row"}}
    assert same(recipe(stages, again).run(build(), data=iter(DATA)).model, recipe(stages, again).run(build(), data=DATA).model)


def test_a_loss_is_named_in_the_file_or_passed():
    named = recipe({"prune": {"criterion": "taylor", "sparsity": 0.5, "loss": "cross_entropy"}}).run(build(), data=DATA)
    passed = recipe({"prune": {"criterion": "taylor", "sparsity": 0.5}}).run(
        build(), data=DATA, loss=nn.functional.cross_entropy
    )
    assert same(named.model, passed.model)


def test_a_stage_can_refuse_the_data():
    with pytest.raises(ValueError, match="data="):
        recipe({"prune": {"criterion": "wanda", "sparsity": 0.5, "data": None}}).run(build(), data=DATA)


def test_an_error_names_the_stage():
    with pytest.raises(ValueError, match="matches no parameter") as caught:
        recipe({"prune": {"sparsity": 0.5}}, {"prune": {"sparsity": 0.6, "include": "hed"}}).run(build())
    assert caught.value.__notes__ == ["in stages[1].prune of the recipe"]


def test_shrinking_without_inputs_says_what_to_pass():
    with pytest.raises(ValueError, match=r"inputs= .* or data="):
        recipe({"shrink": {"channels": 0.5}}).run(build())


def test_what_ran_prints_a_table_of_its_stages():
    stages = [{"shrink": {"channels": 0.5}}, {"prune": {"sparsity": 0.5}}, {"gate": {}}, {"prune": {"sparsity": 0.8}}]
    ran = recipe(*stages, {"compress": {"objective": "size"}}).run(build(), data=DATA)
    model, results = ran
    assert model is ran.model
    assert results is ran.results
    rows = str(ran).splitlines()[2:7]
    assert [row.split()[0] for row in rows] == ["shrink", "prune", "gate", "prune", "compress"]
    plan, metrics = ran.results[1], ran.metrics()
    assert f"{plan.metrics()['pruned']:,} of {plan.metrics()['total']:,} weights" in rows[1]
    assert f"{ran.results[0].metrics()['params_after']:,.0f} of" in rows[0]
    assert metrics["shrink/params"] == ran.results[0].metrics()["params"]
    assert metrics["stages[3].prune/sparsity"] == ran.results[3].metrics()["sparsity"]
    assert metrics["seconds"] == pytest.approx(sum(ran.seconds))
    assert "<table>" in ran._repr_html_()
    assert [stage["stage"] for stage in json.loads(json.dumps(ran.to_dict()))["stages"]] == list(ran.stages)


@pytest.mark.parametrize("stage", [{"distill": {"steps": 2}}, {"reorder": {"pattern": "2:4"}}], ids=["distill", "reorder"])
def test_every_stage_has_a_line_in_the_table(stage):
    ran = recipe({"prune": {"sparsity": 0.5}}, stage).run(build(), data=DATA)
    assert str(ran).splitlines()[3].startswith(next(iter(stage)))


@pytest.mark.parametrize("given", [{"prune": {"sparsity": 0.5}}, "magnitude-80", [{"prune": {"sparsity": 0.5}}]])
def test_a_recipe_made_of_plain_data_says_how_to_read_it(given):
    with pytest.raises(TypeError, match=r"Recipe\.load\(path\), Recipe\.parse\(text\) or Recipe\.of_stages"):
        sc.Recipe(given)
    with pytest.raises(TypeError, match=r"Recipe\.of_stages takes plain data|stages are a list such as"):
        sc.Recipe.parse(given) if isinstance(given, list) else sc.Recipe.of_stages(given)


def test_classes_and_dtypes_are_named():
    ran = recipe(
        {"prune": {"sparsity": 0.5, "types": ["Linear"]}}, {"compress": {"objective": "size", "store": "bfloat16"}}
    ).run(build(), data=DATA)
    assert list(ran.results[0].masks) == ["7.weight", "9.weight"]


@pytest.mark.parametrize("name", shipped())
def test_recipes_of_the_package_run(name):
    made = sc.Recipe.load(name)
    assert shipped()[name].endswith(".")
    assert sc.Recipe.parse(str(made)) == made
    ran = made.run(build(), data=DATA)
    assert len(ran.results) == len(made.stages)
    ran.model(DATA[0][0])


# --- the recipe that made a model -----------------------------------------------------------------------------------------

MADE = {
    "prune": lambda model: sc.prune_(model, sc.wanda, sparsity=0.5, scope="row", data=DATA, exclude="9"),
    "spread and floor": lambda model: sc.prune_(model, sparsity=0.7, spread=sc.owl(0.1, 4.0), floor=0.05),
    "spread by name": lambda model: sc.prune_(model, spread={"0.*": 0.3, "*": 0.6}),
    "method": lambda model: sc.prune_(
        model, method=sc.methods.sparsegpt(damp=0.05), sparsity=0.5, data=DATA, types=[nn.Linear]
    ),
    "pattern": lambda model: sc.prune_(model, pattern=sc.Pattern.parse("2:4")),
    "criterion": lambda model: sc.prune_(
        model, sc.magnitude * sc.grad_square**0.5, sparsity=0.5, data=DATA, loss=nn.functional.cross_entropy
    ),
    "random": lambda model: sc.prune_(model, sc.random(3), sparsity=0.5),
    "shrink": lambda model: sc.shrink_(model, DATA[0][0], channels={"0.*": 0.5}, multiple_of=4),
    "unit criterion": lambda model: sc.shrink_(model, DATA[0][0], sc.fpgm, params=0.6, refit=True, data=DATA),
    "both": lambda model: (sc.shrink_(model, DATA[0][0], flops=0.7), sc.prune_(model, sparsity=0.4, scope="global")),
    "compress": lambda model: (
        sc.prune_(model, sparsity=0.9),
        sc.compress_(model, DATA[0][0], objective="size", store=torch.bfloat16),
    ),
    "compress in groups": lambda model: (
        sc.prune_(model, sparsity=0.9),
        sc.compress_(model, DATA[0][0], objective="size", values="int8", group=64),
    ),
    "reorder": lambda model: (sc.reorder_(model, "2:4", data=DATA, exclude="0"), sc.prune_(model, pattern="2:4")),
    "distill": lambda model: (
        sc.prune_(model, sparsity=0.6),
        sc.distill_(model, build(), DATA, steps=6, lr=1e-2, holdout=0.4, loss=nn.functional.mse_loss),
    ),
    "gate": lambda model: sc.gate_(model, at="7", data=DATA, sparsity=0.4),
}


@pytest.mark.parametrize("how", MADE)
def test_the_recipe_of_a_model_makes_the_same_files_again(tmp_path, how):
    model = build()
    MADE[how](model)
    sc.save(model, tmp_path / "first")
    sc.Recipe.of(model).save(tmp_path / "recipe.yaml")
    again = sc.Recipe.load(tmp_path / "recipe.yaml").run(build(), data=DATA).model
    sc.save(again, tmp_path / "second")
    files = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "second").iterdir())
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert torch.equal(model(DATA[1][0]), again(DATA[1][0]))


def test_a_recipe_holds_how_weights_are_grouped_and_no_group_of_processes():
    given = {"objective": "size", "values": "int8", "group": 64}
    ran = recipe({"prune": {"pattern": "2:4"}}, {"compress": given}).run(build(), data=DATA)
    assert "group: 64" in str(sc.Recipe.of(ran.model))
    with pytest.raises(ValueError, match=r"prune\.group: unknown field"):
        recipe({"prune": {"sparsity": 0.5, "group": 1}})


@pytest.mark.parametrize("how", [how for how in MADE if "compress" not in how])
def test_a_saved_model_holds_its_recipe(tmp_path, how):
    model = build()
    MADE[how](model)
    sc.save(model, tmp_path)
    assert sc.Recipe.load(tmp_path) == sc.Recipe.of(model)
    assert sc.Recipe.of(sc.load(tmp_path, build)) == sc.Recipe.of(model)


METHODS = [
    sc.methods.rank(),
    sc.methods.topk(refit=3),
    sc.methods.sparsegpt(damp=0.02, width=64),
    sc.methods.admm(),
    sc.methods.admm(steps=5, target=sc.methods.flow(0.25, 0.75), curvature="diag"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_methods_read_back_from_their_text(method):
    from secateur.methods import as_method

    assert as_method(str(method)) == method


SPREADS = {"erk": sc.erk, "uniform": sc.uniform, "owl": sc.owl(0.1, 4.0), "by_loss": sc.by_loss(0.2, "diag")}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_spreads_are_recorded(spread):
    model = build()
    sc.prune_(model, sparsity=0.5, spread=spread, data=DATA, loss=nn.functional.cross_entropy)
    again = sc.Recipe.of(model).run(build(), data=DATA).model
    assert same(model, again)


def test_what_is_undone_leaves_the_recipe():
    model = build()
    sc.prune_(model, sparsity=0.8)
    kept = sc.Recipe.of(model)
    sc.compress_(model, DATA[0][0], objective="size").undo_(model)
    sc.gate_(model, at="7", method="topk").undo_()
    assert sc.Recipe.of(model) == kept


def test_calls_that_differ_in_their_layers_alone_are_all_in_the_recipe():
    """The second was taken for a repetition of the first, because the text of both is the same."""
    model, again = build(), build()
    for layer in ("7", "9"):
        sc.prune_(model, sparsity=0.8, include=f"{layer}.weight")
    for layer in ("7", "9"):
        sc.gate_(model, at=layer, method="topk")
    sc.Recipe.of(model).run_(again)
    assert torch.equal(again(DATA[0][0]), model(DATA[0][0]))
    sc.prune_(again, sparsity=0.5)
    once = sc.Recipe.of(again)
    sc.prune_(again, sparsity=0.5)
    assert sc.Recipe.of(again) == once


def own_score(weight):
    return weight.abs()


def test_a_stage_that_no_file_can_hold_says_why(tmp_path):
    model = build()
    sc.prune_(model, own_score, sparsity=0.5)
    with pytest.raises(ValueError, match=r"step 1, prune .*criterion=own_score is a value that a file cannot hold"):
        sc.Recipe.of(model)
    sc.save(model, tmp_path)
    with pytest.raises(ValueError, match="own_score"):
        sc.Recipe.load(tmp_path)
    trained = build()
    pruner = sc.Pruner(trained, sparsity=0.5)
    pruner.step()
    with pytest.raises(ValueError, match="a Pruner made it during training"):
        sc.Recipe.of(trained)
    whole = nn.Sequential(copy.deepcopy(model), nn.Linear(10, 2))
    with pytest.raises(ValueError, match="changed the module '0' alone"):
        sc.Recipe.of(whole)
    with pytest.raises(ValueError, match="nothing was done"):
        sc.Recipe.of(build())


# --- checks ---------------------------------------------------------------------------------------------------------------


def stages(text):
    return f"version: 1\nstages: [{text}]"


WRONG = {
    "no version": ("stages: [{prune: {sparsity: 0.5}}]", r"version: expected 1, got None"),
    "another version": ("version: 2\nstages: [{prune: {sparsity: 0.5}}]", r"version: expected 1, got 2"),
    "no stages": ("version: 1", r"stages: expected a list of stages"),
    "a list": ("- prune", r"a recipe is a mapping"),
    "not YAML": ("a: [", r"not YAML"),
    "twice": (stages("{prune: {sparsity: 0.5, sparsity: 0.6}}"), "'sparsity' is there twice"),
    "gate value": (stages("{gate: {sparsity: 2}}"), r"stages\[0\]\.gate: sparsity=2 must be a number from 0 to below 1"),
    "distill value": (stages("{distill: {steps: -3}}"), r"stages\[0\]\.distill: steps=-3 must be"),
    "reorder value": (stages("{reorder: {pattern: 4x1}}"), r"stages\[0\]\.reorder: reorder_ is for patterns n:m"),
    "typo above": ("version: 1\nstage: []", r"\.stage: unknown field.*'stages'"),
    "typo in a stage": (stages("{prun: {}}"), r"stages\[0\]\.prun: unknown field.*'prune'"),
    "typo in a field": (
        "version: 1\nstages: [{prune: {sparsty: 1}}]",
        r"stages\[0\]\.prune\.sparsty: unknown field.*'sparsity'",
    ),
    "another library's word": (stages("{prune: {amount: 0.5}}"), r"prune\.amount: .*sparsity= is the fraction"),
    "type": (stages("{prune: {sparsity: half}}"), r"prune\.sparsity: expected float or null, got str"),
    "bool as a number": (stages("{shrink: {channels: true}}"), r"shrink\.channels: expected float .*got bool"),
    "type inside": (
        "version: 1\nstages: [{prune: {sparsity: 1, include: [2]}}]",
        r"prune\.include\[0\]: expected str, got int",
    ),
    "value": (stages("{prune: {sparsity: 1.5}}"), r"stages\[0\]\.prune: sparsity=1\.5 must be a fraction"),
    "criterion": (stages("{prune: {criterion: wandaa, sparsity: 0.5}}"), r"Did you mean 'wanda'"),
    "spread": (stages("{prune: {sparsity: 0.5, spread: erc}}"), r"Did you mean 'erk'"),
    "method": (stages("{prune: {sparsity: 0.5, method: sparsegtp}}"), r"'sparsegpt'"),
    "method with code": (
        "version: 1\nstages: [{prune: {sparsity: 0.5, method: 'sparsegpt(open(1))'}}]",
        r"neither a plain value",
    ),
    "loss": (stages("{prune: {sparsity: 0.5, loss: crossentropy}}"), r"'cross_entropy'"),
    "class": (stages("{prune: {sparsity: 0.5, types: [Linaer]}}"), r"'Linear'"),
    "choice": (stages("{compress: {objective: sped}}"), r"expected speed or size, got 'sped'.*'speed'"),
    "target of shrink": (
        stages("{shrink: {channels: 1.5}}"),
        r"stages\[0\]\.shrink: channels=1\.5 is the fraction that remains",
    ),
    "no target of shrink": (stages("{shrink: {refit: true}}"), r"shrink needs one of channels="),
    "method of gate": (stages("{gate: {sparsity: 0.5, method: topp}}"), r"gate\.method: expected threshold or topk.*'topk'"),
    "data": (stages("{prune: {sparsity: 0.5, data: [1]}}"), r"prune\.data: expected null"),
    "optimizer": (stages("{shrink: {channels: 0.5, optimizer: adam}}"), r"not part of a recipe"),
    "two kinds in one stage": (stages("{prune: {sparsity: 0.5}, shrink: {}}"), r"stages\[0\]: expected one of"),
    "no mapping": (stages("{prune: 0.5}"), r"prune: expected a mapping of arguments"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe_is_refused_with_its_path(name, tmp_path):
    text, message = WRONG[name]
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        sc.Recipe.load(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_and_an_unknown_name_give_the_known_ones():
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'wanda-2-4'"):
        sc.Recipe.load("wanda-24")


def test_numbers_and_patterns_need_no_quotes():
    """PyYAML alone reads 2:4 as 124, and 1e-4 as text."""
    made = sc.Recipe.parse("version: 1\nstages: [{prune: {pattern: 2:4}}, {distill: {lr: 1e-4, steps: 8, holdout: .5}}]")
    assert made.stages[0].arguments == {"pattern": "2:4"}
    assert made.stages[1].arguments == {"lr": 1e-4, "steps": 8, "holdout": 0.5}
    assert sc.Recipe.parse(str(made)) == made


def test_fields_are_replaced_by_path():
    made = recipe({"shrink": {"channels": 0.5}}, {"prune": {"sparsity": 0.5}}, {"prune": {"sparsity": 0.6}})
    assert made.replace("shrink.channels", 0.7).stages[0].arguments == {"channels": 0.7}
    assert made.replace("stages[2].prune.sparsity", 0.7).stages[2].arguments == {"sparsity": 0.7}
    assert made.replace("stages[1].scope", "row").stages[1].arguments == {"sparsity": 0.5, "scope": "row"}
    with pytest.raises(ValueError, match="several stages"):
        made.replace("prune.sparsity", 0.7)
    with pytest.raises(ValueError, match=r"no field.*shrink\.channels"):
        made.replace("shrink.chanels", 0.7)
    with pytest.raises(ValueError, match=r"sparsity=7 must be"):
        made.replace("stages[1].sparsity", 7)


def test_the_package_works_without_msgspec_and_yaml():
    """Only reading and writing recipes needs them."""
    code = """
import sys
sys.modules["msgspec"] = sys.modules["yaml"] = None
import torch, secateur as sc, tempfile
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
sc.prune_(model, sparsity=0.5)
sc.save(model, tempfile.mkdtemp())
sc.Recipe
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recipes_are_in_the_wheel():
    """They lie beside the code, in the folder that the wheel takes whole."""
    import secateur.recipes

    folder = Path(secateur.recipes.__file__).parent
    assert {file.stem for file in folder.glob("*.yaml")} == set(shipped())
    assert len(shipped()) >= 5
