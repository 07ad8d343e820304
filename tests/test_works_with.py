"""What a pruned model is used with afterwards, and what a model may be when it is pruned."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import secateur as sc


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step: int = 0, features: int = 8) -> Tensor:
    return torch.randn(5, features, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def zeros(model: nn.Module) -> dict[str, int]:
    return {name: int((p == 0).sum()) for name, p in model.named_parameters() if p.ndim > 1}


def saved(thing, **how):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **how)


@pytest.fixture
def pruned() -> nn.Sequential:
    model = build()
    sc.prune_(model, sparsity=0.5)
    return model


HALF = {"0.weight": 64, "2.weight": 32}


# --- copies and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: saved(m, weights_only=False)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_pruned_model_is_copied_whole(pruned, again):
    other = again(pruned)
    assert type(other) is nn.Sequential
    assert zeros(other) == HALF
    assert torch.equal(other(batch()), pruned(batch()))


def test_the_state_of_a_pruned_model_loads_into_a_dense_one_weights_only(pruned):
    other = build(1)
    other.load_state_dict(saved(pruned.state_dict(), weights_only=True), strict=True)
    assert torch.equal(other(batch()), pruned(batch()))


def test_a_model_is_copied_and_pickled_while_a_pruner_follows_its_optimizer():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    train(model, optimizer)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    train(other, torch.optim.AdamW(other.parameters(), lr=0.1))
    assert zeros(other) != HALF  # the copy is nobody's
    pruner.verify()
    assert zeros(model) == HALF


def test_a_copy_of_a_straight_through_model_is_independent():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=0.5, ste=True).attach(optimizer)
    other = copy.deepcopy(model)
    before = other(batch())
    assert torch.equal(before, model(batch()))
    train(model, optimizer)
    assert torch.equal(other(batch()), before)
    pruner.finish()


@pytest.mark.parametrize(
    "value",
    [
        sc.magnitude,
        sc.wanda,
        sc.lamp,
        sc.ria**2 - 0.5 * sc.random(3).after(10, sc.taylor),
        sc.cubic(0.9, start=10, end=100, every=5),
        sc.join((0, sc.linear(0.3, end=10)), (10, sc.one_shot(0.5, at=12))),
        sc.Pattern.parse("16x1/2:4"),
        sc.plan(build(), sparsity=0.5).masks,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_pickle_and_copy(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert type(other) is type(value)
        assert other == value
        assert str(other) == str(value)


def test_a_plan_pickles_and_undoes_in_a_copy():
    model = build()
    dense = copy.deepcopy(model.state_dict())
    plan = pickle.loads(pickle.dumps(sc.prune_(model, sparsity=0.5, keep_dense=True)))
    assert str(plan)
    plan.undo_(model)
    assert all(torch.equal(value, dense[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "arguments",
    [
        {"criterion": sc.taylor, "sparsity": sc.cubic(0.8, end=10, every=2)},
        {"sparsity": 0.5, "keep_dense": True},
        {"sparsity": 0.5, "ste": True},
        {"sparsity": 0.5, "grow": abs(sc.grad), "swap": sc.cosine(0.0, initial=0.3, end=10)},
    ],
    ids=["gathering", "keep_dense", "ste", "rigl"],
)
def test_the_state_of_a_pruner_is_plain_tensors_and_numbers(arguments):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, **arguments).attach(optimizer)
    train(model, optimizer, 3)
    state = saved(pruner.state_dict(), weights_only=True)
    other_model = build()
    other = sc.Pruner(other_model, **arguments)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert other.masks == pruner.masks
    assert str(other.state_dict()) == str(pruner.state_dict())


# --- compile, export, trace, functional -----------------------------------------------------------------------------


def test_a_pruned_model_compiles_as_one_graph(pruned):
    counter = CompileCounter()
    compiled = torch.compile(pruned, fullgraph=True, backend=counter)
    assert torch.equal(compiled(batch()), pruned(batch()))
    assert counter.frame_count == 1
    assert counter.op_count == 3  # nothing beyond linear, relu, linear


def test_a_compiled_model_trains_with_its_zeros_and_new_masks_do_not_recompile():
    model = build()
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.8, end=6)).attach(optimizer)
    seen = set()
    for step in range(7):
        optimizer.zero_grad()
        compiled(batch(step)).square().mean().backward()
        optimizer.step()
        pruner.verify()
        seen.add(pruner.sparsity)
    assert len(seen) > 5
    assert counter.frame_count == 1


def test_a_compiled_model_may_be_pruned_itself():
    model = build()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plan = sc.prune_(compiled, sparsity=0.5)
    assert zeros(model) == HALF
    assert plan.metrics()["sparsity"] == 0.5
    assert torch.equal(compiled(batch()), model(batch()))
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
    sc.Pruner(compiled, sparsity=0.5).attach(optimizer)
    train(compiled, optimizer)
    assert zeros(model) == HALF


def test_the_plan_of_a_compiled_model_speaks_of_its_own_names():
    compiled = torch.compile(build(), backend="eager")
    plan = sc.prune_(compiled, sparsity=0.5, include="*0")
    assert list(plan.masks) == [name for name, _ in compiled.named_parameters() if name.endswith("0.weight")]
    plan.apply_(compiled)


def test_a_straight_through_estimator_compiles_as_one_graph_forward_and_backward():
    model, eager = build(), build()
    results = []
    for one, compile_it in ((model, True), (eager, False)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        pruner = sc.Pruner(one, sparsity=sc.linear(0.8, end=4), ste=True).attach(optimizer)
        counter = CompileCounter()
        run = torch.compile(one, fullgraph=True, backend=counter) if compile_it else one
        for step in range(5):
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()
        assert counter.frame_count == int(compile_it)  # five sets of masks, one compilation
        results.append((pruner.finish(), one.state_dict()))
    (plan, state), (expected, dense) = results
    assert plan.masks == expected.masks
    assert plan.metrics()["sparsity"] == pytest.approx(0.8, abs=0.01)
    assert all(torch.equal(state[name], dense[name]) for name in dense)


@pytest.mark.slow
def test_a_straight_through_estimator_goes_through_inductors_autograd():
    model = build()
    pruner = sc.Pruner(model, sparsity=0.5, ste=True)
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(batch()).square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(batch()).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
        assert parameter.ndim == 1 or (found[name] != 0).float().mean() > 0.6  # pruned weights get gradients too


def test_a_pruned_model_exports(pruned):
    program = torch.export.export(pruned, (batch(),))
    assert torch.equal(program.module()(batch()), pruned(batch()))
    assert int((program.state_dict["0.weight"] == 0).sum()) == 64


def test_a_traced_copy_of_a_pruned_model_is_pruned(pruned):
    traced = copy.deepcopy(torch.fx.symbolic_trace(pruned))
    assert zeros(traced) == HALF
    assert torch.equal(traced(batch()), pruned(batch()))
    plan = sc.prune_(traced, sparsity=0.75)
    assert plan.metrics()["sparsity"] == 0.75
    assert zeros(pruned) == HALF


def test_a_pruned_model_goes_through_torch_func(pruned):
    parameters = {name: p.detach() for name, p in pruned.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(pruned, values, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters, batch())
    pruned(batch()).square().mean().backward()
    for name, parameter in pruned.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch()[:, None])
    assert each["0.weight"].shape == (5, 16, 8)


def test_a_pruned_model_quantizes(pruned):
    if "fbgemm" not in torch.backends.quantized.supported_engines and "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantized engine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(pruned, {nn.Linear}, dtype=torch.qint8)
        weight = quantized[0].weight().dequantize()
    assert int((weight == 0).sum()) >= 64
    assert bool((weight[pruned[0].weight == 0] == 0).all())


# --- mixed precision ------------------------------------------------------------------------------------------------


def test_zeros_hold_under_autocast():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sc.taylor, sparsity=sc.linear(0.5, start=1, end=3)).attach(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch(step))
        assert output.dtype == torch.bfloat16
        output.float().square().mean().backward()
        optimizer.step()
        pruner.verify()
    assert zeros(model) == HALF


@pytest.mark.parametrize("criterion", [sc.wanda, sc.taylor], ids=str)
def test_evidence_is_collected_under_autocast(criterion):
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sc.prune_(model, criterion, sparsity=0.5, data=[batch()], loss=lambda y, _: y.float().square().mean())
    assert zeros(model) == HALF


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("pattern", [None, "2:4", "out", "4x4"])
def test_every_float_type_is_pruned(dtype, pattern):
    model = build().to(dtype)
    budget = {} if pattern == "2:4" else {"sparsity": 0.5}
    sc.prune_(model, pattern=pattern or "unstructured", **budget)
    assert zeros(model) == HALF
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_type_may_change_in_the_middle_of_training(dtype):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sc.taylor, sparsity=sc.linear(0.8, start=1, end=6), keep_dense=True).attach(optimizer)
    train(model, optimizer, 3)
    model.to(dtype)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step).to(dtype)).square().mean().backward()
        optimizer.step()
        pruner.verify()
    assert pruner.sparsity == pytest.approx(0.8, abs=0.01)
    pruner.undo_()
    assert all(p.dtype == dtype for p in model.parameters())
    assert sum(zeros(model).values()) == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("criterion", [sc.magnitude, sc.taylor], ids=str)
def test_a_step_that_the_grad_scaler_skips_is_no_step(fused, criterion):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    pruner = sc.Pruner(model, criterion, sparsity=sc.linear(0.8, start=2, end=5)).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        before = copy.deepcopy(model.state_dict())
        scaler.step(optimizer)
        scaler.update()
        pruner.verify()
        if step == 1:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert pruner.state_dict()["step"] == 5
    assert pruner.sparsity == pytest.approx(0.8, abs=0.01)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# --- optimizers and loops -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_zeros_hold_with_every_form_of_an_optimizer(kind, form):
    model = build()
    how = {"foreach": form == "foreach"} if form != "fused" else {"fused": True}
    momentum = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.1, **momentum, **how)
    train(model, optimizer, 2)  # moments of weights that go later
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    for _ in range(3):
        train(model, optimizer, 1)
        pruner.verify()
        assert zeros(model) == HALF


def test_accumulated_gradients_count_as_one_step():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.6, end=3)).attach(optimizer)
    for step in range(9):
        (model(batch(step)).square().mean() / 3).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert pruner.state_dict()["step"] == 3
    assert pruner.sparsity == pytest.approx(0.6, abs=0.01)


def test_a_learning_rate_schedule_does_not_disturb_the_hook():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    sc.Pruner(model, sparsity=0.5).attach(optimizer)
    for _ in range(5):
        train(model, optimizer, 1)
        scheduler.step()
    assert zeros(model) == HALF


def test_clipped_gradients_hold_the_zeros():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sc.Pruner(model, sparsity=0.5).attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert zeros(model) == HALF


def test_weights_loaded_in_the_middle_are_masked_at_the_next_step():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    model.load_state_dict(build(3).state_dict())
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        pruner.verify()
    train(model, optimizer, 1)
    assert zeros(model) == HALF


def test_parameters_assigned_in_the_middle_are_followed():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.8, end=6)).attach(optimizer)
    train(model, optimizer, 3)
    model.load_state_dict(build(3).state_dict(), assign=True)
    pruner.apply_()
    pruner.verify()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the old one trains tensors that are gone
    pruner.attach(optimizer)
    train(model, optimizer, 3)
    pruner.verify()
    assert pruner.state_dict()["step"] == 6
    assert pruner.sparsity == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averages_of_pruned_weights_keep_their_zeros(average):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    rule = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9) if average == "ema" else None
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=rule)
    for _ in range(4):
        train(model, optimizer, 1)
        averaged.update_parameters(model)
    assert zeros(averaged.module) == HALF
    assert not torch.equal(averaged.module[0].weight, model[0].weight)
    assert averaged(batch()).shape == (5, 4)
    pruner.finish().apply_(averaged.module)


def test_an_average_that_began_dense_takes_the_zeros_of_the_plan():
    model = build()
    averaged = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    train(model, optimizer)
    with torch.no_grad():
        for mean, parameter in zip(averaged.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
    pruner.finish().apply_(averaged)
    assert zeros(averaged) == HALF


# --- kinds of models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "out", "in", "2x3"])
def test_channels_last_weights_get_the_masks_of_contiguous_ones(pattern):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 30).round())  # ties show the order
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert not last[0].weight.is_contiguous()
    budget = {} if pattern == "2:4" else {"sparsity": 0.5}
    plan = sc.prune_(model, pattern=pattern, **budget)
    other = sc.prune_(last, pattern=pattern, keep_dense=True, **budget)
    assert plan.masks == other.masks
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(value, last.state_dict()[name]) for name, value in model.state_dict().items())


def test_channels_last_weights_train_and_resume():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3)).to(memory_format=torch.channels_last)
    images = torch.randn(2, 4, 7, 7).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sc.taylor, sparsity=sc.linear(0.7, start=1, end=4), keep_dense=True).attach(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        pruner.verify()
    other = sc.Pruner(copy.deepcopy(model), sc.taylor, sparsity=sc.linear(0.7, start=1, end=4), keep_dense=True)
    other.load_state_dict(saved(pruner.state_dict(), weights_only=True))
    assert other.masks == pruner.masks
    other.undo_()
    assert sum(zeros(other.model).values()) == 0


@pytest.mark.parametrize("transposed", [True, False])
def test_a_weight_that_is_a_view_of_another_layout_is_pruned(transposed):
    layer = nn.Linear(6, 6, bias=False)
    expected = sc.plan(layer, sparsity=0.5).masks["weight"]
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(weight.t().contiguous().t() if transposed else torch.cat([weight, weight], 1)[:, :6])
    assert not layer.weight.is_contiguous()
    plan = sc.prune_(layer, sparsity=0.5)
    assert torch.equal(plan.masks["weight"], expected)
    assert torch.equal(layer.weight != 0, expected)


def test_attention_is_pruned_and_evaluates_on_the_fast_path():
    """`in_proj_weight` was skipped, because MultiheadAttention was not among the default types."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plan = sc.prune_(layer, sparsity=0.5)
    assert "self_attn.out_proj.weight" in plan.masks
    assert int((layer.self_attn.in_proj_weight == 0).sum()) == 16 * 48 // 2
    words = torch.randn(3, 5, 16)
    with torch.no_grad():
        slow = layer.train()(words)
        fast = layer.eval()(words)
    torch.testing.assert_close(fast, slow)
    named = sc.prune_(layer, sparsity=0.5, include="self_attn.in_proj_weight")
    assert int((layer.self_attn.in_proj_weight == 0).sum()) == named.metrics()["pruned"] == 16 * 48 // 2


