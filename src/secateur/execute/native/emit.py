"""A small builder for LLVM IR: integers, vectors, addresses and loops, written with Python's operators.

Every kernel is `void kernel(int64 *arguments)`, where arguments are integers and addresses. Threads share the work through an
atomic counter: each thread increments it to get its next piece, so a kernel does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union

from llvmlite import ir

I1, I4, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 4, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


class BFloat(ir.Type):
    """The type bfloat16, which llvmlite does not define."""

    null, intrinsic_name = "0.0", "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


class Float8(ir.Type):
    """The type float8_e4m3fn, which LLVM does not define. Only `Code.load_float` knows it."""

    def _to_string(self) -> str:
        return "i8"


class Quad(ir.Type):
    """Four neighbouring int8 in 32 bits, which are multiplied with four neighbouring unsigned bytes."""

    def _to_string(self) -> str:
        return "i32"


BF16, F8, QUAD = BFloat(), Float8(), Quad()
F8_FACTOR = 256.0  # what `Code.load_float` has divided numbers of type F8 by
Operand = Union[int, "Value"]


class Value:
    """An LLVM value (integer, float, 64-bit address or vector) with Python's operators."""

    def __init__(self, code: Code, raw: Any):
        self.code, self.raw = code, raw

    def _apply(self, name: str, other: Operand | float, *, swapped: bool = False) -> Value:
        mine, theirs = self.raw, self.code.raw(other, self.raw.type)
        pair = (theirs, mine) if swapped else (mine, theirs)
        scalar = self.raw.type.element if isinstance(self.raw.type, ir.VectorType) else self.raw.type
        table = {"add": "fadd", "sub": "fsub", "mul": "fmul"} if not isinstance(scalar, ir.IntType) else {}
        return Value(self.code, getattr(self.code.builder, table.get(name, name))(*pair))

    def __add__(self, other: Operand) -> Value:
        return self._apply("add", other)

    def __radd__(self, other: Operand) -> Value:
        return self._apply("add", other, swapped=True)

    def __sub__(self, other: Operand) -> Value:
        return self._apply("sub", other)

    def __rsub__(self, other: Operand) -> Value:
        return self._apply("sub", other, swapped=True)

    def __mul__(self, other: Operand | float) -> Value:
        return self._apply("mul", other)

    def __rmul__(self, other: Operand) -> Value:
        return self._apply("mul", other, swapped=True)

    def __floordiv__(self, other: Operand) -> Value:
        return self._apply("udiv", other)

    def __mod__(self, other: Operand) -> Value:
        return self._apply("urem", other)

    def __and__(self, other: Operand) -> Value:
        return self._apply("and_", other)

    def __or__(self, other: Operand) -> Value:
        return self._apply("or_", other)

    def __xor__(self, other: Operand) -> Value:
        return self._apply("xor", other)

    def __lshift__(self, other: Operand) -> Value:
        return self._apply("shl", other)

    def __rshift__(self, other: Operand) -> Value:
        return self._apply("lshr", other)

    def _compare(self, how: str, other: Operand) -> Value:
        return Value(self.code, self.code.builder.icmp_signed(how, self.raw, self.code.raw(other, self.raw.type)))

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("<=", other)

    def equals(self, other: Operand) -> Value:
        return self._compare("==", other)


class Variable:
    """A variable that a loop may change. LLVM turns it into a register."""

    def __init__(self, code: Code, first: Value):
        self.code = code
        with code.builder.goto_entry_block():
            self.place = code.builder.alloca(first.raw.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self.code, self.code.builder.load(self.place, typ=self.place.allocated_type))

    def set(self, value: Value) -> None:
        self.code.builder.store(value.raw, self.place)


