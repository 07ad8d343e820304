"""States of a `Pruner`: the recipe is compared, and names do not depend on torch.compile or other wrappers."""

import pytest
import torch
from torch import nn

import secateur as sc

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))


def half(step):
    return min(0.5, step / 10)


class Staircase:
    def __init__(self, height):
        self.height = height

    def __call__(self, step):
        return min(self.height, step // 5 / 10)


def loaded(saved, own):
    """A state of a pruner with the arguments `saved` after three steps, loaded into one with the arguments `own`."""
    model = net()
    first, second = sc.Pruner(model, **saved), sc.Pruner(net(), **own)
    for _ in range(3):
        model(X).square().mean().backward()
        first.step()
    second.load_state_dict(first.state_dict())
    return first, second


SAME = [
    {"sparsity": 0.5},
    {"sparsity": sc.cubic(0.9, start=1, end=8, every=2), "scope": "global"},
    {"sparsity": half},
    {"sparsity": 0.5, "spread": sc.erk},
    {"sparsity": 0.5, "spread": sc.owl(0.1)},
    {"spread": {"0.weight": 0.5, "2.weight": half}},
    {"sparsity": 0.5, "grow": abs(sc.grad), "swap": sc.cosine(0.0, initial=0.3, end=10)},
    {"sparsity": sc.join((0, sc.linear(0.2, end=2)), (4, half))},
    {"pattern": "2:4", "ste": True},
]


@pytest.mark.parametrize("recipe", SAME, ids=[str(number) for number in range(len(SAME))])
def test_a_state_of_the_same_recipe_loads(recipe):
    first, second = loaded(recipe, recipe)
    assert first.masks == second.masks


def test_functions_of_the_step_are_compared_by_value_not_by_name():
    """The text of a lambda, or of an object with its address, is another in every run."""
    loaded({"sparsity": lambda step: step / 10}, {"sparsity": lambda step: step / 10})
    loaded({"sparsity": Staircase(0.5)}, {"sparsity": Staircase(0.5)})
    swap = {"sparsity": 0.5, "grow": abs(sc.grad)}
    loaded({**swap, "swap": Staircase(0.5)}, {**swap, "swap": Staircase(0.5)})
    with pytest.raises(ValueError, match=r"0\.3 at step 3.*0\.15 at step 3"):
        loaded({"sparsity": lambda step: step / 10}, {"sparsity": lambda step: step / 20})


OTHER = [
    ({"sparsity": 0.5}, {"sparsity": 0.6}, "sparsity is 0.5 in the state and 0.6 here"),
    (
        {"sparsity": sc.cubic(0.9, end=10)},
        {"sparsity": sc.cubic(0.9, end=20)},
        "sparsity is cubic(0.9, start=0, end=10, every=1, initial=0.0) in the state and cubic(0.9, start=0, end=20",
    ),
    ({"sparsity": 0.5}, {"sparsity": 0.5, "pattern": "1x2"}, "pattern is unstructured in the state and 1x2 here"),
    ({"pattern": "2:4"}, {"pattern": "1:4"}, "pattern is 2:4 in the state and 1:4 here"),
    ({"sparsity": 0.5}, {"sparsity": 0.5, "scope": "global"}, "scope is tensor in the state and global here"),
    ({"sparsity": 0.5}, {"criterion": sc.movement, "sparsity": 0.5}, "criterion is abs(weight) in the state"),
    ({"sparsity": 0.5}, {"count": 5}, "count is None in the state and 5 here"),
    ({"sparsity": 0.5, "spread": sc.erk}, {"sparsity": 0.5}, "spread is erk in the state and None here"),
    (
        {"sparsity": 0.5, "spread": sc.owl(0.1)},
        {"sparsity": 0.5, "spread": sc.owl(0.2)},
        "spread is owl(0.1, 5.0) in the state and owl(0.2, 5.0) here",
    ),
    ({"spread": {"*": 0.5}}, {"spread": {"*": 0.4}}, "spread is {'*': '0.5'} in the state and {'*': '0.4'} here"),
    (
        {"sparsity": 0.5, "grow": abs(sc.grad), "swap": sc.linear(0.0, initial=0.3, end=9)},
        {"sparsity": 0.5, "grow": sc.random(0), "swap": sc.linear(0.0, initial=0.3, end=9)},
        "method is drop_and_grow(abs(grad), ",
    ),
    ({"sparsity": 0.5, "ste": True}, {"sparsity": 0.5}, "ste is True in the state and False here"),
    ({"sparsity": 0.5, "ste": True}, {"sparsity": 0.5, "ste": True, "every": 3}, "every is 1 in the state and 3 here"),
]


@pytest.mark.parametrize(("saved", "own", "words"), OTHER, ids=[words[:40] for _, _, words in OTHER])
def test_a_state_of_another_recipe_is_refused_with_the_differences_and_changes_nothing(saved, own, words):
    """It was accepted, and training went on with the masks of one recipe and the schedule of another."""
    model = net()
    first, second = sc.Pruner(net(1), **saved), sc.Pruner(model, **own)
    first.model(X).square().mean().backward()
    first.step()
    before, masks = {name: value.clone() for name, value in model.state_dict().items()}, second.masks
    with pytest.raises(ValueError, match="another recipe") as told:
        second.load_state_dict(first.state_dict())
    assert words in str(told.value)
    assert "Nothing has changed" in str(told.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert second.masks is masks


def test_all_differences_are_named():
    with pytest.raises(ValueError, match=r"pattern is .*; scope is .*; sparsity is "):
        loaded({"sparsity": 0.5}, {"sparsity": 0.25, "pattern": "1x2", "scope": "row"})


def test_a_state_with_a_recipe_loads_with_weights_only(tmp_path):
    pruner = sc.Pruner(net(), sparsity=sc.cubic(0.9, end=5), spread=sc.owl())
    pruner.step()
    torch.save(pruner.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["recipe"]["spread"] == "owl(0.08, 5.0)"
    sc.Pruner(net(), sparsity=sc.cubic(0.9, end=5), spread=sc.owl()).load_state_dict(state)


def test_a_state_taken_after_finish_is_still_one_of_a_straight_through_run():
    pruner = sc.Pruner(net(), sparsity=0.5, ste=True)
    pruner.step()
    pruner.finish()
    again = sc.Pruner(net(), sparsity=0.5, ste=True)
    again.load_state_dict(pruner.state_dict())
    assert again.masks == pruner.masks


# --- wrappers -------------------------------------------------------------------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_inside(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


class Wrapper(nn.Module):
    """As DistributedDataParallel and AveragedModel do it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


WRAPPERS = {"bare": lambda model: model, "compiled": compiled, "compiled inside": compiled_inside, "module": Wrapper}


@pytest.mark.parametrize("after", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
@pytest.mark.parametrize("keep_dense", [False, True])
def test_a_state_loads_whatever_wraps_the_two_models(before, after, keep_dense):
    """The names of a compiled model begin with `_orig_mod.`, so its state had "different tensors" for the bare one."""
    recipe = {"criterion": sc.movement, "sparsity": sc.linear(0.5, end=4, every=2), "keep_dense": keep_dense}
    first = sc.Pruner(WRAPPERS[before](net()), **recipe)
    optimizer = torch.optim.SGD(first.model.parameters(), lr=0.1)
    first.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        first.model(X).square().mean().backward()
        optimizer.step()
    second = sc.Pruner(WRAPPERS[after](net(3)), **recipe)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(first.masks.values(), second.masks.values(), strict=True))
    bare = [state["gathered"]["0.weight"]["grad"] for state in (one_names(first), one_names(second))]
    assert torch.equal(*bare)
    weights = [p for name, p in second.model.named_parameters() if name.endswith("weight")]
    assert all(not p[~mask].any() for p, mask in zip(weights, second.masks.values(), strict=True))
    if keep_dense:
        dense = [list(one.state_dict()["dense"].values()) for one in (first, second)]
        assert all(torch.equal(a, b) for a, b in zip(*dense, strict=True))


def one_names(pruner):
    state = pruner.state_dict()
    return {**state, "gathered": {name.removeprefix("module."): value for name, value in state["gathered"].items()}}


def test_a_state_names_tensors_as_in_the_bare_model():
    pruner = sc.Pruner(compiled(net()), sparsity=0.5)
    assert set(pruner.state_dict()["masks"]) == {"0.weight", "2.weight"}


@pytest.mark.parametrize("after", ["bare", "compiled", "compiled inside"])
@pytest.mark.parametrize("before", ["bare", "compiled", "compiled inside"])
def test_a_plan_applies_and_undoes_whatever_torch_compile_wraps(before, after):
    """ "The model has no ['_orig_mod.0.weight']": a plan of a compiled model did not apply to the bare one."""
    plan = sc.plan(WRAPPERS[before](net()), sparsity=0.5)
    model, dense = WRAPPERS[after](net()), net()
    plan.apply_(model, keep_dense=True)
    pairs = list(zip(model.parameters(), dense.parameters(), strict=True))
    assert sum(int((a == 0).sum()) for a, _ in pairs) == 96 // 2 + 128 // 2
    plan.undo_(model)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_other_tensors_are_still_refused():
    state = sc.Pruner(compiled(net()), sparsity=0.5).state_dict()
    with pytest.raises(ValueError, match=r"different tensors: \['1\.weight', '2\.weight'\]"):
        sc.Pruner(nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 8)), sparsity=0.5).load_state_dict(state)
