"""The law of the algebra: cutting tensors and then applying operations equals applying them and then cutting."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.axes import (
    Atom,
    Cat,
    Fam,
    Prod,
    atoms,
    closed,
    collapse,
    factors,
    families,
    fresh,
    keep_mask,
    new_size,
    norm,
    reshape,
    split_at,
    split_outer,
    take,
    unify,
)
from secateur.axes.expressions import same

SIZES = (2, 3, 4, 6, 8, 12)


class Tape:
    """Arrays of distinct numbers with their axes, and the operation that made each array."""

    def __init__(self, shapes):
        self.arrays, self.axes, self.steps = [], [], []
        for number, shape in enumerate(shapes):
            array = np.arange(math.prod(shape)).reshape(shape) * 7919 + number * 104_729
            self.add(array, [Atom(s) for s in shape], None)
        self.bases = len(shapes)

    def add(self, array, axes, step):
        assert list(array.shape) == [e.size for e in axes]
        for e in axes:  # as the tracer does after every operator: a family needs its key in the same tensor
            for fam in families(e):
                if not any(norm(fam.key) is f for other in axes for f in factors(other)):
                    collapse(fam)
        self.arrays.append(array)
        self.axes.append([norm(e) for e in axes])
        self.steps.append(step)

    def replay(self, keep):
        counts = {atom: int(mask.sum()) for atom, mask in keep.items()}
        made = [cut(a, x, keep) for a, x in zip(self.arrays[: self.bases], self.axes)]
        for step in self.steps[self.bases :]:
            made.append(step(made, lambda e: new_size(e, counts)))
        return made


def cut(array, axes, keep):
    if not any(families(e) for e in axes):
        return array[np.ix_(*[keep_mask(e, keep).numpy() for e in axes])]
    fam = next(f for e in axes for f in families(e))  # cut the array at each index of the key, then stack the results
    key = norm(fam.key)
    where = next(d for d, e in enumerate(axes) if any(f is key for f in factors(e)))
    if norm(axes[where]) is not key:
        return None
    rows = []
    for index in range(key.size):
        rest = [pick_in(e, key, index) for d, e in enumerate(axes) if d != where]
        rows.append(cut(array.take(index, where), rest, keep))
    return None if any(r is None for r in rows) else np.stack(rows, where)


def pick_in(e, key, index):
    from secateur.axes import pick

    return pick(e, key, index)


def reshape_step(draw, tape, i):
    array, axes = tape.arrays[i], tape.axes[i]
    left, sizes = array.size, []
    while left > 1:
        divisors = [d for d in range(2, left + 1) if left % d == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        left //= sizes[-1]
    fixed = [p for p, s in enumerate(sizes) if s <= 4 and draw(st.booleans())]
    out = reshape(axes, sizes, fixed)
    tape.add(array.reshape(sizes), out, lambda made, size: made[i].reshape([size(e) for e in out]))


def slice_step(draw, tape, i):
    array, axes = tape.arrays[i], list(tape.axes[i])
    d = draw(st.integers(0, array.ndim - 1))
    start = draw(st.integers(0, array.shape[d] - 1))
    stop = draw(st.integers(start + 1, array.shape[d]))
    step = draw(st.sampled_from([1, 1, 2]))
    whole = axes[d]
    axes[d] = take(whole, start, stop, step)
    before = split_at(whole, start) if step == 1 else None
    index = (slice(None),) * d

    def replay(made, size):
        if before is None:
            return made[i][(*index, slice(start, None if stop == array.shape[d] else stop, step))]
        first = size(before[0])
        return made[i][(*index, slice(first, first + size(axes[d])))]

    tape.add(array[(*index, slice(start, stop, step))], axes, replay)


def permute_step(draw, tape, i):
    order = draw(st.permutations(range(tape.arrays[i].ndim)))
    tape.add(tape.arrays[i].transpose(order), [tape.axes[i][d] for d in order], lambda made, size: made[i].transpose(order))


def add_step(draw, tape, i):
    shape = tape.arrays[i].shape
    j = draw(st.sampled_from([k for k, a in enumerate(tape.arrays) if a.shape == shape]))
    for x, y in zip(tape.axes[i], tape.axes[j]):
        unify(x, y)
    tape.add(tape.arrays[i] * 3 + tape.arrays[j], tape.axes[i], lambda made, size: made[i] * 3 + made[j])


def cat_step(draw, tape, i):
    shape = tape.arrays[i].shape
    d = draw(st.integers(0, len(shape) - 1))
    rest = shape[:d] + shape[d + 1 :]
    fits = [k for k, a in enumerate(tape.arrays) if a.ndim == len(shape) and a.shape[:d] + a.shape[d + 1 :] == rest]
    j = draw(st.sampled_from(fits))
    x, y = tape.axes[i], tape.axes[j]
    for k in range(len(shape)):
        if k != d:
            unify(x[k], y[k])
    out = [Cat([closed(x[k]), closed(y[k])]) if k == d else x[k] for k in range(len(shape))]
    tape.add(np.concatenate([tape.arrays[i], tape.arrays[j]], d), out, lambda made, size: np.concatenate([made[i], made[j]], d))


STEPS = (reshape_step, reshape_step, slice_step, permute_step, add_step, cat_step)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cutting_commutes_with_every_operation(data):
    draw = data.draw
    shapes = [tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))) for _ in range(draw(st.integers(1, 2)))]
    tape = Tape(shapes)
    for _ in range(draw(st.integers(1, 6))):
        i = draw(st.integers(0, len(tape.arrays) - 1))
        if tape.arrays[i].size < 2000 and tape.arrays[i].ndim:
            draw(st.sampled_from(STEPS))(draw, tape, i)
    found = {a: None for axes in tape.axes for e in axes for a in atoms(e) if not a.frozen}
    keep = {}
    for a in found:
        mask = torch.zeros(a.size, dtype=torch.bool)
        mask[draw(st.permutations(range(a.size)))[: max(1, a.size // 2)]] = True
        keep[a] = mask
    counts = {a: int(m.sum()) for a, m in keep.items()}
    for axes in tape.axes:  # the parts of a fused axis need equal counts, which the planner ensures in real cuts
        for fam in (f for e in axes for f in families(e)):
            if len({new_size(p, counts) for p in fam.parts}) > 1:
                return
    for array, axes, made in zip(tape.arrays, tape.axes, tape.replay(keep)):
        expected = cut(array, axes, keep)
        if expected is not None:
            assert np.array_equal(expected, made)


def test_reshape_refines_an_atom_into_a_product():
    width = Atom(12)
    heads, dim = reshape([width], [3, 4])
    assert same(width, Prod((heads, dim)))
    mask = keep_mask(width, {heads: torch.tensor([True, False, True])})
    assert mask.tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_literal_factor_numbers_segments_that_stay_apart():
    width = Atom(12)
    key, part = reshape([width], [3, 4], [0])
    assert isinstance(part, Fam)
    assert isinstance(key, Atom)
    assert key.frozen
    assert [p.size for p in norm(width).parts] == [4, 4, 4]
    q, _, v = norm(width).parts
    mask = keep_mask(width, {q: torch.tensor([True, False, True, True]), v: torch.tensor([False, True, True, True])})
    assert mask.tolist() == [True, False, True, True, True, True, True, True, False, True, True, True]


def test_merging_the_numbered_segments_back_gives_the_concatenation():
    width = Atom(12)
    parts = reshape([width], [3, 4], [0])
    assert same(reshape(parts, [12])[0], width)


def test_unequal_structures_freeze_both_sides():
    a, b = Prod((Atom(4), Atom(6))), Prod((Atom(6), Atom(4)))
    assert not unify(a, b)
    assert all(x.frozen for x in [*atoms(a), *atoms(b)])


def test_split_that_does_not_divide_is_refused():
    assert split_outer(Atom(10), 3) is None
    assert split_at(Prod((Atom(4), Atom(3))), 4) is None


def test_frozen_reason_and_flags_reach_the_parts():
    whole = Atom(8, "model output")
    whole.flags = frozenset({"norm"})
    hi, lo = split_outer(whole, 2)
    assert hi.frozen == lo.frozen == "model output"
    assert "norm" in hi.flags & lo.flags


def test_long_chains_of_unions_do_not_recurse():
    chain = [Atom(4) for _ in range(20_000)]
    for a, b in itertools.pairwise(reversed(chain)):
        unify(a, b)
    assert len({id(norm(a)) for a in chain}) == 1


@pytest.mark.parametrize(("start", "stop", "step", "size"), [(0, 8, 2, 4), (1, 8, 2, 4), (2, 5, 1, 3), (1, 8, 3, 3)])
def test_slice_has_the_size_of_the_slice(start, stop, step, size):
    assert take(Atom(8), start, stop, step).size == size


def test_an_axis_without_indices_has_no_units_to_choose_from():
    assert not atoms(fresh(0))
    assert not atoms(fresh(1))
    assert [a.size for a in atoms(fresh(2))] == [2]
