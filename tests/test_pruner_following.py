"""What a `Pruner` follows: optimizers that come and go, and cuts of its model. Uses that conflict are reported in words."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        optimizer.step()


def step_of(pruner):
    return pruner.state_dict()["step"]


# --- optimizers that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [False, True], ids=["alone", "with a learning rate scheduler"])
def test_replacing_the_optimizer_does_not_stall_the_schedule(scheduler):
    """The deleted optimizer stayed the one whose steps were counted, so the schedule stopped without a word."""
    model = net()
    optimizer = sgd(model)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 100) if scheduler else None
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(optimizer)
    train(model, optimizer, 2)
    del optimizer, rate
    new = sgd(model)
    pruner.attach(new)
    train(model, new, 2)
    assert step_of(pruner) == 4
    assert pruner.sparsity == 0.5


def test_the_schedule_continues_with_the_next_optimizer_when_the_first_is_deleted():
    """Steps of the second optimizer only put zeros back, whether or not the first one still existed."""
    model = net()
    first, second = sgd(model[0]), sgd(model[2:])
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(first, second)
    train(model, second)
    assert step_of(pruner) == 0
    del first
    gc.collect()
    train(model, second, 3)
    assert step_of(pruner) == 3


def test_a_pruner_does_not_keep_its_optimizer_alive():
    """It held the optimizer, and with it all of its state, for as long as the pruner existed."""
    model = net()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert "not attached" in repr(pruner)


def test_detach_ends_the_following_and_attach_continues():
    """There was no way to stop following an optimizer but `finish`."""
    model = net()
    old, new = sgd(model), sgd(model)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(old)
    train(model, old)
    assert pruner.detach(old) is pruner
    train(model, old)
    assert step_of(pruner) == 1
    pruner.attach(new)
    train(model, new, 3)
    assert (step_of(pruner), pruner.sparsity) == (4, 0.5)
    pruner.detach()
    train(model, new)
    assert step_of(pruner) == 4


def test_detaching_a_stranger_is_refused_and_detaches_nothing():
    model = net()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    with pytest.raises(ValueError, match=r"this Adam is not attached; attached is SGD"):
        pruner.detach(optimizer, torch.optim.Adam(model.parameters()))
    train(model, optimizer)
    assert step_of(pruner) == 1


def test_a_second_optimizer_on_the_same_tensors_is_warned_about():
    """A replacement was attached beside an optimizer that still existed, and the schedule waited for the old one silently."""
    model = net()
    old, new = sgd(model), torch.optim.Adam(model.parameters())
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(old)
    with pytest.warns(UserWarning, match=r"this Adam trains tensors that the attached SGD .* call pruner\.detach\(old\)"):
        pruner.attach(new)
    assert old is not new


def test_optimizers_of_different_tensors_and_two_in_one_call_need_no_warning():
    model = net()
    optimizers = [sgd(model[0]), sgd(model[2]), sgd(model), sgd(model)]
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(optimizers[0])
    pruner.attach(optimizers[1])
    pruner.detach().attach(*optimizers[2:])
    train(model, optimizers[3])
    train(model, optimizers[2])
    assert step_of(pruner) == 1


def test_stepping_an_attached_pruner_by_hand_is_refused():
    """Every training step counted twice, so that the schedule ended at half of the training."""
    model = net()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=4)).attach(optimizer)
    train(model, optimizer)
    with pytest.raises(RuntimeError, match=r"attached to SGD .* would count the step twice"):
        pruner.step()
    assert step_of(pruner) == 1
    pruner.detach().step()
    assert step_of(pruner) == 2


def test_two_pruners_on_one_tensor_are_warned_about():
    """A notebook cell that was run twice left two pruners at work on the same weights without a word."""
    model = net()
    optimizer = sgd(model)
    first = sc.Pruner(model, sparsity=0.5, include="0").attach(optimizer)
    second = sc.Pruner(model, sparsity=0.8)
    with pytest.warns(UserWarning, match=r"another pruner .* prunes '0\.weight' too \(1 tensors in all\)"):
        second.attach(optimizer)
    first.detach()
    second.detach()
    sc.Pruner(model, sparsity=0.6, include="0").attach(optimizer)
    sc.Pruner(model, sparsity=0.8, include="2").attach(optimizer)


@pytest.mark.parametrize("end", ["finish", "undo_"])
def test_a_pruner_that_was_ended_says_so(end):
    """`step` after `finish` went on pruning, and after `ste=True` it put hard zeros into the weights."""
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5, keep_dense=True)
    pruner.step()
    getattr(pruner, end)()
    before = copy.deepcopy(model.state_dict())
    state = sc.Pruner(net(), sparsity=0.5, keep_dense=True).state_dict()
    for call in (pruner.step, lambda: pruner.attach(sgd(model)), lambda: pruner.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=rf"came after {end}\(\), which ended this pruner at step 1\. Make a new Pruner"):
            call()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert f"ended by {end}()" in repr(pruner)


def test_finish_may_be_called_twice():
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5)
    pruner.step()
    assert pruner.finish().masks == pruner.finish().masks


def test_training_without_attach_is_reported():
    """`finish` spoke of steps and due dates, and `verify` passed: neither said that the pruner had never done anything."""
    model = net()
    pruner = sc.Pruner(model, sparsity=0.5)
    train(model, sgd(model), 3)
    assert "not attached" in repr(pruner)
    with pytest.warns(UserWarning, match=r"made no masks, because no optimizer was attached"):
        pruner.verify()
    with pytest.warns(UserWarning, match=r"not finished: this pruner has made no masks.*pruner\.attach\(optimizer\)"):
        pruner.finish()


# --- cuts of the model ---------------------------------------------------------------------------------------------------

KINDS = {
    "sgd": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("shrink", [sc.shrink, sc.shrink_], ids=["copy", "in place"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("criterion", [sc.magnitude, sc.movement], ids=str)
def test_an_attached_pruner_follows_a_cut(shrink, kind, criterion):
    """The next `optimizer.step` failed, because the masks had the sizes of the model before the cut."""
    model = net()
    optimizer = KINDS[kind](model)
    pruner = sc.Pruner(model, criterion, sparsity=sc.linear(0.6, end=8)).attach(optimizer)
    train(model, optimizer, 3)
    before, zeros = pruner.masks, {name: p.detach() == 0 for name, p in model.named_parameters()}
    small, plan = shrink(model, X, channels=0.5, optimizer=optimizer)
    for name, mask in pruner.masks.items():
        rows, columns = (plan.cuts.tensors.get(name, {}).get(dim, range(before[name].shape[dim])) for dim in (0, 1))
        assert torch.equal(mask, before[name][list(rows)][:, list(columns)])
        assert mask.shape == small.get_parameter(name).shape
        assert torch.equal(~mask, zeros[name][list(rows)][:, list(columns)])
    pruner.verify()
    held = pruner.masks
    train(small, optimizer, 5)
    pruner.verify()
    assert step_of(pruner) == 8
    assert pruner.masks & held == pruner.masks
    assert pruner.sparsity == pytest.approx(0.6, abs=0.02)
    assert pruner.finish().apply_(small).masks == pruner.masks


def test_gradients_gathered_before_a_cut_are_sliced_like_the_weights():
    model = net()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sc.movement, sparsity=sc.one_shot(0.5, at=9)).attach(optimizer)
    train(model, optimizer, 2)
    before = pruner.state_dict()["gathered"]["2.weight"]["grad"]
    _, plan = sc.shrink_(model, X, channels=0.5, optimizer=optimizer)
    kept = plan.cuts.tensors["2.weight"]
    assert torch.equal(pruner.state_dict()["gathered"]["2.weight"]["grad"], before[kept[0]][:, kept[1]])


def test_n_of_m_holds_again_after_a_cut_that_moved_columns():
    """Columns that go leave groups of four with three or four weights."""
    model = net()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, pattern="2:4").attach(optimizer)
    sc.shrink_(model, X, channels=0.5, multiple_of=4, optimizer=optimizer)
    train(model, optimizer, 2)
    pruner.verify()
    weight = model[2].weight
    assert weight.shape[1] % 4 == 0
    assert int((weight.view(len(weight), -1, 4) != 0).sum(-1).max()) <= 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("shrink", [sc.shrink, sc.shrink_], ids=["copy", "in place"])
def test_an_attached_pruner_follows_the_removal_of_blocks(shrink):
    """The names of the blocks that stay change, and the masks of the removed ones go."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, end=6)).attach(optimizer)
    train(model, optimizer, 2)
    small, plan = shrink(model, X, depth=0.5, optimizer=optimizer)
    (gone,) = plan.cuts.drop.values()
    assert len(gone) == 2
    names = {name for name, p in small.named_parameters() if p.dim() > 1}
    assert set(pruner.masks) == names
    train(small, optimizer, 4)
    pruner.verify()
    assert pruner.sparsity == pytest.approx(0.5, abs=0.02)
    assert set(pruner.finish().masks) == names


