# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""The Triton kernel of `padded_rows` with runs of entries, for values of 8 or 16 bits. For NVIDIA sm_80+.

A warp computes a row. In each turn a lane takes one run: 16 entries, whose columns are a base of 16 bits and the sums of 16
differences of 8 bits (dp4a). That is 2.13 bytes for an int8 entry, so that at 80 % zeros and 4 TB/s an SM must finish about
seven entries per clock. The inputs are in shared memory. In their natural order, 32 lanes that read random columns meet some
bank three times, which alone takes as long as reading the weights. They are therefore stored in 32 blocks of columns, one for
each bank, and neighbouring lanes take runs that are `turns` apart, so that the lanes of a warp are spread over all blocks:
1.2 to 1.6 cycles instead of 3.1 (counted on random rows). An entry takes seven instructions with inputs in float32 (column,
block, address, load, two to convert the value, product) and a run about 30 more, so that an SM could finish eleven entries per
clock. A run is loaded into registers while the runs before it are multiplied.

Every address that bases and differences can make is inside of the shared memory.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .triton_kernels import _ONCE, _early, _load, _multiprocessors

ENTRIES = 16  # of a run
WIDE = 8192  # columns up to which inputs are kept in float32

# Where there is no run, the base is no column.
_FOUR, _BASE, _SCALE = _load(1, 0, _ONCE, 4), _load(1, 0, ".u16", 1, 0xFFFF), _load(1, 0, ".u16", 1)
_OUT_1, _OUT_4, _INT_4 = tl.constexpr("=&r,l,r"), tl.constexpr("=&r," * 4 + "l,r"), tl.constexpr((tl.int32,) * 4)
_F2 = tl.constexpr((tl.float32,) * 2)


# ---------------------------------------------------------------- PTX


def _to_float(bits: int, half: bool, word: str, i: int, to: str) -> str:
    """Returns PTX that converts the i-th value in a word to a float."""
    if bits == 8:  # the byte, and three times its sign
        return f"prmt.b32 t, {word}, 0, 0x{8 + i:x}{8 + i:x}{8 + i:x}{i}; cvt.rn.f32.s32 {to}, t; "
    if half:
        return f"mov.b32 {{h0, h1}}, {word}; cvt.f32.f16 {to}, h{i}; "
    return f"and.b32 t, {word}, 0xffff0000; mov.b32 {to}, t; " if i else f"shl.b32 t, {word}, 16; mov.b32 {to}, t; "


