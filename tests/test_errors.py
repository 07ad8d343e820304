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
        ("Prunner", "no attribute 'Prunner'. Did you mean 'Pruner'"),
        ("input_first", "no attribute 'input_first'. It is now secateur.layers.input_first."),
    ],
)
def test_names_that_the_package_does_not_have_get_a_hint(name, says):
    with pytest.raises(AttributeError, match=re.escape(says)):
        getattr(sc, name)


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
    why = "excluded: exclude='linear' keeps the size of linear.weight[1], and embed.weight[0], embed.bias[0]"
    assert plan.skipped["embed.weight[0]"].startswith(why)
    assert plan.skipped["embed.weight[0]"].endswith("have the same units")
    assert why in str(plan)


def test_exclude_of_all_members_of_a_group_needs_no_explanation():
    _, plan = sc.shrink(Residual(), X, channels=0.5, exclude=["blocks.0"])
    assert plan.skipped["blocks.0.0.weight[0]"] == "excluded"
    with pytest.raises(
        ValueError, match=r"exclude='blocks\.\*' keeps the size of blocks\.0\.0\.weight\[1\], and embed\.weight\[0\]"
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