def test_a_transformer_trains_with_its_zeros_and_evaluates_on_the_fast_path():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.01)
    kinds = (nn.Linear, nn.MultiheadAttention)
    pruner = sc.Pruner(encoder, sc.taylor, sparsity=sc.linear(0.5, start=1, end=3), types=kinds).attach(optimizer)
    words = torch.randn(3, 5, 16)
    for _ in range(4):
        optimizer.zero_grad()
        encoder(words).square().mean().backward()
        optimizer.step()
    pruner.verify()
    assert "layers.1.self_attn.in_proj_weight" in pruner.masks
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(words), encoder.train()(words))


def test_recurrent_weights_are_pruned_when_asked():
    torch.manual_seed(0)
    model = nn.LSTM(6, 8, num_layers=2, bidirectional=True)
    with pytest.raises(ValueError, match="LSTM is not among the types"):
        sc.prune_(model, sparsity=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pruner = sc.Pruner(model, sparsity=0.5, types=(nn.LSTM,)).attach(optimizer)
    assert len(pruner.masks) == 8
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 6))[0].square().mean().backward()
        optimizer.step()
        pruner.verify()
    copied = copy.deepcopy(model)
    words = torch.randn(5, 2, 6)
    assert torch.equal(copied(words)[0], model(words)[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(words)))


