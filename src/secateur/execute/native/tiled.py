"""The kernels of the format `tiled`: a sparse matrix times many positions (input rows or image positions), `tile` at a time.

The inputs are first repacked as [tile][input][position in the tile], so that one weight is multiplied with `tile` neighbouring
numbers. Weights are stored in blocks of columns, small enough for the inputs of a block to stay in the L1 cache, with one byte
per column for its place in the block. `height` rows share one list of columns. Inside a block, rows are ordered by the length
of their lists, so that loops of equal length follow each other and the CPU predicts where they end.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from .emit import BF16, F8, F16, F32, I4, I8, I16, I32, I64, QUAD, Code, Value, Variable, size_of

# "pair": two neighbouring bfloat16, which are multiplied with two neighbouring inputs
STORED: dict[str, ir.Type] = {"float32": F32, "bfloat16": BF16, "float16": F16, "pair": I32}
STORED |= {"quad": QUAD, "int8": I8, "int4": I4, "float8_e4m3fn": F8}  # values with scales, which kernels for one row take
PACK_WIDTH = 64  # input columns that are repacked together, so that the output stays in the cache


def transposed(code: Code, rows: list[Value]) -> list[Value]:
    """Transposes a square matrix of as many vectors as a vector has lanes.

    Halves (then quarters, and so on) are exchanged between pairs of vectors. The last two steps, on squares of 4x4, interleave
    instead, which takes one instruction per vector where an exchange takes two.
    """
    n, rows, mirrored = len(rows), list(rows), []
    step = n // 2
    while step >= 4:
        for i in range(n):
            if not i & step:
                a, b = rows[i], rows[i | step]
                rows[i] = code.shuffle(a, b, [n + (j ^ step) if j & step else j for j in range(n)])
                rows[i | step] = code.shuffle(a, b, [n + j if j & step else j ^ step for j in range(n)])
        step //= 2
    for a, b, c, d in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4]):
        for half in (0, 2):
            left, right = _zipped(code, a, b, half, 1), _zipped(code, c, d, half, 1)
            mirrored += [_zipped(code, left, right, first, 2) for first in (0, 2)]
    return mirrored


def _zipped(code: Code, a: Value, b: Value, first: int, width: int) -> Value:
    """Takes two lanes from `first` on of each four lanes, alternating between a and b, `width` lanes at a time."""
    n = a.raw.type.count
    turns = [(source, k + i) for k in range(first, first + 2, width) for source in (0, n) for i in range(width)]
    return code.shuffle(a, b, [source + four + lane for four in range(0, n, 4) for source, lane in turns])


def _pack_rows(code: Code, tile: int, seen: str, x: Value, stride: Value, batch: Value, inputs: Value, packed: Value) -> None:
    """Repacks up to `tile` rows of x as float32 [input][position]; positions past the batch become zero."""
    kind, unit, more = (F32, 2, 3) if seen == "six" else (STORED[seen], 1, 1)  # `unit` numbers of x make `unit * more` inputs
    size, side, numbers = size_of(kind), min(code.lanes, tile), inputs // more

    def put(lines: list[Value], k: Value, b: Value) -> None:
        for i, line in enumerate(lines if unit == 1 else _six_of(code, lines)):
            code.store(line, packed + ((k * more + i) * tile + b) * 4)

    with code.loop(0, numbers, PACK_WIDTH) as first, code.loop(0, tile, side) as b:
        end = code.least(first + PACK_WIDTH, numbers)
        whole = first + (end - first) // side * side

        def one_by_one(begin: Value, end: Value = end, b: Value = b) -> None:
            with code.loop(begin, end, unit) as k, code.loop(b, b + side) as j:
                source = x + j * stride + k * size
                code.either(
                    j < batch,
                    lambda: put([code.load_float(source + i * size, kind) for i in range(unit)], k, j),
                    lambda: put([code.zero_number()] * unit, k, j),
                )

        def by_squares(first: Value = first, whole: Value = whole, b: Value = b) -> None:
            with code.loop(first, whole, side) as k:
                source = x + b * stride + k * size
                put(transposed(code, [code.load_float(source + stride * i, kind, side) for i in range(side)]), k, b)
            one_by_one(whole)

        code.either(b + side <= batch, by_squares, lambda first=first: one_by_one(first))


def _six_of(code: Code, lines: list[Value]) -> list[Value]:
    """Expands two pairs of bfloat16 (a, b), (c, d) to ab, ac, ad, bc, bd, cd, with the first of each in the lower bits."""
    six: list[Value] = []
    for first, second in zip(lines[::2], lines[1::2]):
        both = ir.VectorType(I32, first.raw.type.count) if isinstance(first.raw.type, ir.VectorType) else I32
        ab, cd = code.cast(first, both), code.cast(second, both)
        a, b, c, d = ab & 0xFFFF, ab >> 16, cd << 16, cd & 0xFFFF0000
        six += [ab, a | c, a | d, b | c, b | d, cd]
    return six


def _pad_planes(code: Code, arguments: int, counter: Value, padded: Value) -> None:
    """Copies float32 planes [height, width] into planes with a border of zeros."""
    x, planes, height, width, pad_y, pad_x = (code.argument(arguments + i) for i in range(6))
    wide, high = width + pad_x * 2, height + pad_y * 2
    with code.pieces(counter, planes) as plane:
        source, to = x + plane * height * width * 4, padded + plane * high * wide * 4
        _zeros(code, to, pad_y * wide)
        _zeros(code, to + (pad_y + height) * wide * 4, pad_y * wide)
        with code.loop(0, height) as row:
            line = to + (pad_y + row) * wide * 4
            _zeros(code, line, pad_x)
            _copy(code, source + row * width * 4, width, line + pad_x * 4)
            _zeros(code, line + (pad_x + width) * 4, pad_x)


def _zeros(code: Code, to: Value, count: Value) -> None:
    with code.loop(0, count) as j:
        code.store(code.zero_number(), to + j * 4)


def _copy(code: Code, source: Value, count: Value, to: Value) -> None:
    """Copies floats, eight at a time. The last eight may overlap the previous ones, which is faster than single copies."""

    def eight(j: Value) -> None:
        code.store(code.load(source + j * 4, code.vector(8)), to + j * 4)

    def long() -> None:
        with code.loop(0, count - 7, 8) as j:
            eight(j)
        eight(count - 8)

    def short() -> None:
        with code.loop(0, count) as j:
            code.store(code.load(source + j * 4, F32), to + j * 4)

    code.either(count < 8, short, long)


class _Matrix:
    """The kernel arguments that describe the packed matrix, and the product of a chunk of its rows with packed inputs."""

    def __init__(self, code: Code, first: int, height: int, tile: int, kind: ir.Type):
        self.code, self.height, self.tile, self.kind = code, height, tile, kind
        self.inputs, self.width, self.blocks, self.panels, self.chunk = (code.argument(first + i) for i in range(5))
        self.values, self.index, self.counts, self.order, self.used, self.starts, self.bias = (
            code.argument(first + 5 + i) for i in range(7)
        )
        self.chunks = (self.panels + self.chunk - 1) // self.chunk

    def rows(self, chunk: Value) -> Value:
        return self.code.least(self.chunk, self.panels - chunk * self.chunk) * self.height

    def multiply(self, chunk: Value, packed: Value, sums: Value, lay_out: Callable[[Value], None] | None = None) -> None:
        """Sets sums [row of the chunk][position] to bias + matrix times the packed inputs.

        `packed` holds all inputs, or, if `lay_out` is given, those of one block, which `lay_out` puts there.
        """
        code, height, tile, size = self.code, self.height, self.tile, size_of(self.kind)
        lanes = min(code.lanes, tile)
        with code.loop(0, self.rows(chunk)) as r:
            b = code.splat(code.load(self.bias + (chunk * self.chunk * height + r) * 4, F32), lanes)
            for j in range(0, tile, lanes):
                code.store(b, sums + r * (tile * 4) + 4 * j)
        with code.loop(0, self.blocks) as k:
            block = chunk * self.blocks + k
            start, first_slot = code.load(self.starts + block * 8, I64), block * self.chunk
            slots = code.widen(code.load(self.used + block * 2, I16), I64)
            at, weights = Variable(code, self.index + start), Variable(code, self.values + start * (height * size))
            if lay_out is not None:
                lay_out(k * self.width)
            x = packed if lay_out is not None else packed + k * self.width * (tile * 4)
            with code.loop(0, slots) as slot:
                count = code.widen(code.load(self.counts + first_slot + slot, I8), I64)
                row = code.widen(code.load(self.order + first_slot + slot, I8), I64)
                into = sums + row * (height * tile * 4)
                _accumulate(code, height, tile, self.kind, at.get(), weights.get(), count, x, into)
                at.set(at.get() + count)
                weights.set(weights.get() + count * (height * size))

    def part(self, number: Value, parts: Value) -> tuple[Value, Value]:
        """Returns the first chunk of one of `parts` parts of the rows, and the end."""
        each = (self.chunks + parts - 1) // parts
        return number * each, self.code.least(number * each + each, self.chunks)


MATRIX = 12  # number of arguments of a _Matrix
RUN, STEPS = 2, 4  # number of leading arguments set by build.run and by build.run_in_steps


def multiply_rows(name: str, features: frozenset[str], height: int, tile: int, seen: str, stored: str) -> str:
    """Generates the kernel for y [batch, rows] = x @ matrix.T + bias.

    A piece of work is one tile of positions. A thread repacks it in its own scratch memory, which stays in the cache, and
    multiplies it with all rows, or with one of `splits` parts of the rows if tiles are few. No thread waits for another.
    """
    code = Code(name, features)
    batch, rows, tiles, splits, scratch_size = (code.argument(RUN + i) for i in range(5))
    matrix = _Matrix(code, RUN + 5, height, tile, STORED[stored])
    x, scratch, y, stride = (code.argument(RUN + 5 + MATRIX + i) for i in range(4))
    packed = scratch + code.take(code.argument_address(1)) * scratch_size
    sums = packed + matrix.inputs * (tile * 4)
    with code.pieces(code.argument_address(0), tiles * splits) as piece:
        part, first = piece % splits, piece // splits * tile
        count = code.least(tile, batch - first)
        _pack_rows(code, tile, seen, x + first * stride, stride, count, matrix.inputs, packed)
        with code.loop(*matrix.part(part, splits)) as chunk:
            matrix.multiply(chunk, packed, sums)
            out = y + (first * rows + chunk * matrix.chunk * height) * 4
            _store_rows(code, tile, sums, out, matrix.rows(chunk), rows * 4, count)
    return code.finish()


def multiply_planes(name: str, features: frozenset[str], height: int, tile: int, stored: str, side_by_side: bool) -> str:
    """Generates the kernel of a convolution: y [image, row, position] = bias + matrix times the padded image at each position.

    A piece of work is one tile of positions and all rows, or one of `splits` parts of the rows if tiles are few. For each
    block of columns, a thread copies their inputs into its own scratch memory, which stays in the L1 cache. With stride 1,
    positions are `side_by_side`: they continue through the padding between two lines. That computes a few unused positions,
    but the inputs of one weight over a tile are contiguous.
    """
    code = Code(name, features)
    matrix, more = _Matrix(code, STEPS, height, tile, STORED[stored]), STEPS + MATRIX
    x, offsets, size, width, scratch, scratch_size = (code.argument(more + i) for i in range(6))
    y, images, rows, splits, out_y, out_x = (code.argument(more + 6 + i) for i in range(6))
    _pad_planes(code, more + 14, code.argument_address(1), x)
    code.wait_for_others(code.argument(3))
    line = width if side_by_side else out_x  # number of positions from one line to the next
    places = (out_y - 1) * line + out_x
    tiles = (places + tile - 1) // tile
    packed = scratch + code.take(code.argument_address(0)) * scratch_size
    sums = packed + (matrix.width + 1) * (tile * 4)
    with code.pieces(code.argument_address(2), images * tiles * splits) as piece:
        part, image, first = piece % splits, piece // splits // tiles, piece // splits % tiles * tile
        count = code.least(tile, places - first)

        def lay_out(column: Value, image: Value = image, first: Value = first, count: Value = count) -> None:
            corner = x + image * size
            with code.loop(0, code.least(matrix.width, matrix.inputs - column)) as j:
                seen, to = corner + code.load(offsets + (column + j) * 8, I64), packed + j * (tile * 4)
                if side_by_side:  # always a whole tile, so memory after the images must be readable
                    for part in range(0, tile, min(code.lanes, tile)):
                        code.store(code.load(seen + first * 4 + part * 4, code.vector(min(code.lanes, tile))), to + part * 4)
                else:
                    steps = code.argument(more + 12), code.argument(more + 13)
                    _line_by_line(code, seen, width, *steps, first, count, out_x, to)

        with code.loop(*matrix.part(part, splits)) as chunk:
            matrix.multiply(chunk, packed, sums, lay_out)
            out = y + (image * rows + chunk * matrix.chunk * height) * out_y * out_x * 4
            with code.loop(first // line, (first + count - 1) // line + 1) as oy:
                begin = code.most(first, oy * line)
                length = code.least(first + count, oy * line + out_x) - begin
                source, to = sums + (begin - first) * 4, out + (oy * out_x + begin - oy * line) * 4
                with code.loop(0, matrix.rows(chunk)) as r:
                    _copy(code, source + r * (tile * 4), length, to + r * out_y * out_x * 4)
    return code.finish()


def _line_by_line(
    code: Code, corner: Value, width: Value, step_y: Value, step_x: Value, first: Value, count: Value, out_x: Value, to: Value
) -> None:
    """Copies the inputs of one weight at the positions from first to first + count.

    It copies eight floats at a time and overwrites the excess with what follows, so eight floats after the images and after
    `packed` must be accessible.
    """
    first_row, last_row = first // out_x, (first + count - 1) // out_x
    place, begin = Variable(code, to), Variable(code, first - first_row * out_x)
    with code.loop(first_row, last_row + 1) as oy:
        source = corner + (oy * step_y * width + begin.get() * step_x) * 4
        length = code.least(out_x - begin.get(), (to + count * 4 - place.get()) // 4)
        _copy_over(code, source, step_x, length, place.get())
        place.set(place.get() + length * 4)
        begin.set(code.number(0))


def _copy_over(code: Code, source: Value, step: Value, count: Value, to: Value) -> None:
    def side_by_side() -> None:
        with code.loop(0, count, 8) as j:
            code.store(code.load(source + j * 4, code.vector(8)), to + j * 4)

    def apart() -> None:
        with code.loop(0, count) as j:
            code.store(code.load(source + j * step * 4, F32), to + j * 4)

    code.either(step.equals(1), side_by_side, apart)


def _accumulate(
    code: Code, height: int, tile: int, kind: ir.Type, index: Value, values: Value, count: Value, x: Value, sums: Value
) -> None:
    """Adds values [count][height] times the rows of x named by `index` to sums [height][tile]. This is the inner loop.

    Loads limit its speed, so four columns are read as one word, and weights in twos or fours where possible.
    """
    lanes = min(code.lanes, tile)
    vectors = tile // lanes
    chains = max(1, min(4, 8 // (height * vectors)))  # independent sums, because an addition has to wait for the previous one
    places = [sums + 4 * (r * tile + v * lanes) for r in range(height) for v in range(vectors)]
    pairs, quads, size, scale = kind == I32, kind is QUAD, size_of(kind), (tile * 4).bit_length() - 1
    sums_kind = code.vector(lanes, I32 if quads else F32)
    totals = [[Variable(code, code.load(place, sums_kind)) for place in places]]
    totals += [[Variable(code, Value(code, ir.Constant(sums_kind, None))) for _ in places] for _ in range(chains - 1)]
    multiply = _quad_product if quads else _pair_product if pairs else code.fma

    def step(row: Value, weights: list[Value], into: list[Variable]) -> None:
        row = code.in_register(row) if lanes > 8 else row  # no gain with vectors of eight
        seen = [code.load(row + 4 * v * lanes, code.vector(lanes, I32 if pairs or quads else F32)) for v in range(vectors)]
        for r, weight in enumerate(weights):
            for v in range(vectors):
                total = into[r * vectors + v]
                total.set(multiply(weight, seen[v], total.get()))

    def one(i: Value, into: list[Variable]) -> None:
        row = x + code.widen(code.load(index + i, I8), I64) * (tile * 4)
        step(row, [_weight(code, values + (i * height + r) * size, kind, lanes) for r in range(height)], into)

    whole = count // 4 * 4
    with code.loop(0, whole, 4) as i:
        columns = code.widen(code.load(index + i, I32, align=1), I64)
        weights = _weights(code, values + i * (height * size), 4 * height, kind, lanes, alone=height == 1)
        for c in range(4):
            left = scale - 8 * c  # shifts the column's byte in the word to the offset of its inputs
            row = x + ((columns << left if left >= 0 else columns >> -left) & (0xFF << scale))
            step(row, weights[c * height : (c + 1) * height], totals[c % chains])
    two = count // 2 * 2
    with code.when(whole < two):
        one(whole, totals[0])
        one(whole + 1, totals[1 % chains])
    with code.when(two < count):
        one(two, totals[0])
    _store_totals(code, totals, places)


def _store_totals(code: Code, totals: list[list[Variable]], places: list[Value]) -> None:
    """Adds the independent sums of each vector and stores the result."""
    for place, first, *others in zip(places, *totals):
        total = first.get()
        for other in others:
            total = total + other.get()
        code.store(total, place)


def _weight(code: Code, place: Value, kind: ir.Type, lanes: int) -> Value:
    """Loads one stored weight, or one pair of weights, into all lanes."""
    return code.splat(code.load(place, I32), lanes) if kind in (I32, QUAD) else code.load_splat(place, kind, lanes)


def _weights(code: Code, place: Value, count: int, kind: ir.Type, lanes: int, alone: bool) -> list[Value]:
    """Loads `count` neighbouring weights, each into all lanes. With `alone` (one row per list), float32 is read in fours."""
    if kind == BF16:
        return [half for n in range(0, count, 2) for half in _two_halves(code, place + 2 * n, lanes)]
    if kind == F32 and alone and lanes >= 8:
        return _four_floats(code, place, lanes)
    return [_weight(code, place + n * size_of(kind), kind, lanes) for n in range(count)]


def _four_floats(code: Code, place: Value, lanes: int) -> list[Value]:
    """Loads four floats into each quarter of a vector, behind a fence that keeps LLVM from splitting them into four loads."""
    four = code.load(place, code.vector(4))
    wide = code.shuffle(four, four, [j % 4 for j in range(lanes)])
    quad = code.call(f"llvm.arithmetic.fence.v{lanes}f32", code.vector(lanes), wide)
    return [code.shuffle(quad, quad, [j // 4 * 4 + c for j in range(lanes)]) for c in range(4)]


def _two_halves(code: Code, place: Value, lanes: int) -> tuple[Value, Value]:
    """Loads two bfloat16 as one word into all lanes, because the load instruction can broadcast words but not halves."""
    both = code.splat(code.load(place, I32, align=2), lanes)
    return code.cast(both << 16, code.vector(lanes)), code.cast(both & 0xFFFF0000, code.vector(lanes))


def _pair_product(a: Value, b: Value, total: Value) -> Value:
    """Returns total + a.low * b.low + a.high * b.high, in one instruction with avx512bf16 and in two otherwise."""
    code, lanes = a.code, a.raw.type.count
    if "avx512bf16" in code.features and lanes == 16:
        halves = code.vector(32, BF16)
        return code.call("llvm.x86.avx512bf16.dpbf16ps.512", total.raw.type, total, code.cast(a, halves), code.cast(b, halves))
    low = [code.cast(each << 16, code.vector(lanes)) for each in (a, b)]
    high = [code.cast(each & 0xFFFF0000, code.vector(lanes)) for each in (a, b)]
    return code.fma(high[0], high[1], code.fma(low[0], low[1], total))


def _quad_product(weight: Value, seen: Value, total: Value) -> Value:
    """Returns total plus the products of four signed with four unsigned bytes, as integers."""
    lanes = total.raw.type.count
    return total.code.call(f"llvm.x86.avx512.vpdpbusd.{lanes * 32}", total.raw.type, total, seen, weight)


def _store_rows(code: Code, tile: int, sums: Value, y: Value, rows: Value, stride: Value, count: Value) -> None:
    """Writes sums [row][tile] to y [position, row], transposing whole squares and copying the rest one by one."""
    side = min(code.lanes, tile)
    whole_rows, whole_count = rows // side * side, count // side * side

    def single(r: Value, b: Value) -> None:
        code.store(code.load(sums + (r * tile + b) * 4, F32), y + b * stride + r * 4)

    with code.loop(0, whole_rows, side) as r:
        with code.loop(0, whole_count, side) as b:
            square = [code.load(sums + ((r + i) * tile + b) * 4, code.vector(side)) for i in range(side)]
            for i, line in enumerate(transposed(code, square)):
                code.store(line, y + (b + i) * stride + r * 4)
        with code.loop(whole_count, count) as b, code.loop(0, side) as i:
            single(r + i, b)
    with code.loop(whole_rows, rows) as r, code.loop(0, count) as b:
        single(r, b)
