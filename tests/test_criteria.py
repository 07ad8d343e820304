"""Each criterion against a slow reference of its own: plain loops, no machinery of the package."""

import copy
import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import secateur as sc
from secateur.criteria import Criterion
from secateur.evidence import TensorEvidence
from secateur.stats import collect


def scores_of(model, criterion, **kwargs):
    """Scores by tensor name, each in its tensor's own shape."""
    found, _ = sc.targets(model)
    table = collect(model, found, criterion.needs, kwargs.get("data"), kwargs.get("loss"))
    with torch.no_grad():
        made = {t.name: criterion.scores(TensorEvidence(t, table[t.name])) for t in found}
        return {t.name: t.layout.restore(made[t.name].rows(0, t.layout.rows)) for t in found}


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(number=3):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(6, 2, 4, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(number)
    ]


def gradients(model, data):
    """A list with, for each batch, name to gradient; the slow way, through .backward on a copy."""
    model = copy.deepcopy(model)
    found = []
    for x, y in data:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def same(found, wanted, **tolerance):
    assert found.keys() == {name for name in wanted if not name.endswith("bias")}
    for name, scores in found.items():
        torch.testing.assert_close(scores.double(), wanted[name].double(), rtol=1e-4, atol=1e-6, **tolerance)


@pytest.mark.parametrize("criterion", [sc.magnitude, abs(sc.weight), Criterion.parse("magnitude")])
def test_magnitude_is_the_absolute_weight(criterion):
    model = net()
    same(scores_of(model, criterion), {n: p.detach().abs() for n, p in model.named_parameters()})


@pytest.mark.parametrize("criterion", [sc.taylor, sc.snip])
def test_taylor_and_snip_are_weight_times_mean_gradient(criterion):
    model, data = net(), batches()
    seen = gradients(model, data)
    mean = {n: sum(g[n] for g in seen) / len(seen) for n in seen[0]}
    wanted = {n: (p.detach() * mean[n]).abs() for n, p in model.named_parameters()}
    same(scores_of(model, criterion, data=data, loss=F.cross_entropy), wanted)


def test_movement_is_minus_weight_times_mean_gradient():
    model, data = net(), batches()
    seen = gradients(model, data)
    mean = {n: sum(g[n] for g in seen) / len(seen) for n in seen[0]}
    wanted = {n: -(p.detach() * mean[n]) for n, p in model.named_parameters()}
    same(scores_of(model, sc.movement, data=data, loss=F.cross_entropy), wanted)


def test_fisher_squares_the_gradient_of_each_batch():
    model, data = net(), batches()
    seen = gradients(model, data)
    wanted = {n: p.detach() ** 2 * sum(g[n] ** 2 for g in seen) / len(seen) for n, p in model.named_parameters()}
    same(scores_of(model, sc.fisher, data=data, loss=F.cross_entropy), wanted)


def test_lamp_is_the_square_over_the_squares_not_smaller():
    model = net()
    wanted = {}
    for name, p in model.named_parameters():
        flat = (p.detach().double() ** 2).reshape(-1)
        order = flat.argsort(stable=True).tolist()
        out = torch.zeros_like(flat)
        for place, index in enumerate(order):
            out[index] = flat[index] / sum(float(flat[j]) for j in order[place:])
        wanted[name] = out.view(p.shape)
    same(scores_of(model, sc.lamp), wanted)


def test_lamp_of_zeros_is_zero_and_no_nan():
    layer = nn.Linear(4, 4)
    nn.init.zeros_(layer.weight)
    assert (scores_of(layer, sc.lamp)["weight"] == 0).all()


def test_lamp_with_global_scope_never_empties_a_tensor():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight *= 1e-6
    plan = sc.plan(model, sc.lamp, sparsity=0.95, scope="global")
    assert all(layer.kept for layer in plan.layers)


def test_ria_is_relative_importance_times_the_root_of_the_input_norm():
    layer = nn.Linear(5, 4, bias=False)
    x = torch.randn(7, 5)
    found = scores_of(layer, sc.ria, data=[x])["weight"]
    w = layer.weight.detach().abs().tolist()
    for i, j in itertools.product(range(4), range(5)):
        row, column = sum(w[i]), sum(w[k][j] for k in range(4))
        norm = math.sqrt(sum(float(v) ** 2 for v in x[:, j]))
        assert float(found[i, j]) == pytest.approx((w[i][j] / row + w[i][j] / column) * math.sqrt(norm), rel=1e-4)


def test_synflow_is_the_gradient_of_the_positive_model_on_ones():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model[1].running_mean.normal_()
    found = scores_of(model, sc.synflow, data=[torch.randn(6, 2, 4, 4)])
    twin = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for value in (*twin.parameters(), *twin.buffers()):
            value.abs_()
    twin(torch.ones(1, 2, 4, 4, dtype=torch.float64)).sum().backward()
    same(found, {n: (p.detach() * p.grad).abs() for n, p in twin.named_parameters() if n in ("0.weight", "4.weight")})


