"""Property tests of masks, patterns, layouts and schedules."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from secateur._layers import Layout, layout_of
from secateur.masks import Masks
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import fold

# --- masks ------------------------------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def masks_like(draw, names_and_shapes):
    made = {}
    for name, shape in names_and_shapes:
        size = math.prod(shape)
        bits = draw(st.integers(0, 2**size - 1))
        made[name] = torch.tensor([bool(bits >> i & 1) for i in range(size)], dtype=torch.bool).view(shape)
    return Masks(made)


@st.composite
def several_masks(draw, number):
    spec = [(f"layer.{i}", draw(shapes)) for i in range(draw(st.integers(0, 3)))]
    return [draw(masks_like(spec)) for _ in range(number)]


@given(several_masks(3))
def test_masks_are_a_boolean_algebra(three):
    a, b, c = three
    assert a & b == b & a
    assert a | b == b | a
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert a & (b | c) == (a & b) | (a & c)
    assert ~~a == a
    assert ~(a & b) == ~a | ~b
    assert a - b == a & ~b
    assert a & a == a | a == a
    assert (a - a).kept == 0
    assert (a | ~a).kept == a.total


@given(several_masks(2))
def test_counts_of_masks_add_up(two):
    a, b = two
    assert a.kept + (~a).kept == a.total
    assert (a | b).kept + (a & b).kept == a.kept + b.kept
    assert a.density + a.sparsity == pytest.approx(1)
    assert a.density == (a.kept / a.total if a.total else 1.0)


@given(several_masks(1))
def test_packed_masks_come_back_bit_for_bit_at_one_bit_each(one):
    (masks,) = one
    packed = masks.pack()
    assert Masks.unpack(packed) == masks
    for name, (bits, shape) in packed.items():
        assert shape == tuple(masks[name].shape)
        assert bits.dtype == torch.uint8
        assert bits.numel() == -(-masks[name].numel() // 8)
        assert sum(int(byte).bit_count() for byte in bits) == int(masks[name].sum())


# --- patterns and layouts ---------------------------------------------------------------------------------------------

units = st.one_of(st.tuples(st.integers(1, 99), st.integers(1, 99)), st.sampled_from(["in", "out"]))
pools = st.one_of(st.none(), st.integers(1, 32).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))))
patterns = st.builds(lambda u, k: Pattern(u, None if u == "out" else k), units, pools)


@given(patterns)
def test_a_pattern_is_read_back_from_its_print(pattern):
    assert Pattern.parse(str(pattern)) == pattern
    assert Pattern.parse(pattern) is pattern


@given(st.text(alphabet="0123456789x:/outin -.", max_size=8))
def test_text_is_a_pattern_or_a_value_error(text):
    try:
        pattern = Pattern.parse(text)
    except ValueError:
        with pytest.raises(ValueError, match="pattern"):
            Pattern.parse(text)
    else:
        assert Pattern.parse(str(pattern)) == pattern


@st.composite
def layouts(draw):
    groups = draw(st.integers(1, 3))
    kernel = draw(st.lists(st.integers(1, 3), max_size=3))
    if not kernel:
        return Layout((draw(st.integers(1, 9)), draw(st.integers(1, 9))))
    flip = draw(st.booleans())
    outs, ins = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape = (ins * groups, outs, *kernel) if flip else (outs * groups, ins, *kernel)
    return Layout(tuple(shape), flip, groups)


@given(layouts())
def test_a_tensor_goes_to_its_matrix_and_back(layout):
    tensor = torch.arange(math.prod(layout.shape)).view(layout.shape)
    matrix = layout.matrix(tensor)
    assert matrix.shape == (layout.rows, layout.cols)
    assert torch.equal(layout.restore(matrix), tensor)


@given(layouts(), st.sampled_from(["unstructured", "2x2", "3x1", "1x5", "out", "in"]), st.integers(0, 99))
def test_unfolding_a_mask_of_units_and_folding_it_gives_the_units(layout, text, seed):
    pattern = Pattern.parse(text)
    sizes = pattern.sizes(layout)
    kept = torch.rand(sizes.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    elements = pattern.unfold(kept, layout)
    assert elements.shape == (layout.rows, layout.cols)
    assert int(sizes.sum()) == layout.rows * layout.cols
    assert int(elements.sum()) == int(sizes[kept].sum())
    if not pattern.elementwise:
        assert pattern.grid(layout) == tuple(kept.shape)
        assert torch.equal(fold(Scores.of(elements.float(), layout), pattern).rows(0, len(kept)), kept.float())


@given(layouts(), st.integers(0, 99))
def test_folding_is_the_mean_of_each_unit(layout, seed):
    scores = torch.rand(layout.rows, layout.cols, generator=torch.Generator().manual_seed(seed)).double()
    a, b = 2, 3
    folded = fold(Scores.of(scores), Pattern((a, b))).rows(0, layout.rows)
    for i in range(folded.shape[0]):
        for j in range(folded.shape[1]):
            block = scores[i * a : (i + 1) * a, j * b : (j + 1) * b]
            assert float(folded[i, j]) == pytest.approx(float(block.mean()), rel=1e-12)


CONVOLUTIONS = [
    nn.Linear(6, 4),
    nn.Conv1d(6, 4, 3, groups=2),
    nn.Conv2d(6, 4, (2, 3)),
    nn.Conv2d(6, 4, 3, groups=2),
    nn.Conv3d(2, 4, 2),
    nn.ConvTranspose1d(6, 4, 3, groups=2),
    nn.ConvTranspose2d(6, 4, (2, 3)),
    nn.ConvTranspose3d(2, 4, 2),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_a_row_of_the_matrix_feeds_one_output_and_no_other(layer):
    shape = tuple(layer.weight.shape)
    layout = layout_of(layer, shape)
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    x = torch.randn(2, channels, *[4] * (len(shape) - 2))
    outputs = 4
    assert layout.rows == outputs
    with torch.no_grad():
        before = layer(x)
        for row in range(outputs):
            mask = torch.ones(layout.rows, layout.cols)
            mask[row] = 0
            after = torch.func.functional_call(layer, {"weight": layer.weight * layout.restore(mask)}, x)
            assert [i for i in range(outputs) if not torch.equal(before[:, i], after[:, i])] == [row]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_an_in_unit_is_what_one_input_channel_is_multiplied_with(layer):
    layout = layout_of(layer, tuple(layer.weight.shape))
    pattern = Pattern.parse("in")
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    grid = pattern.sizes(layout).shape
    assert grid[0] * grid[1] == channels
    x = torch.rand(1, channels, *[4] * (layer.weight.ndim - 2)) + 1
    for unit in range(channels):
        kept = torch.zeros(channels, dtype=torch.bool)
        kept[unit] = True
        weight = layer.weight * layout.restore(pattern.unfold(kept.view(grid), layout))
        seen = x.clone().requires_grad_()
        torch.func.functional_call(layer, {"weight": weight}, seen).sum().backward()
        felt = seen.grad.abs().reshape(channels, -1).sum(1)
        assert felt.nonzero().reshape(-1).tolist() == [unit]


# --- schedules --------------------------------------------------------------------------------------------------------

SHAPES = [sc.cubic, sc.linear, sc.cosine, sc.exponential]


@st.composite
def schedules(draw):
    make = draw(st.sampled_from(SHAPES))
    top = 0.999 if make is sc.exponential else 1.0
    start = draw(st.integers(0, 30))
    return make(
        draw(st.floats(0, top)),
        start=start,
        end=start + draw(st.integers(0, 40)),
        every=draw(st.integers(1, 12)),
        initial=draw(st.floats(0, top)),
    )


@given(schedules())
def test_a_schedule_goes_from_initial_to_final_and_never_turns_back(schedule):
    values = [schedule(step) for step in range(schedule.end + 5)]
    assert all(0 <= value <= 1 for value in values)
    assert values[: schedule.start] == [schedule.initial] * schedule.start
    assert values[schedule.end :] == [schedule.final] * 5
    sign = 1 if schedule.final >= schedule.initial else -1
    assert all(sign * (b - a) >= -1e-12 for a, b in itertools.pairwise(values))


@given(schedules())
def test_due_steps_begin_at_start_and_end_at_end(schedule):
    due = [step for step in range(schedule.end + 50) if schedule.due(step)]
    assert due == sorted({*range(schedule.start, schedule.end, schedule.every), schedule.end})


@given(schedules(), schedules(), st.integers(1, 80))
def test_a_joined_schedule_is_each_part_from_its_own_step(first, second, change):
    joined = sc.join((0, first), (change, second))
    for step in range(100):
        assert joined(step) == (first if step < change else second)(step)


@given(schedules(), schedules(), st.integers(1, 80))
def test_following_the_due_steps_of_a_joined_schedule_ends_at_its_last_value(first, second, change):
    """A joined schedule must be due where a new part begins, or its value would never be applied."""
    joined = sc.join((0, first), (change, second))
    taken = joined(0)
    for step in range(160):
        if joined.due(step):
            taken = joined(step)
    assert taken == joined(160)


@given(schedules())
def test_following_the_due_steps_ends_at_the_final_value(schedule):
    taken = schedule.initial
    for step in range(schedule.end + 20):
        if schedule.due(step):
            taken = schedule(step)
    assert taken == schedule.final


@given(schedules())
def test_a_schedule_is_read_back_from_its_print(schedule):
    names = {name: getattr(sc, name) for name in ("cubic", "linear", "cosine", "exponential", "one_shot")}
    again = eval(str(schedule), {"__builtins__": {}}, names)
    assert [again(step) for step in range(80)] == [schedule(step) for step in range(80)]
    assert [again.due(step) for step in range(80)] == [schedule.due(step) for step in range(80)]
