"""Masks of pools that span processes or files, by one exact threshold that is found digit by digit.

The key of an element is (score, number of its tensor, index in the whole tensor), as integers. Each round counts one digit of
the keys that share the digits found so far; the counts of all processes are added up, and the bin that contains the threshold
is the next digit. Every sharding of the same tensors therefore gives the same masks. Processes exchange only counts: at most
65,536 for one pool, 256 for each of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import kernels
from ._dist import Comm
from .scores import Scores

_AT_ONCE = 1 << 18  # elements whose bits are counted at once
_FEW = 16  # the keys near a cut are kept if they are at most one in so many
_NOTED = 1 << 22  # keys of 16 bits whose numbers are remembered (40 MiB)
READ = 1 << 21  # elements that are read from a file at once
BUCKET = 1 << 20  # counts that are added up at once (8 MiB)
LISTED = 1 << 12  # keys of all processes that are listed rather than counted (32 KiB)
_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}
_FLOATS = {32: torch.float32, 64: torch.float64}


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a tensor in one process or file: its scores as a matrix, and their position in the whole matrix.

    `number` orders the tensors of a pool. Elements that are not `allowed` are already pruned and rank below all others.
    Elements that are `safe` must be kept and rank above all others. `sizes` are the weights of the elements; by default, each
    counts as one. If the scores are the magnitudes of values that are read from a file, `values(first row, end)` reads them.
    """

    scores: Scores
    number: int
    size: int  # elements of the whole matrix
    cols: int  # columns of the whole matrix
    origin: tuple[int, int] = (0, 0)  # row and column of the whole matrix at which the part begins
    counted: bool = True
    allowed: Tensor | None = None
    safe: Tensor | None = None
    sizes: Tensor | None = None
    values: Callable[[int, int], Tensor] | None = None

    def index(self, first: int, at: Tensor) -> Tensor:
        """The indices in the whole matrix of elements at these positions of a slab that begins with row `first`."""
        cols = self.scores.layout.cols
        return (at // cols + (first + self.origin[0])) * self.cols + at % cols + self.origin[1]

    def ends(self, first: int, last: int) -> tuple[int, int]:
        """The lowest and the highest index in the whole matrix of the elements of some rows."""
        low, high = self.index(first, torch.tensor([0, (last - first) * self.scores.layout.cols - 1])).tolist()
        return low, high

    def keys(self, bits: int, check: bool = False) -> Iterator[tuple[Tensor, int, int, bool]]:
        """The scores as integers of the same order, slab by slab: (keys, first row, end, whether there is NaN).

        NaN is looked for with `check`.
        """
        for first, last in self.scores.slabs():
            values = self.scores.rows(first, last)
            if self.allowed is not None:
                values = values.masked_fill(~self.allowed[first:last], 0)  # NaN does not matter where nothing is left
            nan = check and bool(values.sum().isnan()) and bool(values.isnan().any())  # infinities can make the sum NaN
            key = ordered(values, bits)
            if self.allowed is not None:
                key.masked_fill_(~self.allowed[first:last], -(1 << (bits - 1)))
            if self.safe is not None:
                key.masked_fill_(self.safe[first:last], (1 << (bits - 1)) - 1)
            yield key.view(-1), first, last, nan


Near = tuple[Tensor, Tensor]  # keys that share the leading digit of the cut, and their positions in the part


@dataclass(eq=False)
class Pool:
    """Tensors whose elements are ranked together: the `drop` of `total` elements with the lowest keys are pruned.

    With weights, the number of pruned elements is the one whose total weight is nearest to `drop`. `find_cuts` sets the other
    attributes. The cut is at the score `prefix`; among equal scores, elements of tensors before `number` are pruned, and in
    that tensor those up to `index`.
    """

    parts: Sequence[Part]
    drop: float
    total: int
    weighted: bool = False
    prefix: int = 0
    number: int | None = None  # None if all that equal the score go
    index: int = 0
    before: int = 0  # counted before the cut, and at it
    equal: int = 0
    last_stays: bool = False
    known: int = 0  # leading bits of the cut that are found already
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # leading 16 bits of keys by part, and their numbers
    near: dict[int, Near] = field(default_factory=dict)  # by part, where they are few
    kept: dict[int, Tensor] = field(default_factory=dict)  # masks of parts that are right but for the keys in `near`

    def note(self, place: int, counts: Tensor) -> None:
        """Stores the counts of the leading 16 bits of a part, so that it need not be read again to count their digits."""
        keys = counts.nonzero().view(-1)
        if keys.numel() + sum(keys.numel() for keys, _ in self.seen.values()) <= _NOTED:
            self.seen[place] = (keys - counts.numel() // 2).short(), counts[keys]

    @property
    def trivial(self) -> bool:
        """True if no element or every element is pruned."""
        return self.total == 0 or self.drop <= 0 or (not self.weighted and self.drop >= self.total)


class _Digit(NamedTuple):
    """One digit of the keys: which part of the key, how far it is shifted, and its bits."""

    kind: str
    shift: int
    bits: int
    leads: bool = False  # the first digit of a score, which has a sign


def bits_for(kinds: set[torch.dtype]) -> int:
    """How many bits hold scores of these dtypes in order."""
    if torch.float64 in kinds:
        return 64
    return 16 if len(kinds) == 1 and kinds <= {torch.bfloat16, torch.float16} else 32


def plain_magnitudes(scores: Scores) -> Tensor | None:
    """The tensor whose magnitudes are the scores, without a power or a mask, or None."""
    return scores.magnitude_of if scores.power == 1 and scores.under is None else None


def kind_of(scores: Scores) -> torch.dtype:
    """The dtype in which scores are compared. Magnitudes of bfloat16 are widened on the way and fit into it."""
    values = plain_magnitudes(scores)
    return scores.rows(0, 0).dtype if values is None else values.dtype


def ordered(values: Tensor, bits: int) -> Tensor:
    """Floats as integers of so many bits in the same order: of negative numbers all bits but the sign are flipped."""
    if bits == 16:
        values = values.bfloat16() if values.dtype == torch.float32 else values
    else:
        values = values.to(_FLOATS[bits])
    key = (values + 0.0).view(_INTEGERS[bits])  # -0 becomes 0
    return key.bitwise_xor_((key >> (bits - 1)).bitwise_and_((1 << (bits - 1)) - 1))


def find_cuts(pools: Sequence[Pool], bits: int, comm: Comm, *, longest: int, tensors: int) -> bool:
    """Finds the cuts of all pools, in rounds that they share. Returns True, and finds none, if there is NaN anywhere.

    All processes have to call it with as many pools. `bits` is that of `bits_for`, `longest` the size of the largest of so
    many `tensors`, all over all processes. `brackets` may have found the cut of one pool, or the leading digit of it.
    """
    width = 16 if len(pools) == 1 else 8
    for place in range(pools[0].known if len(pools) == 1 else 0, bits, width):
        if _round(pools, bits, _Digit("score", bits - place - width, width, place == 0), comm):
            return True
    ties = [pool for pool in pools if not pool.trivial and (pool.weighted or pool.before + pool.equal > pool.drop)]
    if not ties:
        return False
    digits = max(longest - 1, 1).bit_length()
    few = len(pools) == 1 and not ties[0].weighted and ties[0].equal * comm.size <= LISTED
    if few and bits > 16:  # of 16 bits, the ties of each tensor are known without reading it again
        _list_ties(ties[0], bits, comm, digits)
        return False
    for pool in ties:
        pool.number = pool.parts[0].number if len(pools) > 1 and pool.parts else 0
    if len(pools) == 1:
        if tensors > 1:
            _round(ties, bits, _Digit("number", 0, (tensors - 1).bit_length()), comm)
        width = -(-digits // -(-digits // width))  # as few digits of an index as before, but equally wide
    for shift in reversed(range(0, digits, width)):
        _round(ties, bits, _Digit("index", shift, width), comm)
    for pool in ties:
        pool.last_stays = pool.weighted and pool.drop - pool.before <= pool.before + pool.equal - pool.drop
    return False


def _list_ties(pool: Pool, bits: int, comm: Comm, digits: int) -> None:
    """Finds the tensor and the index of the cut from all elements at its score. An index has so many `digits`."""
    own, number = np.empty(pool.equal, dtype=np.int64), 0  # small tensors between the slabs would fragment the heap
    for place, part in enumerate(pool.parts):
        for at in _ties(pool, place, part, bits) if part.counted else ():
            own[number : number + at.numel()] = part.index(0, at).cpu() + (part.number << digits)
            number += at.numel()
    cut = listed(own[:number], pool.equal, int(pool.drop) - pool.before, comm)
    pool.number, pool.index = cut >> digits, cut & ((1 << digits) - 1)


def listed(own: np.ndarray, equal: int, drop: int, comm: Comm) -> int:
    """The largest integer to prune, if `drop` of the `equal` integers on all processes are; `own` are those of this one."""
    table = np.zeros(LISTED, dtype=np.int64)
    table[comm.rank * equal :][: own.size] = own + 1  # zero is none
    comm.add_(torch.from_numpy(table))
    return int(np.partition(table, drop - equal - 1)[drop - equal - 1]) - 1


def _ties(pool: Pool, place: int, part: Part, bits: int, digit: _Digit | None = None) -> Iterator[Tensor]:
    """The positions in a part of the elements at the score of the cut.

    With a digit of the index, slabs are only read if they have an index that begins with the digits found so far.
    """
    cols, most = part.scores.layout.cols, (1 << (bits - 1)) - 1
    if place in pool.near:
        key, at = pool.near[place]
        yield at[key == pool.prefix]
    elif (read := _reader(part, bits)) is not None:
        for first, last in part.scores.slabs(elements=READ) if part.scores.numel else ():
            low, high = (end >> digit.shift + digit.bits if digit else 0 for end in part.ends(first, last))
            if low <= pool.index <= high or digit is None or digit.kind == "number":
                raw = read(first, last)
                for begin in range(0, raw.size, kernels.PART):
                    same = raw[begin : begin + kernels.PART] & most == pool.prefix
                    yield torch.from_numpy(np.flatnonzero(same)) + (first * cols + begin)
    else:
        for key, first, _, _ in part.keys(bits):
            if bool((same := key == pool.prefix).any()):  # nonzero takes longer
                yield same.nonzero().view(-1) + first * cols


def _round(pools: Sequence[Pool], bits: int, digit: _Digit, comm: Comm) -> bool:
    """Finds the next digit of all pools. With the first, returns whether any process has NaN."""
    step = max(BUCKET >> digit.bits, 1)
    for some in [pools[i : i + step] for i in range(0, len(pools), step)]:
        found = [_count(pool, bits, digit) for pool in some]
        device = found[0][0].device
        nan = torch.tensor([sum(bad for _, bad in found)], device=device)
        table = comm.add_(torch.cat([*(bins.to(device) for bins, _ in found), nan]))
        if digit.leads and int(table[-1]):
            return True
        bins = table[:-1].view(len(some), -1)
        totals = bins.cumsum(1)
        # The bin that reaches the number, or with weights exceeds it; at most the last one that is not empty.
        wanted = torch.tensor([int(pool.drop // 1) - pool.before + pool.weighted for pool in some], device=device)[:, None]
        at = torch.searchsorted(totals, torch.minimum(wanted, totals[:, -1:]))
        equal, upto = bins.gather(1, at), totals.gather(1, at)
        for pool, where, here, there in zip(some, *(t.view(-1).tolist() for t in (at, equal, upto)), strict=True):
            if not pool.trivial:
                _extend(pool, digit, where, here, there)
    return False


def _extend(pool: Pool, digit: _Digit, at: int, equal: int, upto: int) -> None:
    pool.before, pool.equal = pool.before + upto - equal, equal
    if digit.kind == "number":
        pool.number = at
    elif digit.kind == "index":
        pool.index = (pool.index << digit.bits) + at
    else:
        pool.prefix = at - (1 << (digit.bits - 1)) if digit.leads else (pool.prefix << digit.bits) + at


def _count(pool: Pool, bits: int, digit: _Digit) -> tuple[Tensor, int]:
    """The number (or weight) of elements with each value of a digit, and in how many slabs there is NaN."""
    bins: Tensor | None = None
    nans = 0
    for place, part in enumerate(pool.parts):
        if not part.counted or (digit.kind == "index" and part.number != pool.number):
            continue
        if digit.leads and (slabs := _plain_slabs(part, bits)) is not None:
            sums = np.zeros(1 << 16, dtype=np.int64)
            for raw in slabs:
                counts, nan = _leading(raw, bits)
                nans += nan
                sums += counts  # threads of torch would take longer to start and end, and much longer on a busy processor
            here = torch.from_numpy(sums)
            if digit.bits == bits or (digit.bits < 16 and part.values is None):
                pool.note(place, here)
            here = here.view(1 << digit.bits, -1).sum(1)
            bins = here if bins is None else bins.add_(here)
            continue
        if place in pool.seen and (digit.shift >= bits - 16 if digit.kind == "score" else digit.kind == "number"):
            now = _noted_digits(pool, place, bits, digit)
            bins = now if bins is None else bins.add_(now.to(bins.device))
            continue
        near = None if digit.leads else _near(pool, place, bits, digit)
        if digit.kind != "score" and not pool.weighted:
            for at in _ties(pool, place, part, bits, digit):
                bins = torch.zeros(1 << digit.bits, dtype=torch.int64, device=at.device) if bins is None else bins
                if digit.kind == "number":
                    bins[part.number] += at.numel()
                else:
                    rest = part.index(0, at) >> digit.shift
                    rest = rest[(rest >> digit.bits) == pool.index] - (pool.index << digit.bits)
                    bins += torch.bincount(rest, minlength=1 << digit.bits).to(bins.device)
            continue
        if near is not None:
            rest = near[0].long() >> digit.shift
            rest = rest[(rest >> digit.bits) == pool.prefix] - (pool.prefix << digit.bits)
            now = torch.bincount(rest, minlength=1 << digit.bits)
            bins = now if bins is None else bins.add_(now.to(bins.device))
            continue
        for key, first, last, nan in part.keys(bits, check=digit.leads):
            nans += nan
            found, at = _digits(pool, part, key, first, digit)
            if not pool.weighted:
                now = torch.bincount(found, minlength=1 << digit.bits)
            else:
                assert part.sizes is not None
                sizes = part.sizes[first:last].reshape(-1).to(found.device)
                now = torch.zeros(1 << digit.bits, dtype=torch.int64, device=found.device)
                now.scatter_add_(0, found.long(), sizes if at is None else sizes[at])
            bins = now if bins is None else bins.add_(now.to(bins.device))
    return torch.zeros(1 << digit.bits, dtype=torch.int64) if bins is None else bins, nans


def plain_bits(part: Part, bits: int) -> Any:
    """The bits of a part whose scores are plain magnitudes, as an array, or None. They are counted without making keys."""
    values = plain_magnitudes(part.scores)
    plain = part.allowed is None and part.safe is None and part.sizes is None
    return _bits(values, bits) if values is not None and plain else None


def _bits(values: Tensor, bits: int) -> Any:
    fits = values.dtype == torch.float32 if bits == 32 else values.dtype == torch.bfloat16 and bits == 16
    if not fits or values.device.type != "cpu" or not values.is_contiguous():
        return None
    return values.reshape(-1).view(_INTEGERS[bits]).numpy()


def _reader(part: Part, bits: int) -> Callable[[int, int], Any] | None:
    """A function that reads the bits of rows if they are plain magnitudes, in memory or in a file, or None."""
    read, values = part.values, plain_magnitudes(part.scores)
    if read is not None:
        return None if _bits(read(0, 0), bits) is None else lambda first, last: _bits(read(first, last), bits)
    return None if values is None or plain_bits(part, bits) is None else lambda a, b: _bits(values[a:b], bits)


def _plain_slabs(part: Part, bits: int) -> Iterable[Any] | None:
    """The bits of a part of plain magnitudes, a slab at a time if they are in a file, or None."""
    if (read := _reader(part, bits)) is None:
        return None
    return (read(*rows) for rows in part.scores.slabs(elements=part.scores.numel if part.values is None else READ))


def _leading(raw: Any, bits: int) -> tuple[np.ndarray, bool]:
    """The number of magnitudes with each value of the leading 16 bits, and whether there is NaN among them."""
    half, infinite = 1 << 15, 0x7F80
    found = np.zeros(2 * half, dtype=np.int64)
    found[half:] = kernels.count_digits(raw, bits - 16, half)
    nan = bool(found[half + infinite :].any())
    return found, nan and bool(((raw & ((1 << (bits - 1)) - 1)) > infinite << (bits - 16)).any())


def _noted_digits(pool: Pool, place: int, bits: int, digit: _Digit) -> Tensor:
    """The number of elements with each value of a digit, from the numbers of their leading 16 bits."""
    bins = torch.zeros(1 << digit.bits, dtype=torch.int64)
    keys, numbers = pool.seen[place]
    if digit.kind == "number":
        bins[pool.parts[place].number] = numbers[keys == pool.prefix].sum()
        return bins
    rest = keys.long() >> (digit.shift - bits + 16)
    same = (rest >> digit.bits) == pool.prefix
    return bins.scatter_add_(0, rest[same] - (pool.prefix << digit.bits), numbers[same])


def _near(pool: Pool, place: int, bits: int, digit: _Digit) -> Near | None:
    """The keys of a part that share the leading 16 bits, found in the round after these and kept if they are few.

    Only of parts that are in memory: files are read again, so that memory does not grow with their size.
    """
    part = pool.parts[place]
    now = digit.shift + digit.bits == bits - 16 if digit.kind == "score" else digit.kind == "index" and bits == 16
    if place in pool.near or pool.weighted or not now or (raw := plain_bits(part, bits)) is None:
        return pool.near.get(place)
    found: list[Near] = []
    for begin in range(0, raw.size, _AT_ONCE):
        slab = raw[begin : begin + _AT_ONCE]
        at = np.flatnonzero((slab >> bits - 16) & 0x7FFF == pool.prefix)
        found.append((torch.from_numpy(slab[at] & ((1 << (bits - 1)) - 1)), torch.from_numpy(at) + begin))
    if not found or sum(at.numel() for _, at in found) > part.scores.numel // _FEW:
        return None
    pool.near[place] = torch.cat([key for key, _ in found]), torch.cat([at for _, at in found])
    return pool.near[place]


def _digits(pool: Pool, part: Part, key: Tensor, first: int, digit: _Digit) -> tuple[Tensor, Tensor | None]:
    """The digit of each key that shares the digits found so far, and the positions of these keys (None: all)."""
    if digit.leads:
        return (key >> digit.shift).int() + (1 << (digit.bits - 1)), None
    if digit.kind == "score":
        rest = key >> digit.shift
        at = ((rest >> digit.bits) == pool.prefix).nonzero().view(-1)
        return rest[at].long() - (pool.prefix << digit.bits), at
    at = (key == pool.prefix).nonzero().view(-1)
    if digit.kind == "number":
        return torch.full_like(at, part.number), at
    rest = part.index(first, at) >> digit.shift
    same = (rest >> digit.bits) == pool.index
    return rest[same] - (pool.index << digit.bits), at[same]


def keep(pool: Pool, part: Part, bits: int) -> Tensor:
    """The mask of a part, by the cut of its pool."""
    layout = part.scores.layout
    place = next((i for i, one in enumerate(pool.parts) if one is part), -1)
    ties = pool.number is not None and part.number >= pool.number  # some of those that equal the score stay
    split = ties and part.number == pool.number and part.scores.numel > 0
    if split:
        low, high = part.ends(0, layout.rows)
        last = pool.index - pool.last_stays
        split, ties = low <= last < high, high > last
    if place in pool.kept:
        (key, at), kept = pool.near[place], pool.kept.pop(place)
        kept.view(-1).numpy()[at.numpy()] = (key >= pool.prefix if ties else key > pool.prefix).numpy()
    else:
        kept = kernels.new_tensor((layout.rows, layout.cols), torch.bool, part.scores.device)
        if pool.trivial:
            return kept.fill_(pool.drop <= 0)
        _keep_above(kept, pool, part, bits, ties)
    if split:
        for at in _ties(pool, place, part, bits):
            gone = part.index(0, at) <= pool.index - pool.last_stays
            kept.view(-1)[at[gone]] = False
    return kept


def _keep_above(kept: Tensor, pool: Pool, part: Part, bits: int, ties: bool) -> None:
    """Writes which elements of a part are above the score of the cut, or with `ties` at it."""
    raw = plain_bits(part, bits) if bits == 16 else None
    if raw is not None:
        most, out = np.int16(0x7FFF), kept.view(-1).numpy()
        for first in range(0, raw.size, kernels.PART):  # a part fits the cache
            key = raw[first : first + kernels.PART] & most
            (np.greater_equal if ties else np.greater)(key, np.int16(pool.prefix), out=out[first : first + kernels.PART])
    elif part.allowed is None and part.safe is None:
        threshold = value_of(pool.prefix, bits, kind_of(part.scores))
        part.scores.each(lambda slab, a, b: kernels.keep_above(slab, threshold, kept[a:b], ties=ties), raw=True)
    else:
        for key, first, last, _ in part.keys(bits):
            kept[first:last] = (key >= pool.prefix if ties else key > pool.prefix).view(last - first, -1)


def value_of(key: int, bits: int, kind: torch.dtype) -> float:
    """The score that `ordered` turned into this key."""
    raw = torch.tensor(key ^ ((1 << (bits - 1)) - 1) if key < 0 else key).to(_INTEGERS[bits])
    return float(raw.view(_FLOATS.get(bits, kind)))
