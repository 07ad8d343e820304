"""Kernels for one input row, where the time is that of reading the weights: few bytes per weight, each read once.

The kernel of `bitmask` is in its own file. `group` is the number of columns that share a scale (see `Values`); ROW_SCALES
stands for one scale for each row, PLAIN for values without scales.
"""

from __future__ import annotations

from .emit import BF16, F8, F8_FACTOR, F32, I16, I32, I64, Code, Value, Variable, bytes_of, size_of
from .tiled import STORED

ROWS = 64  # matrix rows of a piece of work
GROUP = 8  # weights that are multiplied at once
AHEAD = 2048  # prefetch distance in bytes; the CPU's own prefetcher stops at the end of each page
FAR = 8192  # the same where few instructions follow a load
UNIT = 64  # columns of `dense` are padded to a multiple of this
PLAIN, ROW_SCALES = -1, 0


def each_row(code: Code, rows: Value, bias: Value, y: Value, scales: Value | None = None, factor: float = 1.0):
    """Returns the loop over pieces of work, and the function that finishes the sum of a row and stores it.

    The sum is multiplied with the row's scale and with `factor` if there are scales. Then the bias is added.
    """

    def finish(row: Value, total: Value) -> None:
        if scales is not None:
            total = total * (code.load_float(scales + row * 2, BF16) * factor)
        code.store(total + code.load(bias + row * 4, F32), y + row * 4)

    return code.pieces(code.argument_address(0), (rows + ROWS - 1) // ROWS), finish


def factor_of(stored: str) -> float:
    """Returns what sums of products with stored values have to be multiplied with."""
    return F8_FACTOR if STORED[stored] == F8 else 1.0


def _rows_of(code: Code, piece: Value, rows: Value):
    return code.loop(piece * ROWS, code.least(piece * ROWS + ROWS, rows))


def gather(name: str, features: frozenset[str], stored: str, group: int) -> str:
    """Generates the kernel of `gather`: groups of eight values, the first column of the group, and eight one-byte offsets."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, values, index, first, starts, scales = (code.argument(i) for i in range(2, 11))
    pieces, finish = each_row(code, rows, bias, y, None if group == PLAIN else scales, factor_of(stored))
    chains, size = 4, bytes_of(kind, GROUP)

    def seen(g: Value) -> Value:
        from_first = x + code.widen(code.load(first + g * 2, I16), I64) * 4
        columns = code.load(index + g * GROUP, I64, align=1)  # eight bytes in one load, because loads limit this loop
        picked = code.zero(GROUP)
        for lane in range(GROUP):
            column = columns >> (8 * lane) & 0xFF
            picked = code.insert(picked, code.load_at(from_first, column, F32), lane)
        return picked

    def weights(g: Value) -> Value:
        return code.load_float(values + g * size, kind, GROUP)

    with pieces as piece, _rows_of(code, piece, rows) as row:
        begin, end = (code.widen(code.load(starts + (row + i) * 4, I32), I64) for i in (0, 1))
        sums = [Variable(code, code.zero(GROUP)) for _ in range(chains)]
        whole = begin + (end - begin) // chains * chains
        with code.loop(begin, whole, chains) as g:
            for line in range(0, chains * size, 64):
                code.prefetch(values + g * size + (AHEAD + line))
            code.prefetch(index + g * GROUP + AHEAD // 2)
            for c, total in enumerate(sums):
                total.set(code.fma(weights(g + c), seen(g + c), total.get()))
        with code.loop(whole, end) as g:
            sums[0].set(code.fma(weights(g), seen(g), sums[0].get()))
        finish(row, code.total((sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())))
    return code.finish()


def runs(name: str, features: frozenset[str], stored: str, group: int) -> str:
    """Generates the kernel of `runs`: eight neighbouring values and the first column of each run."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, values, first, starts, scales, groups = (code.argument(i) for i in range(2, 11))
    pieces, finish = each_row(code, rows, bias, y, scales if group == ROW_SCALES else None, factor_of(stored))
    chains, size = 4, bytes_of(kind, GROUP)
    with pieces as piece, _rows_of(code, piece, rows) as row:
        begin, end = (code.widen(code.load(starts + (row + i) * 4, I32), I64) for i in (0, 1))
        sums = [Variable(code, code.zero(GROUP)) for _ in range(chains)]

        def step(g: Value, total: Variable) -> None:
            column = code.widen(code.load(first + g * 2, I16), I64)
            seen, weights = code.load(x + column * 4, code.vector(GROUP)), code.load_float(values + g * size, kind, GROUP)
            if group > 0:
                scale = code.load_float(scales + (row * groups + column // group) * 2, BF16) * factor_of(stored)
                weights = weights * code.splat(scale, GROUP)
            total.set(code.fma(weights, seen, total.get()))

        whole = begin + (end - begin) // chains * chains
        with code.loop(begin, whole, chains) as g:
            for c, total in enumerate(sums):
                step(g + c, total)
        with code.loop(whole, end) as g:
            step(g, sums[0])
        finish(row, code.total((sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())))
    return code.finish()


def dense(name: str, features: frozenset[str], stored: str, group: int) -> str:
    """Generates the kernel of `dense`: all values of a row, in units of 64 columns."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, values, units, scales, groups = (code.argument(i) for i in range(2, 10))
    pieces, finish = each_row(code, rows, bias, y, scales if group == ROW_SCALES else None, factor_of(stored))
    lanes, size, chains = code.lanes, bytes_of(kind, UNIT), 4

    with pieces as piece, _rows_of(code, piece, rows) as row:
        sums = [Variable(code, code.zero(lanes)) for _ in range(chains)]
        line = values + row * units * size
        with code.loop(0, units) as unit:
            code.prefetch(line + unit * size + FAR)
            part = code.zero(lanes)
            for v in range(UNIT // lanes):
                seen = code.load(x + unit * (UNIT * 4) + v * lanes * 4, code.vector(lanes))
                weights = code.load_float(line + unit * size + bytes_of(kind, v * lanes), kind, lanes)
                total = sums[v % chains]
                if group > 0:
                    part = code.fma(weights, seen, part)
                else:
                    total.set(code.fma(weights, seen, total.get()))
            if group > 0:
                place = scales + (row * groups + unit * UNIT // group) * 2
                scale = code.splat(code.load_float(place, BF16) * factor_of(stored), lanes)
                sums[0].set(code.fma(part, scale, sums[0].get()))
        first, second, third, fourth = (each.get() for each in sums)
        finish(row, code.total((first + second) + (third + fourth)))
    return code.finish()


def panels(name: str, features: frozenset[str], height: int, stored: str, group: int) -> str:
    """Generates the kernel of `panels`: `height` rows share a list of columns, so that no sum over lanes is needed."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, count, values, index, starts, scales = (code.argument(i) for i in range(2, 10))
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
                place = values + i * bytes_of(kind, height) + bytes_of(kind, v * GROUP)
                total.set(code.fma(code.load_float(place, kind, GROUP), seen, total.get()))

        whole = begin + (end - begin) // chains * chains
        with code.loop(begin, whole, chains) as i:
            for c in range(chains):
                step(i + c, sums[c])
        with code.loop(whole, end) as i:
            step(i, sums[0])
        for v in range(vectors):
            place = panel * height + v * GROUP
            total = (sums[0][v].get() + sums[1][v].get()) + (sums[2][v].get() + sums[3][v].get())
            if group != PLAIN:
                total = total * (code.load_float(scales + place * 2, BF16, GROUP) * factor_of(stored))
            code.store(total + code.load(bias + place * 4, code.vector(GROUP)), y + place * 4)
    return code.finish()


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