def test_a_pruner_of_a_larger_model_follows_a_cut_of_a_part_in_place():
    model = nn.Sequential(net(), nn.Linear(3, 3))
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    sc.shrink_(model[0], X, channels=0.5, optimizer=optimizer)
    train(model, optimizer)
    pruner.verify()
    assert {name: mask.shape for name, mask in pruner.masks.items()} == {
        name: p.shape for name, p in model.named_parameters() if p.dim() > 1
    }


def refusals():
    spread = {"stem.weight": 0.5, "layers.*": 0.2, "head.weight": 0.1}
    yield "keep_dense", Deep, {"sparsity": 0.5, "keep_dense": True}, {"channels": 0.5}, "keeps dense values"
    yield "spread by name", Deep, {"spread": spread}, {"depth": 0.5}, "spread= by name"


@pytest.mark.parametrize(("build", "recipe", "cut", "words"), [pytest.param(*r[1:], id=r[0]) for r in refusals()])
@pytest.mark.parametrize("shrink", [sc.shrink, sc.shrink_], ids=["copy", "in place"])
def test_a_pruner_that_cannot_follow_a_cut_refuses_it_before_anything_changes(shrink, build, recipe, cut, words):
    torch.manual_seed(0)
    model = build()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, **recipe).attach(optimizer)
    train(model, optimizer)
    before, groups = copy.deepcopy(model.state_dict()), [list(g["params"]) for g in optimizer.param_groups]
    with pytest.raises(ValueError, match=rf"{words}.*finish\(\) first.*Nothing has changed"):
        shrink(model, X, optimizer=optimizer, **cut)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p is q for g, old in zip(optimizer.param_groups, groups) for p, q in zip(g["params"], old, strict=True))
    train(model, optimizer)
    pruner.verify()