def test_synflow_looks_at_one_batch_of_an_endless_stream():
    stream = itertools.chain(iter(batches(1)), (_ for _ in iter(lambda: pytest.fail("a second batch was read"), None)))
    assert sc.plan(net(), sc.synflow, sparsity=0.5, data=stream).metrics()["sparsity"] == pytest.approx(0.5, abs=0.01)


# --- wanda: the norm of every input that a weight is multiplied with --------------------------------------------------


def brute_force_norms(layer, x):
    """Squares of what each weight element is multiplied with, added up: the derivative of each output, one at a time."""
    weight = layer.weight.detach().clone().requires_grad_()
    out = torch.func.functional_call(layer, {"weight": weight}, x)
    total = torch.zeros_like(weight)
    for one in out.reshape(-1):
        (seen,) = torch.autograd.grad(one, weight, retain_graph=True)
        total += seen**2  # an output is a sum of weight times input, so this is the input
    return total.sqrt()


WANDA_LAYERS = [
    (nn.Linear(5, 4), (3, 5)),
    (nn.Linear(5, 4, bias=False), (2, 3, 5)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 9)),
    (nn.Conv2d(3, 2, 3), (2, 3, 5, 5)),
    (nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 2, 5, 5)),
    (nn.Conv2d(4, 6, 3, padding=1, groups=2), (1, 4, 4, 4)),
    (nn.Conv2d(4, 4, 3, padding=1, groups=4), (1, 4, 4, 4)),
    (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (1, 2, 4, 4)),
    (nn.Conv2d(2, 3, 3, padding="same", padding_mode="reflect"), (1, 2, 4, 4)),
    (nn.Conv3d(2, 2, 2), (1, 2, 3, 3, 3)),
    (nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1), (2, 4, 5)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), (1, 4, 3, 3)),
    (nn.ConvTranspose3d(2, 2, 2), (1, 2, 2, 2, 2)),
]


@pytest.mark.parametrize(("layer", "shape"), WANDA_LAYERS, ids=lambda v: str(v) if isinstance(v, nn.Module) else "")
def test_wanda_is_the_weight_times_the_norm_of_what_it_is_multiplied_with(layer, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = layer.weight.detach().abs() * brute_force_norms(layer, x)
    found = scores_of(layer, sc.wanda, data=[x])["weight"]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    per_sample = scores_of(layer, sc.wanda, data=list(x.split(1)))["weight"]
    torch.testing.assert_close(per_sample, wanted, rtol=1e-4, atol=1e-6)


def test_wanda_of_a_convolution_is_wanda_of_its_unfolded_input():
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2)
    x = torch.randn(2, 3, 9, 9)
    columns = F.unfold(x, 3, dilation=2, padding=1, stride=2)
    wanted = layer.weight.detach().abs().reshape(4, -1) * columns.transpose(0, 1).reshape(27, -1).norm(dim=1)
    torch.testing.assert_close(scores_of(layer, sc.wanda, data=[x])["weight"].reshape(4, -1), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_wanda_measures_norms_in_full_precision(dtype):
    layer = nn.Linear(6, 4).to(dtype)
    x = torch.randn(50, 6).to(dtype)
    wanted = layer.weight.detach().abs().float() * x.float().norm(dim=0)
    torch.testing.assert_close(scores_of(layer, sc.wanda, data=[x])["weight"].float(), wanted, rtol=1e-4, atol=1e-6)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def test_the_default_dtype_is_no_part_of_the_scores(default_dtype):
    layer = nn.Linear(6, 4, dtype=torch.float32)
    x = torch.randn(50, 6, dtype=torch.float32)
    wanted = layer.weight.detach().abs() * x.norm(dim=0)
    torch.testing.assert_close(scores_of(layer, sc.wanda, data=[x])["weight"], wanted, rtol=1e-4, atol=1e-6)
    drawn = scores_of(layer, sc.random(5))["weight"]
    torch.set_default_dtype(torch.float32)
    assert torch.equal(drawn, scores_of(layer, sc.random(5))["weight"])


@pytest.mark.parametrize("criterion", [sc.wanda, sc.wanda * sc.taylor], ids=str)
def test_norms_are_right_inside_a_checkpointed_block(criterion):
    class Checkpointed(nn.Module):
        def __init__(self, block, use):
            super().__init__()
            self.block, self.use = block, use

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False) if self.use else self.block(x)

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    data = [(torch.randn(6, 5), torch.randn(6, 3))]
    plain, saved = (scores_of(Checkpointed(block, use), criterion, data=data, loss=F.mse_loss) for use in (False, True))
    for name, wanted in plain.items():
        torch.testing.assert_close(saved[name], wanted, rtol=1e-4, atol=1e-7)


