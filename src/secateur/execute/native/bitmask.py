"""The kernel of `bitmask`, for one input row on x86 with AVX2: one bit per weight, and the nonzero values.

Four rows at a time share the loaded inputs; the bytes of their masks are interleaved, except for up to three rows
at the end. A byte of the mask is looked up in `table`, which tells how to move the next values to eight lanes. For float32, an
entry holds the source lane of each of the eight lanes, with the sign bit set for a zero. Otherwise it holds indices of a byte
shuffle, which puts a bfloat16 into the upper half of a float32, or an int8 into the upper byte of an integer, which is then
shifted. With AVX-512, which expands packed values in one instruction, 32 columns of bfloat16 are taken at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from .emit import BF16, F32, I1, I8, I16, I32, I64, Code, Value, Variable, size_of
from .single import AHEAD, ROW_SCALES, ROWS, each_row
from .tiled import STORED

TOGETHER = 4  # rows that share the loaded inputs


@dataclass
class _Rows:
    """The rows that are processed together: their masks, the addresses of their next values, and their scales."""

    code: Code
    first: Value
    masks: Value
    at: list[Variable]
    soon: Variable  # where to prefetch the values of the next rows, at the same rate as these are read
    pace: Value
    group: int
    scales: Value
    groups: Value

    def scale(self, r: int, column: Value, lanes: int) -> Value:
        place = self.scales + ((self.first + r) * self.groups + column // self.group) * 2
        return self.code.splat(self.code.load_float(place, BF16), lanes)


def bitmask(name: str, features: frozenset[str], stored: str, group: int) -> str:
    """Generates the kernel for values that are stored row by row."""
    code, kind = Code(name, features), STORED[stored]
    x, bias, y, rows, bytes_, values, masks, starts, table, scales, groups = (code.argument(i) for i in range(2, 13))
    size = size_of(kind)
    pieces, finish = each_row(code, rows, bias, y, scales if group == ROW_SCALES else None)

    def spread(entry: Value, at: Value) -> Value:
        if kind == F32:
            lanes = code.load(entry, code.vector(8, I32))
            taken = code.call("llvm.x86.avx2.permps", code.vector(8), code.load(at, code.vector(8)), lanes)
            return code.select(lanes < 0, code.zero(8), taken)
        low = code.load(at, code.vector(16, I8))
        both = code.shuffle(low, low, [*range(16), *range(16)])
        moved = code.call("llvm.x86.avx2.pshuf.b", code.vector(32, I8), both, code.load(entry, code.vector(32, I8)))
        if kind == BF16:
            return code.cast(moved, code.vector(8))
        return code.signed(code.shift_signed(code.cast(moved, code.vector(8, I32)), 24))

    def block(row: Value, count: int) -> None:
        sums = [Variable(code, code.zero(8)) for _ in range(count)]
        at = [Variable(code, values + code.load(starts + (row + r) * 8, I64) * size) for r in range(count)]
        first, after = (code.load(starts + (row + r) * 8, I64) for r in (0, count))
        pace, soon = (after - first) * size // bytes_, Variable(code, values + after * size)
        own = _Rows(code, row, masks + row * bytes_, at, soon, pace, group, scales, groups)
        done, wide = code.number(0), None
        if kind == BF16 and {"avx512bw", "avx512vbmi2", "bmi2"} <= features:
            done, wide = _by_32(own, bytes_, x)

        def steps(start: Value, many: int) -> None:
            """Adds `many` bytes of the mask, which are inside one group of columns that share a scale."""
            parts: list[Value | None] = [None] * count
            for i in range(many):
                g = start + i
                seen = code.load(x + g * 32, code.vector(8))
                word = code.widen(code.load(own.masks + g * count, I32 if count == TOGETHER else I8, align=1), I64)
                for r in range(count):
                    shift = 8 * r - 5  # selects the mask of this row, times 32, the bytes of a table entry
                    entry = (word >> shift if shift >= 0 else word << -shift) & (0xFF << 5)
                    part = parts[r] or (sums[r].get() if group <= 0 else code.zero(8))
                    parts[r] = code.fma(spread(table + entry, at[r].get()), seen, part)
                    at[r].set(at[r].get() + code.call("llvm.ctpop.i64", I64, entry) * size)
            for r, part in enumerate(parts):
                assert part is not None
                sums[r].set(part if group <= 0 else code.fma(part, own.scale(r, start * 8, 8), sums[r].get()))

        whole = done + (bytes_ - done) // 4 * 4
        with code.loop(done, whole, 4) as g:
            for line in range(0, min(256, 128 * size), 64):
                code.prefetch(soon.get() + line)
            code.prefetch(own.masks + g * count + AHEAD // 2)
            soon.set(soon.get() + pace * 4)
            steps(g, 4)
        with code.loop(whole, bytes_) as g:
            steps(g, 1)
        for r in range(count):
            total = code.total(sums[r].get())
            finish(row + r, total if wide is None else total + wide[r])

    with pieces as piece:
        end = code.least(piece * ROWS + ROWS, rows)
        whole = piece * ROWS + (end - piece * ROWS) // TOGETHER * TOGETHER
        with code.loop(piece * ROWS, whole, TOGETHER) as row:
            block(row, TOGETHER)
        with code.loop(whole, end) as row:
            block(row, 1)
    return code.finish()


def _by_32(own: _Rows, bytes_: Value, x: Value) -> tuple[Value, list[Value]]:
    """Processes 32 columns of bfloat16 at once. Returns how many bytes of the mask are done, and the sums of each row."""
    code, count, done = own.code, len(own.at), bytes_ // 4 * 4
    sums = [[Variable(code, code.zero(16)) for _ in range(2)] for _ in own.at]
    with code.loop(0, done, 4) as g:
        for line in (0, 64):
            code.prefetch(own.soon.get() + line)
        code.prefetch(own.masks + g * count + AHEAD // 2)
        own.soon.set(own.soon.get() + own.pace * 4)
        inputs = [code.load(x + g * 32 + 64 * half, code.vector(16)) for half in (0, 1)]
        for mask, place, totals in zip(_masks_of_32(code, own.masks + g * count, count), own.at, sums):
            halves = code.expand_load(place.get(), code.cast(mask, code.vector(32, I1)), code.vector(32, I16))
            place.set(place.get() + code.widen(code.call("llvm.ctpop.i32", I32, mask), I64) * 2)
            bits = code.cast(halves, code.vector(16, I32))
            for odd, weights in enumerate((bits << 16, bits & 0xFFFF0000)):  # the even columns as float32, then the odd ones
                seen = code.shuffle(inputs[0], inputs[1], range(odd, 32, 2))
                totals[odd].set(code.fma(code.cast(weights, code.vector(16)), seen, totals[odd].get()))
    return done, [code.total(even.get() + odd.get()) for even, odd in sums]


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
