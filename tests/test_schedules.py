"""Schedules: their values, by hand."""

import itertools
import math

import pytest
from torch import nn

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


def test_every_built_in_schedule_is_a_schedule():
    schedules = sc.cubic(0.9, end=9), sc.linear(0.9, end=9), sc.cosine(0.9, end=9), sc.exponential(0.9, end=9), sc.one_shot(0.9)
    assert all(isinstance(schedule, sc.Schedule) for schedule in (*schedules, sc.join((0, schedules[0]))))


class Stairs(sc.Schedule):
    """A user's own schedule: up by 0.2 every third step."""

    end = 9

    def __call__(self, step):
        return min(0.6, 0.2 * (step // 3))

    def due(self, step):
        return step % 3 == 0


def sparsities(schedule, steps=12, **options):
    """The sparsity after each step of a pruner that follows the schedule, and the steps at which it changed its masks."""
    model = nn.Linear(20, 50)
    pruner = sc.Pruner(model, sparsity=schedule, **options)
    before, found, changed = pruner.masks, [], []
    for step in range(1, steps):
        pruner.step()
        found.append(round(pruner.sparsity, 3))
        if pruner.masks is not before:
            changed.append(step)
        before = pruner.masks
    return found, changed


def test_a_function_of_the_step_is_a_schedule_that_is_due_at_every_step():
    found, changed = sparsities(lambda step: min(0.5, step / 10))
    assert found == [0.1, 0.2, 0.3, 0.4, *[0.5] * 7]
    assert changed == list(range(1, 12))


def test_a_schedule_of_ones_own_says_when_it_is_due():
    found, changed = sparsities(Stairs())
    assert found == [0, 0, *[0.2] * 3, *[0.4] * 3, *[0.6] * 3]
    assert [step for step in changed if step > 1] == [3, 6, 9]


def test_a_schedule_without_due_of_its_own_is_due_at_every_step():
    class Half(sc.Schedule):
        def __call__(self, step):
            return 0.5

    assert Half().due(7)
    assert sparsities(Half())[1] == list(range(1, 12))


def test_functions_can_be_joined_and_given_by_name():
    joined = sc.join((0, lambda step: 0.1), (4, sc.linear(0.9, start=4, end=8, initial=0.1)))
    assert [joined(0), joined(3), joined(4), joined(8)] == pytest.approx([0.1, 0.1, 0.1, 0.9])
    assert sparsities(None, spread={"weight": lambda step: min(0.5, step / 10)})[0] == [0.1, 0.2, 0.3, 0.4, *[0.5] * 7]


def test_finish_warns_before_the_end_that_a_schedule_names():
    pruner = sc.Pruner(nn.Linear(8, 8), sparsity=Stairs())
    pruner.step()
    with pytest.warns(UserWarning, match="not finished: this is step 1, and the last masks are due at 9"):
        pruner.finish()


@pytest.mark.parametrize(
    ("sparsity", "error", "words"),
    [
        (lambda step: 1.5, ValueError, r"sparsity=.*<lambda> returned 1\.5 at step 0; a schedule returns a fraction"),
        (lambda step: None, ValueError, r"returned None at step 0"),
        (lambda step: True, ValueError, r"returned True at step 0"),
        (lambda: 0.5, TypeError, r"sparsity=.* was called with the step, 0, and raised TypeError"),
        (sc.erk, TypeError, r"sparsity=erk was called with the step"),
    ],
)
def test_functions_that_are_no_schedules_are_refused_when_the_pruner_is_made(sparsity, error, words):
    with pytest.raises(error, match=words):
        sc.Pruner(nn.Linear(4, 4), sparsity=sparsity)


def test_a_value_out_of_range_in_the_middle_of_training_is_an_error():
    pruner = sc.Pruner(nn.Linear(4, 4), sparsity=lambda step: step / 2)
    pruner.step()
    pruner.step()
    with pytest.raises(ValueError, match=r"returned 1\.5 at step 3"):
        pruner.step()


def test_pruning_once_by_a_function_of_the_step_is_refused():
    for verb in (sc.prune_, sc.plan):
        with pytest.raises(TypeError, match=r"use sc\.Pruner"):
            verb(nn.Linear(4, 4), sparsity=lambda step: 0.5)


def test_swap_may_be_a_function_of_the_step():
    layer = nn.Linear(20, 50)
    pruner = sc.Pruner(layer, sparsity=0.5, grow=sc.random(0), swap=lambda step: 0.2)
    for _ in range(3):
        before = pruner.masks["weight"]
        pruner.step()
    assert pruner.sparsity == 0.5
    assert 0 < int((before & ~pruner.masks["weight"]).sum()) <= 100  # of 500; a dropped weight may be drawn again


def test_percent_in_a_schedule_gets_the_fraction():
    with pytest.raises(ValueError, match=r"final must be a fraction from 0 to 1; 90 % is 0\.9"):
        sc.cubic(90, end=1000)