class Code:
    """Builds one kernel. `lanes` is the number of floats in a vector register of the target CPU."""

    def __init__(self, name: str, features: frozenset[str]):
        self.features = features
        self.lanes = 16 if "avx512f" in features else 8
        self.module = ir.Module(name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), name)
        entry = function.append_basic_block("entry")
        self.builder = ir.IRBuilder(function.append_basic_block("body"))
        ir.IRBuilder(entry).branch(self.builder.block)
        self._arguments = self.builder.ptrtoint(function.args[0], I64)

    # ------------------------------------------------------------------ numbers and vectors

    def raw(self, value: Operand | float, like: ir.Type) -> Any:
        if isinstance(value, Value):
            return value.raw
        if isinstance(like, ir.VectorType):
            return ir.Constant(like, [value] * like.count)
        return ir.Constant(like, value)

    def number(self, value: int) -> Value:
        return Value(self, ir.Constant(I64, value))

    def argument(self, index: int) -> Value:
        return self.load(self.argument_address(index), I64)

    def argument_address(self, index: int) -> Value:
        return Value(self, self._arguments) + 8 * index

    def vector(self, lanes: int | None = None, of: ir.Type = F32) -> ir.VectorType:
        return ir.VectorType(of, lanes or self.lanes)

    def zero(self, lanes: int | None = None) -> Value:
        return Value(self, ir.Constant(self.vector(lanes), None))

    def zero_number(self) -> Value:
        return Value(self, ir.Constant(F32, 0.0))

    def constant(self, numbers: Sequence[int], of: ir.Type) -> Value:
        return Value(self, ir.Constant(ir.VectorType(of, len(numbers)), list(numbers)))

    def splat(self, scalar: Value, lanes: int | None = None) -> Value:
        kind = ir.VectorType(scalar.raw.type, lanes or self.lanes)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar.raw, ir.Constant(I32, 0))
        return self.shuffle(Value(self, one), Value(self, one), [0] * kind.count)

    def shuffle(self, first: Value, second: Value, lanes: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(first.raw, second.raw, mask))

    def insert(self, vector: Value, scalar: Value, lane: int) -> Value:
        return Value(self, self.builder.insert_element(vector.raw, scalar.raw, ir.Constant(I32, lane)))

    def extract(self, vector: Value, lane: int) -> Value:
        return Value(self, self.builder.extract_element(vector.raw, ir.Constant(I32, lane)))

    def widen(self, value: Value, to: ir.Type) -> Value:
        return Value(self, self.builder.zext(value.raw, to))

    def signed(self, value: Value) -> Value:
        """Converts integers with a sign to float32."""
        lanes = value.raw.type.count if isinstance(value.raw.type, ir.VectorType) else 1
        return Value(self, self.builder.sitofp(value.raw, F32 if lanes == 1 else self.vector(lanes)))

    def shift_signed(self, vector: Value, bits: int) -> Value:
        """Shifts integers to the right and repeats their sign."""
        return Value(self, self.builder.ashr(vector.raw, ir.Constant(vector.raw.type, [bits] * vector.raw.type.count)))

    def narrow(self, value: Value, to: ir.Type) -> Value:
        return Value(self, self.builder.trunc(value.raw, to))

    def cast(self, value: Value, to: ir.Type) -> Value:
        return Value(self, self.builder.bitcast(value.raw, to))

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.raw, yes.raw, no.raw))

    def least(self, first: Operand, second: Operand) -> Value:
        first = first if isinstance(first, Value) else self.number(first)
        second = second if isinstance(second, Value) else self.number(second)
        return self.select(first < second, first, second)

    def most(self, first: Value, second: Value) -> Value:
        return self.select(first < second, second, first)

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        """Calls an LLVM intrinsic by name."""
        kind = ir.FunctionType(result, [argument.raw.type for argument in arguments])
        function = self.module.globals.get(name) or ir.Function(self.module, kind, name)
        return Value(self, self.builder.call(function, [argument.raw for argument in arguments]))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a * b + c."""
        kind = c.raw.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        return self.call(f"llvm.fmuladd.{suffix}", kind, a, b, c)

    def total(self, vector: Value) -> Value:
        """Returns the sum of the lanes."""
        width = vector.raw.type.count
        while width > 1:
            half = width // 2
            vector = self.shuffle(vector, vector, range(half)) + self.shuffle(vector, vector, range(half, width))
            width = half
        return self.extract(vector, 0)

    # ------------------------------------------------------------------ memory

    def in_register(self, number: Value) -> Value:
        """Forces an address to be computed into one register.

        On Intel CPUs, a vector instruction that reads memory at the sum of two registers is split in two.
        """
        same = ir.FunctionType(I64, [I64])
        return Value(self, self.builder.asm(same, "", "=r,0", [number.raw], False))

    def _pointer(self, address: Value) -> Any:
        return self.builder.inttoptr(address.raw, ir.PointerType())

    def pointer(self, address: Value) -> Value:
        """Converts an address to the pointer type that intrinsics expect."""
        return Value(self, self._pointer(address))

    def load(self, address: Value, kind: ir.Type, align: int | None = None) -> Value:
        scalar = kind.element if isinstance(kind, ir.VectorType) else kind
        return Value(self, self.builder.load(self._pointer(address), typ=kind, align=align or size_of(scalar)))

    def load_at(self, base: Value, index: Value, kind: ir.Type) -> Value:
        """Loads an array element. Unlike with a sum of addresses, LLVM keeps the base address in one register."""
        place = self.builder.gep(self._pointer(base), [index.raw], source_etype=kind)
        return Value(self, self.builder.load(place, typ=kind, align=size_of(kind)))

    def load_float(self, address: Value, stored: ir.Type, lanes: int = 1) -> Value:
        """Loads float32, bfloat16, float16 or int8 as one float32 or as a vector of them, and int4 and float8 as a vector.

        Numbers of type F8 come divided by `F8_FACTOR`, because they are read as float16, which has another range.
        """
        if stored == I4:
            return self._load_int4(address, lanes)
        if isinstance(stored, Float8):
            bits = self.widen(self.load(address, ir.VectorType(I8, lanes)), ir.VectorType(I16, lanes))
            half = self.cast((bits & 0x80) << 8 | (bits & 0x7F) << 7, ir.VectorType(F16, lanes))
            return Value(self, self.builder.fpext(half.raw, self.vector(lanes)))
        kind = stored if lanes == 1 else ir.VectorType(stored, lanes)
        if stored == F32:
            return self.load(address, kind)
        wide = F32 if lanes == 1 else self.vector(lanes)
        if stored == I8:
            return self.signed(self.load(address, kind))
        if isinstance(stored, BFloat):  # the upper half of a float32
            bits = self.load(address, I16 if lanes == 1 else ir.VectorType(I16, lanes))
            return self.cast(self.widen(bits, I32 if lanes == 1 else ir.VectorType(I32, lanes)) << 16, wide)
        return Value(self, self.builder.fpext(self.load(address, kind).raw, wide))

    def _load_int4(self, address: Value, lanes: int) -> Value:
        """Loads int4, of which eight are in a word, the first in the lowest bits."""
        words = self.load(address, ir.VectorType(I32, lanes // 8), align=1)
        spread = self.shuffle(words, words, [lane // 8 for lane in range(lanes)])
        up = spread << self.constant([28 - 4 * (lane % 8) for lane in range(lanes)], I32)
        return self.signed(self.shift_signed(up, 28))

    def load_splat(self, address: Value, stored: ir.Type, lanes: int) -> Value:
        """Loads one number and returns a float32 vector with it in all lanes."""
        if not isinstance(stored, BFloat):
            return self.splat(self.load_float(address, stored), lanes)
        twice = self.splat(self.load(address, I16), 2 * lanes)  # in both halves of each lane; the lower half is then cleared
        return self.cast(self.cast(twice, self.vector(lanes, I32)) & 0xFFFF0000, self.vector(lanes))

    def expand_load(self, address: Value, mask: Value, kind: ir.VectorType) -> Value:
        """Loads consecutive numbers into the lanes that the mask selects, and zeros into the others."""
        name, zeros = f"llvm.masked.expandload.v{kind.count}i{kind.element.width}", ir.Constant(kind, None)
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(kind, [ir.PointerType(), mask.raw.type, kind]), name
        )
        return Value(self, self.builder.call(function, [self._pointer(address), mask.raw, zeros]))

    def store(self, value: Value, address: Value) -> None:
        kind = value.raw.type
        self.builder.store(
            value.raw, self._pointer(address), align=size_of(kind.element if isinstance(kind, ir.VectorType) else kind)
        )

    def prefetch(self, address: Value) -> None:
        """Prefetches the cache line at this address. The address may be invalid."""
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(), I32, I32, I32])
        function = self.module.globals.get("llvm.prefetch.p0") or ir.Function(self.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, [self._pointer(address), *(ir.Constant(I32, n) for n in (0, 3, 1))])  # read, keep, data

    def take(self, counter: Value) -> Value:
        """Increments the counter atomically and returns its old value, the number of the next piece of work."""
        return Value(self, self.builder.atomic_rmw("add", self._pointer(counter), ir.Constant(I64, 1), "monotonic"))

    # ------------------------------------------------------------------ control

    @contextmanager
    def loop(self, first: Operand, end: Operand, step: int = 1) -> Iterator[Value]:
        """Loops over range(first, end, step). The body of the `with` statement becomes the body of the loop."""
        i = Variable(self, first if isinstance(first, Value) else self.number(first))
        head, body, after = (self.builder.append_basic_block(name) for name in ("head", "loop", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch((i.get() < end).raw, body, after)
        self.builder.position_at_end(body)
        now = i.get()
        yield now
        i.set(now + step)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def pieces(self, counter: Value, count: Operand) -> Iterator[Value]:
        """Loops over pieces of work 0 to count - 1, which all threads running this kernel share."""
        head, body, after = (self.builder.append_basic_block(name) for name in ("take", "work", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        piece = self.take(counter)
        self.builder.cbranch((piece < count).raw, body, after)
        self.builder.position_at_end(body)
        yield piece
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield

    def either(self, condition: Value, yes: Callable[[], None], no: Callable[[], None]) -> None:
        with self.builder.if_else(condition.raw) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                no()

    def wait_for_others(self, barrier: Value) -> None:
        """Calls the barrier function at this address; 0 means that there is one thread only."""
        with self.when(self.number(0) < barrier):
            function = self.builder.inttoptr(barrier.raw, ir.FunctionType(ir.VoidType(), []).as_pointer())
            self.builder.call(function, [])

    def finish(self) -> str:
        self.builder.ret_void()
        return str(self.module)


def bytes_of(kind: ir.Type, count: int) -> int:
    """Returns the bytes of `count` stored numbers; int4 are stored two in a byte."""
    return count // 2 if kind == I4 else count * size_of(kind)


def size_of(kind: ir.Type) -> int:
    if isinstance(kind, Float8 | Quad):
        return 1 if isinstance(kind, Float8) else 4
    return {I8: 1, I16: 2, I32: 4, I64: 8, F32: 4, F16: 2, BF16: 2}[kind]
