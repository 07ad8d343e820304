# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""Updates the masks of many tensors on a GPU in place: few kernels, one synchronization, and CUDA graphs after the first call.

A mask has the dtype of its weight, and masked elements score zero. A mask is written only after its whole tensor has been read,
and only where it changes: at constant sparsity, masks hardly change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arrays import BITS, infinity_bits, launch_options
from .radix import DIFFERS, SLOTS, Ranking, bits_of, place, read, solved

_WORDS = 512  # groups of four that a program reads at a time
_TURNS = 8  # such tiles that a program of the writing kernel handles
_WIDE = 2048  # neighbouring elements that a program reads at a time
_FLAT = 4096  # the same, for blocks of one row


class Job(NamedTuple):
    """One mask to update. Whole blocks are pruned; with `lose`, blocks of four in a row lose that many elements."""

    weight: Tensor  # a contiguous matrix
    mask: Tensor  # a contiguous matrix of the same dtype
    block: tuple[int, int]
    power: int
    lose: int = 0
    ranked: bool = True  # False if every block loses elements, so that blocks need no ranking


@triton.jit
def _skip(job, drop, status, code, RANKED: tl.constexpr, AGAIN: tl.constexpr):
    """Returns True if this kernel has nothing to do: after NaN, or if the other pass handles this tensor.

    The first pass handles tensors of which exactly the zeros are pruned, the second (AGAIN) all others.
    """
    skip = tl.load(status) >= code
    if RANKED:
        known = solved(job, drop)
        if not AGAIN and not known and tl.program_id(0) == 0:
            tl.atomic_max(status + 1, 1)
        skip = skip | (known == AGAIN)
    return skip


