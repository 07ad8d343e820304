"""A method is a value: every call that prunes passes each layer to its `solve`, and plans carry what it returns."""

import copy
import types
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.methods import LayerProblem, Method, Solution


@dataclass(frozen=True)
class Double(Method):
    """Ranks, and doubles the weights that stay."""

    factor: float = 2.0
    rewrites = True

    def solve(self, problem, pattern, amount, previous):
        mask = sc.methods.rank().solve(problem, pattern, amount, previous).mask
        return Solution(mask, problem.W * self.factor)

    def __str__(self):
        return f"double({self.factor})"


@dataclass(frozen=True)
class Recorder(Method):
    """Ranks, and keeps the problems it got."""

    seen: tuple[list, ...] = ([],)
    needs = frozenset({"gram", "cross"})

    def solve(self, problem, pattern, amount, previous):
        self.seen[0].append(problem)
        return sc.methods.rank().solve(problem, pattern, amount, previous)


class Stack(nn.Module):
    def __init__(self, width=8, depth=3, scale=1):
        super().__init__()
        self.scale = scale
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.scale == 1 else block(x) * self.scale
        return self.head(x)


def bits(model):
    return {name: value.detach().clone().view(torch.uint8) for name, value in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


DATA = [torch.randn(16, 8) for _ in range(3)]


def test_ranking_once_is_the_default():
    model = Stack()
    for scope in ("tensor", "row", "global"):
        plain = sc.plan(model, sparsity=0.5, scope=scope)
        named = sc.plan(model, sparsity=0.5, scope=scope, method=sc.methods.rank())
        assert plain.masks == named.masks == sc.plan(model, sparsity=0.5, scope=scope, method="rank").masks
        assert str(plain) == str(named)
        assert not plain.weights


@pytest.mark.parametrize("scope", ["tensor", "global"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_masks_and_weights_are_applied_together_and_undone_bit_for_bit(scope, dtype):
    model = Stack().to(dtype)
    with torch.no_grad():
        model.head.weight[0, :2] = torch.tensor([-0.0, 0.0])
    before, dense = bits(model), copy.deepcopy(model)
    plan = sc.plan(model, sparsity=0.5, scope=scope, method=Double())
    assert same(bits(model), before)
    plan.apply_(model, keep_dense=True)
    for name, mask in plan.masks.items():
        assert torch.equal(model.get_parameter(name), torch.where(mask, 2 * dense.get_parameter(name), 0))
    plan.apply_(model, keep_dense=True)  # again: nothing to do, and nothing forgotten
    plan.undo_(model)
    assert same(bits(model), before)
    with pytest.raises(ValueError, match="kept no dense values, or was undone already"):
        plan.undo_(model)


def test_a_plan_with_weights_says_so():
    plan = sc.prune_(Stack(), sparsity=0.5, method=Double())
    assert plan.metrics()["rewritten"] == 4
    assert "the weights that stay were changed too, in 4 tensors" in str(plan)
    assert plan.recipe.endswith("double(2.0)")
    assert plan.to_dict()["recipe"] == plan.recipe
    assert plan.to_dict()["skipped"] == plan.skipped


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda p, m: Solution(m.float()), "must be bool of shape"),
        (lambda p, m: Solution(m[:1]), "must be bool of shape"),
        (lambda p, m: Solution(m, p.W[:, :1]), "must be float of shape"),
        (lambda p, m: Solution(m, p.W / 0), "NaN or infinite"),
    ],
)
def test_what_is_no_solution_is_refused_by_name_and_changes_nothing(answer, words):
    class Odd(Method):
        rewrites = True

        def solve(self, problem, pattern, amount, previous):
            return answer(problem, amount.keep(problem.name, problem.scores, pattern, previous))

    model = Stack()
    before = bits(model)
    with pytest.raises(ValueError, match=f"'blocks.0.0.weight'.*{words}|{words}.*'blocks.0.0.weight'"):
        sc.prune_(model, sparsity=0.5, method=Odd())
    assert same(bits(model), before)


