"""Kernels for one input row, where the time is that of reading the weights: few bytes per weight, each read once."""

from __future__ import annotations

from .emit import BF16, F32, I1, I8, I16, I32, I64, Code, Value, Variable, size_of
from .tiled import STORED

ROWS = 64  # matrix rows of a piece of work
GROUP = 8  # weights that are multiplied at once
AHEAD = 2048  # prefetch distance in bytes; the CPU's own prefetcher stops at the end of each page


def _each_row(code: Code, rows: Value, bias: Value, y: Value, together: int = 1):
    """Returns the loop over pieces of work, and the function that adds the bias to the sum of a row and stores it."""

    def finish(row: Value, total: Value) -> None:
        code.store(total + code.load(bias + row * 4, F32), y + row * 4)

    return code.pieces(code.argument_address(0), (rows + ROWS * together - 1) // (ROWS * together)), finish


def gather(name: str, features: frozenset[str], stored: str) -> str:
    """Generates the kernel of `gather`: groups of eight values, the first column of the group, and eight one-byte offsets."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, values, index, first, starts = (code.argument(i) for i in range(2, 10))
    pieces, finish = _each_row(code, rows, bias, y)
    chains = 4

    def group(g: Value) -> Value:
        seen = x + code.widen(code.load(first + g * 2, I16), I64) * 4
        columns = code.load(index + g * GROUP, I64, align=1)  # eight bytes in one load, because loads limit this loop
        picked = code.zero(GROUP)
        for lane in range(GROUP):
            column = columns >> (8 * lane) & 0xFF
            picked = code.insert(picked, code.load_at(seen, column, F32), lane)
        return picked

    def weights(g: Value) -> Value:
        return code.load_float(values + g * (GROUP * size_of(kind)), kind, GROUP)

    with pieces as piece, code.loop(piece * ROWS, code.least(piece * ROWS + ROWS, rows)) as row:
        begin, end = (code.widen(code.load(starts + (row + i) * 4, I32), I64) for i in (0, 1))
        sums = [Variable(code, code.zero(GROUP)) for _ in range(chains)]
        whole = begin + (end - begin) // chains * chains
        with code.loop(begin, whole, chains) as g:
            for line in range(0, chains * GROUP * size_of(kind), 64):
                code.prefetch(values + g * (GROUP * size_of(kind)) + (AHEAD + line))
            code.prefetch(index + g * GROUP + AHEAD // 2)
            for c, total in enumerate(sums):
                total.set(code.fma(weights(g + c), group(g + c), total.get()))
        with code.loop(whole, end) as g:
            sums[0].set(code.fma(weights(g), group(g), sums[0].get()))
        finish(row, code.total((sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())))
    return code.finish()


def runs(name: str, features: frozenset[str], stored: str) -> str:
    """Generates the kernel of `runs`: eight neighbouring values and the first column of each run."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, values, first, starts = (code.argument(i) for i in range(2, 9))
    pieces, finish = _each_row(code, rows, bias, y)
    chains = 4
    with pieces as piece, code.loop(piece * ROWS, code.least(piece * ROWS + ROWS, rows)) as row:
        begin, end = (code.widen(code.load(starts + (row + i) * 4, I32), I64) for i in (0, 1))
        sums = [Variable(code, code.zero(GROUP)) for _ in range(chains)]

        def step(g: Value, total: Variable) -> None:
            seen = code.load(x + code.widen(code.load(first + g * 2, I16), I64) * 4, code.vector(GROUP))
            total.set(code.fma(code.load_float(values + g * (GROUP * size_of(kind)), kind, GROUP), seen, total.get()))

        whole = begin + (end - begin) // chains * chains
        with code.loop(begin, whole, chains) as g:
            for c, total in enumerate(sums):
                step(g + c, total)
        with code.loop(whole, end) as g:
            step(g, sums[0])
        finish(row, code.total((sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())))
    return code.finish()


def panels(name: str, features: frozenset[str], height: int, stored: str) -> str:
    """Generates the kernel of `panels`: `height` rows share a list of columns, so that no sum over lanes is needed."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, count, values, index, starts = (code.argument(i) for i in range(2, 9))
    vectors, chains, per_piece = height // GROUP, 4, ROWS // height
    with (
        code.pieces(code.argument_address(0), (count + per_piece - 1) // per_piece) as piece,
        code.loop(piece * per_piece, code.least(piece * per_piece + per_piece, count)) as panel,
    ):
        begin, end = (code.widen(code.load(starts + (panel + i) * 4, I32), I64) for i in (0, 1))
        sums = [[Variable(code, code.zero(GROUP)) for _ in range(vectors)] for _ in range(chains)]

        def step(i: Value, totals: list[Variable]) -> None:
            seen = code.splat(code.load(x + code.widen(code.load(index + i * 2, I16), I64) * 4, F32), GROUP)
            for v, total in enumerate(totals):
                weights = code.load_float(values + (i * height + v * GROUP) * size_of(kind), kind, GROUP)
                total.set(code.fma(weights, seen, total.get()))

        whole = begin + (end - begin) // chains * chains
        with code.loop(begin, whole, chains) as i:
            for c in range(chains):
                step(i + c, sums[c])
        with code.loop(whole, end) as i:
            step(i, sums[0])
        for v in range(vectors):
            place = (panel * height + v * GROUP) * 4
            total = (sums[0][v].get() + sums[1][v].get()) + (sums[2][v].get() + sums[3][v].get())
            code.store(total + code.load(bias + place, code.vector(GROUP)), y + place)
    return code.finish()


def bitmask(name: str, features: frozenset[str], stored: str) -> str:
    """Generates the kernel of `bitmask`: one bit per weight and the nonzero values, for x86 with AVX2.

    Four rows at a time share the loaded inputs; the bytes of their masks are interleaved, except for up to three rows at the
    end. A byte of the mask is looked up in `table`, which tells how to move the next values to eight lanes. For bfloat16, an
    entry holds 32 indices of a byte shuffle that puts each value into the upper half of a float32 and zeros elsewhere. For
    float32, an entry holds the source lane of each of the eight lanes, with the sign bit set for a zero.
    """
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, groups, values, masks, starts, table = (code.argument(i) for i in range(2, 11))
    size, together = size_of(kind), 4
    pieces, finish = _each_row(code, rows, bias, y, together=1)
    expands = kind == BF16 and {"avx512bw", "avx512vbmi2", "bmi2"} <= features

    def spread(entry: Value, at: Value) -> Value:
        if kind == F32:
            lanes = code.load(entry, code.vector(8, I32))
            taken = code.call("llvm.x86.avx2.permps", code.vector(8), code.load(at, code.vector(8)), lanes)
            return code.select(lanes < 0, code.zero(8), taken)
        low = code.load(at, code.vector(16, I8))
        both = code.shuffle(low, low, [*range(16), *range(16)])
        bytes_ = code.call("llvm.x86.avx2.pshuf.b", code.vector(32, I8), both, code.load(entry, code.vector(32, I8)))
        return code.cast(bytes_, code.vector(8))

    def block(row: Value, count: int) -> None:
        sums = [Variable(code, code.zero(8)) for _ in range(count)]
        at = [Variable(code, values + code.load(starts + (row + r) * 8, I64) * size) for r in range(count)]
        mine = masks + row * groups
        first, after = (code.load(starts + (row + r) * 8, I64) for r in (0, count))
        pace, soon = (after - first) * size // groups, Variable(code, values + after * size)
        done, wide = _by_32(code, groups, x, mine, at, soon, pace) if expands else (code.number(0), None)

        def step(g: Value) -> None:
            seen = code.load(x + g * 32, code.vector(8))
            word = code.widen(code.load(mine + g * count, I32 if count == together else I8, align=1), I64)
            for r in range(count):
                shift = 8 * r - 5  # selects the mask of this row, times 32, the bytes of a table entry
                entry = (word >> shift if shift >= 0 else word << -shift) & (0xFF << 5)
                sums[r].set(code.fma(spread(table + entry, at[r].get()), seen, sums[r].get()))
                at[r].set(at[r].get() + code.call("llvm.ctpop.i64", I64, entry) * size)

        whole = done + (groups - done) // 4 * 4
        with code.loop(done, whole, 4) as g:  # while these rows are read, the next ones are prefetched at the same rate
            for line in range(0, 256, 64):
                code.prefetch(soon.get() + line)
            code.prefetch(mine + g * count + AHEAD // 2)
            soon.set(soon.get() + pace * 4)
            for i in range(4):
                step(g + i)
        with code.loop(whole, groups) as g:
            step(g)
        for r in range(count):
            total = code.total(sums[r].get())
            finish(row + r, total if wide is None else total + code.total(wide[r]))

    with pieces as piece:
        end = code.least(piece * ROWS + ROWS, rows)
        whole = piece * ROWS + (end - piece * ROWS) // together * together
        with code.loop(piece * ROWS, whole, together) as row:
            block(row, together)
        with code.loop(whole, end) as row:
            block(row, 1)
    return code.finish()


def _by_32(
    code: Code, groups: Value, x: Value, masks: Value, at: list[Variable], soon: Variable, pace: Value
) -> tuple[Value, list[Value]]:
    """Processes 32 columns at once with AVX-512, which expands 32 bfloat16 in one instruction.

    Returns how many groups of eight columns are done, and the sums of each row.
    """
    count, done = len(at), groups // 4 * 4
    sums = [[Variable(code, code.zero(16)) for _ in range(2)] for _ in at]
    with code.loop(0, done, 4) as g:
        for line in (0, 64):
            code.prefetch(soon.get() + line)
        code.prefetch(masks + g * count + AHEAD // 2)
        soon.set(soon.get() + pace * 4)
        inputs = [code.load(x + g * 32 + 64 * half, code.vector(16)) for half in (0, 1)]
        for mask, place, totals in zip(_masks_of_32(code, masks + g * count, count), at, sums):
            halves = code.expand_load(place.get(), code.cast(mask, code.vector(32, I1)), code.vector(32, I16))
            place.set(place.get() + code.widen(code.call("llvm.ctpop.i32", I32, mask), I64) * 2)
            bits = code.cast(halves, code.vector(16, I32))
            for odd, weights in enumerate((bits << 16, bits & 0xFFFF0000)):  # the even columns as float32, then the odd ones
                seen = code.shuffle(inputs[0], inputs[1], range(odd, 32, 2))
                totals[odd].set(code.fma(code.cast(weights, code.vector(16)), seen, totals[odd].get()))
    return done, [even.get() + odd.get() for even, odd in sums]


def _masks_of_32(code: Code, place: Value, count: int) -> list[Value]:
    """Returns the bits of 32 columns for one row, or for four rows whose bytes are interleaved."""
    if count == 1:
        return [code.load(place, I32, align=1)]
    words, masks = [code.load(place + 8 * half, I64, align=1) for half in (0, 1)], []
    for r in range(count):
        own = Value(code, code.raw(0x000000FF000000FF << 8 * r, I64))
        low, high = (code.call("llvm.x86.bmi.pext.64", I64, word, own) for word in words)
        masks.append(code.narrow(low | high << 16, I32))
    return masks


def columns(name: str, features: frozenset[str], stored: str) -> str:
    """Generates the kernel of `columns`: a dense weight stored by columns. Columns whose input is zero are not read.

    Eight columns at a time are added to a slice of the outputs, so that memory is read in long runs.
    """
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, inputs, weight, rows, width, scratch, scratch_size = (code.argument(i) for i in range(2, 11))
    lanes, size, streams = 8, size_of(kind), 8
    active = scratch + code.take(code.argument_address(1)) * scratch_size
    count = Variable(code, code.number(0))
    with code.loop(0, inputs) as k:  # branch-free, because a branch would be mispredicted half of the time
        code.store(k, active + count.get() * 8)
        bits = code.load(x + k * 4, I32)
        count.set(count.get() + code.select((bits & 0x7FFFFFFF).equals(0), code.number(0), code.number(1)))
    whole = count.get() // streams * streams
    with code.pieces(code.argument_address(0), (rows + width - 1) // width) as piece:
        first, end = piece * width, code.least(piece * width + width, rows)
        last = first + (end - first) // lanes * lanes
        with code.loop(first, end) as r:
            code.store(code.load(bias + r * 4, F32), y + r * 4)

        def add(start: Value, many: int) -> None:
            places = [code.load(active + (start + s) * 8, I64) for s in range(many)]
            inputs_ = [code.load(x + k * 4, F32) for k in places]
            lines = [weight + k * rows * size for k in places]
            wide = [code.splat(each, lanes) for each in inputs_]
            with code.loop(first, last, lanes) as r:
                total = code.load(y + r * 4, code.vector(lanes))
                for each, line in zip(wide, lines):
                    total = code.fma(each, code.load_float(line + r * size, kind, lanes), total)
                code.store(total, y + r * 4)
            with code.loop(last, end) as r:
                one = code.load(y + r * 4, F32)
                for each, line in zip(inputs_, lines):
                    one = code.fma(each, code.load_float(line + r * size, kind), one)
                code.store(one, y + r * 4)

        with code.loop(0, whole, streams) as start:
            add(start, streams)
        with code.loop(whole, count.get()) as start:
            add(start, 1)
    return code.finish()
