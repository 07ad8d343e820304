# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""The Triton kernel of `sparse24_mma` for values of 4, 8 or 16 bits: inputs are staged in shared memory. For NVIDIA sm_80+.

Each warp takes tiles of 16 rows by 256 columns; the four warps of a program share the columns. A warp loads its weights, copies
its inputs to its own part of the shared memory (cp.async), from which ldmatrix delivers them, and unpacks small values to
bfloat16 in registers without rounding. Group scales multiply the float32 sum of their group, row scales the final sum.
The instructions and the layout of their operands: NVIDIA, PTX ISA (mma.sp, ldmatrix, cp.async).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import Constants, launch
from .triton_kernels import _NO_PLACES, _ONCE, _early, _load

WARPS = 4
AT_ONCE = 16  # tokens of a program

_VALUES_2, _VALUES_4, _VALUES_8 = (_load(n, 512, _ONCE, 4) for n in (2, 4, 8))
_PLACES = _load(1, 0, _ONCE, 4, _NO_PLACES)
_SCALES_1, _SCALES_2 = _load(1, 0, ".u32", 1), _load(1, 0, ".v2.u32", 2)
_OUT_1, _OUT_2, _OUT_4, _OUT_8, _OUT_16, _OUT_32 = (tl.constexpr("=&r," * n + "l,r") for n in (1, 2, 4, 8, 16, 32))
_INT_2, _INT_4, _INT_8, _INT_16, _INT_32 = (tl.constexpr((tl.int32,) * n) for n in (2, 4, 8, 16, 32))
_F1, _F2, _F4, _F8, _F16, _F32 = (tl.constexpr((tl.float32,) * n) for n in (1, 2, 4, 8, 16, 32))
_WARP_SYNC = tl.constexpr("bar.warp.sync 0xffffffff; mov.u32 $0, 0;")
_MMA = "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32"


# ---------------------------------------------------------------- PTX


