"""The kernel of `windows`, for one input row on x86: 16 rows take up to four weights each from a window of the inputs.

The inputs are two planes of bytes (see `quads.prepare`). A byte shuffle looks up 64 inputs of the window at once, so that no
input is loaded alone. With AVX-512 VNNI, four products are added in one instruction. With AVX2, products of two are added in
16 bits, where the planes have seven bits so that no sum overflows, and then in 32 bits.
"""

from __future__ import annotations

from llvmlite import ir

from .emit import BF16, F32, I8, I16, I32, I64, Code, Value, Variable
from .single import FAR, ROWS

TOGETHER = 16  # rows that share a window
SLOTS = 64  # weights of a step, four for each row
TABLE = 16  # entries of the table of a byte shuffle


def windows(name: str, features: frozenset[str], width: int, bits: int) -> str:
    """Generates the kernel for windows of `width` columns and planes of `bits` bits: 8 with AVX-512 VNNI, 7 otherwise."""
    code = Code(name, features)
    low, high, bias, y, rows, values, index, first, starts, sums, scales, inverse = (code.argument(i) for i in range(2, 14))
    lanes = SLOTS if bits == 8 else SLOTS // 2  # bytes of a vector
    size, count = SLOTS // 2 if width == TABLE else SLOTS, SLOTS // lanes
    back = Value(code, code.builder.fdiv(ir.Constant(F32, 1.0), code.load(inverse, F32).raw))

    def write(row: Value, one: Value, two: Value) -> None:
        """Stores (low + 2**bits * (high - half * sums)) / inverse * scales + bias of one row or of neighbouring rows."""
        many = one.raw.type.count if isinstance(one.raw.type, ir.VectorType) else 1
        floats, integers = (F32, I32) if many == 1 else (code.vector(many), code.vector(many, I32))
        upper = two - code.load(sums + row * 4, integers) * (1 << bits - 1)
        total = code.fma(code.signed(upper), Value(code, code.raw(float(1 << bits), floats)), code.signed(one))
        scale = code.load_float(scales + row * 2, BF16, many) * (back if many == 1 else code.splat(back, many))
        code.store(code.fma(total, scale, code.load(bias + row * 4, floats)), y + row * 4)

    with (
        code.pieces(code.argument_address(0), (rows + ROWS - 1) // ROWS) as piece,
        code.loop(piece * ROWS, code.least(piece * ROWS + ROWS, rows), TOGETHER) as row,
    ):
        begin, end = (code.widen(code.load(starts + (row // TOGETHER + i) * 4, I32), I64) for i in (0, 1))
        zero = Value(code, ir.Constant(code.vector(lanes // 4, I32), None))
        totals = [[Variable(code, zero) for _ in range(count)] for _ in range(2)]
        with code.loop(begin, end) as step:
            code.prefetch(values + step * SLOTS + FAR)
            code.prefetch(index + step * size + FAR * size // SLOTS)
            column = code.widen(code.load(first + step * 2, I16), I64)
            places = _places(code, index + step * size, width, lanes)
            weights = [code.load(values + step * SLOTS + part * lanes, code.vector(lanes, I8)) for part in range(count)]
            for plane, into in zip((low, high), totals):
                for seen, weight, total in zip(_looked_up(code, plane + column, places, width), weights, into):
                    total.set(_product(code, total.get(), seen, weight))
        found = [[total.get() for total in each] for each in totals]
        whole = row + TOGETHER <= rows

        def all_rows(row: Value = row, found: list[list[Value]] = found) -> None:
            for part, (one, two) in enumerate(zip(*found)):
                write(row + part * (lanes // 4), one, two)

        def some_rows(row: Value = row, found: list[list[Value]] = found) -> None:
            for r in range(TOGETHER - 1):
                with code.when(row + r < rows):
                    part, lane = divmod(r, lanes // 4)
                    write(row + r, *(code.extract(each[part], lane) for each in found))

        code.either(whole, all_rows, some_rows)
    return code.finish()


def _places(code: Code, place: Value, width: int, lanes: int) -> list[Value]:
    """Returns the places of the 64 weights in the window, in vectors of `lanes` bytes."""
    if width > TABLE:
        return [code.load(place + part, code.vector(lanes, I8)) for part in range(0, SLOTS, lanes)]
    both = code.load(place, code.vector(SLOTS // 2, I8))  # two places in a byte
    one, two = both & 15, both >> 4
    return [one, two] if lanes < SLOTS else [code.shuffle(one, two, range(SLOTS))]


def _looked_up(code: Code, window: Value, places: list[Value], width: int) -> list[Value]:
    """Returns the bytes of a window at these places."""
    lanes = places[0].raw.type.count
    bytes_ = code.vector(lanes, I8)
    if lanes == SLOTS and width > TABLE and "avx512vbmi" in code.features:
        first, *second = (code.load(window + part, bytes_) for part in range(0, width, lanes))
        if not second:
            return [code.call("llvm.x86.avx512.permvar.qi.512", bytes_, first, each) for each in places]
        return [code.call("llvm.x86.avx512.vpermi2var.qi.512", bytes_, first, each, *second) for each in places]
    name = "llvm.x86.avx512.pshuf.b.512" if lanes == SLOTS else "llvm.x86.avx2.pshuf.b"
    found: list[Value] = []
    for part in range(0, width, TABLE):
        sixteen = code.load(window + part, code.vector(TABLE, I8))
        table = code.shuffle(sixteen, sixteen, [lane % TABLE for lane in range(lanes)])
        # The shuffle gives zero where the upper bit is set. The sum sets it for all places outside of these 16.
        most = Value(code, code.raw(0x80 - TABLE, bytes_))
        own = [each if width == TABLE else code.call(f"llvm.uadd.sat.v{lanes}i8", bytes_, each - part, most) for each in places]
        taken = [code.call(name, bytes_, table, each) for each in own]
        found = [a | b for a, b in zip(found, taken)] if found else taken
    return found


def _product(code: Code, total: Value, seen: Value, weights: Value) -> Value:
    """Adds the products of four unsigned inputs and four weights to each integer."""
    if seen.raw.type.count == SLOTS:
        integers = total.raw.type
        return code.call(
            "llvm.x86.avx512.vpdpbusd.512", integers, total, code.cast(seen, integers), code.cast(weights, integers)
        )
    pairs = code.call("llvm.x86.avx2.pmadd.ub.sw", code.vector(16, I16), seen, weights)
    ones = Value(code, code.raw(1, code.vector(16, I16)))
    return total + code.call("llvm.x86.avx2.pmadd.wd", code.vector(8, I32), pairs, ones)