def test_tied_weights_are_one_target_and_stay_tied():
    torch.manual_seed(0)
    model = Tied()
    plan = sc.prune_(model, sparsity=0.5, include=["middle", "head"])
    assert len(plan.masks) == 2
    assert model.head.weight is model.embedding.weight
    assert int((model.embedding.weight == 0).sum()) == 48
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sc.Pruner(model, sparsity=0.5, include=["middle", "head"]).attach(optimizer)
    words = torch.arange(12).view(3, 4)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
    assert model.head.weight is model.embedding.weight
    assert int((model.head.weight == 0).sum()) == 48


def test_a_tied_embedding_is_left_alone_by_default_and_the_plan_says_so():
    plan = sc.prune_(Tied(), sparsity=0.5)
    assert list(plan.masks) == ["middle.weight"]
    assert "Embedding" in plan.skipped["embedding.weight"]


def test_a_tied_straight_through_weight_is_masked_wherever_it_is_used():
    torch.manual_seed(0)
    model = Tied()
    pruner = sc.Pruner(model, sparsity=0.5, include=["middle", "head"], ste=True)
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    words = torch.arange(12).view(3, 4)
    output = model(words)
    pruner.finish()
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model(words), output)


def test_a_module_used_twice_is_pruned_once():
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    plan = sc.prune_(model, sc.taylor, sparsity=0.5, data=[batch()], loss=lambda y, _: y.square().mean())
    assert list(plan.masks) == ["0.weight"]
    assert int((shared.weight == 0).sum()) == 32


