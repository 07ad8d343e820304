"""`select` against a reference that sorts stably and prunes the first elements."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import kernels
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import keep_largest, select

ELEMENT = Pattern()
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, 0.5]


def lowest_go(flat: torch.Tensor, drop: int) -> torch.Tensor:
    kept = torch.ones(flat.numel(), dtype=torch.bool)
    kept[torch.argsort(flat.double() + 0.0, stable=True)[:drop]] = False
    return kept


def oracle(tensors: dict[str, torch.Tensor], scope: str, drop_of) -> dict[str, torch.Tensor]:
    """`drop_of(size)` is the number of elements to prune in a pool."""
    if scope == "global":
        flat = torch.cat([t.double().reshape(-1) for t in tensors.values()])
        parts = lowest_go(flat, drop_of(flat.numel())).split([t.numel() for t in tensors.values()])
        return {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
    if scope == "tensor":
        return {name: lowest_go(t.reshape(-1), drop_of(t.numel())).view(t.shape) for name, t in tensors.items()}
    return {name: torch.stack([lowest_go(row, drop_of(row.numel())) for row in t]) for name, t in tensors.items()}


def agrees(tensors: dict[str, torch.Tensor], scope: str, *, count: int | None = None, sparsity: float | None = None) -> None:
    scores = {name: Scores.of(t) for name, t in tensors.items()}
    found = select(scores, ELEMENT, scope=scope, count=count, sparsity=sparsity)
    wanted = oracle(tensors, scope, lambda size: count if count is not None else round(sparsity * size))
    assert found.keys() == wanted.keys()
    for name in tensors:
        assert found[name].dtype == torch.bool
        assert torch.equal(found[name], wanted[name]), name


@st.composite
def tensor_of_few_values(draw, dtype, shape=None):
    rows, cols = shape or (draw(st.integers(1, 6)), draw(st.integers(1, 25)))
    values = draw(st.lists(st.sampled_from(SPECIAL), min_size=rows * cols, max_size=rows * cols))
    return torch.tensor(values, dtype=dtype).view(rows, cols)


@pytest.mark.parametrize("scope", ["tensor", "row", "global"])
@given(data=st.data())
def test_select_is_the_stable_sort_whatever_the_ties(scope, data):
    tensors = {}
    for i in range(data.draw(st.integers(1, 3))):
        tensors[f"t{i}"] = data.draw(tensor_of_few_values(data.draw(st.sampled_from(DTYPES))))
    agrees(tensors, scope, sparsity=data.draw(st.floats(0, 1)))


@given(data=st.data())
def test_select_is_the_stable_sort_for_any_finite_values(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    width = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}[dtype]
    values = data.draw(st.lists(st.floats(allow_nan=False, width=width), min_size=1, max_size=40))
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype).view(1, -1)
    agrees({"t": tensor}, "tensor", count=data.draw(st.integers(0, len(values))))


@pytest.mark.parametrize("scope", ["tensor", "global"])
@given(data=st.data())
def test_count_is_exact(scope, data):
    tensor = data.draw(tensor_of_few_values(torch.float32))
    count = data.draw(st.integers(0, tensor.numel()))
    kept = select({"t": Scores.of(tensor)}, ELEMENT, scope=scope, count=count)["t"]
    assert int((~kept).sum()) == count


@given(data=st.data())
def test_what_was_pruned_before_stays_pruned_and_counts(data):
    tensor = data.draw(tensor_of_few_values(data.draw(st.sampled_from(DTYPES))))
    flags = data.draw(st.lists(st.booleans(), min_size=tensor.numel(), max_size=tensor.numel()))
    before = torch.tensor(flags).view(tensor.shape)
    count = data.draw(st.integers(0, tensor.numel()))
    kept = select({"t": Scores.of(tensor)}, ELEMENT, count=count, previous={"t": before})["t"]
    ranked = tensor.double().masked_fill(~before, -math.inf)
    order = sorted(range(tensor.numel()), key=lambda i: (flags[i], float(ranked.reshape(-1)[i]), i))
    wanted = torch.ones(tensor.numel(), dtype=torch.bool)
    wanted[order[:count]] = False
    assert not (kept & ~before).any()
    assert torch.equal(kept, wanted.view(tensor.shape) & before)
    assert int((~kept).sum()) == max(count, int((~before).sum()))


def test_minus_infinity_still_goes_before_the_lowest_finite_score_when_masks_are_held():
    lowest = torch.finfo(torch.float32).min
    scores = {"t": Scores.of(torch.tensor([[lowest, -math.inf, 1.0, 2.0]]))}
    free = select(scores, ELEMENT, count=1)["t"]
    held = select(scores, ELEMENT, count=1, previous={"t": torch.ones(1, 4, dtype=torch.bool)})["t"]
    assert free.tolist() == [[True, False, True, True]]
    assert torch.equal(free, held)


# --- pools larger than a slab, so that a sample really brackets the threshold ----------------------------------------


def layouts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    slab = kernels.slab_elements(torch.device("cpu"))
    rows, cols = 5, max(slab, 1 << 17) // 4 + 1001  # more than a slab and more than a sample, in ragged slabs
    normal = torch.randn(rows, cols, generator=generator)
    return {
        "normal": normal,
        "sorted": normal.reshape(-1).sort().values.view(rows, cols),
        "sorted down": normal.reshape(-1).sort(descending=True).values.view(rows, cols),
        "rows of different scales": normal * torch.tensor([1e-20, 1.0, 1e20, 1e-3, 1e8])[:, None],
        "almost all zero": torch.where(torch.rand(rows, cols, generator=generator) < 1e-4, normal, torch.zeros(())),
        "one value": torch.full((rows, cols), 2.0),
        "few values": torch.randint(-3, 4, (rows, cols), generator=generator).float(),
        "infinities": torch.randint(-1, 2, (rows, cols), generator=generator).float() * math.inf + 0 * normal,
        "a spike every 1000": torch.where(torch.arange(rows * cols).view(rows, cols) % 1000 == 0, 1e6 + normal, normal),
    }


LAYOUTS = {name: t.nan_to_num(0.0, math.inf, -math.inf) for name, t in layouts().items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sparsity", [0.0, 1e-5, 0.5, 0.937, 1.0])
def test_an_unrepresentative_sample_never_changes_the_threshold(name, sparsity):
    agrees({"t": LAYOUTS[name]}, "tensor", sparsity=sparsity)


@pytest.mark.parametrize("name", ["sorted", "rows of different scales", "few values", "infinities"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_pools_are_exact_in_every_dtype(name, dtype):
    agrees({"t": LAYOUTS[name].to(dtype)}, "tensor", sparsity=0.62)


@pytest.mark.parametrize("name", ["sorted", "rows of different scales", "few values"])
def test_many_short_rows_are_exact(name):
    flat = LAYOUTS[name].reshape(-1)[:300_000]
    agrees({"t": flat.view(-1, 3)}, "tensor", sparsity=0.3)
    agrees({"t": flat.view(-1, 30)[:2000]}, "row", sparsity=0.3)


def test_a_global_pool_of_unequal_tensors_is_exact():
    small, large = LAYOUTS["normal"][:1, :7] * 1e-6, LAYOUTS["rows of different scales"]
    for sparsity in (0.2, 0.8, 0.999):
        agrees({"large": large, "small": small, "one": torch.zeros(1, 1)}, "global", sparsity=sparsity)


def test_magnitudes_read_in_place_are_the_absolute_scores():
    for name, tensor in LAYOUTS.items():
        direct = select({"t": Scores.magnitude(tensor)}, ELEMENT, sparsity=0.7)["t"]
        assert torch.equal(direct, select({"t": Scores.of(tensor.abs())}, ELEMENT, sparsity=0.7)["t"]), name


@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_strided_weights_rank_as_their_copies_do(scope):
    tensor = LAYOUTS["normal"].t()
    assert not tensor.is_contiguous()
    strided = select({"t": Scores.magnitude(tensor)}, ELEMENT, scope=scope, sparsity=0.4)["t"]
    assert torch.equal(strided, select({"t": Scores.magnitude(tensor.contiguous())}, ELEMENT, scope=scope, sparsity=0.4)["t"])


@given(data=st.data())
def test_a_global_pool_of_two_precisions_is_exact(data):
    """A float64 threshold need not be a float32 number; rounding it would move the cut."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    narrow = torch.rand(5, 10, generator=generator)
    wide = narrow.double() + (torch.rand(5, 10, generator=generator).double() - 0.5) * 1e-9
    agrees({"narrow": narrow, "wide": wide}, "global", count=data.draw(st.integers(0, 100)))