def test_a_pruner_of_another_module_does_not_move_to_a_copy():
    model = nn.Sequential(net(), nn.Linear(3, 3))
    optimizer = sgd(model)
    sc.Pruner(model, sparsity=0.5).attach(optimizer)
    with pytest.raises(ValueError, match=r"made for another module .* Use shrink_"):
        sc.shrink(model[0], X, channels=0.5, optimizer=optimizer)
    train(model, optimizer)


def test_soft_masks_refuse_a_cut():
    model = net()
    optimizer = sgd(model)
    pruner = sc.Pruner(model, sparsity=0.5, ste=True).attach(optimizer)
    with pytest.raises(ValueError, match=r"ste=True.*finish\(\) first.*Nothing has changed"):
        sc.shrink_(model, X, channels=0.5, optimizer=optimizer)
    train(model, optimizer)
    pruner.finish()
    assert model[0].weight.shape == (16, 6)


@pytest.mark.parametrize("attached", [True, False])
def test_a_cut_that_the_pruner_did_not_hear_of_is_named(attached):
    """torch reported two sizes that do not match, without the layer and without what to do."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=0.5)
    if attached:
        pruner.attach(optimizer)
    sc.shrink_(model, X, channels=0.5)
    with pytest.raises(RuntimeError, match=r"'0\.weight' is \(\d+, 6\) and its mask \(16, 6\): the model was cut.*optimizer="):
        train(model, optimizer) if attached else pruner.step()
    with pytest.raises(RuntimeError, match="the model was cut"):
        pruner.verify() if attached else pruner.apply_()


def test_warnings_come_before_anything_is_attached():
    model = net()
    optimizer = sgd(model)
    first = sc.Pruner(model, sparsity=0.5).attach(optimizer)
    second, before = sc.Pruner(model, sparsity=0.9), model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="another pruner"):
            second.attach(optimizer)
    assert torch.equal(model[0].weight, before)
    train(model, optimizer)
    assert (step_of(first), step_of(second)) == (1, 0)