def test_a_lazy_layer_is_skipped_or_refused_in_words_until_it_is_initialised():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    plan = sc.prune_(model, sparsity=0.5)
    assert list(plan.masks) == ["0.weight"]
    assert "no values yet" in plan.skipped["1.weight"]
    model(batch())
    assert len(sc.prune_(model, sparsity=0.5).masks) == 2


def test_a_model_built_on_the_meta_device_is_pruned_once_it_has_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with pytest.raises(ValueError, match="meta"):
        sc.prune_(model, sparsity=0.5)
    model.load_state_dict(build().state_dict(), assign=True)
    sc.prune_(model, sparsity=0.5)
    assert zeros(model) == HALF


def test_frozen_weights_and_inference_mode():
    model = build().requires_grad_(False)
    with torch.inference_mode():
        sc.prune_(model, sparsity=0.5)
    assert zeros(model) == HALF
    assert not any(p.requires_grad or p.is_inference() for p in model.parameters())


def test_weights_made_in_inference_mode_are_pruned():
    with torch.inference_mode():
        model = build()
    sc.prune_(model, sparsity=0.5)
    assert zeros(model) == HALF


@pytest.mark.parametrize("how", [{"criterion": "wanda"}, {"method": "sparsegpt"}, {"method": "flow"}], ids=str)
def test_a_model_made_in_inference_mode_runs_on_data(how):
    with torch.inference_mode():
        model = nn.Sequential(build(), nn.BatchNorm1d(build()(batch()).shape[1]))  # its buffers are put back after each run
        sc.plan(model, sparsity=0.5, data=[batch()], **how)
    plan = sc.prune_(model, sparsity=0.5, data=[batch()], **how)
    assert plan.metrics()["sparsity"] == 0.5


