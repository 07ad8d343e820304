"""Planned counts are legal and nearest to the wanted ones, compared with an exhaustive search."""

import itertools
import operator
import time

import pytest
import torch
from cutting import check, group_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_probes import Attention, Lam, tokens
from torch import nn

from secateur.axes import Arithmetic, Atom, AxisSize, Const, Constraint, Group, Planner
from secateur.trace import plan_counts, trace


class Tied(nn.Module):
    """Attention whose head dim is the width divided by the heads, as in many vision transformers."""

    def __init__(self, width=12, heads=3, layers=1):
        super().__init__()
        self.heads, self.i = heads, nn.Linear(12, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.proj = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.o = nn.Linear(width, 5)

    def forward(self, x):
        x = self.i(x)
        b, n, c = x.shape
        for qkv, proj in zip(self.qkv, self.proj):
            q, k, v = qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            x = x + proj((torch.softmax(q @ k.mT * 0.2, -1) @ v).transpose(1, 2).reshape(b, n, c))
        return self.o(x)


def equation(left, right, *atoms):
    return Constraint(operator.eq, left, right, True, "by hand", atoms)


def times(number, source):
    return Arithmetic(operator.mul, Const(number), source)


def test_planner_needs_no_model():
    width, dim = Atom(12), Atom(4)
    groups = {"width": Group(width), "dim": Group(dim)}
    planner = Planner({}, [equation(AxisSize(width), times(3, AxisSize(dim)), width, dim)])
    counts = planner.counts({groups["width"]: 8, groups["dim"]: 3}).counts
    assert counts == {groups["width"]: 9, groups["dim"]: 3}


def test_planner_says_which_constraint_moved_a_count():
    width = Atom(12)
    floored = Arithmetic(operator.floordiv, AxisSize(width), Const(3))
    planned = Planner({}, [equation(times(3, floored), AxisSize(width), width)]).counts({(group := Group(width)): 7})
    assert planned.counts == {group: 6}
    assert planned.moved == {group: "keeps 6 instead of 7: by hand ((3 * (12 // 3)) == 12)"}


def cost(wanted, counts):
    return sum(abs(counts[g] - n) / g.size for g, n in wanted.items())


def legal(t, counts):
    by_atom = {g.atom: n for g, n in counts.items()}
    try:
        return all(bool(c.holds(by_atom)) for c in t.constraints)
    except ZeroDivisionError:
        return False


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_planned_counts_are_legal_and_none_is_nearer(data):
    t = trace(Tied(width=6, heads=3), tokens())
    groups = t.prunable
    assert sorted(g.size for g in groups) == [2, 2, 3, 6]
    every = [dict(zip(groups, counts)) for counts in itertools.product(*[range(1, g.size + 1) for g in groups])]
    for _ in range(3):  # several times: results that are kept must not change later answers
        wanted = {g: data.draw(st.integers(1, g.size)) for g in groups}
        got = plan_counts(t, wanted).counts
        assert legal(t, got)
        assert cost(wanted, got) == pytest.approx(min(cost(wanted, c) for c in every if legal(t, c)))


def test_cut_with_planned_counts_is_exact_where_sizes_depend_on_each_other():
    check(Tied(), tokens(), ratios=(0.5, 0.7, 0.9))


def test_groups_that_are_not_named_stay_whole():
    t = trace(Tied(), tokens())
    width = group_of(t, "o.weight", 1)[0]
    plan = plan_counts(t, {width: 6})
    assert plan.counts == {width: 12}
    assert "keeps 12 instead of 6" in plan.moved[width]
    assert "//" in plan.moved[width]


def test_multiple_of_holds_for_axes_and_products_of_axes():
    t = trace(Attention(heads=4, kv=4, dim=6), tokens())
    heads, dims = group_of(t, "v.weight", 0)
    qk = group_of(t, "q.weight", 0)[-1]
    plan = plan_counts(t, {heads: 3, dims: 5, qk: 5}, multiple_of=8)
    assert plan.counts[heads] * plan.counts[dims] % 8 == 0
    assert plan.counts[heads] * plan.counts[qk] % 8 == 0
    t = check(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 5)), tokens(), multiple_of=8)
    assert plan_counts(t, {t.prunable[0]: 21}, multiple_of=8).counts[t.prunable[0]] == 24


def test_wanted_counts_outside_of_the_possible_are_refused():
    t = trace(Tied(), tokens())
    with pytest.raises(ValueError, match="wanted 0 units; possible are 1 to"):
        plan_counts(t, {t.prunable[0]: 0})
    frozen = next(g for g in t.groups if g.frozen)
    with pytest.raises(ValueError, match="cannot lose units"):
        plan_counts(t, {frozen: 1})


def test_many_layers_with_one_width_are_planned_quickly():
    t = trace(Tied(width=96, heads=6, layers=24), tokens())
    wanted = {g: max(1, g.size // 2) for g in t.prunable}
    begin = time.process_time()
    plan = plan_counts(t, wanted)
    assert time.process_time() - begin < 5
    assert legal(t, plan.counts)
    assert sum(plan.counts.values()) < sum(g.size for g in t.prunable)


def test_questions_that_differ_little_are_answered_quickly():
    """A budget asks hundreds of times, and changes a few counts each time."""
    t = trace(Tied(width=96, heads=6, layers=24), tokens())
    wanted = {g: max(1, g.size // 2) for g in t.prunable}
    plan_counts(t, wanted)
    begin = time.process_time()
    for group in t.prunable[:20]:
        plan_counts(t, {**wanted, group: max(1, group.size // 3)})
    assert time.process_time() - begin < 5


def test_independent_groups_get_what_they_want():
    m = Lam(lambda s, x: s.c(torch.relu(s.b(torch.relu(s.a(x))))), a=nn.Linear(12, 9), b=nn.Linear(9, 7), c=nn.Linear(7, 5))
    t = trace(m, tokens())
    wanted = dict.fromkeys(t.prunable, 4)
    plan = plan_counts(t, wanted)
    assert plan.counts == wanted
    assert not plan.moved
