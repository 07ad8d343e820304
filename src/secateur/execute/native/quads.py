"""Kernels before and after the product of the formats `quads` and `quads8`: inputs to planes of bytes (also for `windows`), and
integers to results."""

from __future__ import annotations

from llvmlite import ir

from .emit import BF16, F32, I8, I32, Code, Value, Variable

LANES = 16
MIDDLE = 128  # is added to the upper bytes, because the instruction takes unsigned inputs
EXPONENT = 0x7F800000  # the bits of a float32 that make it a power of two
LEAST, MOST = 0x0D800000, 0x7B000000  # bits of the float32 between which the largest input must be: 2**-100 and 2**119


def prepare(name: str, features: frozenset[str], bits: int, count: int) -> str:
    """Generates the kernel that rounds each row of x [batch, columns] to integers of count * bits bits times a factor.

    Half of the range is added, so that integers are not negative. With a count of 2, their lower bits go to planes [0, row] and
    the upper ones to planes [1, row], in a byte each, with `stride` bytes for a row; with 1, there is one plane. One over the
    factor of the row goes to `inverse` (infinity if its largest input is not finite, or too large or too small). For two planes
    the factor is a power of two. For one, where that would waste up to half of the few integers, it is the largest input over
    the largest integer. Columns are a multiple of 16.
    """
    code, middle = Code(name, features), 1 << count * bits - 1
    x, batch, columns, planes, inverse, stride = (code.argument(i) for i in range(2, 8))
    integers = code.vector(LANES, I32)
    with code.pieces(code.argument_address(0), batch) as row:
        line = x + row * columns * 4
        most = Variable(code, Value(code, ir.Constant(integers, None)))
        with code.loop(0, columns, LANES) as k:
            most.set(code.most(most.get(), code.load(line + k * 4, integers) & 0x7FFFFFFF))
        found, width = most.get(), LANES
        while width > 1:
            width //= 2
            found = code.most(code.shuffle(found, found, range(width)), code.shuffle(found, found, range(width, 2 * width)))
        largest = code.extract(found, 0)
        quotient = Value(code, code.builder.fdiv(ir.Constant(F32, float(middle - 1)), code.cast(largest, F32).raw))
        scale = quotient if count == 1 else code.cast(code.cast(quotient, I32) & EXPONENT, F32)
        scale = code.select(largest.equals(0), Value(code, ir.Constant(F32, 1.0)), scale)
        odd = (largest < LEAST) & (Value(code, ir.Constant(I32, 0)) < largest) | (Value(code, ir.Constant(I32, MOST)) < largest)
        code.store(code.select(odd, Value(code, ir.Constant(F32, float("inf"))), scale), inverse + row * 4)
        factor = code.splat(scale, LANES)
        with code.loop(0, columns, LANES) as k:
            rounded = code.call("llvm.rint.v16f32", code.vector(LANES), code.load(line + k * 4, code.vector(LANES)) * factor)
            number = Value(code, code.builder.fptosi(rounded.raw, integers)) + middle
            for plane, part in enumerate([number] if count == 1 else [number & (1 << bits) - 1, number >> bits]):
                code.store(code.narrow(part, code.vector(LANES, I8)), planes + (batch * plane + row) * stride + k)
    return code.finish()


def finish(name: str, features: frozenset[str], count: int) -> str:
    """Generates the kernel for y = (low + 256 * (high - 128 * sums)) / inverse * scales + bias.

    `low` and `high` are integers [batch, rows], one after the other. With a count of 1, there is only `high`.
    """
    code = Code(name, features)
    first, batch, rows, sums, scales, inverse, bias, y = (code.argument(i) for i in range(2, 10))

    def write(row: Value, r: Value, lanes: int, back: Value) -> None:
        integers = I32 if lanes == 1 else code.vector(lanes, I32)
        floats = F32 if lanes == 1 else code.vector(lanes)
        place = (row * rows + r) * 4
        high = first if count == 1 else first + batch * rows * 4
        total = code.signed(code.load(high + place, integers) - code.load(sums + r * 4, integers) * MIDDLE)
        if count == 2:
            total = code.fma(total, Value(code, code.raw(256.0, floats)), code.signed(code.load(first + place, integers)))
        scale = code.load_float(scales + r * 2, BF16, lanes) * (back if lanes == 1 else code.splat(back, lanes))
        code.store(code.fma(total, scale, code.load(bias + r * 4, floats)), y + place)

    with code.pieces(code.argument_address(0), batch) as row:
        power = code.load(inverse + row * 4, F32)
        back = Value(code, code.builder.fdiv(ir.Constant(F32, 1.0), power.raw))
        whole = rows // LANES * LANES
        with code.loop(0, whole, LANES) as r:
            write(row, r, LANES, back)
        with code.loop(whole, rows) as r:
            write(row, r, 1, back)
    return code.finish()