@pytest.mark.parametrize("scale", [1, 3], ids=["blocks feed each other", "changed in between"])
@torch.no_grad()
def test_layers_are_solved_block_by_block_with_the_inputs_of_the_pruned_blocks_before(scale):
    model, method = Stack(scale=scale), Recorder(([],))
    before = bits(model)
    plan = sc.plan(model, sparsity=0.5, data=DATA, method=method)
    assert same(bits(model), before)
    pruned = copy.deepcopy(model)
    plan.apply_(pruned)
    x, y = torch.cat(DATA), torch.cat(DATA)
    for problem, dense, other in zip(method.seen[0], [*model.blocks, model.head], [*pruned.blocks, pruned.head], strict=True):
        torch.testing.assert_close(problem.H.float(), y.T @ y, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(problem.C.float(), (x - y).T @ y, rtol=1e-4, atol=1e-3)
        x, y = scale * dense(x), scale * other(y)


def test_a_failure_on_the_way_leaves_the_model_as_it_was():
    class Stops(Method):
        needs = frozenset({"gram"})
        rewrites = True

        def solve(self, problem, pattern, amount, previous):
            if problem.name == "head.weight":
                raise RuntimeError("enough")
            return Double().solve(problem, pattern, amount, previous)

    model = Stack().train()
    before = bits(model)
    with pytest.raises(RuntimeError, match="enough"):
        sc.prune_(model, sparsity=0.5, data=DATA, method=Stops())
    assert same(bits(model), before)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_planning_does_not_break_a_graph_that_is_waiting_for_its_backward_pass():
    model = Stack()
    loss = model(DATA[0]).square().mean()
    sc.plan(model, sparsity=0.5, data=DATA, method="sparsegpt")
    loss.backward()
    assert model.head.weight.grad is not None


def test_weights_made_in_inference_mode_are_rewritten_and_restored():
    with torch.inference_mode():
        model = Stack()
    before = bits(model)
    plan = sc.prune_(model, pattern="2:4", data=DATA, method="sparsegpt", keep_dense=True)
    assert not same(bits(model), before)
    plan.undo_(model)
    assert same(bits(model), before)


def test_a_pruner_goes_through_the_same_door():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.6, end=3), data=DATA, method="sparsegpt", keep_dense=True)
    pruner.attach(optimizer)
    for _ in range(4):
        before = pruner.masks
        optimizer.zero_grad()
        F.mse_loss(model(DATA[0]), torch.ones(16, 4)).backward()
        optimizer.step()
        assert not (pruner.masks - before).kept  # what was pruned stays pruned
        pruner.verify()
    assert pruner.sparsity == pytest.approx(0.6, abs=0.01)
    assert pruner.finish().recipe.startswith("sparsegpt(")


def test_drop_and_grow_is_a_method_and_the_keywords_are_short_for_it():
    swap, runs = sc.cosine(0.0, initial=0.4, end=10, every=2), []
    for how in ({"method": sc.methods.drop_and_grow(abs(sc.grad), swap)}, {"grow": abs(sc.grad), "swap": swap}):
        torch.manual_seed(1)
        model = Stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = sc.Pruner(model, sparsity=0.5, **how).attach(optimizer)
        first = pruner.masks
        for x in DATA * 2:
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.ones(16, 4)).backward()
            optimizer.step()
        runs.append((first, pruner.masks))
    assert runs[0] == runs[1]
    assert (runs[0][0] - runs[0][1]).kept > 0
    with pytest.raises(TypeError, match=r"use sc\.Pruner"):
        sc.plan(Stack(), sparsity=0.5, method=sc.methods.drop_and_grow(abs(sc.grad), swap))
    with pytest.raises(ValueError, match="give one of the two"):
        sc.Pruner(Stack(), sparsity=0.5, method="rank", grow=abs(sc.grad), swap=swap)


def test_the_swaps_may_follow_any_function_of_the_step():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=0.5, method=sc.methods.drop_and_grow("abs(grad)", lambda step: 0.5 / (1 + step)))
    pruner.attach(optimizer)
    first = pruner.masks
    for x in DATA:
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(16, 4)).backward()
        optimizer.step()
    assert (first - pruner.masks).kept > 0
    assert pruner.sparsity == 0.5


@pytest.mark.parametrize(
    ("kwargs", "kind", "words"),
    [
        ({"method": "sparsgpt", "sparsity": 0.5}, ValueError, "Did you mean 'sparsegpt'"),
        ({"method": 3, "sparsity": 0.5}, TypeError, "is not a method"),
        ({"method": "sparsegpt", "sparsity": 0.5}, ValueError, "needs inputs, so pass data="),
        ({"method": "sparsegpt", "sparsity": 0.5, "data": []}, ValueError, "gave no batch"),
        (
            {"method": "sparsegpt", "criterion": "wanda", "sparsity": 0.5, "data": DATA},
            ValueError,
            "would not use the criterion",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, kind, words):
    with pytest.raises(kind, match=words):
        sc.plan(Stack(), **kwargs)


def test_a_criterion_spreads_the_budget_of_a_method_that_chooses_by_itself():
    model = Stack()
    spread = sc.plan(model, sparsity=0.5, scope="global")
    found = sc.plan(model, sparsity=0.5, scope="global", method="sparsegpt", data=DATA)
    assert [layer.kept for layer in found.layers] == [layer.kept for layer in spread.layers]
    assert found.masks != spread.masks
    by_owl = sc.plan(model, "wanda", sparsity=0.5, spread=sc.owl(), method="sparsegpt", data=iter(DATA))
    assert by_owl.metrics()["sparsity"] == pytest.approx(0.5, abs=0.02)


def test_convolutions_and_models_without_blocks_are_solved_as_one_block():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)
    )
    data = [torch.randn(4, 2, 6, 6) for _ in range(2)]
    plan = sc.prune_(model, sparsity=0.5, method=sc.methods.sparsegpt(), data=data)
    assert plan.metrics()["sparsity"] == 0.5
    assert all(int((model.get_parameter(name) == 0).sum()) == int((~mask).sum()) for name, mask in plan.masks.items())


