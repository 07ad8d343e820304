"""An emulator of PTX, as far as our kernels use it: it runs compiled kernels on CPU tensors and finds faulty accesses.

All threads of a grid run together, as numpy arrays. A launch raises `Fault` for an address outside of the tensors it was given,
for a misaligned address, for a read of shared memory that nobody has written or whose copy has not arrived, for two threads
that use the same shared memory without a barrier between them, and for operands of mma.sp whose effect is not defined. Shared
memory starts as NaN. In a launch that may start before the preceding kernel has finished, tensors other than `early` must not
be touched before `griddepcontrol.wait`.

Semantics: NVIDIA, Parallel Thread Execution ISA; the layout of the operands of mma.sp: section "Matrix fragments for
multiply-accumulate operation with sparse matrix A". Sums are rounded once for each instruction, unlike those of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ptx_arithmetic import COMPARE, PLAIN, bf16_to_float, divide, float_to_bf16, float_to_e4m3
from ptx_memory import Array, Fault, Shared, Tensors
from ptx_program import TYPES, UNSIGNED, Instruction, Place, Program

NEVER = 1 << 30


class Launch:
    """One launch of a kernel. `arguments` are those of the PTX entry, `dynamic` the bytes of shared memory that it declares.

    `early` are the tensors that a kernel which starts early may read before it waits; None for other kernels.
    """

    def __init__(
        self,
        program: Program,
        grid: Sequence[int],
        threads: int,
        dynamic: int,
        arguments: Sequence[int],
        tensors: Any,
        early: Any,
    ) -> None:
        self.program, self.threads, self.blocks = program, threads, int(np.prod(grid))
        self.total = self.blocks * threads
        self.tensors = Tensors(tensors, self.total * program.local)
        self.waited, self.early = early is None, Tensors(early or [])
        self.shared = Shared(self.blocks, program.shared + dynamic, threads)
        self.copies: list[tuple[Array, Array, Array, Array]] = []  # thread, block, address, values
        index = np.arange(self.total)
        self.thread, self.block = index % threads, index // threads
        self.lane = self.thread % 32
        self.special = {
            "%tid.x": self.thread, "%ntid.x": np.full(self.total, threads), "%laneid": self.lane,
            "%ctaid.x": self.block % grid[0], "%ctaid.y": self.block // grid[0] % grid[1],
            "%ctaid.z": self.block // (grid[0] * grid[1]),
            **{f"%nctaid.{axis}": np.full(self.total, size) for axis, size in zip("xyz", grid)},
        }  # fmt: skip
        self.parameters = {name: value for (name, _), value in zip(program.parameters, arguments)}
        self.registers: dict[str, Array] = {}

    # ------------------------------------------------ operands

    def value(self, operand: Any, kind: str) -> Array:
        """The operand of all threads as this type; bfloat16 as bits."""
        type_ = TYPES[kind]
        if isinstance(operand, int | float):
            if kind == "pred":
                return np.full(self.total, bool(operand))
            if isinstance(operand, float) and type_.kind != "f":
                return np.full(self.total, np.float32(operand)).view(np.uint32).astype(type_)
            if isinstance(operand, int) and type_.kind == "f":
                return np.full(self.total, operand, UNSIGNED[type_.itemsize]).view(type_)
            if isinstance(operand, int):
                operand &= (1 << 8 * type_.itemsize) - 1
                return np.full(self.total, operand, UNSIGNED[type_.itemsize]).view(type_)
            return np.full(self.total, operand, type_)
        if isinstance(operand, list):  # the parts of a wider number, the lowest first
            size = 8 * type_.itemsize // len(operand)
            parts = [self.value(each, f"b{size}").astype(UNSIGNED[type_.itemsize]) for each in operand]
            whole = parts[0]
            for i, part in enumerate(parts[1:], 1):
                whole = whole | part << UNSIGNED[type_.itemsize](size * i)
            return whole.view(type_)
        if operand in self.special:
            return self.special[operand].astype(type_)
        if operand in self.program.symbols:
            return np.full(self.total, self.program.symbols[operand], type_)
        if (held := self.registers.get(operand)) is None:
            raise Fault(f"register {operand} is read before it is written")
        if kind == "pred" or held.dtype.itemsize == type_.itemsize:
            return held.view(type_)
        return held.astype(UNSIGNED[type_.itemsize]).view(type_)

    def put(self, operand: Any, value: Array, mask: Array | None) -> None:
        """Writes a register: numbers are extended or cut to its width."""
        if isinstance(operand, list):
            size = value.dtype.itemsize // len(operand)
            whole = value.view(UNSIGNED[value.dtype.itemsize])
            for i, each in enumerate(operand):
                self.put(each, (whole >> whole.dtype.type(8 * size * i)).astype(UNSIGNED[size]), mask)
            return
        if operand == "_":
            return
        width = self.program.registers[operand]
        if width.kind == "b":
            value = value.astype(bool)
        elif value.dtype.itemsize == width.itemsize:
            value = value.view(UNSIGNED[width.itemsize])
        elif value.dtype.kind == "f":
            value = value.view(UNSIGNED[value.dtype.itemsize]).astype(UNSIGNED[width.itemsize])
        else:
            value = value.astype(np.dtype(f"{value.dtype.kind}{width.itemsize}")).view(UNSIGNED[width.itemsize])
        if mask is not None:
            value = np.where(mask, value, self.registers.get(operand, np.full_like(value, 0x5B)))
        self.registers[operand] = value

    def floats(self, operand: Any, kind: str) -> Array:
        value = self.value(operand, kind)
        return bf16_to_float(value) if kind == "bf16" else value

    # ------------------------------------------------ control

    def run(self) -> None:
        """Runs the blocks of code in their order, each for the threads that are there."""
        code, labels = self.program.code, self.program.labels
        leaders = {0, *labels.values(), *(i + 1 for i, each in enumerate(code) if each.name.split(".")[0] in ("bra", "ret"))}
        at = np.zeros(self.total, np.int64)
        with np.errstate(all="ignore"):
            while (first := int(at.min())) < len(code):
                here = at == first
                mask = None if bool(here.all()) else here
                i = first
                while True:
                    each = code[i]
                    i += 1
                    taken = mask
                    if each.guard is not None:
                        holds = self.value(each.guard[0], "pred") == each.guard[1]
                        taken = holds if mask is None else holds & mask
                    head = each.name.split(".")[0]
                    if head == "bra":
                        at = np.where(here, i, at)
                        at = np.where(here if taken is None else taken, labels[each.operands[0]], at)
                        break
                    if head in ("ret", "exit"):
                        at = np.where(here, i, at)
                        at = np.where(here if taken is None else taken, NEVER, at)
                        break
                    if taken is None or bool(taken.any()):
                        self.step(each, taken)
                    if i in leaders or i == len(code):
                        at = np.where(here, i if i < len(code) else NEVER, at)
                        break
        if self.copies:
            raise Fault("the kernel ends with copies that it has not waited for")

    def step(self, each: Instruction, mask: Array | None) -> None:
        head, *parts = each.parts
        special = getattr(self, f"_{head}", None)
        if special is not None:
            special(each, parts, mask)
            return
        if head not in PLAIN:
            raise NotImplementedError(each.text)
        self._plain(each, head, parts, mask)

    # ------------------------------------------------ instructions

    def _plain(self, each: Instruction, head: str, parts: list[str], mask: Array | None) -> None:
        to, *sources = each.operands
        kind = parts[-1]
        if kind in ("bf16x2", "f16x2", "bf16"):
            self.put(to, self._halves(head, kind, sources), mask)
            return
        if kind in ("s16x2", "u16x2"):
            halves = [self.value(each, "b32").view(f"{'i' if kind[0] == 's' else 'u'}2") for each in sources]
            self.put(to, PLAIN[head](*halves).view(np.uint32), mask)
            return
        values = [self.value(each, "b32" if head in ("shl", "shr", "bfe") and i else kind) for i, each in enumerate(sources)]
        if parts[0] == "local":  # cvta makes an address of an offset in a thread's own memory
            values[0] = values[0] + self.tensors.first_local(self.total)
        run = PLAIN[head]
        if head == "mov" and isinstance(sources[0], list):
            self.put(to, values[0], mask)
            return
        if "wide" in parts:
            wide = np.dtype(f"{values[0].dtype.kind}{2 * values[0].dtype.itemsize}")
            values = [v.astype(wide) for v in values[:2]]
            values += [self.value(each, f"b{8 * wide.itemsize}").view(wide) for each in sources[2:]]
        if head == "div" and TYPES[kind].kind in "iu":
            run = divide
        self.put(to, run(*values), mask)

    def _halves(self, head: str, kind: str, sources: list[Any]) -> Array:
        """Arithmetic on one or two numbers of half precision."""
        if head in ("and", "or", "xor", "mov"):
            return PLAIN[head](*(self.value(each, kind) for each in sources))
        words = [self.value(each, kind) for each in sources]
        size, out = words[0].dtype.itemsize // 2, np.zeros_like(words[0])
        for i in range(size):
            numbers = [(word >> word.dtype.type(16 * i)).astype(np.uint16) for word in words]
            if kind.startswith("bf16"):
                result = float_to_bf16(PLAIN[head](*(bf16_to_float(n).astype(np.float64) for n in numbers)))
            else:
                result = (
                    PLAIN[head](*(n.view(np.float16).astype(np.float64) for n in numbers)).astype(np.float16).view(np.uint16)
                )
            out |= result.astype(out.dtype) << out.dtype.type(16 * i)
        return out

    def _setp(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        how, kind = parts[0], parts[-1]
        a, b = (self.floats(operand, kind) for operand in each.operands[1:3])
        if how in ("nan", "num"):
            result = (np.isnan(a) | np.isnan(b)) == (how == "nan")
        elif how not in COMPARE:  # "neu" and the like are true for NaN
            result = COMPARE[how.removesuffix("u")](a, b) | np.isnan(a) | np.isnan(b)
        else:
            result = COMPARE[how](a, b)
            if how == "ne" and a.dtype.kind == "f":
                result &= ~(np.isnan(a) | np.isnan(b))
        self.put(each.operands[0], result, mask)

    def _selp(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        to, a, b, which = each.operands
        self.put(to, np.where(self.value(which, "pred"), self.value(a, parts[-1]), self.value(b, parts[-1])), mask)

    def _cvt(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        to, *sources = each.operands
        into, of = parts[-2:]
        values = [self.floats(operand, of) for operand in sources]
        if into in ("bf16x2", "f16x2"):
            halves = [float_to_bf16(v) if into == "bf16x2" else v.astype(np.float16).view(np.uint16) for v in values]
            result = halves[0].astype(np.uint32) << np.uint32(16) | halves[1]
        elif into == "e4m3x2":
            result = float_to_e4m3(values[0]).astype(np.uint16) << np.uint16(8) | float_to_e4m3(values[1])
        elif into == "bf16":
            result = float_to_bf16(values[0])
        elif TYPES[into].kind in "iu" and values[0].dtype.kind == "f":
            result = (np.trunc(values[0]) if "rzi" in parts else np.rint(values[0])).astype(TYPES[into])
        else:
            result = values[0].astype(TYPES[into])
        self.put(to, result, mask)

    def _ld(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        to, place = each.operands
        if "param" in parts:
            self.put(to, self.value(self.parameters[place.base], parts[-1]), mask)
            return
        count, type_ = len(to) if isinstance(to, list) else 1, TYPES[parts[-1]]
        width = count * type_.itemsize
        held = np.full((self.total, width), 0xDB, np.uint8)
        on = np.arange(self.total) if mask is None else mask.nonzero()[0]
        held[on] = self._read(each, parts, self._address(place, parts)[on], on, width)
        for i, register in enumerate(to if isinstance(to, list) else [to]):
            part = np.ascontiguousarray(held[:, i * type_.itemsize : (i + 1) * type_.itemsize])
            self.put(register, part.view(type_)[:, 0], mask)

    def _address(self, place: Place, parts: list[str]) -> Array:
        if "shared" in parts:
            return self.value(place.base, "b32").astype(np.int64) + place.offset
        return self.value(place.base, "b64") + np.uint64(place.offset % 2**64)

    def _read(self, each: Instruction, parts: list[str], address: Array, on: Array, width: int) -> Array:
        if "shared" in parts:
            return self.shared.load(self.block[on], address, width, self.thread[on], each.text)
        return self._global().load(address, width, each.text)

    def _global(self) -> Tensors:
        return self.tensors if self.waited else self.early

    def _st(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        place, given = each.operands
        type_ = TYPES[parts[-1]]
        columns = [self.value(one, parts[-1]) for one in (given if isinstance(given, list) else [given])]
        values = np.stack([c.view(UNSIGNED[type_.itemsize]) for c in columns], 1).view(np.uint8)
        on = np.arange(self.total) if mask is None else mask.nonzero()[0]
        address = self._address(place, parts)[on]
        if "shared" in parts:
            self.shared.store(self.block[on], address, values[on], self.thread[on], each.text)
        elif not self.waited:
            raise Fault(f"write before the preceding kernel has finished: {each.text}")
        else:
            self.tensors.store(address, values[on], each.text)

    def _atom(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        """One thread after the other, in their order."""
        *to, place, given = each.operands
        type_, how = TYPES[parts[-1]], {"add": np.add, "max": np.maximum, "min": np.minimum}[parts[-2]]
        on = np.arange(self.total) if mask is None else mask.nonzero()[0]
        address, values = self._address(place, parts)[on], self.value(given, parts[-1])
        before = np.zeros(self.total, type_)
        for i, thread in enumerate(on):
            here, own, who = address[i : i + 1], self.block[thread : thread + 1], self.thread[thread : thread + 1]
            if "shared" in parts:
                held = self.shared.load(own, here, type_.itemsize, who, each.text, noted=False)
            else:
                held = self._global().load(here, type_.itemsize, each.text)
            before[thread] = held.view(type_)[0, 0]
            after = how(before[thread : thread + 1], values[thread : thread + 1]).view(np.uint8)[None]
            if "shared" in parts:
                self.shared.data[own[:, None], here.astype(np.int64)[:, None] + np.arange(type_.itemsize)] = after
            else:
                self.tensors.store(here, after, each.text)
        for register in to:
            self.put(register, before, mask)

    _red = _atom

    def _cp(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        if "wait_all" in parts:
            waiting = np.ones(self.total, bool) if mask is None else mask
            left = []
            for index, block, address, values in self.copies:
                done = waiting[index]
                if done.any():
                    self.shared.arrive(block[done], address[done], values[done], self.thread[index[done]], each.text)
                if not done.all():
                    left.append((index[~done], block[~done], address[~done], values[~done]))
            self.copies = left
        elif "shared" in parts:
            to, place, size, *number = each.operands
            on = np.arange(self.total) if mask is None else mask.nonzero()[0]
            used = self.value(number[0], "b32")[on] if number else np.full(len(on), size)
            values, source = np.zeros((len(on), size), np.uint8), self._address(place, ["global"])[on]
            if bool((source % np.uint64(size)).any()):
                raise Fault(f"misaligned address: {each.text}")
            for bytes_ in np.unique(used).tolist():
                if bytes_:
                    some = used == bytes_
                    values[some, :bytes_] = self._global().load(source[some], bytes_, each.text)
            address = self._address(to, ["shared"])[on]
            self.shared.store(self.block[on], address, values, self.thread[on], each.text, later=True)
            self.copies.append((on, self.block[on], address, values))

    def _bar(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        there = np.ones(self.total, bool) if mask is None else mask
        shape = (self.blocks, self.threads // 32, 32)
        if "warp" in parts:
            warps = there.reshape(shape)
            if bool((warps.any(-1) & ~warps.all(-1)).any()):
                raise Fault(f"some threads of a warp miss a barrier: {each.text}")
            self.shared.syncs += warps.all(-1)
        else:
            blocks = there.reshape(self.blocks, -1)
            if bool((blocks.any(-1) & ~blocks.all(-1)).any()):
                raise Fault(f"some threads of a block miss a barrier: {each.text}")
            self.shared.barriers += blocks.all(-1)

    _barrier = _bar

    def _griddepcontrol(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        self.waited = self.waited or "wait" in parts

    def _warps(self, each: Instruction, values: Array, mask: Array | None) -> Array:
        """Values by warp and lane. All threads of a warp must be there."""
        if mask is not None and bool((mask.reshape(-1, 32).any(-1) & ~mask.reshape(-1, 32).all(-1)).any()):
            raise Fault(f"some threads of a warp miss: {each.text}")
        return values.reshape(-1, 32)

    def _shfl(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        to, given, by, limit, _ = each.operands
        values = self._warps(each, self.value(given, "b32"), mask)
        lane = np.arange(32)[None, :]
        by, limit = (self.value(one, "b32").astype(np.int64).reshape(-1, 32) for one in (by, limit))
        clamp, segment = limit & 31, limit >> 8 & 31
        last = lane & segment | clamp & ~segment
        how = parts[1]
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": lane & segment | by & 31 & ~segment}[how]
        inside = source >= last if how == "up" else source <= last
        got = np.take_along_axis(values, np.where(inside, source, lane), 1).reshape(-1)
        register, *found = to if isinstance(to, list) else [to]
        self.put(register, got, mask)
        for predicate in found:
            self.put(predicate, inside.reshape(-1), mask)

    def _vote(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        if "ballot" not in parts:
            raise NotImplementedError(each.text)
        votes = self._warps(each, self.value(each.operands[1], "pred"), mask)
        self.put(each.operands[0], np.repeat((votes << np.arange(32)).sum(1), 32).astype(np.uint32), mask)

    def _redux(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        values = self._warps(each, self.value(each.operands[1], parts[-1]), mask)
        how = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}[parts[1]]
        self.put(each.operands[0], np.repeat(how.reduce(values, 1), 32).astype(values.dtype), mask)

    def _matrices(self, each: Instruction, place: Place, number: int, mask: Array | None) -> Any:
        """Yields, for each matrix of 8 x 8 halves, the addresses of both halves that a lane has a part of."""
        address = self._warps(each, self._address(place, ["shared"]), mask)
        row, column = (self.lane[:32] // 4)[:, None], self.lane[:32, None] % 4 * 2 + np.arange(2)
        if "trans" in each.parts:
            row, column = column, row
        on = np.ones(self.total, bool) if mask is None else mask
        for i in range(number):
            rows = address[:, 8 * i : 8 * i + 8]
            self.shared.places(self.block[on], np.tile(rows, 4).reshape(-1)[on], 16, each.text)
            yield on, (rows[:, row] + 2 * column).reshape(-1, 2)[on]

    def _ldmatrix(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        to, place = each.operands
        for register, (on, address) in zip(to, self._matrices(each, place, len(to), mask)):
            own = np.zeros((self.total, 4), np.uint8)
            for i in range(2):
                own[on, 2 * i : 2 * i + 2] = self.shared.load(
                    self.block[on], address[:, i], 2, self.thread[on], each.text, written=False
                )
            self.put(register, own.view(np.uint32)[:, 0], mask)

    def _stmatrix(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        place, given = each.operands
        given = given if isinstance(given, list) else [given]
        for register, (on, address) in zip(given, self._matrices(each, place, len(given), mask)):
            values = self.value(register, "b32")[on].view(np.uint8).reshape(-1, 4)
            for i in range(2):
                self.shared.store(self.block[on], address[:, i], values[:, 2 * i : 2 * i + 2], self.thread[on], each.text)

    def _mma(self, each: Instruction, parts: list[str], mask: Array | None) -> None:
        """mma.sp.m16n8k32 in half precision: 16 rows by 32 columns, of which two of four are stored, times 32 by 8."""
        if parts[0] not in ("sp", "sp_ordered_metadata") or "m16n8k32" not in parts:
            raise NotImplementedError(each.text)
        to, a, b, c, words, selector = each.operands
        kind = parts[-2]

        def halves(registers: list[Any]) -> Array:  # [warp, lane, register, half]
            bits = np.stack([self._warps(each, self.value(r, "b32"), mask) for r in registers], -1)
            both = np.stack([bits & np.uint32(0xFFFF), bits >> np.uint32(16)], -1).astype(np.uint16)
            return bf16_to_float(both) if kind == "bf16" else both.view(np.float16).astype(np.float32)

        stored, dense = halves(a), halves(b)
        meta = self._warps(each, self.value(words, "b32"), mask)
        warps = len(meta)
        lane = np.arange(32)
        group, four = lane // 4, lane % 4
        A, B = np.zeros((warps, 16, 32)), np.zeros((warps, 32, 8))
        for register in range(4):
            row, first = group + 8 * (register % 2), 4 * four + 16 * (register // 2)  # the first of the lane's four columns
            owner = 4 * group + 2 * selector + register // 2  # the lane with the metadata of these 16 columns
            code = meta[:, owner] >> (16 * (register % 2) + 4 * four).astype(np.uint32)
            places = [code & np.uint32(3), code >> np.uint32(2) & np.uint32(3)]
            if bool((places[0] >= places[1]).any()):
                raise Fault(f"metadata that is not ordered: {each.text}")
            for i, place in enumerate(places):
                A[np.arange(warps)[:, None], row, first + place] = stored[:, :, register, i]
            for i in range(2):
                B[:, 8 * register + 2 * four + i, group] = dense[:, :, register, i]
        product = A @ np.where(np.isfinite(B), B, 0) + np.where(np.isfinite(B), 0, np.nan).sum(1, keepdims=True)
        for i, (register, before) in enumerate(zip(to, c)):
            old = self._warps(each, self.value(before, "f32"), mask)
            total = product[:, group + 8 * (i // 2), 2 * four + i % 2] + old
            self.put(register, total.astype(np.float32).reshape(-1), mask)
