"""Attributes that the traced run did not read change with the cut if the constructor determines them, and else stay."""

import operator

import pytest
import torch
from torch import nn

from secateur.axes import Arithmetic, Attr, Const, determined
from secateur.trace import plan_counts, solve_attributes, trace, undetermined


class Config:
    def __init__(self, width=8, heads=4, groups=2, inner=12):
        self.width, self.heads, self.groups, self.inner = width, heads, groups, inner
        self.head_dim = 6


class Block(nn.Module):
    """Attention with fewer key heads than query heads, and a branch that the traced run does not take."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.dim = config.heads, config.head_dim
        self.times = config.heads // config.groups
        self.width = config.width
        self.total = config.heads * config.head_dim
        self.half = int(config.inner * 0.5)
        self.q = nn.Linear(config.width, config.heads * config.head_dim)
        self.k = nn.Linear(config.width, config.groups * config.head_dim)
        self.v = nn.Linear(config.width, config.groups * config.head_dim)
        self.o = nn.Linear(config.heads * config.head_dim, config.width)

    def forward(self, x, repeat=False):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, -1, self.dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        if repeat:
            k, v = (t.repeat_interleave(self.times, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.4, enable_gqa=not repeat)
        return x + self.o(y.transpose(1, 2).reshape(b, n, -1))


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.i = nn.Linear(5, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))
        self.up, self.down = nn.Linear(config.width, config.inner), nn.Linear(config.inner, 5)

    def forward(self, x, repeat=False):
        x = self.i(x)
        for block in self.blocks:
            x = block(x, repeat)
        return self.down(torch.relu(self.up(x)))


def cut(model, wanted):
    """Returns the attribute changes of a cut that keeps wanted(group) units as {where: new}, and the undetermined ones."""
    t = trace(model, torch.randn(2, 3, 5))
    keep = {g.atom: n for g, n in plan_counts(t, {g: wanted(g) for g in t.prunable}).counts.items()}
    names = {id(m): f"{p}." if p else "" for p, m in model.named_modules()} | {id(model.config): "config."}
    return {names[id(c.owner)] + c.key[0]: c.new for c in solve_attributes(t, keep)}, undetermined(t, keep)


def test_unread_attributes_and_the_config_follow_a_uniform_cut():
    """`times`, the number of query heads for each key head, is read only in the branch that is not taken."""
    found, left = cut(Net(Config(heads=8, groups=2)), lambda g: g.size // 2)
    for block in ("blocks.0", "blocks.1"):
        assert found[f"{block}.times"] == 2
        assert found[f"{block}.width"] == 4
        assert found[f"{block}.dim"] == 3
        assert found[f"{block}.total"] == 6
    assert found["config.width"] == 4
    assert found["config.inner"] == 6
    assert (found["config.heads"], found["config.groups"], found["config.head_dim"]) == (2, 1, 3)
    assert left == []


def test_the_branch_that_the_run_did_not_take_works_after_the_cut():
    from secateur.surgery import shrink

    torch.manual_seed(0)
    model = Net(Config(heads=8, groups=2)).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    small, plan = shrink(model, x, channels=0.6, scope="tensor")
    assert any(a.name == "times" for a in plan.cuts.attributes)
    assert torch.allclose(small(x), small(x, repeat=True))


def test_layers_cut_differently_have_attributes_of_their_own_and_no_config():
    first = {"blocks.0.q.weight", "blocks.0.k.weight"}
    found, left = cut(
        Net(Config(heads=8, groups=2)),
        lambda g: g.size // 2 if g.size == 4 and first & {m.tensor for m in g.members} else g.size,
    )
    assert found == {"blocks.0.heads": 4, "blocks.0.times": 2, "blocks.0.total": 24}
    assert set(left) == {"config.heads", "config.groups", "config.head_dim"}  # no config gives both layers


def test_a_comparison_of_an_unread_attribute_holds_after_the_cut():
    """The run only evaluates `if self.times > 1`, so counts that would make it 1 are not legal."""

    class Compares(Block):
        def forward(self, x, repeat=False):
            return super().forward(x, repeat) if self.times > 1 else x

    model = Net(Config(heads=8, groups=2))
    model.__class__ = Compared
    model.blocks = nn.ModuleList(Compares(model.config) for _ in range(2))
    found, _ = cut(model, lambda g: 1)
    assert found["blocks.0.times"] == found["blocks.1.times"] == 2


class Compared(Net):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(2))


class Computed(Config):
    """The head dimension is computed from width and heads. If only the width is cut, no config gives all sizes."""

    def __init__(self):
        super().__init__(width=48, heads=8, groups=2)
        self.head_dim = 1  # read by Block, which the models below replace


class Divided(Net):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList(DividedBlock(config) for _ in range(2))


class DividedBlock(nn.Module):
    forward = Block.forward

    def __init__(self, config):
        super().__init__()
        self.dim = config.width // config.heads
        self.times = config.heads // config.groups
        self.q = nn.Linear(config.width, config.heads * self.dim)
        self.k = nn.Linear(config.width, config.groups * self.dim)
        self.v = nn.Linear(config.width, config.groups * self.dim)
        self.o = nn.Linear(config.heads * self.dim, config.width)


class ComparingBlock(DividedBlock):
    def forward(self, x, repeat=False):
        return super().forward(x, repeat) if self.times > 1 else x


class Comparing(Net):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList(ComparingBlock(config) for _ in range(2))


@pytest.mark.parametrize("kind", [Divided, Comparing])
def test_an_unread_ratio_is_found_where_the_head_dimension_is_computed(kind):
    """Cuts half of the width everywhere, and one of four query heads for each key head in the first block."""
    model = kind(Computed())

    def wanted(g):
        names = {m.tensor for m in g.members}
        if "i.weight" in names:
            return 25
        return 3 if g.size == 4 and "blocks.0.q.weight" in names else g.size

    found, _ = cut(model, wanted)
    assert found["blocks.0.times"] == 3
    assert found.get("blocks.1.times", 4) == 4


def test_an_attribute_that_some_call_was_given_is_not_unread():
    """`width` is also passed to `arange`, so it keeps its value although the weights shrink."""

    class Table(Net):
        def __init__(self, config):
            super().__init__(config)
            self.width = config.width
            self.table = nn.Linear(8, 5)

        def forward(self, x, repeat=False):
            return super().forward(x, repeat) + self.table(torch.arange(self.width, dtype=x.dtype))

    model = Table(Config())
    found, _ = cut(model, lambda g: max(1, g.size // 2))
    assert "width" not in found
    assert found["blocks.0.width"] == 4


def test_a_config_number_that_one_module_needs_as_it_was_stays_there():
    """Two modules read `config.width`: one makes a tensor as wide as the weights, the other passes it to `arange`."""

    class Fills(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config

        def forward(self, x):
            return x + x.new_ones(*x.shape[:2], self.config.width)

    class Counts(Fills):
        def __init__(self, config):
            super().__init__(config)
            self.table = nn.Linear(8, 5)

        def forward(self, x):
            return x + self.table(torch.arange(self.config.width, dtype=x.dtype))

    config = Config()
    model = nn.Sequential(nn.Linear(5, 8), Fills(config), nn.Linear(8, 5), Counts(config))
    t = trace(model, torch.randn(2, 3, 5))
    (change,) = solve_attributes(t, {g.atom: 4 for g in t.prunable})
    assert (change.owner, change.key, change.new, change.module) == (config, ("width", None), 4, "1")


def test_a_model_that_its_class_does_not_build_from_the_config_is_left_alone():
    class Odd(Net):
        def __init__(self, config, more):
            super().__init__(config)
            self.more = more

    model = Odd(Config(), 3)
    assert trace(model, torch.randn(2, 3, 5)).blueprint is None


def test_the_config_holds_plain_numbers_after_a_trace():
    model = Net(Config())
    trace(model, torch.randn(2, 3, 5))
    assert all(type(v) is int for v in vars(model.config).values())


A, B, C = (Attr(object(), (name, None), old) for name, old in (("a", 4), ("b", 2), ("c", 8)))


def op(function, left, right):
    return Arithmetic(function, left, right)


@pytest.mark.parametrize(
    ("target", "equations", "value"),
    [
        (A, [(op(operator.mul, A, C), 12), (C, 4)], 3),
        (op(operator.floordiv, A, B), [(op(operator.mul, A, C), 12), (op(operator.mul, B, C), 6)], 2),
        (A, [(op(operator.mul, A, C), 12)], None),  # several solutions
        (A, [(A, 3), (op(operator.add, A, Const(1)), 5)], None),  # none
        (A, [(C, 4)], None),  # not in any equation
    ],
)
def test_a_number_is_determined_when_all_solutions_agree(target, equations, value):
    assert determined(target, equations) == value
