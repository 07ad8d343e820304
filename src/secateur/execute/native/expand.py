"""The kernel of `expand`, for one input row on CPUs with AVX-512 VNNI: a bit per weight, and int8 or int4 of four rows in turn.

One instruction expands the packed values of 64 columns. They are multiplied as integers (see `fixed_point`). All values are
read in one stream, which is faster than reading four rows from four places.
"""

from __future__ import annotations

from .emit import BF16, I1, I8, I16, I32, I64, Code, Value, Variable
from .fixed_point import Inputs, sum_of_planes
from .single import FAR, ROWS, each_row

TOGETHER = 4  # rows that are stored in turn
HALF = {"int8": 128, "int4": 8}  # is added to the values, because the instruction takes unsigned weights


def expand(name: str, features: frozenset[str], stored: str, group: int) -> str:
    """Generates the kernel. `scratch` has `scratch_size` bytes for the inputs of each thread.

    It sets `odd` to 1 if integers cannot hold the inputs. The results are wrong then.
    """
    code, grouped = Code(name, features), group > 0
    x, bias, y, rows, units, values, masks, starts, scales, groups = (code.argument(i) for i in range(2, 12))
    scratch, scratch_size, odd = (code.argument(i) for i in range(12, 15))
    integers, signs = code.vector(16, I32), Value(code, code.raw(HALF[stored], code.vector(64, I8)))
    pieces, finish = each_row(code, rows, bias, y, None if grouped else scales)
    inputs = Inputs(code, x, units, scratch + code.take(code.argument_address(1)) * scratch_size, grouped, HALF[stored])
    with code.when(inputs.odd):
        code.store(code.number(1), odd)
    with pieces as piece, code.loop(piece * ROWS, code.least(piece * ROWS + ROWS, rows), TOGETHER) as row:
        at = Variable(code, values + (code.load(starts + row // TOGETHER * 8, I64) >> int(stored == "int4")))
        sums = [[Variable(code, first) for first in inputs.corrections()] for _ in range(TOGETHER)] if not grouped else []
        totals = [Variable(code, code.zero(16)) for _ in range(TOGETHER)] if grouped else []
        with code.loop(0, inputs.units) as unit:
            line = masks + (row * units + unit * TOGETHER) * 8
            for more in (0, 64, 128):
                code.prefetch(at.get() + (FAR + more))
            code.prefetch(line + FAR // 2)
            planes = inputs.planes(unit)
            for r in range(TOGETHER):
                mask = code.load(line + r * 8, I64)
                taken = code.call("llvm.ctpop.i64", I64, mask) + 1  # an even number of values is stored
                weights = code.cast(_expanded(code, at.get(), mask, stored) ^ signs, integers)
                at.set(at.get() + ((taken & -2) if stored == "int8" else taken >> 1))
                before = inputs.corrections(unit) if grouped else [each.get() for each in sums[r]]
                after = [inputs.dot(total, weights, plane) for total, plane in zip(before, planes)]
                if grouped:
                    place = scales + (code.least(row + r, rows - 1) * groups + unit * 64 // group) * 2
                    scale = code.splat(code.load_float(place, BF16), 16)
                    totals[r].set(code.fma(sum_of_planes(after), scale, totals[r].get()))
                else:
                    for total, now in zip(sums[r], after):
                        total.set(now)
        for r in range(TOGETHER):
            with code.when(row + r < rows):
                if grouped:
                    found = code.total(totals[r].get())
                else:
                    found = sum_of_planes([code.total(each.get()) for each in sums[r]])
                finish(row + r, found * inputs.scale)
    return code.finish()


def _expanded(code: Code, at: Value, mask: Value, stored: str) -> Value:
    """Returns the packed values at the bits of the mask, and zeros elsewhere, as 64 bytes. The upper bits of int4 are zero."""
    bits, bytes_ = code.cast(mask, code.vector(64, I1)), code.vector(64, I8)
    if stored == "int8":
        return code.expand_load(at, bits, bytes_)
    both = code.widen(code.load(at, code.vector(32, I8)), code.vector(32, I16))  # two values in each
    packed = code.cast((both | both << 4) & 0x0F0F, bytes_)
    return code.call("llvm.x86.avx512.mask.expand.v64i8", bytes_, packed, packed ^ packed, bits)
