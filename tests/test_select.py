"""`select` in small: the order of the tie rule, pools and budgets, by hand. The laws are in laws/test_select_laws.py."""

import itertools
import mmap
from pathlib import Path

import pytest
import torch

from secateur import kernels
from secateur._layers import Layout
from secateur.kernels import arrays
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import keep_largest, select

SCORES = {"a": Scores.of(torch.tensor([[3.0, 1.0, 1.0], [0.0, 2.0, 1.0]])), "b": Scores.of(torch.tensor([[1.0, 5.0]]))}
ELEMENT = Pattern()


def test_among_equals_the_lowest_index_goes_first():
    kept = select({"a": SCORES["a"]}, ELEMENT, count=3)["a"]
    assert kept.tolist() == [[True, False, False], [False, True, True]]


def test_a_global_pool_breaks_ties_in_the_order_of_the_tensors():
    kept = select(SCORES, ELEMENT, scope="global", count=4)
    assert kept["a"].tolist() == [[True, False, False], [False, True, False]]
    assert kept["b"].tolist() == [[True, True]]


def test_a_row_is_a_pool_of_its_own():
    kept = select({"a": SCORES["a"]}, ELEMENT, scope="row", count=1)["a"]
    assert kept.tolist() == [[True, False, True], [False, True, True]]


def test_each_tensor_may_have_its_own_number():
    kept = select(SCORES, ELEMENT, count={"a": 5, "b": 0})
    assert int(kept["a"].sum()) == 1
    assert int(kept["b"].sum()) == 2
    kept = select(SCORES, ELEMENT, sparsity={"a": 0.5, "b": 1.0})
    assert int(kept["a"].sum()) == 3
    assert int(kept["b"].sum()) == 0


def test_minus_zero_and_zero_are_one_score():
    kept = select({"t": Scores.of(torch.tensor([[0.0, -0.0, 0.0, -0.0]]))}, ELEMENT, count=2)["t"]
    assert kept.tolist() == [[False, False, True, True]]


def test_slabs_cover_every_row_once_in_whole_multiples():
    cols = kernels.slab_elements(torch.device("cpu")) // 7
    scores = Scores.of(torch.zeros(101, cols))
    spans = [span[:2] for span in scores.slabs(multiple=3)]
    assert spans[0][0] == 0
    assert spans[-1][1] == 101
    assert all(b == c for (_, b), (c, _) in itertools.pairwise(spans))
    assert all((last - first) % 3 == 0 for first, last in spans[:-1])


def test_scores_are_asked_for_a_slab_at_a_time():
    asked = []
    matrix = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(0))
    scores = Scores(Layout((1000, 1000)), matrix.device, lambda a, b: (asked.append(b - a), matrix[a:b])[1])
    kept = select({"t": scores}, ELEMENT, sparsity=0.5)["t"]
    assert int(kept.sum()) == 500_000
    assert max(asked) * 1000 <= kernels.slab_elements(matrix.device)


def test_selecting_does_not_change_the_scores():
    matrix = torch.randn(50, 50)
    before = matrix.clone()
    for scope in ("tensor", "row", "global"):
        select({"t": Scores.magnitude(matrix)}, ELEMENT, scope=scope, sparsity=0.5)
    select({"t": Scores.of(matrix)}, Pattern.parse("4x4"), sparsity=0.5, previous={"t": torch.ones(50, 50, dtype=torch.bool)})
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("count", [-1, 7])
def test_a_count_outside_the_pool_names_the_tensor(count):
    with pytest.raises(ValueError, match=f"count={count}.*'a'"):
        select({"a": SCORES["a"]}, ELEMENT, count=count)


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_nothing(four_threads, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-50, 50, (40, 30_000), generator=generator).to(dtype)
    for pattern, scope in (("unstructured", "tensor"), ("unstructured", "row"), ("2:4", "tensor"), ("3:7", "tensor")):
        several = select({"t": Scores.magnitude(weight)}, Pattern.parse(pattern), scope=scope, sparsity=0.3)["t"]
        torch.set_num_threads(1)
        one = select({"t": Scores.of(weight.abs())}, Pattern.parse(pattern), scope=scope, sparsity=0.3)["t"]
        torch.set_num_threads(4)
        assert torch.equal(several, one), pattern


def test_nan_is_named_whichever_thread_finds_it(four_threads):
    weight = torch.ones(40, 30_000)
    weight[37, 5] = torch.nan
    for pattern, scope in (("unstructured", "tensor"), ("unstructured", "row"), ("2:4", "tensor")):
        with pytest.raises(ValueError, match=r"'t'.*NaN"):
            select({"t": Scores.magnitude(weight)}, Pattern.parse(pattern), scope=scope, sparsity=0.3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("magnitude", [False, True])
def test_whole_numbers_rank_like_any_other(dtype, magnitude):
    scores = torch.randint(0 if dtype in (torch.uint8, torch.bool) else -50, 50, (70, 101)).to(dtype)
    for drop in (0, 1, 700, scores.numel()):
        keys = scores.double().abs() if magnitude else scores.double()
        wanted = torch.ones(scores.numel(), dtype=torch.bool)
        wanted[keys.reshape(-1).argsort(stable=True)[:drop]] = False
        assert torch.equal(keep_largest(scores, drop, magnitude=magnitude), wanted.view(scores.shape))


@pytest.mark.skipif(not arrays._system_has_huge_pages(), reason="the system has no huge pages")
def test_large_results_begin_at_a_huge_page_and_waste_little_memory_at_their_end():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = (2 << 21) + (1 << 14)  # two huge pages and four small ones
    before = resident()
    made = [kernels.new_tensor((size,), torch.bool).fill_(True) for _ in range(8)]
    assert resident() - before < 1.2 * 8 * size
    assert all(one.data_ptr() % (1 << 21) == 0 for one in made)
    assert all(one.untyped_storage().nbytes() == size for one in made)  # what torch.save writes