@given(data=st.data())
def test_a_global_pool_of_half_and_single_precision_is_exact(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    half = torch.rand(5, 10, generator=generator).to(data.draw(st.sampled_from([torch.float16, torch.bfloat16])))
    single = half.float() + torch.randint(-1, 2, (5, 1), generator=generator) * 1e-4
    agrees({"half": half, "single": single}, "global", count=data.draw(st.integers(0, 100)))


# --- NaN, nothing, one tensor on its own ------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tensor", "row", "global"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 1.0])
def test_nan_is_an_error_that_names_the_tensor(scope, dtype, sparsity):
    broken = torch.ones(4, 30, dtype=dtype)
    broken[2, 17] = math.nan
    with pytest.raises(ValueError, match=r"'head\.weight'.*NaN"):
        select({"ok": Scores.of(torch.ones(3, 3)), "head.weight": Scores.of(broken)}, ELEMENT, scope=scope, sparsity=sparsity)


def test_nan_is_found_in_n_of_m_groups_too():
    broken = torch.ones(2, 8)
    broken[1, 7] = math.nan
    with pytest.raises(ValueError, match=r"'t'.*NaN"):
        select({"t": Scores.of(broken)}, Pattern.parse("2:4"))


def test_nan_that_was_pruned_before_is_ignored():
    scores = torch.tensor([[math.nan, 3.0, 1.0, 2.0]])
    before = torch.tensor([[False, True, True, True]])
    assert select({"t": Scores.of(scores)}, ELEMENT, count=2, previous={"t": before})["t"].tolist() == [
        [False, True, False, True]
    ]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "2x2", "1x3", "out"])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_an_empty_tensor_gives_an_empty_mask(shape, pattern, scope):
    kept = select({"t": Scores.of(torch.empty(shape))}, Pattern.parse(pattern), scope=scope, sparsity=0.5)["t"]
    assert kept.numel() == 0