@triton.jit
def _survey_kernel(
    x, mask, means, job, drop, status, code, rows, cols, across, height, width,
    AGAIN: tl.constexpr, POWER: tl.constexpr, ONE: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    SHARE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Computes the means of UNITS neighbouring blocks in float64, counts the zeros among them, and tells if the mask differs
    from the mask of nonzero means.

    With AGAIN, only the means are computed, and only if they are still needed. WIDTH is `width` if EXACT, else the next power
    of two.
    """
    if AGAIN:  # noqa: SIM102 - with `and`, Triton would always evaluate both
        if solved(job, drop):
            return
    down = tl.program_id(0)
    unit, i = tl.program_id(1) * UNITS + tl.arange(0, UNITS), tl.arange(0, WIDTH)
    col = unit[:, None] * (WIDTH if EXACT else width) + i[None, :]  # EXACT lets the compiler see contiguous columns
    inside = col < cols if EXACT else (i[None, :] < width) & (col < cols)
    total, ones = tl.zeros([UNITS], tl.float64), tl.zeros([UNITS], tl.int32)
    for k in range(height):
        row = down * height + k
        at = row.to(tl.int64) * cols + col
        here = inside & (row < rows)
        u = tl.load(mask + at, mask=here, other=0.0)
        s = tl.abs((tl.load(x + at, mask=here, other=0.0) * u).to(tl.float32))
        bits = bits_of(u).to(tl.int32)
        ones += tl.sum(tl.where(bits == ONE, 1, tl.where(bits == 0, 0, -(1 << 24))), 1)
        total += tl.sum((s * s if POWER == 2 else s).to(tl.float64), 1)
    size = tl.minimum(height, rows - down * height) * tl.minimum(width, cols - unit * width)
    if SHARE > 0:  # 1 / size, if that is a power of two; divisions are slow
        mean = (total * SHARE).to(tl.float32)
    else:
        mean = (total / size.to(tl.float64)).to(tl.float32)
    there = unit < across
    tl.store(means + down.to(tl.int64) * across + unit, mean, mask=there)
    if not AGAIN:
        zeros = tl.sum(((mean == 0) & there).to(tl.int32))
        if zeros > 0:
            tl.atomic_add(job + (down + tl.program_id(1)) % SLOTS, zeros, sem="relaxed")
        if tl.max(((ones != tl.where(mean == 0, 0, size)) & there).to(tl.int32)) > 0:
            tl.store(job + DIFFERS, 1)
        if tl.max(((mean != mean) & there).to(tl.int32)) > 0:
            tl.atomic_max(status, code)


@triton.jit
def _zeros_kernel(
    x, mask, job, status, code, n,
    INFINITY: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Does the same for single elements: counts zeros, and tells if the mask differs from the mask of nonzero elements."""
    zeros, highest, differs = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for turn in range(TURNS):
        at, inside = place(tl.program_id(0), turn, n, TILE, TURNS, EVEN)
        key, u = read(x, mask, at, inside, True)
        highest = tl.maximum(highest, key)
        differs |= bits_of(u).to(tl.int32) ^ tl.where(key > 0, ONE, 0)
        zeros += tl.where((key == 0) & inside, 1, 0)
    number = tl.sum(zeros)
    if number > 0:
        tl.atomic_add(job + tl.program_id(0) % SLOTS, number, sem="relaxed")
    if tl.max((differs != 0).to(tl.int32)) > 0:
        tl.store(job + DIFFERS, 1)
    if tl.max(highest) > INFINITY:
        tl.atomic_max(status, code)


@triton.jit
def _nonzero_kernel(
    x, mask, out, job, drop, status, code, n, ONE: tl.constexpr, EVEN: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr
):
    """Writes the mask of nonzero elements, if exactly the zeros are to be pruned and the mask differs from it."""
    skip = _skip(job, drop, status, code, True, False) | (tl.load(job + DIFFERS) == 0)
    if not skip:
        for turn in range(TURNS):
            at, inside = place(tl.program_id(0), turn, n, TILE, TURNS, EVEN)
            key = read(x, mask, at, inside, True)[0]
            tl.store(out + at, tl.where(key > 0, ONE, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _spread_kernel(
    kept, mask, job, drop, status, code, rows, cols, across, height, width,
    ONE: tl.constexpr, WIDTH: tl.constexpr, AGAIN: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the mask of elements from `kept`: the ranked blocks (AGAIN), or else the means of blocks, kept if not zero.

    WIDTH is the width of a block if that is a power of two, else 0.
    """
    skip = _skip(job, drop, status, code, True, AGAIN)
    if not AGAIN:
        skip = skip | (tl.load(job + DIFFERS) == 0)
    if not skip:
        col = tl.program_id(1) * TILE + tl.arange(0, TILE)
        unit = col // (WIDTH if WIDTH else width)
        for k in range(ROWS):
            row = tl.program_id(0) * ROWS + k
            inside = (col < cols) & (row < rows)
            keep = tl.load(kept + (row // height).to(tl.int64) * across + unit, mask=inside, other=0)
            place = mask + row.to(tl.int64) * cols + col
            old = tl.load(place, mask=inside, other=0)
            new = tl.where(keep != 0, ONE, 0).to(mask.dtype.element_ty)
            if tl.max(((new != old) & inside).to(tl.int32)) > 0:
                tl.store(place, new, mask=inside)


@triton.jit
def _part(v, m, at: tl.constexpr, KIND: tl.constexpr):
    """Returns the key of one of the two products of half precision in a word."""
    x = (v >> at).to(tl.int16).to(KIND, bitcast=True) * (m >> at).to(tl.int16).to(KIND, bitcast=True)
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _fours_kernel(
    x, mask, means, kept, changed, job, drop, status, code, groups,
    LOSE: tl.constexpr, RANKED: tl.constexpr, AGAIN: tl.constexpr, HALF: tl.constexpr, ONE: tl.constexpr,
    INFINITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Prunes the LOSE lowest of each group of four and writes the kept elements as four bits to `kept`.

    If RANKED, some groups stay whole: those marked in `kept` (AGAIN), or else those whose mean is not zero.
    """
    if not _skip(job, drop, status, code, RANKED, AGAIN):
        KIND: tl.constexpr = tl.float16 if HALF else tl.bfloat16
        g = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = g < groups
        v, m = tl.load(x + g, mask=inside, other=0), tl.load(mask + g, mask=inside, other=0)
        v0, v1, m0, m1 = v.to(tl.int32), (v >> 32).to(tl.int32), m.to(tl.int32), (m >> 32).to(tl.int32)
        a, b, c, d = _part(v0, m0, 0, KIND), _part(v0, m0, 16, KIND), _part(v1, m1, 0, KIND), _part(v1, m1, 16, KIND)
        ab, ac, ad = (a > b).to(tl.int32), (a > c).to(tl.int32), (a > d).to(tl.int32)
        bc, bd, cd = (b > c).to(tl.int32), (b > d).to(tl.int32), (c > d).to(tl.int32)
        a_stays, b_stays = ab + ac + ad >= LOSE, 1 - ab + bc + bd >= LOSE
        c_stays, d_stays = 2 - ac - bc + cd >= LOSE, 3 - ad - bd - cd >= LOSE
        if RANKED:
            if AGAIN:
                whole = tl.load(kept + g, mask=inside, other=0) != 0
            else:
                whole = tl.load(means + g, mask=inside, other=0) != 0
            a_stays, b_stays, c_stays, d_stays = a_stays | whole, b_stays | whole, c_stays | whole, d_stays | whole
        low = tl.where(a_stays, 1, 0) | tl.where(b_stays, 1 << 16, 0)
        high = tl.where(c_stays, 1, 0) | tl.where(d_stays, 1 << 16, 0)
        differs = ((low * ONE) ^ m0) | ((high * ONE) ^ m1)
        bits = low | (high << 1)  # a, b at bits 0 and 16; c, d at bits 1 and 17
        tl.store(kept + g, ((bits | (bits >> 14)) & 15).to(tl.int8), mask=inside)
        tl.store(changed + tl.program_id(0), tl.max(((differs != 0) & inside).to(tl.int32)))
        if tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d))) > INFINITY:
            tl.atomic_max(status, code)


@triton.jit
def _fours_write_kernel(
    mask, kept, changed, job, drop, status, code, groups,
    RANKED: tl.constexpr, AGAIN: tl.constexpr, ONE: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Writes the masks of the tiles of groups that changed."""
    if not _skip(job, drop, status, code, RANKED, AGAIN):
        for turn in range(TURNS):
            tile = tl.program_id(0) * TURNS + turn
            g = tile * TILE + tl.arange(0, TILE)
            if tl.load(changed + tile, mask=tile * TILE < groups, other=0) != 0:
                bits = tl.load(kept + g, mask=g < groups, other=0).to(tl.int32)
                low, high = (bits & 1) | (bits & 4) << 14, (bits & 2) >> 1 | (bits & 8) << 13
                word = (high * ONE).to(tl.int64) << 32 | (low * ONE).to(tl.int64) & 0xFFFFFFFF
                tl.store(mask + g, word, mask=g < groups)


def _one(dtype: torch.dtype) -> int:
    return int(torch.ones((), dtype=dtype).view(BITS[dtype.itemsize]))


class _Sizes(NamedTuple):
    """Sizes of the working memory for one job."""

    units: tuple[int, int]
    ranking: Ranking
    means: int
    kept: int
    changed: int

    @staticmethod
    def of(job: Job) -> _Sizes:
        (rows, cols), (height, width) = job.weight.shape, job.block
        units = -(-rows // height), -(-cols // width)
        number, single = units[0] * units[1], job.block == (1, 1)
        ranking = Ranking.of(number, job.weight.dtype if single else torch.float32)
        ranked = number if job.ranked and not single else 0
        return _Sizes(units, ranking, ranked, 0 if single else number, triton.cdiv(number, _WORDS) if job.lose else 0)


class Steps:
    """Updates masks repeatedly. It is valid as long as the weights, the masks and the blocks stay the same tensors and sizes,
    because its CUDA graphs contain their addresses.

    It owns working memory for the largest job, but no tensor of the jobs. A first pass reads everything once, which suffices
    for masks that do not change. A second pass finds the remaining thresholds.
    """

    def __init__(self, jobs: Sequence[Job]):
        sizes = [_Sizes.of(job) for job in jobs]
        device = jobs[0].weight.device
        new = {"device": device, "dtype": torch.int32}
        self.index, self.ranked = device.index, any(job.ranked for job in jobs)
        self.job = torch.zeros(len(jobs), 64 + 4 * 256, **new)
        self.drop, self.status = torch.zeros(len(jobs), **new), torch.zeros(2, **new)
        self.blocks = torch.empty(max(size.ranking.blocks if job.ranked else 0 for job, size in zip(jobs, sizes)), **new)
        self.means = torch.empty(max(size.means for size in sizes), device=device)
        self.kept = torch.empty(max(size.kept for size in sizes), device=device, dtype=torch.int8)
        self.changed = torch.empty(max(size.changed for size in sizes), **new)
        self.drops: list[int] = []
        self.found = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.seen = self.found.numpy()
        self.graphs: list[torch.cuda.CUDAGraph | None] = [None, None]
        self.ran = [False, False]
        self.raw, self.stream = -1, None

    def __call__(self, jobs: Callable[[], Sequence[Job]], drops: list[int]) -> int | None:
        """Updates all masks, with `drops` blocks pruned from each. Returns the index of the first job with NaN, or None.

        The masks of that job and of those after it are not changed.
        """
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(jobs, drops)
        if self.drops != drops:
            self.drop.copy_(torch.tensor(drops, dtype=torch.int32))
            self.drops = drops
        seen = self.seen
        self._go(jobs, again=False)
        if seen[1]:
            self._go(jobs, again=True)
        if seen[0] or seen[1]:
            self.status.zero_()
        return len(drops) - int(seen[0]) if seen[0] else None

    def _go(self, jobs: Callable[[], Sequence[Job]], again: bool) -> None:
        graph = self.graphs[again]
        if graph is not None:
            graph.replay()
        elif self.ran[again]:
            self._recorded(jobs(), again).replay()
        else:
            self._launch(jobs(), again)
            self.ran[again] = True
        raw = torch._C._cuda_getCurrentRawStream(self.index)
        if raw != self.raw or self.stream is None:
            self.raw, self.stream = raw, torch.cuda.current_stream()
        self.stream.synchronize()

    def _recorded(self, jobs: Sequence[Job], again: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._launch(jobs, again)
            finally:
                graph.capture_end()
        self.graphs[again] = graph
        return graph

    def _launch(self, jobs: Sequence[Job], again: bool) -> None:
        if self.ranked and not again:
            self.job.zero_()
        for at, job in enumerate(jobs):
            if job.ranked or not again:
                self._one_mask(job, at, len(jobs) - at, again, survey=not again or len(jobs) > 1)
        self.found.copy_(self.status, non_blocking=True)

    def _one_mask(self, job: Job, at: int, code: int, again: bool, survey: bool) -> None:
        size, weight, mask = _Sizes.of(job), job.weight, job.mask
        told = self.job[at], self.drop[at:], self.blocks, self.status, code
        one, bits = _one(mask.dtype), mask.view(BITS[mask.element_size()])
        means, kept = self.means[: size.means], self.kept[: size.kept]
        if job.ranked and not size.means:  # single elements
            self._elements(job, size.ranking, one, bits, told, again)
            return
        if size.means:
            if survey:
                self._survey(job, size, one, told, again)
            if again:
                size.ranking.digits(means, None, *told)
                size.ranking.choose(means, None, kept, *told)
        if job.lose:
            self._fours(job, size, one, told, again)
        else:
            (height, width), (rows, cols) = job.block, weight.shape
            wide, deep = width if width & (width - 1) == 0 else 0, 8
            _spread_kernel[(triton.cdiv(rows, deep), triton.cdiv(cols, _WIDE))](
                kept if again else means, bits, self.job[at], self.drop[at:], self.status, code, rows, cols, size.units[1],
                height, width, one, wide, again, _WIDE, deep, **launch_options(4),
            )  # fmt: skip

    def _elements(self, job: Job, ranking: Ranking, one: int, bits: Tensor, told: tuple[Any, ...], again: bool) -> None:
        pair = job.weight, job.mask
        if again:
            ranking.digits(*pair, *told)
            ranking.choose(*pair, bits, *told, one=one)
            return
        n, turns = ranking.n, 2
        grid, sizes = (triton.cdiv(n, _WIDE * turns),), (n % (_WIDE * turns) == 0, _WIDE, turns)
        _zeros_kernel[grid](*pair, told[0], *told[3:], n, ranking.infinity, one, *sizes, **launch_options(4))
        sizes = (ranking.even, _WIDE, ranking.turns)
        _nonzero_kernel[(ranking.programs,)](*pair, bits, *told[:2], *told[3:], n, one, *sizes, **launch_options(4))

    def _survey(self, job: Job, size: _Sizes, one: int, told: tuple[Any, ...], again: bool) -> None:
        (rows, cols), (height, width), (down, across) = job.weight.shape, job.block, size.units
        wide = triton.next_power_of_2(width)
        whole = rows % height == 0 and cols % width == 0 and (height * width) & (height * width - 1) == 0
        units = min(max((_FLAT if height == 1 else 1024) // wide, 1), triton.next_power_of_2(across))
        _survey_kernel[(down, triton.cdiv(across, units))](
            job.weight, job.mask, self.means, told[0], told[1], self.status, told[-1], rows, cols, across, height, width,
            again, job.power, one, wide, wide == width, 1 / (height * width) if whole else 0, units, **launch_options(4),
        )  # fmt: skip

    def _fours(self, job: Job, size: _Sizes, one: int, told: tuple[Any, ...], again: bool) -> None:
        words, own = (tensor.view(-1).view(torch.int64) for tensor in (job.weight, job.mask))
        common = (told[0], told[1], self.status, told[-1], len(words))
        half, infinity = job.weight.dtype == torch.float16, infinity_bits(job.weight.dtype)
        _fours_kernel[(size.changed,)](
            words, own, self.means if job.ranked else self.kept, self.kept, self.changed, *common,
            job.lose, job.ranked, again, half, one, infinity, _WORDS, **launch_options(4),
        )  # fmt: skip
        _fours_write_kernel[(triton.cdiv(size.changed, _TURNS),)](
            own, self.kept, self.changed, *common, job.ranked, again, one, _WORDS, _TURNS, **launch_options(4)
        )