@pytest.mark.parametrize("how", [{"criterion": "taylor"}, {"method": "loss"}], ids=str)
def test_gradients_of_a_model_made_in_inference_mode_are_refused_in_words(how):
    with torch.inference_mode():
        model = build()
    for each in (False, True):
        with (
            torch.inference_mode(each),
            pytest.raises(ValueError, match=r"'0.weight' was made in inference mode.*copy.deepcopy"),
        ):
            sc.prune_(model, sparsity=0.5, data=[(batch(), batch())], loss=nn.functional.mse_loss, **how)
    assert zeros(model) == {"0.weight": 0, "2.weight": 0}
    assert all(parameter.requires_grad for parameter in model.parameters())
    sc.plan(copy.deepcopy(model), sparsity=0.5, data=[(batch(), batch())], loss=lambda y, _: y.square().mean(), **how)


def test_pruning_does_not_break_a_graph_that_is_waiting_for_its_backward_pass():
    model = build()
    loss = model(batch()).square().mean()
    sc.plan(model, sparsity=0.5)  # touches nothing, so autograd's saved tensors are as they were
    loss.backward()
    assert model[0].weight.grad is not None


def test_weights_in_shared_memory_are_pruned_there():
    model = build().share_memory()
    sc.prune_(model, sparsity=0.5)
    assert model[0].weight.is_shared()
    assert zeros(model) == HALF


def test_planning_leaves_storages_resizable():
    model = build()
    sc.plan(model, sparsity=0.5)
    assert model[0].weight.untyped_storage().resizable()


def test_a_jit_trace_of_a_pruned_model_gives_the_same_result(pruned):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(pruned, batch())
    assert torch.equal(traced(batch()), pruned(batch()))


def test_weight_norm_is_left_alone_with_a_reason():
    model = build()
    nn.utils.parametrizations.weight_norm(model[0])
    plan = sc.prune_(model, sparsity=0.5)
    assert list(plan.masks) == ["2.weight"]
    assert any("parametri" in reason for reason in plan.skipped.values())
