"""The kernel of the format `amx_tiles`: 16 input rows times 16 weight rows, 32 columns of bfloat16 at a time, on AMX registers.

A tile of weights has 16 rows and 32 columns and is laid out as the register expects: 16 lines, one for each pair of columns,
of 32 bfloat16. Tiles that are all zero are not stored; of the others, one bit per weight and the values are. The kernel expands
a few tiles at a time in the L1 cache and multiplies them with all input rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .emit import I1, I8, I16, I32, I64, Code, Value, Variable

SIDE, LINE, TILE = 16, 64, 1024  # rows of a tile; bytes of a line, and of a tile
GROUPS = (4, 2, 1)  # input tiles that are multiplied with one tile of weights while it is in its register
SUMS, SEEN, WEIGHTS = (0, 1, 2, 3), (4, 5), 6  # register numbers


def _tile(code: Code, name: str, *arguments: int | Value) -> None:
    """Emits an instruction on tile registers, which are given by number."""
    given = [each if isinstance(each, Value) else Value(code, ir.Constant(I8, each)) for each in arguments]
    code.call(f"llvm.x86.{name}", ir.VoidType(), *given)


def _move(code: Code, name: str, register: int, place: Value) -> None:
    _tile(code, name, register, code.pointer(place), code.number(LINE))


def _lay_out(code: Code, counter: Value, x: Value, stride: Value, batch: Value, columns: Value, packed: Value) -> None:
    """Repacks x [batch, columns] as [tile of columns][row][32], where 32 bfloat16 are a cache line. Zeros pad both sides."""
    whole, tiles = columns // 32, (columns + 31) // 32
    rows = (batch + (SIDE - 1)) // SIDE * SIDE

    zeros = Value(code, ir.Constant(code.vector(32, I16), None))
    with (
        code.pieces(counter, rows // SIDE) as piece,
        code.loop(0, tiles) as tile,
        code.loop(piece * SIDE, piece * SIDE + SIDE) as row,
    ):
        source, to = x + row * stride + tile * LINE, packed + (tile * rows + row) * LINE

        def line(source: Value = source, to: Value = to) -> None:
            code.store(code.load(source, code.vector(32, I16)), to)

        def partly(row: Value = row, source: Value = source, to: Value = to) -> None:
            code.store(zeros, to)
            with code.when(row < batch), code.loop(0, columns - whole * 32) as k:
                code.store(code.load(source + k * 2, I16), to + k * 2)

        code.either((row < batch) & (tile < whole), line, partly)


class _Weights:
    """The weight tiles of a piece of work, expanded into a ring of `size` tiles in the L1 cache.

    Tiles are expanded `lead` tiles ahead of their use, so that reading bits and values overlaps with the multiplications and
    no tile is loaded right after it was written, which is slow.
    """

    def __init__(self, code: Code, ring: Value, size: int, lead: int, values: Value, masks: Value):
        self.code, self.ring, self.size, self.lead = code, ring, size, lead
        self.at, self.masks, self.slot = Variable(code, values), Variable(code, masks), Variable(code, code.number(0))
        for _ in range(lead):
            self.spread()

    def place(self, slot: Value) -> Value:
        return self.ring + slot % self.size * TILE

    def spread(self) -> None:
        """Expands the next tile from its bits and values."""
        code, to, masks = self.code, self.place(self.slot.get()), self.masks.get()
        for number in range(SIDE):
            mask, at = code.load(masks + 4 * number, I32), self.at.get()
            code.store(code.expand_load(at, code.cast(mask, code.vector(32, I1)), code.vector(32, I16)), to + LINE * number)
            self.at.set(at + code.widen(code.call("llvm.ctpop.i32", I32, mask), I64) * 2)
        self.masks.set(masks + LINE)
        self.slot.set(self.slot.get() + 1)


def _multiply(
    code: Code, group: int, weights: _Weights, first: Value, tiles: Value, index: Value, seen: Value, skip: Value, ahead: bool
) -> None:
    """Adds inputs times weights to the sums, for `group` input tiles and the weight tiles from `first` on.

    With `ahead`, one further weight tile is expanded after each product.
    """
    with code.loop(0, tiles) as t:
        _move(code, "tileloadd64", WEIGHTS, weights.place(first + t))
        inputs = seen + code.widen(code.load(index + t, I8), I64) * skip
        for g in range(group):
            _move(code, "tileloadd64", SEEN[g % 2], inputs + g * TILE)
            _tile(code, "tdpbf16ps", SUMS[g], SEEN[g % 2], WEIGHTS)
        if ahead:
            weights.spread()


def multiply(name: str, features: frozenset[str], size: int, lead: int) -> str:
    """Generates the kernel for y [batch, rows] = x @ matrix.T + bias in bfloat16, with float32 sums.

    A piece of work is up to 16 panels of 16 matrix rows and a strip of input rows. `counts` holds the number of tiles of each
    panel in each block of columns, `index` the place of each tile in its block, and `starts` where the values and the tiles of
    a piece begin.
    """
    code = Code(name, features)
    config, x, stride, batch, columns, packed = (code.argument(4 + i) for i in range(6))
    rows, panels, together, blocks, width = (code.argument(10 + i) for i in range(5))
    values, masks, index, counts, starts, bias, y = (code.argument(15 + i) for i in range(7))
    scratch, scratch_size, strip, strips = (code.argument(22 + i) for i in range(4))
    _lay_out(code, code.argument_address(1), x, stride, batch, columns, packed)
    code.wait_for_others(code.argument(3))
    _tile(code, "ldtilecfg", code.pointer(config))
    ring = scratch + code.take(code.argument_address(0)) * scratch_size
    sums = ring + size * TILE
    lines = (batch + (SIDE - 1)) // SIDE * SIDE  # padded number of input rows
    pieces = (panels + together - 1) // together
    with code.pieces(code.argument_address(2), pieces * strips) as piece:
        own, first = piece // strips, piece % strips * strip
        many, height = code.least(together, panels - own * together), code.least(strip, lines - first)
        tile = Variable(code, code.load(starts + own * 16 + 8, I64))
        begin = values + code.load(starts + own * 16, I64) * 2
        weights = _Weights(code, ring, size, lead, begin, masks + tile.get() * LINE)
        with code.loop(0, blocks) as block, code.loop(0, many) as panel:
            count = code.widen(code.load(counts + (own * blocks + block) * together + panel, I8), I64)
            seen, into = packed + (block * width * lines + first) * LINE, sums + panel * strip * LINE
            _all_rows(code, block.equals(0), count, index + tile.get(), weights, seen, lines * LINE, into, height)
            tile.set(tile.get() + count)
        with code.loop(0, many) as panel:
            _finish(code, sums + panel * strip * LINE, own * together + panel, first, batch, rows, bias, y, height)
    _tile(code, "tilerelease")
    return code.finish()


def _all_rows(
    code: Code,
    first: Value,
    count: Value,
    index: Value,
    weights: _Weights,
    seen: Value,
    skip: Value,
    into: Value,
    height: Value,
) -> None:
    """Adds the tiles of one panel times all rows of a strip to its sums; with `first`, the sums start at zero."""
    begin: Value = code.number(0)
    mine = weights.slot.get() - weights.lead
    for group in GROUPS:
        end = height // (group * SIDE) * (group * SIDE)
        with code.loop(begin, end, group * SIDE) as row:
            places = [into + (row + g * SIDE) * LINE for g in range(group)]

            def zero(group: int = group) -> None:
                for g in range(group):
                    _tile(code, "tilezero", SUMS[g])

            def again(places: Sequence[Value] = places) -> None:
                for g, place in enumerate(places):
                    _move(code, "tileloadd64", SUMS[g], place)

            def products(ahead: bool, group: int = group, row: Value = row) -> None:
                _multiply(code, group, weights, mine, count, index, seen + row * LINE, skip, ahead)

            code.either(first, zero, again)
            code.either(row.equals(0), lambda go=products: go(True), lambda go=products: go(False))
            for g, place in enumerate(places):
                _move(code, "tilestored64", SUMS[g], place)
        begin = end


def _finish(
    code: Code, sums: Value, panel: Value, first: Value, batch: Value, rows: Value, bias: Value, y: Value, height: Value
) -> None:
    """Adds the bias to sums [row][16] and writes them to y as bfloat16."""
    column = panel * SIDE
    extra = code.load(bias + column * 4, code.vector(SIDE))
    with code.loop(0, code.least(height, batch - first)) as row:
        total = code.load(sums + row * LINE, code.vector(SIDE)) + extra
        halves = _nearest_halves(code, total)
        to = y + ((first + row) * rows + column) * 2

        def partly(row: Value = row, halves: Value = halves, to: Value = to) -> None:
            code.store(halves, sums + row * LINE)
            with code.loop(0, rows - column) as k:
                code.store(code.load(sums + row * LINE + k * 2, I16), to + k * 2)

        code.either(column + SIDE <= rows, lambda halves=halves, to=to: code.store(halves, to), partly)


def _nearest_halves(code: Code, numbers: Value) -> Value:
    """Rounds float32 to bfloat16, to nearest even. NaN stays NaN, because a bit in its upper half is set."""
    bits = code.cast(numbers, code.vector(SIDE, I32))
    rounded = bits + (bits >> 16 & 1) + 0x7FFF
    no_number = Value(code, code.builder.fcmp_unordered("uno", numbers.raw, numbers.raw))
    return code.narrow(code.select(no_number, bits | 0x400000, rounded) >> 16, code.vector(SIDE, I16))
