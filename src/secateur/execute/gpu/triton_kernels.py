# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
"""Triton kernels that compute with packed matrices. Imported when one is first run, since not every machine has Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


# ---------------------------------------------------------------- two of four, few tokens


def _load(times: int, apart: int, what: str, width: int) -> tl.constexpr:
    """So many loads, `apart` bytes apart, of `width` registers each; zeros where the last argument is 0."""
    outs = [f"${i}" for i in range(width * times)]
    parts = [outs[width * i : width * (i + 1)] for i in range(times)]
    names = [f"{{{', '.join(part)}}}" if width > 1 else part[0] for part in parts]
    reads = "".join(f"@p ld.global{what} {name}, [${len(outs)} + {apart * i}]; " for i, name in enumerate(names))
    zeros = "".join(f"mov.u32 {out}, 0; " for out in outs)
    return tl.constexpr(f"{{ .reg .pred p; setp.ne.u32 p, ${len(outs) + 1}, 0; {zeros}{reads}}}")


# Weights are read once, so they are kept out of the first cache; all that a step needs is asked for at once.
_ONE, _EIGHT = (_load(times, 512, ".L1::no_allocate.L2::256B.v4.u32", 4) for times in (1, 8))
_PAIRS, _INPUTS = _load(32, 16, ".u32", 1), _load(8, 512, ".v4.u32", 4)
_OUTS_4, _OUTS_32 = (tl.constexpr("=&r," * n + "l,r") for n in (4, 32))
_INTS_4, _INTS_32 = (tl.constexpr((tl.int32,) * n) for n in (4, 32))


def _mma(kind: str, who: int) -> tl.constexpr:
    name = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
    return tl.constexpr(f"{name} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9,$10,$11}}, {{$13,$14,$15,$16}}, $12, {who};")


_BF16 = (_mma("bf16", 0), _mma("bf16", 1))
_F16 = (_mma("f16", 0), _mma("f16", 1))
_BF16_EVEN, _BF16_ODD, _F16_EVEN, _F16_ODD = *_BF16, *_F16


@triton.jit
def _multiply(a, b, m, c, K: tl.constexpr, HALF: tl.constexpr):
    """Tensor cores: 16 rows by 32 columns of which half are stored, times 32 by 8. One warp, each thread with its part."""
    EVEN: tl.constexpr = _F16_EVEN if HALF else _BF16_EVEN
    ODD: tl.constexpr = _F16_ODD if HALF else _BF16_ODD
    return tl.inline_asm_elementwise(
        ODD if K % 2 else EVEN, "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [a[4 * K], a[4 * K + 1], a[4 * K + 2], a[4 * K + 3], b[4 * K], b[4 * K + 1], b[4 * K + 2], b[4 * K + 3], m[K // 2],
         c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _put(c, bias, y, tile, first, tokens, rows, BIAS: tl.constexpr, WARPS: tl.constexpr):
    """Add up what the warps found for one tile of 16 rows by 8 tokens, and write it."""
    both = tl.join(tl.join(c[0], c[2]), tl.join(c[1], c[3]))  # [thread, upper or lower half, even or odd token]
    total = tl.sum(tl.reshape(both, (WARPS, 32, 2, 2)), 0)
    lane = tl.arange(0, 32)[:, None, None]
    row = tile * 16 + lane // 4 + 8 * tl.arange(0, 2)[None, :, None]
    token = first + lane % 4 * 2 + tl.arange(0, 2)[None, None, :]
    inside = (row < rows) & (token < tokens)
    if BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y + token.to(tl.int64) * rows + row, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _bricks_kernel(
    values, words, x, bias, y, tokens, rows, bricks,
    BIAS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Two tiles of 16 rows by 8 tokens, by 16 if WIDE. The warps share the columns.

    One element of each tensor here is one thread's: the layout of the fragments is that of the instruction.
    """
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    tile = tl.program_id(0) * 2
    group = tl.program_id(1) * (2 if WIDE else 1)
    zero = tl.zeros([32 * WARPS], tl.float32)
    c, d, e, f = (zero, zero, zero, zero), (zero, zero, zero, zero), (zero, zero, zero, zero), (zero, zero, zero, zero)
    token = group * 8 + lane // 4
    own = values.to(tl.int64) + (tile.to(tl.int64) * bricks * 8 * 32 + lane) * 16
    own_words = words.to(tl.int64) + (tile.to(tl.int64) * bricks * 32 + lane) * 16
    if WIDE:
        own_x = x.to(tl.int64) + (group.to(tl.int64) * bricks * 8 * 32 + lane) * 16
    else:
        own_x = x.to(tl.int64) + (token.to(tl.int64) * bricks * 256 + lane % 4 * 2) * 2
    for step in range(0, bricks, WARPS):
        brick = step + warp
        there = (brick < bricks).to(tl.int32)
        place, next_place = own + brick.to(tl.int64) * 4096, own + (bricks + brick).to(tl.int64) * 4096
        m = tl.inline_asm_elementwise(_ONE, _OUTS_4, [own_words + brick * 512, there], _INTS_4, is_pure=False, pack=1)
        n = tl.inline_asm_elementwise(
            _ONE, _OUTS_4, [own_words + (bricks + brick) * 512, there], _INTS_4, is_pure=False, pack=1
        )
        a = tl.inline_asm_elementwise(_EIGHT, _OUTS_32, [place, there], _INTS_32, is_pure=False, pack=1)
        h = tl.inline_asm_elementwise(_EIGHT, _OUTS_32, [next_place, there], _INTS_32, is_pure=False, pack=1)
        tl.debug_barrier()  # or the assembler waits for each weight before it asks for the next, to save registers
        if WIDE:
            near = own_x + brick.to(tl.int64) * 4096
            b = tl.inline_asm_elementwise(_INPUTS, _OUTS_32, [near, there], _INTS_32, is_pure=False, pack=1)
            g = tl.inline_asm_elementwise(
                _INPUTS, _OUTS_32, [near + bricks * 4096, there], _INTS_32, is_pure=False, pack=1
            )
        else:
            near = ((brick < bricks) & (token < tokens)).to(tl.int32)
            b = tl.inline_asm_elementwise(_PAIRS, _OUTS_32, [own_x + brick * 512, near], _INTS_32, is_pure=False, pack=1)
        for k in tl.static_range(8):
            c = _multiply(a, b, m, c, k, HALF)
            d = _multiply(h, b, n, d, k, HALF)
            if WIDE:
                e = _multiply(a, g, m, e, k, HALF)
                f = _multiply(h, g, n, f, k, HALF)
    _put(c, bias, y, tile, group * 8, tokens, rows, BIAS, WARPS)
    _put(d, bias, y, tile + 1, group * 8, tokens, rows, BIAS, WARPS)
    if WIDE:
        _put(e, bias, y, tile, group * 8 + 8, tokens, rows, BIAS, WARPS)
        _put(f, bias, y, tile + 1, group * 8 + 8, tokens, rows, BIAS, WARPS)


