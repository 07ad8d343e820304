"""`Pruner`: masks held through training, schedules, dynamic sparsity, straight-through weights, stopping and going on."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc

STEPS = 12
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def one_step(model, optimizer, step=0):
    pick = slice(4 * (step % 10), 4 * (step % 10) + 4)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(X[pick]), Y[pick])
        loss.backward()
        return loss

    optimizer.step(closure)


def zeros_are_masks(pruner, model):
    return all(torch.equal(model.get_parameter(n) != 0, m) for n, m in pruner.masks.items())


def frozen(masks):
    return sc.Masks({name: mask.clone() for name, mask in masks.items()})


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    "adamw maximize": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparsity_is_held_after_every_step(name):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.8).attach(optimizer)
    held = frozen(pruner.masks)
    for step in range(STEPS):
        one_step(model, optimizer, step)
        assert zeros_are_masks(pruner, model)
        pruner.verify()
    assert pruner.masks == held
    assert pruner.sparsity == pytest.approx(0.8, abs=0.01)
    assert not any(torch.signbit(model.get_parameter(n)[~m]).any() for n, m in held.items())


@pytest.mark.parametrize("scope", ["tensor", "global", "row"])
@pytest.mark.parametrize("shape", [sc.cubic, sc.linear, sc.cosine, sc.exponential])
def test_a_gradual_schedule_ends_at_the_exact_count_and_never_lets_a_weight_back(scope, shape):
    model = net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    schedule = shape(0.9, start=2, end=9, every=3)
    pruner = sc.Pruner(model, sparsity=schedule, scope=scope).attach(optimizer)
    before, counts = frozen(pruner.masks), []
    for step in range(1, STEPS + 1):
        one_step(model, optimizer, step)
        assert pruner.masks & before == pruner.masks
        if not schedule.due(step):
            assert pruner.masks == before
        elif scope == "global":
            assert pruner.masks.total - pruner.masks.kept == round(schedule(step) * pruner.masks.total)
        before = frozen(pruner.masks)
        counts.append(pruner.masks.total - pruner.masks.kept)
    sizes = {"tensor": [96, 256, 48], "global": [400], "row": [6] * 16 + [16] * 19}[scope]
    assert counts[0] == 0
    assert counts[-1] == sum(round(0.9 * size) for size in sizes)


def test_stepping_by_hand_is_the_same_as_attaching():
    runs = []
    for attached in (True, False):
        model = net()
        optimizer = OPTIMIZERS["sgd momentum"](model.parameters())
        pruner = sc.Pruner(model, sparsity=sc.cubic(0.8, start=1, end=8, every=2))
        if attached:
            pruner.attach(optimizer)
        for step in range(STEPS):
            one_step(model, optimizer, step)
            if not attached:
                pruner.step()
        runs.append((model.state_dict(), pruner.masks))
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(runs[0][0][n], runs[1][0][n]) for n in runs[0][0])


def test_several_optimizers_hold_the_zeros_and_the_first_advances_the_schedule():
    model = net()
    first = OPTIMIZERS["adam"](model[0].parameters())
    second = OPTIMIZERS["sgd"]([*model[2].parameters(), *model[4].parameters()])
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(first, second)
    for step in range(6):
        F.mse_loss(model(X), Y).backward()
        second.step()
        assert pruner.state_dict()["step"] == step
        first.step()
        assert pruner.state_dict()["step"] == step + 1
        assert zeros_are_masks(pruner, model)
    assert pruner.sparsity == 0.5


def test_attaching_the_same_optimizer_twice_does_not_hurry_the_schedule():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=10))
    with pytest.raises(ValueError, match="attached already"):
        pruner.attach(optimizer).attach(optimizer)
    one_step(model, optimizer)
    assert pruner.state_dict()["step"] == 1


def test_a_skipped_step_does_not_advance_the_schedule():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for poison in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        if poison:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    assert pruner.state_dict()["step"] == 2


def test_verify_catches_an_optimizer_that_is_not_attached():
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5)
    pruner.step()
    pruner.verify()
    one_step(model, OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(RuntimeError, match=r"0\.weight.*not attached"):
        pruner.verify()
    pruner.apply_()
    pruner.verify()


@pytest.mark.parametrize("wrong", ["sgd", None, 5])
def test_only_optimizers_attach(wrong):
    with pytest.raises(TypeError, match="torch optimizers"):
        sc.Pruner(net(), sparsity=0.5).attach(wrong)


def test_an_optimizer_of_another_model_does_not_attach():
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5)
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="none of the pruned tensors"):
        pruner.attach(OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["sgd"](net().parameters()))
    assert torch.equal(model[0].weight, before)
    one_step(model, OPTIMIZERS["sgd"](model.parameters()))


def test_an_optimizer_that_was_made_before_decompress_does_not_attach():
    model, x = net(), torch.randn(1, 6)
    sc.prune_(model, sparsity=0.9)
    sc.compress_(model, x, objective="size")
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"made before sc\.shrink or sc\.decompress_ holds the old tensors: make a new one"):
        sc.Pruner.hold(sc.decompress_(model)).attach(early)


def test_masks_taken_earlier_do_not_change_later():
    pruner = sc.Pruner(net(), sparsity=sc.one_shot(0.5, at=1))
    before = pruner.masks
    assert before.sparsity == 0
    pruner.step()
    assert pruner.sparsity == 0.5
    assert before.sparsity == 0


def test_n_of_m_is_held_through_training():
    model = net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    pruner = sc.Pruner(model, pattern="2:4", include=["2", "4"]).attach(optimizer)
    for step in range(4):
        one_step(model, optimizer, step)
    assert (model[2].weight.view(16, 4, 4) != 0).sum(2).eq(2).all()
    assert pruner.sparsity == 0.5


def test_a_criterion_may_change_during_training():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    early = -sc.magnitude
    pruner = sc.Pruner(model, sc.magnitude.after(3, early), sparsity=sc.linear(0.8, start=0, end=4)).attach(optimizer)
    for step in range(2):
        one_step(model, optimizer, step)
    assert pruner.masks == sc.plan(net(), early, sparsity=0.4).masks
    for step in range(2, 5):
        one_step(model, optimizer, step)
    assert pruner.sparsity == pytest.approx(0.8, abs=0.01)
    weights = net()[2].weight.detach().abs()
    largest, smallest = weights > weights.median(), weights < weights.quantile(0.2)
    assert not pruner.masks["2.weight"][smallest].any()
    assert 0 < int((~pruner.masks["2.weight"] & largest).sum()) < 128


# --- gradients of the training itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", [sc.taylor, sc.movement, sc.fisher], ids=str)
def test_gradients_are_averaged_since_the_last_masks(criterion):
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, criterion, sparsity=sc.one_shot(0.5, at=4)).attach(optimizer)
    seen, squares = {}, {}
    for step in range(4):
        optimizer.zero_grad()
        F.mse_loss(model(X[step : step + 8]), Y[step : step + 8]).backward()
        for name, p in model.named_parameters():
            seen[name] = seen.get(name, 0) + p.grad / 4
            squares[name] = squares.get(name, 0) + p.grad**2 / 4
        weights = None
        if step == 3:
            twin = copy.deepcopy(model)
            torch.optim.SGD(twin.parameters(), lr=0.1).load_state_dict(optimizer.state_dict())
            weights = {n: p.detach() - 0.1 * p.grad for n, p in model.named_parameters()}
        optimizer.step()
    formula = {
        sc.taylor: lambda n: (weights[n] * seen[n]).abs(),
        sc.movement: lambda n: -(weights[n] * seen[n]),
        sc.fisher: lambda n: weights[n] ** 2 * squares[n],
    }[criterion]
    for name, mask in pruner.masks.items():
        scores = formula(name)
        assert float(scores[mask].min()) >= float(scores[~mask].max()) - 1e-7
        assert int((~mask).sum()) == mask.numel() // 2


def test_gradients_from_before_the_last_masks_are_forgotten():
    layer = nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    pruner = sc.Pruner(layer, abs(sc.grad), sparsity=sc.linear(0.5, start=0, end=2, every=1)).attach(optimizer)
    first, second = (torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for gradient in (100 * first, second):
        before = frozen(pruner.masks)["weight"]
        layer.weight.grad = gradient.clone()
        optimizer.step()
    assert int(before.sum()) == 18
    wanted = before & (second.abs() > second.abs()[before].sort().values[5])
    assert torch.equal(pruner.masks["weight"], wanted)


def test_a_tensor_without_a_gradient_is_named():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"]([p for p in model.parameters() if p.requires_grad])
    sc.Pruner(model, sc.movement, sparsity=0.5).attach(optimizer)
    with pytest.raises(RuntimeError, match=r"'0\.weight'.* have no gradient"):
        one_step(model, optimizer)


def test_a_criterion_that_needs_inputs_needs_data():
    with pytest.raises(ValueError, match="pass data="):
        sc.Pruner(net(), sc.wanda, sparsity=0.5)


def test_evidence_that_will_be_missing_is_missed_before_training_starts():
    later = sc.one_shot(0.5, at=1000)
    with pytest.raises(ValueError, match="pass loss="):
        sc.Pruner(net(), sc.taylor, sparsity=later, data=[(X, Y)])
    with pytest.raises(TypeError, match="data= is an iterable of batches"):
        sc.Pruner(net(), sc.wanda, sparsity=later, data=X)


def test_a_sparsity_that_falls_is_refused_where_what_was_pruned_stays_pruned():
    with pytest.raises(ValueError, match="stay pruned"):
        sc.Pruner(net(), sparsity=sc.linear(0.2, initial=0.8, end=10))


def test_data_and_loss_feed_a_criterion_at_each_update():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sc.wanda * sc.fisher, sparsity=sc.linear(0.5, end=4), data=[(X, Y)], loss=F.mse_loss).attach(
        optimizer
    )
    for step in range(5):
        one_step(model, optimizer, step)
    assert pruner.sparsity == 0.5
    assert zeros_are_masks(pruner, model)


# --- drop and grow ----------------------------------------------------------------------------------------------------

SWAP = sc.cosine(0.0, initial=0.3, end=10, every=2)


@pytest.mark.parametrize("grow", [abs(sc.grad), sc.random(7)], ids=["rigl", "set"])
@pytest.mark.parametrize("pattern", ["unstructured", "1x2", "out"])
def test_dynamic_sparsity_keeps_the_number_of_weights_and_moves_them(grow, pattern):
    model = net()
    optimizer = OPTIMIZERS["sgd momentum"](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.5, grow=grow, swap=SWAP, pattern=pattern).attach(optimizer)
    one_step(model, optimizer)
    start = frozen(pruner.masks)
    counts = {name: int(mask.sum()) for name, mask in start.items()}
    moved = 0
    for step in range(1, STEPS):
        before = frozen(pruner.masks)
        one_step(model, optimizer, step)
        assert {name: int(mask.sum()) for name, mask in pruner.masks.items()} == counts
        pruner.verify()
        moved += (pruner.masks - before).kept
        if not SWAP.due(step + 1):
            assert pruner.masks == before
    assert moved > 0


def test_rigl_drops_the_smallest_and_grows_the_steepest():
    layer = nn.Linear(6, 4, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    pruner = sc.Pruner(layer, sparsity=0.5, grow=abs(sc.grad), swap=sc.one_shot(0.25, at=2)).attach(optimizer)
    grads = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for i, gradient in enumerate(grads):
        layer.weight.grad = gradient.clone()
        if i == 1:
            before, weights = frozen(pruner.masks)["weight"], layer.weight.detach() - 1e-6 * gradient
        optimizer.step()
    kept = before.nonzero().tolist()
    goes = sorted(kept, key=lambda at: float(weights[tuple(at)].abs()))[:3]
    outside = [at for at in itertools.product(range(4), range(6)) if not before[at] or list(at) in goes]
    since_the_first_masks = grads[0] + grads[1]
    comes = sorted(outside, key=lambda at: -float(since_the_first_masks[tuple(at)].abs()))[:3]
    wanted = before.clone()
    for at in goes:
        wanted[tuple(at)] = False
    for at in comes:
        wanted[at] = True
    assert torch.equal(pruner.masks["weight"], wanted)


def test_the_number_of_swapped_weights_is_rounded():
    layer = nn.Linear(20, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    pruner = sc.Pruner(layer, sparsity=0.5, grow=abs(sc.grad), swap=sc.one_shot(0.29, at=1)).attach(optimizer)
    before = frozen(pruner.masks)["weight"]
    layer.weight.grad = (~before).float()  # nothing that is dropped comes straight back
    optimizer.step()
    assert 0.29 * int(before.sum()) < 29  # in floating point
    assert int((pruner.masks["weight"] & ~before).sum()) == int((before & ~pruner.masks["weight"]).sum()) == 29


def test_growing_at_random_goes_on_finding_new_places():
    """Scores drawn alike at every update would let the same few weights come and go for ever."""
    layer = nn.Linear(20, 20, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    swap = sc.linear(0.3, initial=0.3, end=100)
    pruner = sc.Pruner(layer, sparsity=0.8, grow=sc.random(3), swap=swap).attach(optimizer)
    ever = pruner.masks["weight"].clone()
    for _ in range(40):
        optimizer.zero_grad()
        layer(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        ever |= pruner.masks["weight"]
    assert int(ever.sum()) > 300  # 80 at a time, 24 of them new at each of 40 swaps


def test_grown_weights_start_at_zero():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.5, grow=abs(sc.grad), swap=sc.one_shot(0.3, at=3)).attach(optimizer)
    for step in range(2):
        one_step(model, optimizer, step)
    before = frozen(pruner.masks)
    one_step(model, optimizer, 2)
    new = pruner.masks - before
    assert new.kept > 0
    assert all(not model.get_parameter(name)[mask].any() for name, mask in new.items())


@pytest.mark.parametrize(
    "sparsity", [sc.cubic(0.8, end=5), sc.one_shot(0.8, at=3), sc.linear(0.8, start=2, end=8, every=2)], ids=str
)
def test_growing_with_a_gradual_sparsity_is_refused(sparsity):
    with pytest.raises(ValueError, match="grow= swaps weights at a constant sparsity"):
        sc.Pruner(net(), sparsity=sparsity, grow=abs(sc.grad), swap=SWAP)


def test_growing_by_gradients_of_data():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sc.wanda, sparsity=0.5, grow=abs(sc.grad), swap=SWAP, data=[(X, Y)], loss=F.mse_loss).attach(
        optimizer
    )
    for step in range(4):
        one_step(model, optimizer, step)
    assert pruner.sparsity == 0.5


def test_growing_by_a_function_of_the_users_own():
    def steepest(grad):
        return grad.abs()

    runs = []
    for grow in (steepest, abs(sc.grad)):
        model = net()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        pruner = sc.Pruner(model, sparsity=0.5, grow=grow, swap=SWAP).attach(optimizer)
        for step in range(5):
            one_step(model, optimizer, step)
        runs.append(frozen(pruner.masks))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"sparsity": 0.5, "swap": SWAP}, "swap= goes with grow="),
        ({"sparsity": 0.5, "grow": sc.random(0)}, "grow= needs swap="),
        ({"sparsity": 0.5, "grow": sc.random(0), "swap": 0.3}, "grow= needs swap="),
        ({"sparsity": 0.5, "grow": sc.random(0), "swap": SWAP, "scope": "global"}, 'scope="tensor"'),
        ({"pattern": "2:4", "grow": sc.random(0), "swap": SWAP}, "without n:m"),
        ({"sparsity": 0.5, "grow": sc.random(0), "swap": SWAP, "ste": True}, "choose one"),
    ],
)
def test_what_does_not_go_together_is_refused_and_touches_nothing(kwargs, words):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        sc.Pruner(model, **kwargs)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- straight through -------------------------------------------------------------------------------------------------


def test_straight_through_masks_the_forward_pass_and_trains_the_dense_weights():
    model, plain = net(), net()
    pruner = sc.Pruner(model, sparsity=0.5, ste=True)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner.attach(optimizer)
    sc.prune_(plain, sparsity=0.5)
    assert torch.equal(model(X), plain(X))
    loss = F.mse_loss(model(X), Y)
    loss.backward()
    F.mse_loss(plain(X), Y).backward()
    for a, b in zip((model[0], model[2], model[4]), (plain[0], plain[2], plain[4]), strict=True):
        dense = a.parametrizations.weight.original
        torch.testing.assert_close(dense.grad, b.weight.grad)
        assert dense.grad[~(b.weight != 0)].any()
    before = model[0].parametrizations.weight.original.detach().clone()
    optimizer.step()
    assert (model[0].parametrizations.weight.original != before).all()


def test_straight_through_lets_weights_come_back():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=20, initial=0.5), ste=True).attach(optimizer)
    start = frozen(pruner.masks)
    for step in range(20):
        one_step(model, optimizer, step)
    assert pruner.sparsity == 0.5
    assert (pruner.masks - start).kept > 0


def test_finishing_leaves_plain_weights_in_their_old_places():
    for ste in (False, True):
        model, dense = net(), net()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        pruner = sc.Pruner(model, sparsity=0.5, ste=ste).attach(optimizer)
        for step in range(3):
            one_step(model, optimizer, step)
        out = model(X)
        plan = pruner.finish()
        assert list(model.state_dict()) == list(dense.state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in dense.named_parameters()]
        assert [type(module) for module in model.modules()] == [type(module) for module in dense.modules()]
        assert optimizer.param_groups[0]["params"][0] is model[0].weight
        assert torch.equal(model(X), out)
        assert plan.masks == pruner.masks
        assert zeros_are_masks(pruner, model)
        dense.load_state_dict(model.state_dict(), strict=True)
        one_step(model, optimizer)
        assert pruner.state_dict()["step"] == 3


@pytest.mark.parametrize("criterion", [sc.wanda, sc.synflow, sc.taylor, sc.ria], ids=str)
def test_straight_through_goes_with_every_kind_of_evidence(criterion):
    model, plain = net(), net()
    pruner = sc.Pruner(model, criterion, sparsity=0.5, ste=True, data=[(X, Y)], loss=F.mse_loss)
    wanted = sc.plan(plain, criterion, sparsity=0.5, data=[(X, Y)], loss=F.mse_loss)
    pruner.attach(OPTIMIZERS["sgd"](model.parameters()))
    assert pruner.masks == wanted.masks


def test_straight_through_masks_every_use_of_a_tied_weight():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    plain = copy.deepcopy(model)
    pruner = sc.Pruner(model, sparsity=0.5, ste=True)
    pruner.attach(OPTIMIZERS["sgd"](model.parameters()))
    sc.prune_(plain, sparsity=0.5)
    assert torch.equal(model(X), plain(X))
    pruner.finish()
    assert model[0].weight is model[2].weight
    assert torch.equal(model(X), plain(X))


def test_a_model_that_trains_straight_through_can_be_copied():
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5, ste=True)
    pruner.step()
    assert torch.equal(copy.deepcopy(model)(X), model(X))


# --- undoing ----------------------------------------------------------------------------------------------------------


def test_undo_brings_back_what_was_pruned_and_keeps_what_was_trained():
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.5, keep_dense=True).attach(optimizer)
    masks = frozen(pruner.masks)
    for step in range(3):
        one_step(model, optimizer, step)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    pruner.undo_()
    for name, mask in masks.items():
        assert torch.equal(model.get_parameter(name), torch.where(mask, trained[name], before[name]))
    assert pruner.sparsity == 0
    one_step(model, optimizer)


def test_undo_of_a_gradual_run_brings_back_the_last_value_each_weight_had():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.linear(0.8, end=6, every=2), keep_dense=True).attach(optimizer)
    last = {name: model.get_parameter(name).detach().clone() for name in pruner.masks}
    for _step in range(8):
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        held = frozen(pruner.masks)
        for name, mask in held.items():
            p = model.get_parameter(name)
            last[name] = torch.where(mask, p.detach() - 0.1 * p.grad, last[name])
        optimizer.step()
    pruner.undo_()
    for name, value in last.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=0, atol=1e-7)


def test_undo_of_a_straight_through_run_brings_back_the_dense_weights_as_trained():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.5, ste=True, keep_dense=True).attach(optimizer)
    for step in range(5):
        one_step(model, optimizer, step)
    dense = model[0].parametrizations.weight.original.detach().clone()
    pruner.undo_()
    assert torch.equal(model[0].weight, dense)


def test_undo_without_dense_values_is_refused():
    with pytest.raises(ValueError, match="keep_dense=True"):
        sc.Pruner(net(), sparsity=0.5).undo_()


# --- stopping and going on --------------------------------------------------------------------------------------------

RUNS = {
    "gradual": {"sparsity": sc.cubic(0.8, start=1, end=10, every=2)},
    "constant": {"sparsity": 0.6},
    "global": {"sparsity": sc.linear(0.8, end=10), "scope": "global"},
    "2:4": {"pattern": "2:4"},
    "movement": {"criterion": sc.movement, "sparsity": sc.cubic(0.8, start=3, end=10, every=3)},
    "taylor": {"criterion": sc.taylor, "sparsity": sc.linear(0.7, start=2, end=11, every=4)},
    "fisher": {"criterion": sc.fisher + sc.taylor, "sparsity": sc.linear(0.7, start=2, end=11, every=4)},
    "rigl": {"sparsity": 0.5, "grow": abs(sc.grad), "swap": SWAP},
    "set": {"sparsity": 0.5, "grow": sc.random(3), "swap": SWAP},
    "keep dense": {"sparsity": sc.cubic(0.8, end=10, every=2), "keep_dense": True},
    "data": {"criterion": sc.movement, "sparsity": 0.5, "data": [(X, Y)], "loss": F.mse_loss},
    "rigl keep dense": {"sparsity": 0.5, "grow": abs(sc.grad), "swap": SWAP, "keep_dense": True},
    "straight through": {"sparsity": sc.linear(0.7, end=10), "ste": True},
    "straight through movement": {"criterion": sc.movement, "sparsity": sc.linear(0.7, start=2, end=10, every=3), "ste": True},
}


@pytest.mark.parametrize("attach_first", [False, True], ids=["load, attach", "attach, load"])
@pytest.mark.parametrize("stop", [1, 5, 8])
@pytest.mark.parametrize("name", RUNS)
def test_going_on_from_a_checkpoint_is_bitwise_the_uninterrupted_run(name, stop, attach_first, tmp_path):
    def begin(seed):
        model = net(seed)
        pruner = sc.Pruner(model, **RUNS[name])
        return model, torch.optim.AdamW(model.parameters(), lr=0.02), pruner

    model, optimizer, pruner = begin(0)
    pruner.attach(optimizer)
    for step in range(STEPS):
        if step == stop:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pruner": pruner.state_dict()}
            torch.save(state, tmp_path / "state.pt")
        one_step(model, optimizer, step)

    again, second, resumed = begin(9)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    if attach_first:
        resumed.attach(second)  # prunes at once where the budget says so; too late, if the state keeps what it pruned
        refused = ""
        try:
            resumed.load_state_dict(state["pruner"])
        except RuntimeError as error:
            refused = str(error)
        if refused:
            assert "load the model's state before" in refused
            return
    else:
        resumed.load_state_dict(state["pruner"])
        resumed.attach(second)
    for step in range(stop, STEPS):
        one_step(again, second, step)

    assert resumed.masks == pruner.masks
    assert list(again.state_dict()) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    if "keep_dense" in RUNS[name]:
        pruner.undo_()
        resumed.undo_()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_state_taken_in_memory_does_not_change_as_training_goes_on():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sc.movement, sparsity=sc.one_shot(0.5, at=9), keep_dense=True).attach(optimizer)
    one_step(model, optimizer)
    state = pruner.state_dict()
    before = copy.deepcopy(state)
    for step in range(3):
        one_step(model, optimizer, step)
    assert torch.equal(state["gathered"]["0.weight"]["grad"], before["gathered"]["0.weight"]["grad"])
    assert torch.equal(state["dense"]["0.weight"], before["dense"]["0.weight"])


def test_the_masks_of_a_state_take_one_bit_each():
    pruner = sc.Pruner(net(), sparsity=0.5)
    packed = pruner.state_dict()["masks"]
    assert sum(bits.numel() for bits, _ in packed.values()) == 96 // 8 + 256 // 8 + 48 // 8


@pytest.mark.parametrize(
    "break_it",
    [
        lambda s: s.update(version=99),
        lambda s: s.pop("version"),
        lambda s: s.pop("masks"),
        lambda s: s.pop("gathered"),
        lambda s: s["masks"].pop("0.weight"),
        lambda s: s["masks"].update({"0.weight": s["masks"]["2.weight"]}),
    ],
    ids=["version", "no version", "no masks", "no gathered", "a mask missing", "a mask of another shape"],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(break_it):
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5)
    state = pruner.state_dict()
    break_it(state)
    weights, masks = model[0].weight.detach().clone(), frozen(pruner.masks)
    with pytest.raises(ValueError, match=r"state|version|mask"):
        pruner.load_state_dict(state)
    assert torch.equal(model[0].weight, weights)
    assert pruner.masks == masks


def test_a_state_without_dense_values_is_no_state_of_a_pruner_that_keeps_them():
    model = net()
    plain = sc.Pruner(model, sparsity=0.5)
    plain.step()
    with pytest.raises(ValueError, match="dense"):
        sc.Pruner(model, sparsity=0.5, keep_dense=True).load_state_dict(plain.state_dict())


def test_printing_a_pruner_shows_its_step_and_sparsity():
    pruner = sc.Pruner(net(), sparsity=sc.linear(0.5, end=2))
    pruner.step()
    assert "step 1, 3 tensors, 25.00% sparse" in repr(pruner)
    assert "abs(weight)" in repr(pruner)


def test_a_plan_along_the_way_applies_to_a_dense_copy():
    model, dense = net(), net()
    pruner = sc.Pruner(model, sparsity=0.5)
    pruner.step()
    pruner.plan().apply_(dense)
    assert torch.equal(dense[0].weight, model[0].weight)


# --- what a reviewer broke ----------------------------------------------------------------------------------------------


def test_an_uneven_spread_that_moves_between_updates_still_adds_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.6, end=60, every=5), spread=sc.owl(0.15, 2.5)).attach(optimizer)
    for _ in range(60):
        optimizer.zero_grad()
        (model(torch.randn(32, 64) * 10) - torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    assert pruner.sparsity == pytest.approx(0.6, abs=0.001)


@pytest.mark.parametrize("budget", [{"sparsity": 0.5}, {"pattern": "2:4"}], ids=str)
def test_soft_masks_on_a_constant_budget_follow_the_dense_weights(budget):
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, **budget, ste=True).attach(optimizer)
    first = pruner.masks["weight"]
    for step in range(50):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(16, 8)) - torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    dense = nn.Linear(8, 8, bias=False)
    dense.weight.data.copy_(model.parametrizations.weight.original.detach())
    assert torch.equal(pruner.masks["weight"], sc.plan(dense, **budget).masks["weight"])
    assert not torch.equal(pruner.masks["weight"], first)


def test_soft_masks_may_be_made_anew_less_often():
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pruner = sc.Pruner(model, sparsity=0.5, ste=True, every=3).attach(optimizer)
    seen = [pruner.masks]
    for step in range(3):
        model.parametrizations.weight.original.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        seen.append(pruner.masks)
    assert [seen[i] is seen[i + 1] for i in range(3)] == [True, True, False]
    for wrong in ({"every": 0, "ste": True}, {"every": 2}, {"every": 1.5, "ste": True}):
        with pytest.raises(ValueError, match="every="):
            sc.Pruner(nn.Linear(4, 4), sparsity=0.5, **wrong)


def test_a_copy_of_model_optimizer_and_pruner_can_be_attached_and_goes_on():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(optimizer)
    one_step(model, optimizer)
    model2, optimizer2, pruner2 = copy.deepcopy((model, optimizer, pruner))
    pruner2.attach(optimizer2)
    for step in range(1, 4):
        one_step(model, optimizer, step)
        one_step(model2, optimizer2, step)
    assert pruner2.masks == pruner.masks
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), model2.parameters(), strict=True))


def test_an_attach_that_fails_can_be_done_again():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    good = model[0].weight[0, 0].item()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    pruner = sc.Pruner(model, sparsity=0.5)
    with pytest.raises(ValueError, match="NaN"):
        pruner.attach(optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = good
    pruner.attach(optimizer)
    assert pruner.sparsity == 0.5
    one_step(model, optimizer)
    pruner.verify()


def test_finishing_before_the_end_of_the_schedule_warns():
    with pytest.warns(UserWarning, match="not finished"):
        sc.Pruner(net(), sparsity=0.9).finish()
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.cubic(0.9, end=1000, every=100)).attach(optimizer)
    one_step(model, optimizer)
    with pytest.warns(UserWarning, match="step 1, and the last masks are due at 1000"):
        pruner.finish()


def test_an_optimizer_in_a_wrapper_is_followed():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):  # as some frameworks do: no super().__init__
            self.optimizer = optimizer

        def step(self, closure=None):
            return self.optimizer.step(closure)

    model = net()
    inner = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.5).attach(Wrapper(inner))
    one_step(model, inner)
    pruner.verify()


def test_a_layer_that_rests_for_a_step_adds_nothing():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sc.taylor, sparsity=sc.one_shot(0.5, at=3)).attach(optimizer)
    for step in range(3):
        if step == 1:
            optimizer.zero_grad()
            model[0].weight.square().sum().backward()  # the other layers take no part
            optimizer.step()
        else:
            one_step(model, optimizer, step)
    assert pruner.sparsity == 0.5


def test_first_masks_of_rigl_are_there_before_the_first_step():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sparsity=0.5, grow=abs(sc.grad), swap=SWAP).attach(optimizer)
    assert pruner.sparsity == 0.5
    pruner.verify()


def test_a_layer_may_be_unused_in_a_step_when_masks_are_made_at_every_step():
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    pruner = sc.Pruner(model, sc.taylor, sparsity=sc.linear(0.5, end=4)).attach(optimizer)
    one_step(model, optimizer)
    optimizer.zero_grad()
    model[0].weight.square().sum().backward()  # only this layer takes part: the others have a gradient of nothing
    optimizer.step()
    for step in range(2, 4):
        one_step(model, optimizer, step)
    assert pruner.sparsity == 0.5


def test_the_schedule_that_falls_is_the_one_that_is_named():
    rising, falling = sc.linear(0.5, end=4), sc.linear(0.1, initial=0.4, end=4)
    with pytest.raises(ValueError, match=r"linear\(0\.1"):
        sc.Pruner(net(), sparsity=rising, spread={"0.weight": falling})