@pytest.mark.parametrize("scope", ["tensor", "row", "global"])
def test_a_count_beyond_the_pool_is_an_error(scope):
    with pytest.raises(ValueError, match=r"count=13.*'t'"):
        select({"t": Scores.of(torch.rand(3, 4))}, ELEMENT, scope=scope, count=13)


@given(data=st.data())
def test_one_tensor_alone_is_ranked_in_its_own_shape(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    tensor = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).float()
    drop = data.draw(st.integers(0, tensor.numel()))
    assert torch.equal(keep_largest(tensor, drop), lowest_go(tensor.reshape(-1), drop).view(tensor.shape))
    signless = keep_largest(tensor, drop, magnitude=True)
    assert torch.equal(signless, lowest_go(tensor.abs().reshape(-1), drop).view(tensor.shape))


# --- units ------------------------------------------------------------------------------------------------------------


def unit_of(pattern: str, rows: int, cols: int) -> torch.Tensor:
    """The number of the unit each element belongs to, units counted row by row."""
    a, b = (1, cols) if pattern == "out" else (rows, 1) if pattern == "in" else map(int, pattern.split("x"))
    wide = -(-cols // b)
    return (torch.arange(rows) // a * wide)[:, None] + (torch.arange(cols) // b)[None, :]


@settings(max_examples=100)
@given(data=st.data())
def test_units_go_whole_and_in_order_of_their_mean(data):
    rows, cols = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    pattern = data.draw(st.sampled_from(["out", "in", "1x1", "2x2", "3x1", "1x4", "4x3", "16x16"]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    scores = torch.randint(0, 4, (rows, cols), generator=generator).double()
    units = unit_of(pattern, rows, cols)
    size = torch.zeros(int(units.max()) + 1).double().index_add_(0, units.reshape(-1), torch.ones(rows * cols).double())
    mean = torch.zeros_like(size).index_add_(0, units.reshape(-1), scores.reshape(-1)) / size
    count = data.draw(st.integers(0, len(mean)))
    kept = select({"t": Scores.of(scores)}, Pattern.parse(pattern), count=count)["t"]
    assert torch.equal(kept, lowest_go(mean, count)[units])


@given(data=st.data())
def test_ragged_units_come_as_near_to_the_sparsity_as_whole_units_can(data):
    rows, cols = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    pattern = data.draw(st.sampled_from(["2x2", "3x1", "1x4", "4x3"]))
    scores = torch.rand(rows, cols, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))).double()
    share = data.draw(st.floats(0, 1))
    units = unit_of(pattern, rows, cols)
    size = torch.zeros(int(units.max()) + 1).double().index_add_(0, units.reshape(-1), torch.ones(rows * cols).double())
    mean = torch.zeros_like(size).index_add_(0, units.reshape(-1), scores.reshape(-1)) / size
    kept = select({"t": Scores.of(scores)}, Pattern.parse(pattern), sparsity=share)["t"]
    pruned = int((~kept).sum())
    reachable = torch.cat([torch.zeros(1).double(), size[mean.sort(stable=True).indices].cumsum(0)])
    assert abs(pruned - share * rows * cols) <= float((reachable - share * rows * cols).abs().min()) + 0.5
    assert all(len(set(kept[units == u].tolist())) == 1 for u in range(len(size)))


@settings(max_examples=100)
@given(data=st.data())
def test_n_of_m_keeps_the_best_n_of_every_aligned_group(data):
    m = data.draw(st.integers(1, 20))
    n = data.draw(st.integers(1, m))
    scores = data.draw(tensor_of_few_values(data.draw(st.sampled_from(DTYPES))))
    kept = select({"t": Scores.of(scores)}, Pattern(keep=(n, m)))["t"]
    for row, flags in zip(scores, kept, strict=True):
        for group, chosen in zip(row.split(m), flags.split(m), strict=True):
            assert int(chosen.sum()) == min(n, len(group))
            assert torch.equal(chosen, lowest_go(group, max(len(group) - n, 0)))


@given(data=st.data())
def test_a_pruned_block_loses_its_lowest_and_a_kept_one_stays_whole(data):
    rows, cols = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 13))
    a, b = data.draw(st.sampled_from([(1, 2), (1, 4), (2, 2), (3, 2), (2, 5), (1, 8)]))
    lose = data.draw(st.integers(1, a * b - 1))
    tensor = data.draw(tensor_of_few_values(torch.float32, (rows, cols))).nan_to_num(posinf=3.0, neginf=-3.0)
    corners = [(r, c) for r in range(0, rows, a) for c in range(0, cols, b)]
    blocks = [tensor[r : r + a, c : c + b] for r, c in corners]
    count = data.draw(st.integers(0, len(blocks)))
    stays = lowest_go(torch.stack([block.double().mean().float() for block in blocks]), count)
    wanted = torch.ones(rows, cols, dtype=torch.bool)
    for (r, c), block, whole in zip(corners, blocks, stays, strict=True):
        if not whole:
            inside = lowest_go(block.reshape(-1), min(lose, block.numel()))
            wanted[r : r + a, c : c + b] = inside.view(block.shape)
    found = select({"t": Scores.of(tensor)}, Pattern((a, b), lose=lose), count=count)["t"]
    assert torch.equal(found, wanted)


@given(data=st.data())
def test_magnitudes_to_a_power_and_under_a_mask_rank_as_the_product_does(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([4, 8, 12, 13]))
    tensor = torch.randn(rows, cols, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).to(dtype)
    under = (torch.rand(rows, cols, generator=torch.Generator().manual_seed(7)) > 0.4).to(dtype)
    pattern = Pattern.parse(data.draw(st.sampled_from(["unstructured", "1x4", "2x2", "1x4-2", "2x2-1", "2:4"])))
    power = data.draw(st.sampled_from([1, 2]))
    budget = {} if pattern.keep else {"count": data.draw(st.integers(0, -(-rows // 2)))}
    wide = (tensor * under).abs().to(torch.promote_types(dtype, torch.float32))
    plain = select({"t": Scores.of(wide**power)}, pattern, **budget)
    assert torch.equal(select({"t": Scores.magnitude(tensor, power=power, under=under)}, pattern, **budget)["t"], plain["t"])
