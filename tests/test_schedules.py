"""Schedules: their values, by hand."""

import itertools
import math

import pytest

import secateur as sc


def test_cubic_is_the_formula_of_zhu_and_gupta():
    schedule = sc.cubic(0.9, start=10, end=110, every=10, initial=0.1)
    assert schedule(60) == pytest.approx(0.9 + (0.1 - 0.9) * 0.5**3)
    assert schedule(0) == 0.1
    assert schedule(500) == 0.9


def test_linear_is_a_straight_line():
    assert [sc.linear(0.8, end=4)(step) for step in range(6)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])


def test_cosine_is_half_a_wave():
    schedule = sc.cosine(0.0, initial=0.3, end=8)
    assert [schedule(s) for s in (0, 2, 4, 8)] == pytest.approx([0.3, 0.15 * (1 + math.sqrt(0.5)), 0.15, 0])


def test_exponential_takes_the_same_share_of_what_is_left():
    kept = [1 - sc.exponential(0.9, end=10)(step) for step in range(11)]
    assert [b / a for a, b in itertools.pairwise(kept)] == pytest.approx([0.1**0.1] * 10)


def test_one_shot_jumps_once():
    schedule = sc.one_shot(0.7, at=5)
    assert [schedule(4), schedule(5), schedule(6)] == [0, 0.7, 0.7]
    assert [step for step in range(20) if schedule.due(step)] == [5]


def test_every_says_which_steps_are_due_and_the_end_always_is():
    schedule = sc.cubic(0.9, start=2, end=11, every=4)
    assert [step for step in range(30) if schedule.due(step)] == [2, 6, 10, 11]


def test_join_hands_over_at_its_steps():
    joined = sc.join((0, sc.linear(0.5, end=10)), (20, sc.linear(0.9, start=20, end=30, initial=0.5)))
    assert [joined(0), joined(10), joined(19), joined(25), joined(99)] == pytest.approx([0, 0.5, 0.5, 0.7, 0.9])


def test_a_part_that_jumps_as_it_takes_over_is_due_then():
    joined = sc.join((0, sc.one_shot(0.3)), (10, sc.one_shot(0.6)))
    assert joined(10) == 0.6
    assert joined.due(10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sc.cubic(1.5, end=10),
        lambda: sc.cubic(-0.1, end=10),
        lambda: sc.cubic(math.nan, end=10),
        lambda: sc.cubic(0.5, end=10, initial=2.0),
        lambda: sc.cubic(0.5, start=10, end=5),
        lambda: sc.cubic(0.5, start=-1, end=5),
        lambda: sc.cubic(0.5, end=5, every=0),
        lambda: sc.exponential(1.0, end=5),
        sc.join,
        lambda: sc.join((5, sc.one_shot(0.5)), (5, sc.one_shot(0.6))),
        lambda: sc.join((5, sc.one_shot(0.5)), (2, sc.one_shot(0.6))),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make):
    with pytest.raises(ValueError, match=r"needs|fraction|never reaches"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: sc.cubic("0.9", end=10),
        lambda: sc.cubic(True, end=10),
        lambda: sc.cubic(0.9, end=10.5),  # the last step would never be due
        lambda: sc.cubic(0.9, end="10"),
        lambda: sc.cubic(0.9, end=10, every=2.5),
        lambda: sc.join((0, 0.5)),
    ],
)
def test_things_that_are_no_numbers_or_steps_are_refused_when_the_schedule_is_made(make):
    with pytest.raises((TypeError, ValueError), match=r"cubic|join|sparsity|step|fraction|number"):
        make()