def test_wanda_sees_an_input_that_is_passed_by_name():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 4)

        def forward(self, x):
            return self.fc(input=x)

    model, x = ByName(), torch.randn(7, 5)
    found = scores_of(model, sc.wanda, data=[x])["fc.weight"]
    torch.testing.assert_close(found, model.fc.weight.detach().abs() * x.norm(dim=0), rtol=1e-4, atol=1e-6)


def test_wanda_sees_what_a_layer_really_gets_after_the_users_own_hook():
    layer, x = nn.Linear(5, 4), torch.randn(7, 5)
    layer.register_forward_pre_hook(lambda _, args: (3 * args[0],))
    found = scores_of(layer, sc.wanda, data=[x])["weight"]
    torch.testing.assert_close(found, layer.weight.detach().abs() * (3 * x).norm(dim=0), rtol=1e-4, atol=1e-6)


def test_wanda_sees_every_use_of_a_tied_weight():
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(7, 5)
    both = torch.cat([x, model[0](x).relu().detach()])
    found = scores_of(model, sc.wanda, data=[x])["0.weight"]
    torch.testing.assert_close(found, model[0].weight.detach().abs() * both.norm(dim=0), rtol=1e-4, atol=1e-6)


def test_wanda_sees_every_call_of_a_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 5)

        def forward(self, x):
            return self.fc(self.fc(x))

    model, x = Twice(), torch.randn(7, 5)
    both = torch.cat([x, model.fc(x).detach()])
    found = scores_of(model, sc.wanda, data=[x])["fc.weight"]
    torch.testing.assert_close(found, model.fc.weight.detach().abs() * both.norm(dim=0), rtol=1e-4, atol=1e-6)


# --- composing --------------------------------------------------------------------------------------------------------


def test_needs_are_declared_by_the_expression():
    assert sc.magnitude.needs == frozenset()
    assert sc.wanda.needs == {"input_norm"}
    assert sc.taylor.needs == {"grad"}
    assert sc.fisher.needs == {"grad_square"}
    assert (sc.taylor + sc.wanda).needs == {"grad", "input_norm"}
    assert sc.taylor.after(10, sc.magnitude).needs == {"grad"}


def test_criteria_print_as_what_they_are():
    assert str(sc.magnitude) == "abs(weight)"
    assert str(sc.movement) == "-(weight * grad)"
    assert str(sc.fisher) == "weight ** 2 * grad_square"
    assert str(2 * sc.magnitude - sc.grad**2) == "2 * abs(weight) - grad ** 2"
    assert str(sc.random(3)) == "random(3)"


@pytest.mark.parametrize("other", ["x", None, True, [1], torch.ones(1)])
def test_criteria_combine_with_criteria_and_numbers_only(other):
    for combine in (lambda c: c * other, lambda c: c + other, lambda c: c**other, lambda c: c - other):
        with pytest.raises(TypeError, match="criteria and numbers"):
            combine(sc.weight)


@pytest.mark.parametrize(
    "wrong", [lambda: sc.weight.after(1.5, sc.grad), lambda: sc.weight.after(5, "grad"), lambda: sc.random("a")]
)
def test_what_could_not_be_read_back_cannot_be_made(wrong):
    with pytest.raises((TypeError, ValueError)):
        wrong()


def test_an_infinite_factor_cannot_be_read_back_so_it_cannot_be_made():
    for number in (math.inf, -math.inf, math.nan):
        with pytest.raises((TypeError, ValueError), match="number"):
            sc.weight * number


def test_random_is_the_same_for_the_same_seed_and_name_only():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    a, b = scores_of(model, sc.random(1)), scores_of(model, sc.random(1))
    assert torch.equal(a["0.weight"], b["0.weight"])
    assert not torch.equal(a["0.weight"], a["1.weight"])
    assert not torch.equal(a["0.weight"], scores_of(model, sc.random(2))["0.weight"])
    assert float(a["0.weight"].min()) >= 0
    assert float(a["0.weight"].max()) < 1


def test_half_precision_arithmetic_makes_no_ties():
    layer = nn.Linear(64, 64).to(torch.bfloat16)
    squares = scores_of(layer, sc.weight**2 + 1)["weight"]
    assert squares.dtype == torch.float32
    assert torch.equal(squares, layer.weight.detach().float() ** 2 + 1)


# --- a user's own function --------------------------------------------------------------------------------------------


def test_a_function_is_a_criterion_and_its_arguments_are_its_needs():
    def mine(weight, grad):
        return (weight * grad).abs()

    model, data = net(), batches()
    own = sc.criterion(mine)
    assert own.needs == {"grad"}
    assert str(own) == "mine"
    assert Criterion.parse("mine * 2", {"mine": mine}) == own * 2
    same(
        scores_of(model, own, data=data, loss=F.cross_entropy),
        {**scores_of(model, sc.taylor, data=data, loss=F.cross_entropy)},
    )
    a = sc.plan(model, mine, sparsity=0.5, data=data, loss=F.cross_entropy)
    assert a.masks == sc.plan(model, sc.taylor, sparsity=0.5, data=data, loss=F.cross_entropy).masks


