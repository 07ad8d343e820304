"""Mistakes that new users make are answered in our words: what was given, what was expected, what to do."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


CALLS = {
    "prune_": lambda model, **data: sc.prune_(model, sc.taylor, sparsity=0.5, **data),
    "Pruner": lambda model, **data: sc.Pruner(model, sc.taylor, sparsity=0.5, **data).attach(
        torch.optim.SGD(model.parameters(), 0.1)
    ),
    "shrink_": lambda model, **data: sc.shrink_(model, X, sc.taylor, channels=0.5, **data),
}
LOSSES = {
    "no target": (
        {"data": [X], "loss": F.cross_entropy},
        ValueError,
        r"has no target.*let data= give pairs \(inputs, target\)",
    ),
    "no target, from a loader": (
        {"data": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), 6), "loss": F.cross_entropy},
        ValueError,
        r"has no target.*let data= give pairs \(inputs, target\)",
    ),
    "wrong target": ({"data": [(X, Y[:3])], "loss": F.cross_entropy}, ValueError, r"output .*\(6, 4\).* the target .*\(3,\)"),
    "one pair": ({"data": (X, Y), "loss": F.cross_entropy}, TypeError, r"\(6, 8\) and \(6,\).*data=\[\(inputs, target\)\]"),
    "one pair in a list": ({"data": [X, Y], "loss": F.cross_entropy}, TypeError, r"data=\[\(inputs, target\)\]"),
    "class": ({"data": [(X, Y)], "loss": nn.CrossEntropyLoss}, TypeError, r"is a class; .*loss=CrossEntropyLoss\(\)"),
    "one argument": (
        {"data": [(X, Y)], "loss": lambda output: output.sum()},
        TypeError,
        "two arguments, the model's output and",
    ),
    "module with one argument": (
        {"data": [(X, Y)], "loss": nn.Softmax(-1)},
        TypeError,
        "two arguments, the model's output and",
    ),
    "inputs elsewhere": (
        {"data": [(X.to("meta"), Y)], "loss": F.cross_entropy},
        ValueError,
        "the inputs are on meta and the model on cpu",
    ),
    "target elsewhere": (
        {"data": [(X, Y.to("meta"))], "loss": F.cross_entropy},
        ValueError,
        "the inputs are on meta and the model on cpu",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mistake", LOSSES)
def test_mistakes_in_data_and_loss_are_explained(model, call, mistake):
    given, error, says = LOSSES[mistake]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=says):
        CALLS[call](model, **given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, lambda *both: 2 * F.cross_entropy(*both)])
def test_any_loss_of_two_arguments_is_accepted(model, loss):
    assert sc.prune_(model, sc.taylor, sparsity=0.5, data=[(X, Y)], loss=loss).metrics()["sparsity"] == 0.5


@pytest.mark.parametrize(
    "data", [(X, X + 1), [X[:4], X[4:]], ((X, Y), (X, Y)), [(X, Y)]], ids=["tuple", "sizes", "pairs", "one"]
)
def test_two_batches_are_not_taken_for_a_pair(model, data):
    assert sc.prune_(model, sc.wanda, sparsity=0.5, data=data).metrics()["sparsity"] == 0.5


@pytest.mark.parametrize("criterion", [sc.wanda, sc.synflow], ids=str)
def test_inputs_on_another_device_are_named_without_a_loss(model, criterion):
    with pytest.raises(ValueError, match="the inputs are on meta and the model on cpu; move one of them"):
        sc.prune_(model, criterion, sparsity=0.5, data=[X.to("meta")])


def test_gates_name_inputs_on_another_device(model):
    with pytest.raises(ValueError, match="the inputs are on meta and the model on cpu; move one of them"):
        sc.gate_(model, at="0", data=[X.to("meta")])


def test_shrink_names_example_inputs_on_another_device(model):
    model.insert(0, Values())
    with pytest.raises(ValueError, match="the inputs are on meta and the model on cpu; move one of them"):
        sc.shrink(model, X.to("meta"), channels=0.5)


class Values(nn.Module):
    """Reads the values of its input, which tensors on the meta device do not have."""

    def forward(self, x):
        return x if float(x.sum()) > 0 else -x


def test_a_state_dict_of_a_model_names_decompress(model):
    with pytest.raises(TypeError, match=r"not a model \(Sequential\).*decompress_\(copy.deepcopy\(model\)\).state_dict\(\)"):
        sc.dense_state_dict(model)
    with pytest.raises(TypeError, match="not int"):
        sc.dense_state_dict(3)


FOREIGN = [
    (lambda model: sc.prune_(model, amount=0.5), "prune_ has no argument amount=; sparsity= .* count="),
    (lambda model: sc.plan(model, amount=0.5), "plan has no argument amount=; sparsity="),
    (lambda model: sc.Pruner(model, amount=0.5), "Pruner has no argument amount=; sparsity="),
    (lambda model: sc.gate_(model, amount=0.5), "gate_ has no argument amount=; sparsity="),
    (lambda model: sc.prune_(model, pruning_ratio=0.5), "pruning_ratio=; sparsity="),
    (lambda model: sc.prune_(model, sparsity=0.5, round_to=8), "round_to=; sc.shrink.*multiple_of="),
    (lambda model: sc.prune_(model, sparsity=0.5, ignored_layers=[model[0]]), "ignored_layers=; exclude="),
    (lambda model: sc.prune_(model, sparsity=0.5, global_pruning=True), 'global_pruning=; scope="global"'),
    (lambda model: sc.prune_(model, importance="taylor", sparsity=0.5), "importance=; criterion="),
    (lambda model: sc.prune_(model, "wanda", sparsity=0.5, calibration=[X]), "calibration=; data= takes batches"),
    (lambda model: sc.prune_(model, ratio=0.5), "ratio=; sparsity="),
    (lambda model: sc.prune_(model, sparsity=0.5, ignore="0"), "ignore=; exclude="),
    (lambda model: sc.prune_(model, heads=0.5), "heads=; sc.shrink removes attention heads"),
    (lambda model: sc.prune_(model, sparsity=0.5, schedule=sc.cubic(0.9, end=9)), r"schedule=; sc.Pruner.*sc\.cubic\(0\.9"),
    (lambda model: sc.Pruner(model, sparsity=0.5, epochs=9), r"epochs=; sparsity= takes a schedule"),
    (lambda model: sc.cubic(0.9, steps=9), "cubic has no argument steps=; end="),
    (lambda model: sc.shrink(model, X, include="0"), r"include=; channels= takes ratios by name"),
    (lambda model: sc.gate_(model, include="0"), "include=; at="),
    (lambda model: sc.compress_(model, data=[X]), "compress_ has no argument data=; example_inputs="),
    (lambda model: sc.bench(model, X, repeats=3), "bench has no argument repeats=; seconds="),
    (lambda model: sc.search(model, len, sparsity=0.5), r"search has no argument sparsity=; .*vary="),
    (lambda model: sc.sensitivity(model, len, sparsity=0.5), "sensitivity has no argument sparsity=; levels="),
    (lambda model: sc.report(before=model, after=model, inputs_=X), "report has no argument inputs_=. Did you mean"),
    (lambda model: sc.prune_(model, sparsty=0.5), "no argument sparsty=. Did you mean 'sparsity'"),
    (lambda model: sc.prune_(model, something_else=0.5), r"no argument something_else=\.$"),
    *(
        (lambda model, shrink=shrink, given=given: shrink(model, X, **given), f"{shrink.__name__} has no argument {says}")
        for shrink in (sc.shrink, sc.shrink_)
        for given, says in (
            ({"amount": 0.3}, "amount=; channels=, .* is the fraction that remains"),
            ({"pruning_ratio": 0.3}, "pruning_ratio=; channels=, .* is the fraction that remains"),
            ({"sparsity": 0.3}, "sparsity=; channels=, .* is the fraction that remains"),
            ({"channels": 0.5, "round_to": 8}, "round_to=; multiple_of="),
            ({"chanels": 0.5}, "chanels=. Did you mean 'channels'"),
            ({"ratio": 0.5}, "ratio=; channels="),
            ({"heads": 0.5}, "heads=; channels= .* removes attention heads"),
            ({"calibration": [X], "channels": 0.5}, "calibration=; data="),
        )
    ),
]


@pytest.mark.parametrize(("call", "says"), FOREIGN, ids=[says for _, says in FOREIGN])
def test_arguments_of_other_libraries_get_a_hint(model, call, says):
    with pytest.raises(TypeError, match=says):
        call(model)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("prune", "no attribute 'prune'. prune_ changes the model in place. plan only computes what it would do."),
        ("compress", "no attribute 'compress'. compress_ changes the model in place."),
        ("rotate", "no attribute 'rotate'. rotate_ changes the model in place."),
        ("Prunner", "no attribute 'Prunner'. Did you mean 'Pruner'"),
        ("input_first", "no attribute 'input_first'. It is now secateur.layers.input_first."),
        *((name, f"no attribute '{name}'. It is secateur.methods.{name}.") for name in dir(sc.methods) if name.islower()),
    ],
)
def test_names_that_the_package_does_not_have_get_a_hint(name, says):
    with pytest.raises(AttributeError, match=re.escape(says)):
        getattr(sc, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [("wanda", "'wanda' is a criterion and not a method: it is sc.wanda"), ("sparsgpt", "Did you mean 'sparsegpt'?")],
)
def test_names_that_the_methods_do_not_have_get_a_hint(name, says):
    with pytest.raises(AttributeError, match=re.escape(says)):
        getattr(sc.methods, name)


def test_an_operation_that_no_criterion_has_names_the_reader():
    with pytest.raises(ValueError, match=r"'wanda' is no operation; .*sc\.criterion\('wanda'\)"):
        sc.Criterion("wanda")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: recipe().save(3), "Recipe.save takes the path of a file, not int"),
        (lambda: recipe().run("model"), "a recipe runs on a torch.nn.Module, not str"),
        (lambda: sc.Recipe.of("model"), "a recipe runs on a torch.nn.Module, not str"),
    ],
    ids=["Recipe.save", "Recipe.run", "Recipe.of"],
)
def test_mistakes_with_recipes_are_named(call, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda model: sc.gate_(model, 0.5), "gate_ takes model by position, and 2 values were given; .* sparsity=, at="),
        (lambda model: sc.bench(model, model, X), "bench takes model and example_inputs by position, and 3 values"),
        (lambda model: sc.cubic(0.9, 1000), "cubic takes final by position, and 2 values were given; .*end="),
        (
            lambda model: recipe().run(model, X),
            "Recipe.run takes model by position, and 2 values were given; .*example_inputs=",
        ),
    ],
    ids=["gate_", "bench", "cubic", "Recipe.run"],
)
def test_too_many_positional_arguments_name_the_keywords(model, call, says):
    with pytest.raises(TypeError, match=says):
        call(model)


def recipe():
    return sc.Recipe.of_stages([{"shrink": {"channels": 0.5}}])


def agreement(model):
    return 1.0


@pytest.mark.parametrize(
    "call",
    [
        lambda model, **given: sc.report(before=model, after=model, seconds=0, disk=False, **given),
        lambda model, **given: sc.search(model, agreement, **given),
        lambda model, **given: recipe().run(model, **given),
        lambda model, **given: sc.shrink(model, channels=0.5, **given),
        lambda model, **given: sc.bench(model, seconds=0, **given),
    ],
    ids=["report", "search", "Recipe.run", "shrink", "bench"],
)
def test_inputs_is_an_old_name_of_example_inputs(model, call):
    call(model, example_inputs=X)
    with pytest.warns(FutureWarning, match=r"inputs= is called example_inputs= now"):
        call(model, inputs=X)
    with pytest.raises(TypeError, match="has no argument inputs="):
        call(model, inputs=X, example_inputs=X)


WRONG_PLACE = [
    ({"criterion": "flow", "sparsity": 0.5}, r"criterion='flow' is a method .*pass method='flow'"),
    ({"criterion": "sparsegpt(damp=0.1)", "sparsity": 0.5}, r"pass method='sparsegpt\(damp=0\.1\)'"),
    ({"criterion": sc.methods.sparsegpt(), "sparsity": 0.5}, r"is a method; pass it as method="),
    ({"criterion": "erk", "sparsity": 0.5}, r"pass spread='erk'"),
    ({"criterion": "2:4"}, r"pass pattern='2:4'"),
    ({"criterion": 0.5}, r"criterion=0\.5 is a number; .*pass sparsity=0\.5"),
    ({"method": "wanda", "sparsity": 0.5}, r"wanda is a criterion; pass it as criterion="),
    ({"method": sc.methods.sparsegpt, "sparsity": 0.5}, r"Call it: sc\.methods\.sparsegpt\(\)"),
    ({"sparsity": {"0": 0.5}}, r"pass spread=\{'0': 0\.5\}"),
    ({"sparsity": "2:4"}, r"pass pattern='2:4'"),
    ({"sparsity": 50}, r"50 % is 0\.5"),
    ({"sparsity": "50%"}, r"50 % is 0\.5"),
]


@pytest.mark.parametrize(("given", "says"), WRONG_PLACE, ids=[says for _, says in WRONG_PLACE])
def test_a_value_in_the_wrong_argument_names_the_right_one(model, given, says):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=says):
        sc.prune_(model, **given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_percent_is_answered_with_the_fraction(model):
    for given, says in ((50, "50 % is 0.5"), ("50%", "50 % is 0.5"), (1.5, "1.5 % is 0.015")):
        with pytest.raises(ValueError, match=says):
            sc.gate_(model, sparsity=given, method="topk")
        with pytest.raises(ValueError, match=says):
            sc.shrink(model, X, params=given)
    with pytest.raises(ValueError, match=r"input elements to zero$"):
        sc.gate_(model, sparsity=-1, method="topk")


def test_a_compiled_model_is_shrunk_before_torch_compile(model):
    for shrink in (sc.shrink, sc.shrink_):
        with pytest.raises(ValueError, match=r"shrink the model before torch\.compile, or pass model\._orig_mod"):
            shrink(torch.compile(model), X, params=0.8)
        with pytest.raises(ValueError, match=r"module '0' is compiled; shrink the model before torch\.compile$"):
            shrink(nn.Sequential(torch.compile(nn.Linear(8, 4)), nn.Linear(4, 2)), X, params=0.8)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        return self.head(self.fc(self.embed(input_ids)).relu())


MASKED_CALLS = {
    "wanda": lambda model, data: sc.plan(model, "wanda", sparsity=0.5, data=data),
    "flow": lambda model, data: sc.plan(model, method="flow", sparsity=0.5, data=data),
    "loss": lambda model, data: sc.plan(model, method="loss", sparsity=0.5, data=data),
    "refit": lambda model, data: sc.shrink(model, data[0], channels=0.5, data=data, refit=True),
    "distill": lambda model, data: sc.distill_(model, copy.deepcopy(model), data, holdout=data, steps=1),
}


@pytest.mark.parametrize("name", MASKED_CALLS)
def test_a_mask_of_another_shape_than_the_tokens_is_refused(name):
    model, ids = Tokens(), torch.arange(14).view(2, 7) % 9
    good = {"input_ids": ids, "attention_mask": torch.ones(2, 7).long()}
    for shape in ((2, 5), (2, 9), (1, 7)):
        bad = {"input_ids": ids, "attention_mask": torch.ones(shape).long()}
        shown = re.escape(
            f"batch 2 of data= (counted from 1): attention_mask has the shape {shape} and input_ids the shape (2, 7)"
        )
        with pytest.raises(ValueError, match=shown):
            MASKED_CALLS[name](model, [good, bad])
    square = {"input_ids": ids, "attention_mask": torch.ones(7, 7).tril().bool()}  # which position reads which
    longer = {"input_ids": ids, "attention_mask": torch.ones(2, 9).long(), "past_key_values": (torch.zeros(2, 2),)}
    for batch in (good, square, longer) if name not in ("refit", "distill") else (good,):
        MASKED_CALLS[name](model, [batch])


@pytest.mark.parametrize("name", MASKED_CALLS)
def test_a_mask_that_excludes_every_position_is_refused(name):
    model, ids = Tokens(), torch.arange(14).view(2, 7) % 9
    batch = {"input_ids": ids, "attention_mask": torch.zeros(2, 7).long()}
    shown = r"batch 2 of data= \(counted from 1\): attention_mask excludes every position"
    with pytest.raises(ValueError, match=shown):
        MASKED_CALLS[name](model, [{"input_ids": ids}, batch])


def test_regular_expressions_are_told_from_globs(model):
    with pytest.raises(ValueError, match=r"include='re:\.\*q_proj' .*globs .*not by regular expressions"):
        sc.prune_(model, sparsity=0.5, include="re:.*q_proj")


def test_a_glob_of_a_container_suggests_its_layers():
    block = nn.Sequential()
    block.add_module("mlp", nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"at='\*\.mlp' .*did you mean '\*\.mlp\.\*'"):
        sc.gate_(nn.Sequential(block), at="*.mlp", data=[X])


def test_a_method_without_data_says_what_it_needs(model):
    with pytest.raises(ValueError, match=r"needs inputs, so pass data="):
        sc.prune_(model, sparsity=0.5, method="flow")


def test_a_spread_with_another_signature_is_named(model):
    with pytest.raises(TypeError, match=r"spread= is called with two arguments, the scores .* and the total sparsity"):
        sc.prune_(model, sparsity=0.5, spread=lambda scores: 0.5)


def test_the_state_of_a_pruner_is_a_mapping(model):
    with pytest.raises(TypeError, match=r"the mapping that state_dict\(\) returned, not NoneType"):
        sc.Pruner(model, sparsity=0.5).load_state_dict(None)


@pytest.mark.parametrize("value", ["good", None, {}])
def test_evaluate_of_a_report_returns_a_number(model, value):
    with pytest.raises(ValueError, match=r"evaluate returned .*must return a finite number, or \(value, low, high\)"):
        sc.report(before=model, after=model, evaluate=lambda _: value, seconds=0, disk=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: sc.prune_(model, sparsity=0.5, include="linear_in"),
        lambda model: sc.prune_(model, sparsity=0.5, exclude="linear_in"),
        lambda model: sc.prune_(model, spread={"linear_in": 0.5}, sparsity=0.1),
        lambda model: sc.shrink(model, X, channels=0.5, exclude="linear_in"),
        lambda model: sc.gate_(model, at="linear_in", data=[X]),
        lambda model: sc.sensitivity(model, agreement, by={"a": "linear_in"}),
    ],
    ids=["include", "exclude", "spread", "shrink", "gate_", "sensitivity"],
)
def test_the_end_of_a_name_suggests_the_glob(call):
    block = nn.Sequential()
    block.add_module("linear_in", nn.Linear(8, 8))
    block.add_module("linear_out", nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"did you mean '\*\.linear_in(\.\*)?'"):
        call(nn.Sequential(block))


def pruned(model):
    sc.prune_(model, sparsity=0.9)
    return model


WRONG_SHAPE = torch.randn(5, 7)
RUNS = {
    "bench": lambda model: sc.bench({"first": model, "second": model}, WRONG_SHAPE),
    "compress_": lambda model: sc.compress_(pruned(model), WRONG_SHAPE),
    "shrink": lambda model: sc.shrink(model, WRONG_SHAPE, channels=0.5),
    "verify": lambda model: sc.shrink(model, X, channels=0.5)[1].verify(WRONG_SHAPE),
    "to_onnx": lambda model: sc.to_onnx(model, WRONG_SHAPE, "nothing.onnx"),
    "wanda": lambda model: sc.prune_(model, "wanda", sparsity=0.5, data=[WRONG_SHAPE]),
    "synflow": lambda model: sc.prune_(model, "synflow", sparsity=0.5, data=[WRONG_SHAPE]),
    "reconstruction": lambda model: sc.shrink(model, X, sc.reconstruction, channels=0.5, data=[WRONG_SHAPE]),
    "measured": lambda model: sc.gate_(model, data=[X]).measured(WRONG_SHAPE),
}


@pytest.mark.parametrize("run", RUNS)
def test_inputs_of_the_wrong_shape_are_reported_as_they_were_given(model, run):
    with pytest.raises(ValueError, match=r"Sequential does not run on .*\(5, 7\).*\(5x7 and 8x16\)"):
        RUNS[run](model)


def test_a_target_among_the_example_inputs_is_named(model):
    with pytest.raises(ValueError, match=r"does not run on the example inputs .*\(6, 8\), \(6,\).*a target is not among them"):
        sc.compress_(pruned(model), (X, Y))


@pytest.mark.parametrize("given", [[1], (1,), None, {}, {1: 1}], ids=["list", "tuple", "None", "empty", "numbers"])
def test_bench_says_how_several_models_are_passed(model, given):
    models = given if not given else {1: model} if isinstance(given, dict) else type(given)([model, model])
    with pytest.raises(TypeError, match=r'mapping of names to modules .*"dense": model'):
        sc.bench(models, X)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seconds": "a"}, "seconds='a'"),
        ({"seconds": -1}, "seconds=-1"),
        ({"threads": 0}, "threads=0"),
        ({"threads": "2"}, "threads='2'"),
    ],
    ids=str,
)
def test_bench_checks_its_numbers(model, options, says):
    with pytest.raises(ValueError, match=says):
        sc.bench(model, X, **options)


def test_bench_names_the_models_that_it_timed(model):
    found = sc.bench({"dense": model}, X, seconds=0)
    with pytest.raises(KeyError, match="no model 'sparse' was timed, only 'dense'"):
        found.ratio("dense", "sparse")


@pytest.mark.parametrize(
    "call",
    [
        lambda model, data: sc.prune_(model, "wanda", sparsity=0.5, data=data),
        lambda model, data: sc.gate_(model, data=data),
        lambda model, data: sc.distill_(model, copy.deepcopy(model), data),
    ],
    ids=["prune_", "gate_", "distill_"],
)
def test_a_dataset_without_a_loader_gets_a_hint(model, call):
    with pytest.raises(TypeError, match=r"TensorDataset gives single samples; pass torch\.utils\.data\.DataLoader"):
        call(model, torch.utils.data.TensorDataset(X, Y))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"evaluate": 0.9}, "evaluate=0.9 must be a function"),
        ({"other_inputs": X}, "other_inputs= maps words"),
        ({"data": [X]}, "data= is the name of the data"),
        ({"seconds": "a"}, "seconds='a'"),
        ({"sweep": 3}, "sweep= is a mapping"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_report_checks_its_arguments(model, options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        sc.report(before=model, after=model, **{"seconds": 0, **options})


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.linear(x)


def test_exclude_says_which_tensor_froze_the_residual_stream():
    _, plan = sc.shrink(Residual(), X, channels=0.5, exclude=["linear"])
    why = (
        "excluded: exclude='linear' keeps the size of linear.weight[1], which has the same units as embed.weight[0], embed.bias"
    )
    assert plan.skipped["embed.weight[0]"].startswith(why)
    assert why in str(plan)


def test_exclude_of_all_members_of_a_group_needs_no_explanation():
    _, plan = sc.shrink(Residual(), X, channels=0.5, exclude=["blocks.0"])
    assert plan.skipped["blocks.0.0.weight[0]"] == "excluded"
    with pytest.raises(
        ValueError,
        match=r"exclude='blocks\.\*' keeps the size of blocks\.0\.0\.weight\[1\], which has the .* embed\.weight\[0\]",
    ):
        sc.shrink(Residual(), X, channels=0.5, exclude=["blocks.*"])


# --- a pair whose second element is an input ------------------------------------------------------------------------


class Masked(nn.Module):
    """Takes a mask beside its input, as language models do."""

    def __init__(self, masked=True):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        if not masked:
            self.forward = self.plain

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x).relu()
        return x if mask is None else x * mask

    def plain(self, x):
        return Masked.forward(self, x)


PAIR = (torch.randn(3, 5, 8), torch.ones(3, 5, 1))
USES = {
    "wanda": lambda m, data: sc.plan(m, sc.wanda, sparsity=0.5, data=data),
    "sparsegpt": lambda m, data: sc.plan(m, sparsity=0.5, method="sparsegpt", data=data),
    "gate_": lambda m, data: sc.gate_(m, data=data),
    "refit": lambda m, data: sc.shrink(m, PAIR[0], channels=0.5, refit=True, data=data),
}


@pytest.mark.parametrize("use", USES)
def test_a_pair_whose_second_element_may_be_an_input_warns(use):
    with pytest.warns(UserWarning, match=r"a batch of data= is a pair.*Masked also takes 'mask'.*pass mappings"):
        USES[use](Masked(), [PAIR])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Masked(), {"x": PAIR[0], "mask": PAIR[1]}),
        (Masked(), (PAIR[0], torch.zeros(3))),  # one number for each sample is a target
        (Masked(masked=False), PAIR),  # the model takes one input
    ],
    ids=["mapping", "targets", "one input"],
)
def test_other_batches_do_not_warn(use, model, batch):
    USES[use](copy.deepcopy(model), [batch])


def test_a_pair_for_a_loss_does_not_warn():
    sc.plan(Masked(), sc.taylor, sparsity=0.5, data=[(PAIR[0], torch.zeros(3, 5, 8))], loss=nn.functional.mse_loss)


LONG = [{"x": torch.arange(1000).view(10, 100)} for _ in range(20)]
WRONG_PLACES = {
    "batches as the pattern of reorder_": (
        lambda model: sc.reorder_(model, LONG),
        r"reorder_ takes a pattern such as '2:4' as its second argument, not list; pass batches as data=",
    ),
    "batches as a pattern": (lambda model: sc.prune_(model, pattern=LONG), "pattern .* is not understood"),
    "batches as evaluate": (lambda model: sc.sensitivity(model, LONG), "evaluate=.* must be a function"),
    "a fraction as the criterion of shrink": (
        lambda model: sc.shrink(model, X, 0.5),
        "criterion=0.5 is a number; to keep this fraction pass params=0.5",
    ),
    "a plan of another model": (
        lambda model: sc.plan(nn.ModuleDict({str(i) + "x": nn.Linear(2, 2) for i in range(9)}), sparsity=0.5).apply_(model),
        r"no '0x.weight' \(9 such tensors\); this plan is of another model",
    ),
    "the target flow as the method": (
        lambda model: sc.prune_(model, method=sc.methods.flow, sparsity=0.5, data=[X]),
        "method=sc.methods.flow is not a method.*It is a target of sc.methods.admm; pass method='flow'",
    ),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_an_argument_in_the_wrong_place_is_named_in_few_words(model, name):
    call, message = WRONG_PLACES[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call(model)
    assert len(str(caught.value)) < 500


def test_lists_of_tokens_are_answered_with_return_tensors():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids):
            return self.fc(self.embed(input_ids))

    with pytest.raises(ValueError, match=r"'input_ids' must be tensors; tokenizers return them with return_tensors='pt'"):
        sc.prune_(Tokens(), sc.wanda, sparsity=0.5, data=[{"input_ids": [[1, 2, 3]]}])


@pytest.mark.parametrize(
    ("how", "used"),
    [({}, False), ({"spread": sc.erk}, False), ({"criterion": sc.wanda}, True), ({"method": "flow"}, True)],
    ids=["magnitude", "erk", "wanda", "flow"],
)
def test_a_plan_notes_data_that_it_did_not_use(model, how, used):
    plan = sc.plan(model, sparsity=0.5, data=[X], **how)
    assert ("nothing read it" in str(plan)) is not used
    assert "nothing read it" not in str(sc.plan(model, sparsity=0.5))


@pytest.mark.parametrize("how", [{"criterion": sc.wanda}, {"method": "flow"}], ids=["wanda", "flow"])
def test_tokens_on_the_meta_device_are_refused(how):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    batches = [torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long, device="meta")]
    with pytest.raises(ValueError, match=r"batch 2 of data= .* is on the meta device, so it holds no values"):
        sc.prune_(model, sparsity=0.5, data=batches, **how)


@pytest.mark.parametrize(
    ("how", "used"),
    [
        ({}, False),
        ({"criterion": sc.fpgm}, False),
        ({"criterion": sc.wanda}, True),
        ({"criterion": sc.reconstruction}, True),
        ({"refit": True}, True),
    ],
    ids=["magnitude", "fpgm", "wanda", "reconstruction", "refit"],
)
def test_a_cut_notes_data_that_it_did_not_use(model, how, used):
    _, plan = sc.shrink(model, X, channels=0.5, data=[X], **how)
    assert ("nothing read it" in str(plan)) is not used


def test_a_loader_as_example_inputs_is_told_to_give_one_batch(model):
    loader = torch.utils.data.DataLoader([{"x": row, "y": row} for row in X], batch_size=2)
    with pytest.raises(ValueError, match=r"\(8,\)\] and 16 more\).*pass one batch: next\(iter\(loader\)\)"):
        sc.shrink(model, loader, channels=0.5)


def test_a_criterion_without_a_similar_name_lists_all_names(model):
    with pytest.raises(ValueError, match=r"'l1' is neither evidence nor a criterion\. Criteria are magnitude, .*wanda"):
        sc.prune_(model, "l1", sparsity=0.5)