def _to_bf16(bits: int, words: list[str]) -> str:
    """Returns PTX that puts eight stored values into the registers a0 to a3, each of two bfloat16.

    The bits 0x4300 | u are 128 + u for u below 128, so that a mask and an addition convert a value exactly.
    """
    if bits == 16:
        return "".join(f"mov.b32 a{j}, {word}; " for j, word in enumerate(words))
    lines = []
    for j in range(4):
        word, shift = (words[0], 4 * j) if bits == 4 else (words[j // 2], 8 * (j % 2))
        source = "t" if shift else word
        lines.append(f"shr.u32 t, {word}, {shift}; " if shift else "")
        if bits == 4:  # the two values are at bits 4j and 16 + 4j; flipping the sign bit adds 8, so 136 is subtracted
            lines.append(f"lop3.b32 a{j}, {source}, 0x000f000f, 0x43084308, 0x6a; fma.rn.bf16x2 a{j}, a{j}, one, off; ")
        else:  # 128 + the low seven bits, minus 128, or minus 256 where the sign bit is set
            lines.append(f"lop3.b32 a{j}, {source}, 0x007f007f, 0x43004300, 0xea; ")
            lines.append(f"lop3.b32 u, {source}, 0x00800080, 0xc300c300, 0x6a; fma.rn.bf16x2 a{j}, a{j}, one, u; ")
    return "".join(lines)


def multiply_ptx(bits: int, steps: int, wide: int, tiles: int, chain: bool) -> tuple[str, str]:
    """Returns PTX for 16 * tiles rows by 8 * wide tokens and `steps` times 32 columns, and its constraints.

    Operands: sums; words of each tile; places of each tile; the address of the inputs in shared memory; with `chain`, the
    former sums, to which products are added. The inputs are read once for all tiles.
    """
    count, per = 4 * wide * tiles, bits // 4
    words = [[f"${count + t * per * steps + i}" for i in range(per * steps)] for t in range(tiles)]
    at = count + tiles * per * steps
    places = [[f"${at + t * (steps // 2) + i}" for i in range(steps // 2)] for t in range(tiles)]
    at += tiles * (steps // 2)
    place, before = f"${at}", [f"${at + 1 + i}" if chain else "z" for i in range(count)]
    text = "{ .reg .b32 a<4>,b<8>,t,u,one,off,odd; .reg .f32 z; mov.f32 z, 0f00000000; mov.b32 one, 0x3f803f80; "
    text += f"mov.b32 off, 0xc308c308; xor.b32 odd, {place}, 64; "
    for k in range(steps):
        for w in range(wide):
            where = f"{'odd' if k % 2 else place} + {k // 2 * 128 + 4096 * w}"
            text += f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b{4 * w},b{4 * w + 1},b{4 * w + 2},b{4 * w + 3}}}, [{where}]; "
        for t in range(tiles):
            text += _to_bf16(bits, words[t][per * k : per * k + per])
            for w in range(wide):
                first = 4 * (t * wide + w)
                out = ",".join(f"${first + i}" for i in range(4))
                c = out if k else ",".join(before[first : first + 4])
                b = ",".join(f"b{4 * w + i}" for i in range(4))
                text += f"{_MMA} {{{out}}}, {{a0,a1,a2,a3}}, {{{b}}}, {{{c}}}, {places[t][k // 2]}, {k % 2}; "
    inputs = tiles * (per * steps + steps // 2) + 1
    return text + "}", ",".join(["=&f"] * count + ["r"] * inputs + ["f"] * (count if chain else 0))


def stage_ptx(wide: int, sides: int) -> str:
    """Returns PTX that copies a warp's share of the inputs of one tile to shared memory, 512 bytes for each token.

    They are in pieces of 16 bytes whose number is exclusive-ored with the token, so that ldmatrix meets no bank twice.
    Operands: $1 the place, $2 the inputs, $3 their stride, $4 the tokens, $5 is 16, or 0 to write zeros: a warp without a tile
    multiplies these, and what was in the memory before might be NaN. $6 is the barrier of the warps that share the memory.
    """
    wait = "bar.warp.sync 0xffffffff; " if sides == 1 else f"bar.sync $6, {32 * sides}; "
    text = f"{{ .reg .pred p; .reg .b32 t; .reg .b64 a; mov.b64 a, $2; {wait}"
    for r in range(8 * wide // sides):
        text += f"setp.gt.s32 p, $4, {r}; xor.b32 t, $1, {16 * (r % 8)}; "
        text += f"@p cp.async.ca.shared.global [t + {512 * r}], [a], 16, $5; add.s64 a, a, $3; "
    return text + f"cp.async.commit_group; cp.async.wait_all; {wait}mov.u32 $0, 0; }}"


def reduce_ptx(count: int) -> tuple[str, str]:
    """Returns PTX that adds `count` numbers of each lane over the warps, through shared memory. A warp keeps its share."""
    each = count // WARPS
    place, back = f"${each + count}", f"${each + count + 1}"
    text = "{ .reg .f32 f; bar.sync 0; "
    text += "".join(f"st.shared.f32 [{place} + {128 * v}], ${each + v}; " for v in range(count)) + "bar.sync 0; "
    for i in range(each):
        text += f"ld.shared.f32 ${i}, [{back} + {128 * i}]; "
        for w in range(1, WARPS):
            text += f"ld.shared.f32 f, [{back} + {128 * (i + w * count)}]; add.f32 ${i}, ${i}, f; "
    return text + "}", ",".join(["=&f"] * each + ["f"] * count + ["r", "r"])


@cache
def constants(bits: int, group: int, scaled: bool, biased: bool, tiles: int, sides: int, wide: int, chain: bool) -> Constants:
    """Returns the constexprs of a kernel; first its PTX: shared memory, staging, products, the sum, and their constraints."""
    shared = f"{{ .shared .align 1024 .b8 shared[{4096 * wide * WARPS}]; mov.u32 $0, shared; }}"
    main = multiply_ptx(bits, group // 32 if group else 4, wide, tiles, group == 0)
    texts = shared, stage_ptx(wide, sides), *main, *reduce_ptx(4 * wide * tiles)
    return Constants((*texts, bits, group, scaled, biased, tiles, sides, wide, chain, WARPS))


# ---------------------------------------------------------------- kernel


@triton.jit
def _part(values, FROM: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (values[FROM + i],)  # noqa: RUF005 - Triton does not support unpacking
    return out


@triton.jit
def _load_tile(values, words, scales, tile, column_tile, across, lane, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Issues the loads of one tile: values, places and scales. Offsets have 32 bits, to need fewer registers."""
    there = (column_tile < across).to(tl.int32)
    index = tile * across + column_tile
    at = values.to(tl.int64) + (index * (16 * BITS) + lane).to(tl.int64) * 16
    if BITS == 4:
        held = tl.inline_asm_elementwise(_VALUES_2, _OUT_8, [at, there], _INT_8, is_pure=False, pack=1)
    elif BITS == 8:
        held = tl.inline_asm_elementwise(_VALUES_4, _OUT_16, [at, there], _INT_16, is_pure=False, pack=1)
    else:
        held = tl.inline_asm_elementwise(_VALUES_8, _OUT_32, [at, there], _INT_32, is_pure=False, pack=1)
    near = words.to(tl.int64) + (index * 32 + lane).to(tl.int64) * 16
    places = tl.inline_asm_elementwise(_PLACES, _OUT_4, [near, there], _INT_4, is_pure=False, pack=1)
    if GROUP == 0:
        return held, places, (there,)
    else:  # a row has 256 // GROUP scales of two bytes for each tile
        row = (tile * 16 + lane // 4) * across + column_tile
        upper_at = scales.to(tl.int64) + row.to(tl.int64) * (512 // GROUP)
        lower_at = scales.to(tl.int64) + (row + 8 * across).to(tl.int64) * (512 // GROUP)
        if GROUP == 128:
            upper = tl.inline_asm_elementwise(_SCALES_1, _OUT_1, [upper_at, there], tl.int32, is_pure=False, pack=1)
            lower = tl.inline_asm_elementwise(_SCALES_1, _OUT_1, [lower_at, there], tl.int32, is_pure=False, pack=1)
            return held, places, (upper, lower)
        else:
            upper = tl.inline_asm_elementwise(_SCALES_2, _OUT_2, [upper_at, there], _INT_2, is_pure=False, pack=1)
            lower = tl.inline_asm_elementwise(_SCALES_2, _OUT_2, [lower_at, there], _INT_2, is_pure=False, pack=1)
            return held, places, upper + lower


@triton.jit
def _scale(scales, HALF: tl.constexpr, WHICH: tl.constexpr, GROUP: tl.constexpr):
    """Returns the scale of one group for the upper or the lower eight rows of a tile."""
    AT: tl.constexpr = HALF * (256 // GROUP) + WHICH
    word = scales[AT // 2]
    bits = word << 16 if AT % 2 == 0 else word & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _multiply(
    now, place, sums, TEXT: tl.constexpr, NEEDS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one tile of columns for each tile of rows to the sums."""
    PER: tl.constexpr = BITS // 4
    STEPS: tl.constexpr = 4 if GROUP == 0 else GROUP // 32
    COUNT: tl.constexpr = 4 * WIDE * TILES
    GIVES: tl.constexpr = _F4 if COUNT == 4 else _F8 if COUNT == 8 else _F16 if COUNT == 16 else _F32
    for g in tl.static_range(8 // STEPS):
        given = ()
        for t in tl.static_range(TILES):
            given = given + _part(now[t][0], g * STEPS * PER, STEPS * PER)
        for t in tl.static_range(TILES):
            given = given + _part(now[t][1], g * (STEPS // 2), STEPS // 2)
        given = given + (place + g * STEPS * 64,)  # noqa: RUF005
        if GROUP == 0:
            sums = tl.inline_asm_elementwise(TEXT, NEEDS, given + sums, GIVES, is_pure=False, pack=1)
        else:
            found = tl.inline_asm_elementwise(TEXT, NEEDS, given, GIVES, is_pure=False, pack=1)
            after = ()
            for i in tl.static_range(COUNT):
                scale = _scale(now[i // (4 * WIDE)][2], i // 2 % 2, g, GROUP)
                after = after + (sums[i] + found[i] * scale,)  # noqa: RUF005
            sums = after
    return sums


@triton.jit(do_not_specialize=["tokens"])
def _staged_kernel(
    values, words, scales, x, bias, y, tokens, rows, across,
    SHARED: tl.constexpr, STAGE: tl.constexpr, TEXT: tl.constexpr, NEEDS: tl.constexpr, REDUCE: tl.constexpr,
    REDUCE_NEEDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    TILES: tl.constexpr, SIDES: tl.constexpr, WIDE: tl.constexpr, CHAIN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Computes SIDES times TILES tiles of 16 rows by 8 * WIDE tokens. Each tensor has one element per thread.

    WARPS warps share the columns. The SIDES warps with the same columns and other rows share a part of the shared memory and
    wait for each other; no other warps wait before the sums are added.
    """
    if CHAIN:
        tl.extra.cuda.gdc_launch_dependents()
    thread = tl.arange(0, 32 * WARPS * SIDES)
    lane, warp, side = thread % 32, thread // 32 % WARPS, thread // (32 * WARPS)
    tile = (tl.program_id(0) * SIDES + side) * TILES
    first = tl.program_id(1) * 16
    shared = tl.inline_asm_elementwise(SHARED, "=r,r", [thread], tl.int32, is_pure=False, pack=1)
    part = shared + warp * (4096 * WIDE)
    place = part + lane % 8 * 512 + ((lane // 8) ^ (lane % 8)) * 16
    SHARE: tl.constexpr = 8 * WIDE // SIDES  # tokens that a warp copies
    stride = (side.to(tl.int64) * 0 + across) * 512
    left = side * -SHARE + tokens - first
    put = part + side * (SHARE * 512) + ((lane * 16) ^ (side * SHARE % 8 * 16))
    COUNT: tl.constexpr = 4 * WIDE * TILES
    sums = ()
    for i in tl.static_range(COUNT):  # noqa: B007 - Triton needs a name
        sums = sums + (tl.zeros([32 * WARPS * SIDES], tl.float32),)  # noqa: RUF005
    for step in range(0, across, WARPS):
        column_tile = step + warp
        now = ()
        for t in tl.static_range(TILES):
            now = now + (_load_tile(values, words, scales, tile + t, column_tile, across, lane, BITS, GROUP),)  # noqa: RUF005
        tl.inline_asm_elementwise(_WARP_SYNC, "=r,r", [lane], tl.int32, is_pure=False, pack=1)  # keeps the loads up here
        if CHAIN:
            tl.extra.cuda.gdc_wait()  # until the inputs are written
        near_x = x.to(tl.int64) + (((first + side * SHARE) * across + column_tile) * 32 + lane).to(tl.int64) * 16
        size = tl.where(column_tile < across, 16, 0)
        tl.inline_asm_elementwise(
            STAGE, "=&r,r,l,l,r,r,r", [put, near_x, stride, left, size, warp + 1], tl.int32, is_pure=False, pack=1
        )
        sums = _multiply(now, place, sums, TEXT, NEEDS, BITS, GROUP, TILES, WIDE)
    EACH: tl.constexpr = COUNT // WARPS
    GIVE: tl.constexpr = _F1 if EACH == 1 else _F2 if EACH == 2 else _F4 if EACH == 4 else _F8
    own = shared + lane * 4 + side * (128 * COUNT * WARPS)
    to, back = own + warp * (128 * COUNT), own + warp * (128 * EACH)
    total = tl.inline_asm_elementwise(REDUCE, REDUCE_NEEDS, sums + (to, back), GIVE, is_pure=False, pack=1)  # noqa: RUF005
    for i in tl.static_range(EACH):
        which = warp * EACH + i
        row = 16 * (tile + which // (4 * WIDE)) + lane // 4 + which // 2 % 2 * 8
        token = first + which // 4 % WIDE * 8 + lane % 4 * 2 + which % 2
        out = total[i]
        if SCALED and GROUP == 0:
            bits = tl.load(scales + row, mask=row < rows, other=0).to(tl.int32) << 16
            out *= bits.to(tl.float32, bitcast=True)
        if BIAS:
            out += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
        inside = (token < tokens) & (row < rows)
        tl.store(y + token.to(tl.int64) * rows + row, out.to(y.dtype.element_ty), mask=inside)


# By bits of a value and columns that share a scale: the most tokens for which a setting is used, and the tiles of a warp, the
# warps that share inputs, and the limit on registers, which changes the schedule too. Measured on an H200.
SETTINGS = {
    (16, 0): ((8, (1, 1, 128)), (16, (2, 2, 128))),
    (8, 0): ((2, (1, 1, 128)), (8, (1, 2, 128)), (16, (2, 1, 128))),
    (8, 128): ((16, (2, 1, 128)),),
    (8, 64): ((4, (1, 1, 64)), (8, (2, 2, 128)), (16, (2, 1, 128))),
    (4, 128): ((2, (1, 1, 128)), (4, (1, 2, 64)), (8, (2, 2, 128)), (16, (2, 2, 168))),
    (4, 64): ((8, (2, 1, 128)), (16, (2, 2, 128))),
}


@cache
def choice(tokens: int, bits: int, group: int) -> tuple[int, int, int]:
    """Returns the tiles of a warp, the warps that share inputs, and the limit on registers."""
    return next(setting for most, setting in SETTINGS[bits, group] if min(tokens, AT_ONCE) <= most)


def staged(
    x: Tensor, values: Tensor, words: Tensor, scales: Tensor | None, bias: Tensor | None, rows: int, bits: int, group: int
) -> Tensor:
    """Returns x @ matrix.T + bias in bfloat16, for x of any rank.

    `scales` are the bits of bfloat16 [rows, groups], or None for plain values.
    """
    shape, (down, across, *_) = x.shape, values.shape
    columns = shape[-1]
    tokens = x.numel() // columns
    if columns != across * 256:
        x = F.pad(x, (0, across * 256 - columns))
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    wide = 2 if tokens > 8 else 1
    tiles, sides, registers = choice(tokens, bits, group)
    sides = sides if down % (tiles * sides) == 0 else 1
    chain = _early(x.device)
    y = torch.empty((tokens, rows) if len(shape) == 2 else (*shape[:-1], rows), dtype=x.dtype, device=x.device)
    held, extra = words if scales is None else scales, words if bias is None else bias
    launch(
        _staged_kernel, (down // (tiles * sides), -(-tokens // AT_ONCE)),
        (values, words, held, x, extra, y), (tokens, rows, across),
        constants(bits, group, scales is not None, bias is not None, tiles, sides, wide, chain),
        num_warps=WARPS * sides, launch_pdl=chain, maxnreg=registers,
    )  # fmt: skip
    return y