def keyword_only(*, weight):
    return weight.abs()


class Callable:
    def __call__(self, weight):
        return weight.abs()


@pytest.mark.parametrize(
    "function",
    [keyword_only, Callable(), functools.partial(lambda weight: weight.abs()), lambda weight: weight.abs()],
    ids=["keyword only", "object", "partial", "lambda"],
)
def test_any_callable_of_evidence_is_a_criterion(function):
    model = net()
    plan = sc.plan(model, function, sparsity=0.5)
    assert plan.masks == sc.plan(model, sc.magnitude, sparsity=0.5).masks
    assert str(plan)


def test_a_transform_without_a_name_can_be_mapped():
    model = net()
    plan = sc.plan(model, sc.magnitude.map(functools.partial(torch.clamp, min=0.0)), sparsity=0.5)
    assert plan.masks == sc.plan(model, sc.magnitude, sparsity=0.5).masks


def no_arguments():
    return torch.ones(1)


@pytest.mark.parametrize("function", [lambda gradient: gradient, no_arguments, torch.abs, lambda *args: args[0]])
def test_a_function_of_something_else_is_refused_with_what_there_is(function):
    with pytest.raises(TypeError, match=r"weight, grad, grad_square, input_norm"):
        sc.criterion(function)


@pytest.mark.parametrize("given", [5, None])
def test_a_criterion_must_be_a_function(given):
    with pytest.raises(TypeError, match=r"sc\.magnitude"):
        sc.plan(net(), given, sparsity=0.5)


@pytest.mark.parametrize(
    "function",
    [
        lambda weight: weight.sum(),
        lambda weight: weight.t(),
        lambda weight: weight > 0,
        lambda weight: weight.long(),
        lambda weight: weight.tolist(),
        lambda weight: None,
    ],
)
def test_scores_of_the_wrong_shape_are_an_error_that_names_the_layer(function):
    with pytest.raises(ValueError, match=r"must give float scores of shape \(4, 18\)"):
        sc.plan(net(), function, sparsity=0.5)
    with pytest.raises(ValueError, match=r"0\.weight"):
        sc.plan(net(), function, sparsity=0.5)
    with pytest.raises(ValueError, match="must give float scores"):
        sc.plan(net(), sc.weight.map(function), sparsity=0.5)


@pytest.mark.parametrize("criterion", [sc.criterion(lambda weight: weight.abs_()), sc.weight.map(lambda s: s.abs_())])
def test_a_function_that_works_in_place_does_not_reach_the_model(criterion):
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    sc.plan(model, criterion, sparsity=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_scores_that_need_gradients_are_detached():
    model = net()
    scale = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        plan = sc.plan(model, lambda weight: weight.abs() * scale, sparsity=0.5)
    assert plan.masks == sc.plan(model, sparsity=0.5).masks


def test_arguments_with_defaults_are_a_functions_own_affair():
    def mine(weight, eps=1e-6):
        return weight.abs() + eps

    model = net()
    assert sc.plan(model, mine, sparsity=0.5).masks == sc.plan(model, sparsity=0.5).masks
    assert sc.plan(model, functools.partial(mine, eps=0.0), sparsity=0.5).masks == sc.plan(model, sparsity=0.5).masks


@pytest.mark.parametrize(
    ("text", "wanted"), [("wanda", sc.wanda), ("abs(weight*grad)", sc.taylor), ("random(3)", sc.random(3))]
)
def test_a_criterion_can_be_given_as_text(text, wanted):
    assert sc.criterion(text) == wanted


def test_text_is_a_criterion_wherever_one_is_taken():
    model, data = nn.Linear(8, 4), [torch.randn(5, 8)]
    by_text = sc.plan(model, "wanda", sparsity=0.5, data=data)
    assert by_text.masks == sc.plan(model, sc.wanda, sparsity=0.5, data=data).masks
    assert by_text.recipe.startswith("abs(weight) * input_norm")
    assert sc.Pruner(model, "magnitude", sparsity=0.5, grow="abs(grad)", swap=sc.one_shot(0.3)).recipe.criterion == sc.magnitude


@pytest.mark.parametrize(("text", "hint"), [("wandaa", "wanda"), ("abs(wieght)", "weight"), ("magnitud", "magnitude")])
def test_an_unknown_name_gets_the_nearest_known_one(text, hint):
    with pytest.raises(ValueError, match=f"Did you mean '{hint}'"):
        sc.plan(nn.Linear(4, 4), text, sparsity=0.5)