@triton.jit
def _prepare_kernel(x, out, tokens, columns, bricks, SIZE: tl.constexpr):
    """Inputs in pairs, in the order in which the tensor cores want them: for many tokens, reading them would take too long."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    lane = at // 4 % 32
    token = at // (bricks * 1024) * 8 + lane // 4
    column = at // 128 % (bricks * 8) * 32 + at % 4 * 8 + lane % 4 * 2
    inside = (token < tokens) & (column < columns)
    tl.store(out + at, tl.load(x + (token * columns + column) // 2, mask=inside, other=0))


def bricks(x: Tensor, values: Tensor, words: Tensor, bias: Tensor | None, rows: int, warps: int = 0) -> Tensor:
    (tokens, columns), (tiles, deep) = x.shape, values.shape[:2]
    wide = tokens > 8
    warps = warps or (8 if tiles < 512 else 4)
    groups = -(-tokens // 16) * 2 if wide else 1
    if wide:
        seen = torch.empty(groups * deep * 1024, dtype=torch.int32, device=x.device)
        _prepare_kernel[(groups * deep,)](x.view(torch.int32), seen, tokens, columns, deep, 1024)
    else:
        seen = F.pad(x, (0, deep * 256 - columns)) if columns != deep * 256 else x
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    _bricks_kernel[(tiles // 2, max(1, groups // 2))](
        values, words, seen, values if bias is None else bias, y, tokens, rows, deep,
        bias is not None, x.dtype == torch.float16, wide, warps, num_warps=warps,
    )  # fmt: skip
    return y


# ---------------------------------------------------------------- lists of columns, one token


# Not tl.load: that would send everything through shared memory, to have the addresses in another order.
_GATHER = tl.constexpr("{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0; @p ld.global.u16 $0, [$1]; }")


@triton.jit
def _lists_kernel(values, index, x, bias, y, rows, columns, each, BIAS: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr):
    """One warp for each row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x += tl.program_id(1).to(tl.int64) * columns
    begin = row.to(tl.int64)[:, None] * each
    total = tl.zeros([ROWS, 256], tl.float32)
    for k in range(0, each, 256 * TURNS):
        held, index_of = (), ()
        for turn in tl.static_range(TURNS):  # ask for all of it first
            place = k + turn * 256 + tl.arange(0, 256)[None, :]
            inside = (place < each) & (row < rows)[:, None]
            held = held + (tl.load(values + begin + place, mask=inside, other=0.0),)
            index_of = index_of + (tl.load(index + begin + place, mask=inside, other=-1),)
        tl.debug_barrier()  # or the assembler waits for each before it asks for the next, to save registers
        for turn in tl.static_range(TURNS):
            column = index_of[turn].to(tl.int32) & 0xFFFF
            at = x.to(tl.int64) + column.to(tl.int64) * 2
            bits = tl.inline_asm_elementwise(_GATHER, "=&r,l,r,r", [at, column, columns], tl.int32, is_pure=True, pack=1)
            if y.dtype.element_ty == tl.bfloat16:
                seen = (bits << 16).to(tl.float32, bitcast=True)
            else:
                seen = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            total += held[turn].to(tl.float32) * seen
    out = tl.sum(total, 1)
    if BIAS:
        out += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(1).to(tl.int64) * rows + row, out.to(y.dtype.element_ty), mask=row < rows)


