"""Tensors that a model keeps between runs outside its parameters, and runs as the user will make them."""

import copy

import pytest
import torch
from torch import nn

import secateur as sc


class Attention(nn.Module):
    """Attention with learned biases that are looked up once in eval mode and kept, as several vision transformers do."""

    def __init__(self, width=12, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention_biases = nn.Parameter(torch.randn(heads, 25))
        self.register_buffer("attention_bias_idxs", torch.arange(25).view(5, 5), persistent=False)
        self.attention_bias_cache = {}

    def train(self, mode=True):
        super().train(mode)
        if mode and self.attention_bias_cache:
            self.attention_bias_cache = {}
        return self

    def biases(self, device):
        if self.training:
            return self.attention_biases[:, self.attention_bias_idxs]
        if str(device) not in self.attention_bias_cache:
            self.attention_bias_cache[str(device)] = self.attention_biases[:, self.attention_bias_idxs]
        return self.attention_bias_cache[str(device)]

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (self.heads, -1)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) + self.biases(x.device)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Table(nn.Module):
    """Keeps a table that is made of weights in an attribute."""

    def __init__(self, width=12):
        super().__init__()
        self.first, self.out, self.gains, self.table = (
            nn.Linear(width, 16),
            nn.Linear(16, width),
            nn.Parameter(torch.rand(16)),
            None,
        )

    def forward(self, x):
        if self.training or self.table is None:
            self.table = self.gains.exp()
        return self.out(self.first(x).relu() * self.table)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 12), nn.ModuleList(kind() for _ in range(2)), nn.Linear(12, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.parametrize("grad", [False, True], ids=["no graph", "with a graph"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("kind", [Attention, Table])
def test_a_cache_of_an_earlier_run_does_not_stay_in_the_small_model(kind, in_place, grad):
    torch.manual_seed(0)
    model, x = Net(kind).double().eval(), torch.randn(2, 5, 6).double()
    fresh = copy.deepcopy(model)
    with torch.set_grad_enabled(grad):
        model(x)
    caches = [dict(vars(block)) for block in model.blocks]
    small, plan = (sc.shrink_ if in_place else sc.shrink)(model, x, channels=0.6)
    expected, reference = sc.shrink(fresh, x, channels=0.6)
    assert plan.cuts == reference.cuts
    assert torch.equal(small(x), expected(x))
    assert torch.equal(small.train()(x), expected.train()(x))
    assert small.eval()(x[:1]).shape == (1, 5, 3)
    if not in_place:
        assert all(vars(block)[key] is value for block, held in zip(model.blocks, caches) for key, value in held.items())
        assert plan.verify().max_error < 1e-12  # the original holds its cache again


@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_caches_and_removed_blocks_go_together(in_place):
    class Residual(Attention):
        def forward(self, x):
            return x + super().forward(x)

    class Chain(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    torch.manual_seed(0)
    model, x = Chain(Residual).eval(), torch.randn(2, 5, 6)
    with torch.no_grad():
        model(x)
    small, _ = (sc.shrink_ if in_place else sc.shrink)(model, x, depth=0.5, channels=0.4)
    assert len(small.blocks) == 1
    assert small(x).shape == small.train()(x).shape == (2, 5, 3)


def test_a_dict_that_no_run_fills_again_is_cut_with_the_model():
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.shifts = nn.Linear(6, 16), nn.Linear(16, 3), {"a": torch.randn(16)}

        def forward(self, x):
            return self.b((self.a(x) + self.shifts["a"]).relu())

    torch.manual_seed(0)
    small, plan = sc.shrink(Constants(), torch.randn(2, 6), channels=0.5)
    assert small.shifts["a"].shape == (8,)
    assert plan.verify().max_error < 1e-6


def test_a_cache_that_is_older_than_a_cast_is_computed_again():
    """`model.double()` leaves a dict of tensors as it is; the cut once took such a cache for a tensor of the model."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.table = nn.Linear(6, 16), nn.Linear(16, 3), nn.Parameter(torch.randn(16))
            self.cache = {}

        def forward(self, x):
            if self.training:
                return self.b(self.a(x) + self.table.exp())
            if "table" not in self.cache:
                self.cache["table"] = self.table.exp()
            return self.b(self.a(x) + self.cache["table"])

    torch.manual_seed(0)
    model, x = Cached().eval(), torch.randn(2, 6)
    with torch.no_grad():
        model(x)
    model, x = model.double(), x.double()
    small, _ = sc.shrink(model, x, channels=0.5)
    assert small.table.shape == (8,)
    assert small.train()(x).shape == (2, 3)


# ---------------------------------------------------------------- as the user runs it


class Strict(nn.Module):
    """In training mode it compares its width with a number that a trace in eval mode does not see."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.a(x).relu()
        if self.training:
            h = h.view(-1, 2, 8).flatten(1)
        return self.b(h)


def test_a_small_model_that_fails_in_training_mode_is_returned_with_a_warning():
    model, x = Strict(), torch.randn(2, 6)
    for mode in (True, False):
        with pytest.warns(UserWarning, match="runs in eval mode but not in training mode: RuntimeError"):
            small, _ = sc.shrink(model.train(mode), x, channels=0.5)
        assert small.eval()(x).shape == (2, 3)
        assert model.training is mode
    sc.shrink(model, x, params=1.0)


def test_a_model_that_itself_fails_in_training_mode_is_cut():
    class OnlyEval(Strict):
        def forward(self, x):
            assert not self.training
            return super().forward(x)

    small, _ = sc.shrink(OnlyEval().eval(), torch.randn(2, 6), channels=0.5)
    assert small.a.out_features == 8


# ---------------------------------------------------------------- groups that cannot be cut alone


class Shared(nn.Module):
    """Two layers whose widths both follow from one attribute, so that neither can be cut alone."""

    def __init__(self):
        super().__init__()
        self.width, self.a, self.b, self.c = 16, nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(32, 3)

    def forward(self, x):
        a, b = (layer(x).view(len(x), self.width // 1, 1).flatten(1) for layer in (self.a, self.b))
        return self.c(torch.cat([a.relu(), b.tanh()], 1))


def test_groups_that_an_attribute_ties_together_are_verified_together():
    torch.manual_seed(0)
    _, plan = sc.shrink(Shared().double(), torch.randn(4, 6).double(), channels=0.5)
    found = plan.verify(groups=True)
    assert found.max_error < 1e-12
    assert found.groups.keys() == {"a.weight[0]", "b.weight[0]"}
    assert len(set(found.groups.values())) == 1
