"""Inputs as integers of 24 bits, whose products with int8 weights AVX-512 VNNI sums exactly (the instruction vpdpbusd).

An input x becomes X = round(x / scale), where the scale is a power of two and the largest input becomes 2**22 to 2**23. That
is about as precise as float32 is for it. X is stored as three signed bytes in three planes: low + 256 * middle + 65536 * high.

The instruction multiplies unsigned with signed bytes, four at a time. Weights are made unsigned by adding `half`, 128 for int8,
which adds half * X to every product; sums therefore start at `corrections`, -half times the sum of the inputs.
"""

from __future__ import annotations

from llvmlite import ir

from .emit import F32, I8, I32, I64, Code, Value, Variable

PLANES = 3
UNIT = 64  # inputs that are multiplied at once
LARGEST = 127.0 * (1 + 256 + 65536)  # the largest number that three signed bytes hold
LEAST, MOST = 0x0D800000, 0x7B000000  # bits of the float32 between which the largest input must be: 2**-100 and 2**119
BYTES = 2 * PLANES * UNIT  # scratch memory for each unit: the planes and the corrections


class Inputs:
    """The first 64 * units inputs, repacked in `scratch`. Needs BYTES of scratch for each unit, and for one more.

    `units` is 0 if the inputs are not finite, all zero, or too large or too small. `odd` is false if they are all zero.
    """

    def __init__(self, code: Code, x: Value, units: Value, scratch: Value, grouped: bool, half: int):
        self.code, self.scratch, self.grouped, self.half = code, scratch, grouped, half
        self.many, self.bytes_ = code.vector(16, I32), code.vector(UNIT, I8)
        largest = self._largest(x, units)
        usable = (code.narrow(code.number(LEAST), I32) < largest) & (largest < code.narrow(code.number(MOST), I32))
        self.units = code.select(usable, units, code.number(0))
        self.odd = self.units.equals(0) & (code.narrow(code.number(0), I32) < largest)
        size = code.select(usable, code.cast(largest, F32), Value(code, ir.Constant(F32, 1.0)))
        most = Value(code, code.builder.fdiv(ir.Constant(F32, LARGEST), size.raw))
        inverse = code.cast(code.cast(most, I32) & 0x7F800000, F32)  # the exponent alone: a power of two
        self.scale = Value(code, code.builder.fdiv(ir.Constant(F32, 1.0), inverse.raw))
        self._repack(x, code.splat(inverse, 16))

    def _largest(self, x: Value, units: Value) -> Value:
        """Returns the bits of the largest absolute value. Those of NaN and infinity are larger than those of any number."""
        code = self.code
        most = Variable(code, Value(code, ir.Constant(self.many, None)))
        with code.loop(0, units * 4) as k:
            bits = code.load(x + k * 64, self.many) & 0x7FFFFFFF
            most.set(code.most(most.get(), bits))
        found, width = most.get(), 16
        while width > 1:
            width //= 2
            found = code.most(code.shuffle(found, found, range(width)), code.shuffle(found, found, range(width, 2 * width)))
        return code.extract(found, 0)

    def _repack(self, x: Value, inverse: Value) -> None:
        code = self.code
        totals = [Variable(code, Value(code, ir.Constant(self.many, None))) for _ in range(PLANES)]
        ones = code.cast(Value(code, code.raw(self.half, self.bytes_)), self.many)
        with code.loop(0, self.units) as unit:
            for k in range(4):
                scaled = code.load(x + unit * (UNIT * 4) + k * 64, code.vector(16)) * inverse
                rounded = code.call("llvm.rint.v16f32", code.vector(16), scaled)
                number = Value(code, code.builder.fptosi(rounded.raw, self.many))
                for plane in range(PLANES):
                    code.store(code.narrow(number, code.vector(16, I8)), self._place(unit, plane) + k * 16)
                    number = code.shift_signed(number + 128, 8)  # rounded, since bytes are signed
            for plane, total in enumerate(totals):
                before = Value(code, ir.Constant(self.many, None)) if self.grouped else total.get()
                total.set(self.dot(before, ones, self._plane(unit, plane)))
                if self.grouped:
                    code.store(0 - total.get(), self._place(unit, PLANES + plane))
        for plane, total in enumerate(totals):
            code.store(0 - total.get(), self._place(self.units, PLANES + plane))

    def _place(self, unit: Value, plane: int) -> Value:
        return self.scratch + unit * BYTES + plane * UNIT

    def _plane(self, unit: Value, plane: int) -> Value:
        return self.code.load(self._place(unit, plane), self.many, align=1)

    def planes(self, unit: Value) -> list[Value]:
        return [self._plane(unit, plane) for plane in range(PLANES)]

    def corrections(self, unit: Value | None = None) -> list[Value]:
        """Returns where sums start: over the columns of one unit, or over all columns."""
        at = self.units if unit is None else unit
        return [self._plane(at, PLANES + plane) for plane in range(PLANES)]

    def dot(self, total: Value, weights: Value, plane: Value) -> Value:
        """Adds the products of four unsigned and four signed bytes to each of 16 integers."""
        return self.code.call("llvm.x86.avx512.vpdpbusd.512", self.many, total, weights, plane)


def sum_of_planes(sums: list[Value]) -> Value:
    """Returns low + 256 * middle + 65536 * high as float32, of integers (added exactly) or of vectors of integers."""
    low, middle, high = sums
    code = low.code
    if not isinstance(low.raw.type, ir.VectorType):
        low, middle, high = (Value(code, code.builder.sext(each.raw, I64)) for each in sums)
        return code.signed(low + middle * 256 + high * 65536)
    factors = [Value(code, code.raw(factor, code.vector(16))) for factor in (256.0, 65536.0)]
    return code.fma(code.signed(high), factors[1], code.fma(code.signed(middle), factors[0], code.signed(low)))