def test_the_objective_is_the_squared_error_of_the_outputs():
    x, W, V = torch.randn(50, 6).double(), torch.randn(3, 6).double(), torch.randn(3, 6).double()
    one = LayerProblem("layer", W, H=x.T @ x)
    torch.testing.assert_close(one.objective(V), (x @ (W - V).T).square().sum(0))
    aimed = LayerProblem("layer", W, H=x.T @ x, B=W @ (x.T @ x))
    torch.testing.assert_close(aimed.objective(V) - aimed.objective(W), one.objective(V))


# --- the package's face -----------------------------------------------------------------------------------------------


def test_no_module_stands_in_the_way_of_a_function():
    for name in ("plan", "targets", "shrink", "save", "load", "bench", "criterion"):
        assert isinstance(getattr(sc, name), types.FunctionType), name
    assert sc.plan.__module__ == "secateur.plans"
    assert sc.targets.__module__ == "secateur.targeting"


def test_dir_lists_every_public_name():
    assert set(sc.__all__) <= set(dir(sc))
    assert {"shrink", "save", "compress_", "methods"} <= set(dir(sc))


def test_input_first_is_in_layers_and_the_old_name_says_so():
    from secateur.layers import input_first

    with pytest.raises(AttributeError, match=r"secateur\.layers\.input_first"):
        sc.input_first
    assert "input_first" not in sc.__all__
    assert callable(input_first)


def test_a_method_that_returns_no_solution_is_told():
    """A bare mask once raised "'Tensor' object has no attribute 'mask'"."""

    class Bare(sc.methods.Method):
        def solve(self, problem, pattern, amount, previous):
            return torch.ones_like(problem.W, dtype=torch.bool)

    with pytest.raises(
        TypeError, match=r"solve returned a Tensor for 'weight'; it must return Solution\(mask, weight or None\)"
    ):
        sc.plan(torch.nn.Linear(4, 3), sparsity=0.5, method=Bare())


def test_the_recipe_names_the_spread():
    plan = sc.plan(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)), sparsity=0.8, spread=sc.erk)
    assert "scope tensor, spread erk" in str(plan)


# --- methods of one's own that break their promises -----------------------------------------------------------------


def test_a_method_that_ignores_the_amount_is_refused():
    class Half(Method):
        def solve(self, problem, pattern, amount, previous):
            return Solution(torch.rand_like(problem.W) > 2)

    model = Stack()
    before = bits(model)
    with pytest.raises(ValueError, match=r"keeps 0 of the 64 weights of 'blocks.0.0.weight', and the budget leaves 32"):
        sc.prune_(model, sparsity=0.5, method=Half())
    assert same(bits(model), before)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "out", "1x4-2"])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_a_method_that_takes_the_amount_is_accepted(pattern, scope):
    class Smallest(Method):
        def solve(self, problem, pattern, amount, previous):
            return Solution(amount.keep(problem.name, problem.scores, pattern, previous))

    budget = {} if pattern == "2:4" else {"sparsity": 0.25, "scope": scope}
    torch.manual_seed(0)
    model = Stack()
    assert sc.plan(model, pattern=pattern, method=Smallest(), **budget).masks == sc.plan(model, pattern=pattern, **budget).masks


def test_a_method_that_ignores_the_pattern_is_refused():
    class FirstHalf(Method):
        def solve(self, problem, pattern, amount, previous):
            mask = torch.ones_like(problem.W, dtype=torch.bool)
            mask[:, : mask.shape[1] // 2] = False
            return Solution(mask)

    with pytest.raises(ValueError, match=r"keeps more than 2 of 4 neighbours in 'blocks.0.0.weight'; the pattern is 2:4"):
        sc.prune_(Stack(), pattern="2:4", method=FirstHalf())


def test_a_method_that_needs_unknown_evidence_is_refused():
    class Wants(Method):
        needs = frozenset({"gramm"})

        def solve(self, problem, pattern, amount, previous):
            raise AssertionError

    with pytest.raises(ValueError, match=r"needs 'gramm', and evidence is one of .*'gram'"):
        sc.prune_(Stack(), sparsity=0.5, method=Wants(), data=DATA)


def test_new_weights_need_rewrites():
    class Doubles(Double):
        rewrites = False

    with pytest.raises(ValueError, match=r"double\(2.0\) returned new weights for 'blocks.0.0.weight'; state rewrites = True"):
        sc.prune_(Stack(), sparsity=0.5, method=Doubles())


def test_weights_that_come_back_need_revives():
    @dataclass(frozen=True)
    class Fresh(Method):
        def solve(self, problem, pattern, amount, previous):
            return Solution(amount.keep(problem.name, problem.scores, pattern, None))

    torch.manual_seed(0)
    model = Stack()
    pruner = sc.Pruner(model, sc.random(0), sparsity=sc.linear(0.6, end=2), method=Fresh())
    pruner.step()
    with pytest.raises(ValueError, match="that were pruned before; state revives = True"):
        pruner.step()