@triton.jit
def _lists_next(values, index, item, chunks, each, rows, HIGH: tl.constexpr, TURNS: tl.constexpr):
    row = (item // chunks) * HIGH + tl.arange(0, HIGH)
    begin = row.to(tl.int64)[:, None] * each
    held, found = (), ()
    for turn in tl.static_range(TURNS):
        place = (item % chunks * TURNS + turn) * 256 + tl.arange(0, 256)[None, :]
        inside = (place < each) & (row < rows)[:, None]
        held = held + (tl.load(values + begin + place, mask=inside, other=0.0),)
        found = found + (tl.load(index + begin + place, mask=inside, other=-1),)
    return held, found


@triton.jit
def _lists_walk(values, index, x, bias, y, rows, columns, each, chunks, groups, BIAS: tl.constexpr, HIGH: tl.constexpr, TURNS: tl.constexpr):
    x += tl.program_id(1).to(tl.int64) * columns
    y += tl.program_id(1).to(tl.int64) * rows
    total = tl.zeros([HIGH, 256], tl.float32)
    first = tl.program_id(0)
    held, found = _lists_next(values, index, first * chunks, chunks, each, rows, HIGH, TURNS)
    for group in range(first, groups, tl.num_programs(0)):
        for chunk in range(chunks):
            now, column_of = held, found
            after = tl.where(chunk + 1 < chunks, group * chunks + chunk + 1, (group + tl.num_programs(0)) * chunks)
            held, found = _lists_next(values, index, after, chunks, each, rows, HIGH, TURNS)
            tl.debug_barrier()
            for turn in tl.static_range(TURNS):
                column = column_of[turn].to(tl.int32) & 0xFFFF
                at = x.to(tl.int64) + column.to(tl.int64) * 2
                bits = tl.inline_asm_elementwise(_GATHER, "=&r,l,r,r", [at, column, columns], tl.int32, is_pure=False, pack=1)
                if y.dtype.element_ty == tl.bfloat16:
                    seen = (bits << 16).to(tl.float32, bitcast=True)
                else:
                    seen = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
                total += now[turn].to(tl.float32) * seen
        row = group * HIGH + tl.arange(0, HIGH)
        out = tl.sum(total, 1)
        if BIAS:
            out += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
        tl.store(y + row, out.to(y.dtype.element_ty), mask=row < rows)
        total = tl.zeros([HIGH, 256], tl.float32)


def walk(x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, high: int = 4, turns: int = 0, programs: int = 1056) -> Tensor:
    (tokens, columns), (rows, each) = x.shape, values.shape
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    turns = turns or min(2, -(-each // 256))
    groups = -(-rows // high)
    _lists_walk[(min(groups, programs), tokens)](
        values, index, x, values if bias is None else bias, y, rows, columns, each, -(-each // (256 * turns)), groups, bias is not None, high, turns, num_warps=high
    )
    return y


def lists(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, high: int = 4, turns: int = 0, warps: int = 4
) -> Tensor:
    (tokens, columns), (rows, each) = x.shape, values.shape
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    turns = turns or min(4, -(-each // 256))
    _lists_kernel[(-(-rows // high), tokens)](
        values,
        index,
        x,
        values if bias is None else bias,
        y,
        rows,
        columns,
        each,
        bias is not None,
        high,
        turns,
        num_warps=high,
    )
    return y


# ---------------------------------------------------------------- inputs that are zero, one token


@triton.jit
def _skips_kernel(weight, x, parts, rows, columns, each, HIGH: tl.constexpr):
    """The rows of the transposed weight whose input is not zero, added up; the others are not read."""
    out = tl.program_id(0) * 256 + tl.arange(0, 256)
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, columns)
    row = begin + tl.arange(0, HIGH)
    total = tl.zeros([HIGH, 256], tl.float32)
    seen = tl.load(x + row, mask=row < end, other=0.0)
    for _ in range(begin, end, HIGH):
        read = (seen != 0)[:, None] & (out < rows)[None, :]
        w = tl.load(weight + row.to(tl.int64)[:, None] * rows + out[None, :], mask=read, other=0.0)
        after = row + HIGH
        seen = tl.load(x + after, mask=after < end, other=0.0)
        tl.debug_barrier()  # the next inputs are asked for before the weights are waited for
        factor = tl.load(x + row, mask=row < end, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * factor[:, None]
        row = after
    tl.store(parts + tl.program_id(1).to(tl.int64) * rows + out, tl.sum(total, 0), mask=out < rows)


@triton.jit
def _fold_kernel(parts, bias, y, rows, pieces, BIAS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    out = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for k in range(0, pieces, HIGH):
        piece = k + tl.arange(0, HIGH)
        read = (piece < pieces)[:, None] & (out < rows)[None, :]
        total += tl.load(parts + piece[:, None] * rows + out[None, :], mask=read, other=0.0)
    done = tl.sum(total, 0)
    if BIAS:
        done += tl.load(bias + out, mask=out < rows, other=0.0).to(tl.float32)
    tl.store(y + out, done.to(y.dtype.element_ty), mask=out < rows)


def skips(x: Tensor, weight: Tensor, bias: Tensor | None, programs: int = 528, high: int = 32, warps: int = 4) -> Tensor:
    columns, rows = weight.shape
    across = -(-rows // 256)
    each = max(1, -(-columns // max(1, programs // across) // high)) * high
    pieces = -(-columns // each)
    parts = torch.empty(pieces, rows, dtype=torch.float32, device=x.device)
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _skips_kernel[(across, pieces)](weight, x, parts, rows, columns, each, high, num_warps=warps)
    _fold_kernel[(-(-rows // 64),)](parts, parts if bias is None else bias, y, rows, pieces, bias is not None, 32, 64)
    return y


# ---------------------------------------------------------------- blocks, many tokens


@triton.jit
def _squares_kernel(
    x, values, index, starts, order, bias, y, tokens, rows, columns,
    BIAS: tl.constexpr, EVEN: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One row of blocks by TOKENS tokens, computed upside down: the tensor cores like the long side last."""
    block_row = tl.load(order + tl.program_id(0))
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.arange(0, DEEP)
    out = tl.arange(0, HIGH)
    begin, end = tl.load(starts + block_row), tl.load(starts + block_row + 1)
    from_x = x + token.to(tl.int64)[:, None] * columns + inner[None, :]
    from_w = values + out[:, None] * DEEP + inner[None, :]
    total = tl.zeros([HIGH, TOKENS], tl.float32)
    for piece in range(begin, end):
        column = tl.load(index + piece) * DEEP
        if EVEN:
            seen = tl.load(from_x + column)
        else:
            seen = tl.load(from_x + column, mask=(token < tokens)[:, None], other=0.0)
        w = tl.load(from_w + piece.to(tl.int64) * (HIGH * DEEP))
        total = tl.dot(w, tl.trans(seen), total)
    row = block_row * HIGH + out
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    place = y + token.to(tl.int64)[:, None] * rows + row[None, :]
    done = tl.trans(total.to(y.dtype.element_ty))
    if EVEN:
        tl.store(place, done)
    else:
        tl.store(place, done, mask=(token < tokens)[:, None])


@triton.jit
def _squares_tma_kernel(
    x, values, index, starts, order, bias, y, tokens, rows,
    BIAS: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The same with tiles that the copy engine moves: x, values and y are descriptors."""
    block_row = tl.load(order + tl.program_id(0))
    first = tl.program_id(1) * TOKENS
    begin, end = tl.load(starts + block_row), tl.load(starts + block_row + 1)
    total = tl.zeros([HIGH, TOKENS], tl.float32)
    for piece in range(begin, end):
        column = tl.load(index + piece) * DEEP
        seen = x.load([first, column])
        w = values.load([piece * HIGH, 0])
        total = tl.dot(w, tl.trans(seen), total)
    if BIAS:
        total += tl.load(bias + block_row * HIGH + tl.arange(0, HIGH)).to(tl.float32)[:, None]
    y.store([first, block_row * HIGH], tl.trans(total.to(y.dtype)))


def squares(
    x: Tensor, values: Tensor, index: Tensor, starts: Tensor, order: Tensor, bias: Tensor | None, rows: int,
    wide: int = 0, warps: int = 0, stages: int = 0, tma: bool = False,
) -> Tensor:  # fmt: skip
    (tokens, columns), (_, high, deep) = x.shape, values.shape
    wide = wide or (256 if tokens >= 2048 else 128 if tokens >= 128 else 64)
    warps = warps or (8 if high * wide >= 128 * 256 else 4)
    stages = stages or 4
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    grid = (len(order), -(-tokens // wide))
    extra = values if bias is None else bias
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        _squares_tma_kernel[grid](
            TensorDescriptor.from_tensor(x, [wide, deep]),
            TensorDescriptor.from_tensor(values.view(-1, deep), [high, deep]),
            index, starts, order, extra, TensorDescriptor.from_tensor(y, [wide, high]), tokens, rows,
            bias is not None, high, deep, wide, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return y
    _squares_kernel[grid](
        x, values, index, starts, order, extra, y, tokens, rows, columns,
        bias is not None, tokens % wide == 0, high, deep, wide, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