def turn_ptx(bits: int, wide: bool, half: bool) -> tuple[str, str]:
    """Returns PTX that adds the products of one run to two sums, and its constraints.

    Operands: the sums; values; differences; the base; the columns; the shift and the factor that find the place of a column;
    the address of the inputs; the former sums. They stay as they are if the base is not a column.
    """
    count = ENTRIES * bits // 32
    values, steps = [f"${2 + i}" for i in range(count)], [f"${2 + count + i}" for i in range(4)]
    base, columns, shift, factor, memory, *before = (f"${6 + count + i}" for i in range(7))
    text = "{ .reg .pred p; .reg .b32 run, v, b, a, t; .reg .b16 h0, h1; .reg .f32 s, w, f0, f1; "
    text += f"setp.lt.u32 p, {base}, {columns}; mov.f32 f0, {before[0]}; mov.f32 f1, {before[1]}; "
    text += f"selp.b32 run, {base}, 0, p; shl.b32 run, run, 7; "
    for e in range(ENTRIES):
        mask = "0x" + "80" * (e % 4 + 1)  # times 128: the bytes from a column to the next one in its block
        text += f"dp4a.u32.u32 v, {steps[e // 4]}, {mask}, run; " + ("mov.b32 run, v; " if e % 4 == 3 else "")
        text += f"shr.u32 b, v, {shift}; mad.lo.s32 a, b, {factor}, v; add.u32 a, a, {memory}; "
        if wide:
            text += "ld.shared.f32 s, [a]; "
        elif half:
            text += "ld.shared.b16 h0, [a]; cvt.f32.f16 s, h0; "
        else:
            text += "ld.shared.u16 t, [a]; shl.b32 t, t, 16; mov.b32 s, t; "
        per = 32 // bits
        text += _to_float(bits, half, values[e // per], e % per, "w") + f"fma.rn.f32 f{e % 2}, w, s, f{e % 2}; "
    text += "".join(f"selp.f32 ${i}, f{i}, {before[i]}, p; " for i in range(2))
    return text + "}", ",".join(["=&f"] * 2 + ["r"] * (count + 9) + ["f"] * 2)


def stage_ptx(wide: bool, half: bool) -> str:
    """Returns PTX that copies eight neighbouring columns of one block (two blocks if not `wide`) to shared memory.

    Operands: $1 the place, $2 and $3 the inputs of both blocks, $4 and $5 whether they exist.
    """
    text = "{ .reg .pred p, q; .reg .b32 a<4>, b<4>, t; .reg .b16 h0, h1; .reg .f32 s; "
    text += "setp.ne.u32 p, $4, 0; setp.ne.u32 q, $5, 0; " + "".join(f"mov.u32 {n}{i}, 0; " for n in "ab" for i in range(4))
    text += "@p ld.global.v4.u32 {a0, a1, a2, a3}, [$2]; "
    text += "" if wide else "@q ld.global.v4.u32 {b0, b1, b2, b3}, [$3]; "
    for e in range(8):
        if wide:
            text += _to_float(16, half, f"a{e // 2}", e % 2, "s") + f"@p st.shared.f32 [$1 + {128 * e}], s; "
        else:
            pick = "0x7632" if e % 2 else "0x5410"
            text += f"prmt.b32 t, a{e // 2}, b{e // 2}, {pick}; @p st.shared.b32 [$1 + {128 * e}], t; "
    return text + "mov.u32 $0, 0; }"


def block_of(columns: int, wide: bool) -> int:
    """Returns how many columns a block has, a power of two of at least eight."""
    return max(8, triton.next_power_of_2(-(-columns // (32 if wide else 64))))


@cache
def texts(columns: int, bits: int, wide: bool, half: bool) -> tuple[str, ...]:
    """Returns the PTX of a kernel: shared memory, staging, and the products of a run with their constraints."""
    block, last = block_of(columns, wide), columns + 255 * ENTRIES
    size = 128 * block + (4 if wide else 2) * (last // block + 1)
    shared = f"{{ .shared .align 1024 .b8 shared[{-(-size // 128) * 128}]; mov.u32 $0, shared; }}"
    return shared, stage_ptx(wide, half), *turn_ptx(bits, wide, half)


# ---------------------------------------------------------------- kernel


@triton.jit
def _part(values, FROM: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[FROM + i],)  # noqa: RUF005 - Triton does not support unpacking
    return out


@triton.jit
def _load_run(values, index, row, turn, rows, turns, lanes, own_lane, BITS: tl.constexpr):
    """Issues the loads of one run for each lane: values, differences and base."""
    there = ((row < rows) & (turn < turns)).to(tl.int32)
    turn = row * turns + turn
    run = turn * lanes + own_lane
    out = ()
    for i in tl.static_range(BITS // 8):
        at = values.to(tl.int64) + ((turn * (BITS // 8) + i) * lanes + own_lane).to(tl.int64) * 16
        out = out + tl.inline_asm_elementwise(_FOUR, _OUT_4, [at, there], _INT_4, is_pure=False, pack=1)
    near = index.to(tl.int64) + run.to(tl.int64) * 16
    steps = tl.inline_asm_elementwise(_FOUR, _OUT_4, [near, there], _INT_4, is_pure=False, pack=1)
    at = index.to(tl.int64) + (rows * turns * lanes).to(tl.int64) * 16 + run.to(tl.int64) * 2
    base = tl.inline_asm_elementwise(_BASE, _OUT_1, [at, there], tl.int32, is_pure=False, pack=1)
    return out + steps + (base,)


@triton.jit
def _load_scale(scales, row, rows, SCALED: tl.constexpr):
    if not SCALED:
        return row
    else:
        at, inside = scales.to(tl.int64) + row.to(tl.int64) * 2, (row < rows).to(tl.int32)
        return tl.inline_asm_elementwise(_SCALE, _OUT_1, [at, inside], tl.int32, is_pure=False, pack=1)


@triton.jit
def _stage(x, columns, shared, lane, warp, STAGE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr):
    """Copies the inputs of one token to shared memory: each lane fills one bank."""
    for piece in range(0, BLOCK // 8, WARPS):
        part = piece + warp
        column = lane * (BLOCK if WIDE else 2 * BLOCK) + part * 8
        there = ((part < BLOCK // 8) & (column < columns)).to(tl.int32)
        also = ((part < BLOCK // 8) & (column + BLOCK < columns)).to(tl.int32)
        at = x.to(tl.int64) + column.to(tl.int64) * 2
        to = shared + part * 1024 + lane * 4
        tl.inline_asm_elementwise(
            STAGE, "=&r,r,l,l,r,r", [to, at, at + BLOCK * 2, there, also], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _runs_kernel(
    values, index, scales, x, bias, y, rows, columns, turns, lanes, groups,
    SHARED: tl.constexpr, STAGE: tl.constexpr, TURN: tl.constexpr, NEEDS: tl.constexpr, BITS: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
    WIDE: tl.constexpr, HIGH: tl.constexpr, TURNS: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Computes HIGH rows by one token in each warp, then further ones. The next weights are loaded before the products.

    Each tensor has one element per thread.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    x += tl.program_id(1).to(tl.int64) * columns
    y += tl.program_id(1).to(tl.int64) * rows
    EACH: tl.constexpr = BITS // 2 + 5
    own_lane = tl.minimum(lane, lanes - 1)  # further lanes read the same as the last one, without further cycles
    group = tl.program_id(0)
    held, scale = (), ()
    for h in tl.static_range(HIGH):
        row = (group * HIGH + h) * WARPS + warp
        for t in tl.static_range(TURNS):
            held = held + _load_run(values, index, row, t, rows, turns, lanes, own_lane, BITS)
        scale = scale + (_load_scale(scales, row, rows, SCALED),)  # noqa: RUF005
    shared = tl.inline_asm_elementwise(SHARED, "=r,r", [thread], tl.int32, is_pure=False, pack=1)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until the inputs are written
    _stage(x, columns, shared, lane, warp, STAGE, BLOCK, WIDE, WARPS)
    tl.debug_barrier()
    zero, none = tl.zeros([32 * WARPS], tl.float32), tl.zeros([32 * WARPS], tl.int32)
    places = (none + columns, none + SHIFT, none + ((4 if WIDE else 2) - 128 * BLOCK), shared)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        sums = ()
        for h in tl.static_range(2 * HIGH):  # noqa: B007 - Triton needs a name
            sums = sums + (zero,)  # noqa: RUF005
        for piece in range(PIECES):
            # A run is loaded into the registers of the one that was just used.
            last = piece + 1 == PIECES
            later, first = tl.where(last, group + tl.num_programs(0), group), tl.where(last, 0, (piece + 1) * TURNS)
            loaded, after = (), ()
            for h in tl.static_range(HIGH):
                both = (sums[2 * h], sums[2 * h + 1])
                row = (later * HIGH + h) * WARPS + warp
                for t in tl.static_range(TURNS):
                    run = _part(held, (h * TURNS + t) * EACH, EACH)
                    both = tl.inline_asm_elementwise(TURN, NEEDS, run + places + both, _F2, is_pure=False, pack=1)
                    loaded = loaded + _load_run(values, index, row, first + t, rows, turns, lanes, own_lane, BITS)
                after = after + both
            held, sums = loaded, after
        next_scale = ()
        for h in tl.static_range(HIGH):
            total = tl.where(lane < lanes, sums[2 * h] + sums[2 * h + 1], 0.0)
            if SCALED:
                total *= (scale[h] << 16).to(tl.float32, bitcast=True)
            whole = tl.sum(tl.reshape(total, (WARPS, 32)), 1, keep_dims=True)
            out = tl.reshape(tl.broadcast_to(whole, (WARPS, 32)), (32 * WARPS,))
            row = (group * HIGH + h) * WARPS + warp
            inside = (row < rows) & (lane == 0)
            if BIAS:
                out += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + row, out.to(y.dtype.element_ty), mask=inside)
            next_scale = next_scale + (_load_scale(scales, row + tl.num_programs(0) * HIGH * WARPS, rows, SCALED),)  # noqa: RUF005
        scale = next_scale


# By the turns of a row: warps, rows of a warp, turns at once, programs of a multiprocessor, registers. Measured on an H200.
SETTINGS = {
    8: {1: (16, 1, 1, 2, 64), 2: (16, 1, 2, 2, 64), 4: (16, 1, 2, 2, 64)},
    16: {1: (8, 2, 1, 4, 64), 2: (8, 2, 2, 3, 80), 4: (8, 1, 2, 4, 64)},
}


def choice(turns: int, columns: int, bits: int) -> tuple[int, int, int, int, int, bool]:
    """Returns the setting for rows of so many turns, and whether inputs are kept in float32."""
    return *SETTINGS[bits][1 if turns == 1 else 2 if turns <= 3 else 4], columns <= WIDE


def runs(x: Tensor, values: Tensor, index: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns x @ matrix.T + bias. `scales` are the bits of bfloat16 [rows, 1], or None for plain values."""
    (tokens, columns), (rows, turns, parts, lanes, _) = x.shape, values.shape
    if columns % 8:
        x = F.pad(x, (0, -columns % 8))
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    bits, half = 8 * parts, x.dtype == torch.float16
    warps, high, most, programs, registers, wide = choice(turns, columns, bits)
    pieces = -(-turns // most)
    block, groups, early = block_of(x.shape[1], wide), -(-rows // (warps * high)), _early(x.device)
    rounds = -(-groups // (programs * _multiprocessors(x.device)))
    y = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    held, extra = index if scales is None else scales, index if bias is None else bias
    sizes = bits, scales is not None, bias is not None, early, block, 6 + block.bit_length(), wide
    launch(
        _runs_kernel, (-(-groups // rounds), tokens), (values, index, held, x, extra, y),
        (rows, x.shape[1], turns, lanes, groups),
        (*texts(x.shape[1], bits, wide, half), *sizes, high, -(-turns // pieces), pieces, warps),
        num_warps=warps, launch_pdl=early, maxnreg=registers,
    )  # fmt: skip
    return y
