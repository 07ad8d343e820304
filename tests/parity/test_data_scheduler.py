"""Compares `BaseDataScheduler` with torch's, and tests what torch's cannot: rebuilding, pickling, loading."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.ao.pruning._experimental import data_scheduler as their_schedulers
from torch.ao.pruning._experimental import data_sparsifier as their_sparsifiers

from secateur.drop_in.ao_pruning._experimental import data_scheduler as our_schedulers
from secateur.drop_in.ao_pruning._experimental import data_sparsifier as our_sparsifiers

from .conftest import distinct

LIBRARIES = pytest.mark.parametrize(
    ("schedulers", "sparsifiers"),
    [(our_schedulers, our_sparsifiers), (their_schedulers, their_sparsifiers)],
    ids=["ours", "torch"],
)


def tenths(base: type) -> Any:
    """Makes a closed-form schedule: a tenth of the target more at each step, up to the target."""

    class Tenths(base):
        def get_schedule_param(self) -> dict[str, float]:
            assert self._get_sp_called_within_step
            return {name: value * min(self.last_epoch / 10, 1.0) for name, value in self.base_param.items()}

    return Tenths


class Halves(our_schedulers.BaseDataScheduler):
    """A chained schedule: half of the previous value."""

    def get_schedule_param(self) -> dict[str, float]:
        if self.last_epoch == 0:
            return self.base_param
        return {name: config["sparsity_level"] / 2 for name, config in self.data_sparsifier.data_groups.items()}


class Tenths(tenths(our_schedulers.BaseDataScheduler)):
    """Defined at module level, so that it can be pickled."""


def made(sparsifiers: Any = our_sparsifiers) -> Any:
    data = [("a", distinct((10, 8), torch.float32)), ("b", distinct((5, 4), torch.float32))]
    return sparsifiers.DataNormSparsifier(data_list=data, sparsity_level=0.8)


def levels(sparsifier: Any) -> list[float]:
    return [config["sparsity_level"] for config in sparsifier.data_groups.values()]


def run(sparsifier: Any, scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        sparsifier.step()
        scheduler.step()


def test_a_schedule_equals_torch_step_by_step(capsys):
    seen = []
    for schedulers, sparsifiers in ((our_schedulers, our_sparsifiers), (their_schedulers, their_sparsifiers)):
        sparsifier = made(sparsifiers)
        scheduler = tenths(schedulers.BaseDataScheduler)(sparsifier, "sparsity_level", verbose=True)
        told = [(scheduler._step_count, scheduler.last_epoch, levels(sparsifier))]
        for _ in range(12):
            run(sparsifier, scheduler, 1)
            masks = [sparsifier.get_mask(name).bool().tolist() for name in "ab"]
            told.append(
                (scheduler._step_count, scheduler.last_epoch, sparsifier._step_count, scheduler.get_last_param(), masks)
            )
        told.append(repr(scheduler))
        told.append(scheduler.state_dict())
        told.append(capsys.readouterr().out)
        seen.append(told)
    assert seen[0] == seen[1]


@LIBRARIES
def test_signature_and_arguments(schedulers, sparsifiers):
    mine = inspect.signature(our_schedulers.BaseDataScheduler.__init__).parameters.values()
    other = inspect.signature(schedulers.BaseDataScheduler.__init__).parameters.values()
    assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in other]
    with pytest.raises(TypeError):
        tenths(schedulers.BaseDataScheduler)(object(), "sparsity_level")
    sparsifier = made(sparsifiers)
    with pytest.raises(NotImplementedError):
        schedulers.BaseDataScheduler(sparsifier, "sparsity_level")
    if schedulers is our_schedulers:
        assert "step" not in vars(sparsifier)  # unchanged


@LIBRARIES
def test_steps_in_the_wrong_order_are_warned_of(schedulers, sparsifiers):
    sparsifier = made(sparsifiers)
    scheduler = tenths(schedulers.BaseDataScheduler)(sparsifier, "sparsity_level")
    with pytest.warns(UserWarning, match="before") as caught:
        scheduler.step()
    assert caught[0].filename == __file__
    sparsifier = made(sparsifiers)
    scheduler = tenths(schedulers.BaseDataScheduler)(sparsifier, "sparsity_level")
    sparsifier.step = lambda: None
    with pytest.warns(UserWarning, match="step"):
        scheduler.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsifier = made(sparsifiers)
        run(sparsifier, tenths(schedulers.BaseDataScheduler)(sparsifier, "sparsity_level"), 3)


@LIBRARIES
def test_a_scheduler_turns_mask_updates_on_and_any_setting_can_be_scheduled(schedulers, sparsifiers):
    class Zeros(schedulers.BaseDataScheduler):
        def get_schedule_param(self):
            return {name: min(self.last_epoch, 4) for name in self.data_sparsifier.data_groups}

    sparsifier = made(sparsifiers)
    sparsifier.enable_mask_update = False
    scheduler = Zeros(sparsifier, "zeros_per_block")
    assert sparsifier.enable_mask_update
    assert scheduler.base_param == {"a": 4, "b": 4}
    run(sparsifier, scheduler, 2)
    assert [config["zeros_per_block"] for config in sparsifier.data_groups.values()] == [2, 2]
    assert (sparsifier.get_mask("a") == 0).sum() == 16


def test_a_scheduler_made_anew_in_the_middle_keeps_its_targets():
    told = {}
    for schedulers, sparsifiers in ((our_schedulers, our_sparsifiers), (their_schedulers, their_sparsifiers)):
        sparsifier = made(sparsifiers)
        kind = tenths(schedulers.BaseDataScheduler)
        run(sparsifier, kind(sparsifier, "sparsity_level"), 5)
        again = kind(sparsifier, "sparsity_level", last_epoch=5)
        told[schedulers] = again.base_param, levels(sparsifier)
    assert told[our_schedulers] == ({"a": 0.8, "b": 0.8}, [pytest.approx(0.48)] * 2)
    assert told[their_schedulers][0] == {"a": 0.4, "b": 0.4}  # torch takes the current level as the target


def test_a_level_that_the_user_sets_in_the_middle_is_the_new_target():
    sparsifier = made()
    run(sparsifier, Tenths(sparsifier, "sparsity_level"), 5)
    sparsifier.data_groups["b"]["sparsity_level"] = 0.6
    assert Tenths(sparsifier, "sparsity_level", last_epoch=5).base_param == {"a": 0.8, "b": 0.6}


def test_a_new_schedule_starts_from_the_levels_of_the_moment():
    sparsifier = made()
    run(sparsifier, Tenths(sparsifier, "sparsity_level"), 5)
    assert Tenths(sparsifier, "sparsity_level").base_param == {"a": 0.4, "b": 0.4}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", [Tenths, Halves])
def test_a_copy_goes_on_where_the_original_was(kind, copied):
    sparsifier = made()
    scheduler = kind(sparsifier, "sparsity_level")
    run(sparsifier, scheduler, 3)
    other = copied(scheduler)
    assert other.data_sparsifier is not sparsifier
    before = levels(sparsifier), sparsifier._step_count
    run(other.data_sparsifier, other, 2)
    assert (levels(sparsifier), sparsifier._step_count) == before
    run(sparsifier, scheduler, 2)
    assert levels(other.data_sparsifier) == levels(sparsifier)
    assert other.data_sparsifier._step_count == sparsifier._step_count == 5
    assert torch.equal(other.data_sparsifier.get_mask("a"), sparsifier.get_mask("a"))
    resumed = kind(copied(sparsifier), "sparsity_level", last_epoch=4)
    assert resumed.base_param == scheduler.base_param


@pytest.mark.parametrize("kind", [Tenths, Halves])
def test_a_schedule_goes_on_in_a_new_process_from_the_two_states(kind):
    sparsifier = made()
    scheduler = kind(sparsifier, "sparsity_level")
    run(sparsifier, scheduler, 4)
    saved = copy.deepcopy((sparsifier.state_dict(), scheduler.state_dict()))

    again = made()
    again.load_state_dict(saved[0])
    resumed = kind(again, "sparsity_level")
    resumed.load_state_dict(saved[1])
    assert levels(again) == levels(sparsifier)
    run(sparsifier, scheduler, 3)
    run(again, resumed, 3)
    assert levels(again) == levels(sparsifier)
    assert resumed.state_dict() == scheduler.state_dict()
    assert torch.equal(again.get_mask("a"), sparsifier.get_mask("a"))


def test_states_go_between_the_libraries():
    ours, theirs = made(), made(their_sparsifiers)
    mine = Tenths(ours, "sparsity_level")
    other = tenths(their_schedulers.BaseDataScheduler)(theirs, "sparsity_level")
    run(ours, mine, 4)
    state = mine.state_dict()
    before = copy.deepcopy(state)
    other.load_state_dict(state)
    run(theirs, other, 1)
    run(ours, mine, 1)
    assert levels(theirs) == levels(ours)
    mine.load_state_dict(other.state_dict())
    assert mine.state_dict() == other.state_dict()
    assert state.keys() == before.keys()


def test_a_name_that_the_sparsifier_does_not_have_is_an_error_and_writes_nothing():
    class Wrong(our_schedulers.BaseDataScheduler):
        def get_schedule_param(self):
            return {"a": 0.1, "bb": 0.1} if self.last_epoch else self.base_param

    sparsifier = made()
    scheduler = Wrong(sparsifier, "sparsity_level")
    sparsifier.step()
    with pytest.raises(ValueError, match=r"'bb'.*Did you mean 'b'"):
        scheduler.step()
    assert levels(sparsifier) == [0.8, 0.8]
    assert set(sparsifier.data_groups) == {"a", "b"}
