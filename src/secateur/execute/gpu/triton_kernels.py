# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""Triton kernels for the GPU formats. Imported when one of them is first run, since Triton may not be installed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _early(device: torch.device) -> bool:
    """Returns True if a kernel may start before the preceding one has finished and wait for it later (Hopper and newer)."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


# ---------------------------------------------------------------- sparse24_mma: 2:4, few tokens


def _load(times: int, apart: int, what: str, width: int, empty: int = 0) -> tl.constexpr:
    """Returns PTX for `times` loads of `width` registers, `apart` bytes apart; `empty` in all if the last argument is 0."""
    outs = [f"${i}" for i in range(width * times)]
    parts = [outs[width * i : width * (i + 1)] for i in range(times)]
    names = [f"{{{', '.join(part)}}}" if width > 1 else part[0] for part in parts]
    reads = "".join(f"@p ld.global{what} {name}, [${len(outs)} + {apart * i}]; " for i, name in enumerate(names))
    fill = "".join(f"mov.u32 {out}, {empty}; " for out in outs)
    return tl.constexpr(f"{{ .reg .pred p; setp.ne.u32 p, ${len(outs) + 1}, 0; {fill}{reads}}}")


# Weights are read only once, so they bypass the L1 cache. All loads of a step are issued together.
_ONCE = ".L1::no_allocate.L2::256B.v4.u32"
_NO_PLACES = 0x44444444  # the first two places of every group, for a tile that is not there: mma.sp does not define zeros
_ONE, _EIGHT = _load(1, 512, _ONCE, 4, _NO_PLACES), _load(8, 512, _ONCE, 4)
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
    """Adds 16 rows by 32 columns (half of them stored) times 32 by 8 to c. Each thread of a warp holds a part."""
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
    """Sums the warps' results for one tile of 16 rows by 8 tokens and writes it."""
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
def _sparse24_mma_kernel(
    values, words, x, bias, y, tokens, rows, across,
    EARLY: tl.constexpr, BIAS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Computes two tiles of 16 rows by 8 tokens (16 if WIDE). The warps split the columns among them.

    Each tensor in this kernel has one element per thread, as the fragment layout of the instruction requires.
    """
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    tile = tl.program_id(0) * 2
    group = tl.program_id(1) * (2 if WIDE else 1)
    zero = tl.zeros([32 * WARPS], tl.float32)
    c, d, e, f = (zero, zero, zero, zero), (zero, zero, zero, zero), (zero, zero, zero, zero), (zero, zero, zero, zero)
    token = group * 8 + lane // 4
    own = values.to(tl.int64) + (tile.to(tl.int64) * across * 8 * 32 + lane) * 16
    own_words = words.to(tl.int64) + (tile.to(tl.int64) * across * 32 + lane) * 16
    if WIDE:
        own_x = x.to(tl.int64) + (group.to(tl.int64) * across * 8 * 32 + lane) * 16
    else:
        own_x = x.to(tl.int64) + (token.to(tl.int64) * across * 256 + lane % 4 * 2) * 2
    for step in range(0, across, WARPS):
        column_tile = step + warp
        there = (column_tile < across).to(tl.int32)
        place, next_place = own + column_tile.to(tl.int64) * 4096, own + (across + column_tile).to(tl.int64) * 4096
        m = tl.inline_asm_elementwise(_ONE, _OUTS_4, [own_words + column_tile * 512, there], _INTS_4, is_pure=False, pack=1)
        n = tl.inline_asm_elementwise(
            _ONE, _OUTS_4, [own_words + (across + column_tile) * 512, there], _INTS_4, is_pure=False, pack=1
        )
        a = tl.inline_asm_elementwise(_EIGHT, _OUTS_32, [place, there], _INTS_32, is_pure=False, pack=1)
        h = tl.inline_asm_elementwise(_EIGHT, _OUTS_32, [next_place, there], _INTS_32, is_pure=False, pack=1)
        tl.debug_barrier()  # keeps the assembler from waiting for each load before issuing the next
        if EARLY:
            tl.extra.cuda.gdc_wait()  # until the inputs are written
        if WIDE:
            near = own_x + column_tile.to(tl.int64) * 4096
            b = tl.inline_asm_elementwise(_INPUTS, _OUTS_32, [near, there], _INTS_32, is_pure=False, pack=1)
            g = tl.inline_asm_elementwise(_INPUTS, _OUTS_32, [near + across * 4096, there], _INTS_32, is_pure=False, pack=1)
        else:
            near = ((column_tile < across) & (token < tokens)).to(tl.int32)
            b = tl.inline_asm_elementwise(_PAIRS, _OUTS_32, [own_x + column_tile * 512, near], _INTS_32, is_pure=False, pack=1)
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
def _prepare_kernel(x, out, tokens, columns, across, EARLY: tl.constexpr, SIZE: tl.constexpr):
    """Reorders the inputs, as pairs, into the order in which the tensor cores read them (only for more than eight tokens)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    lane = at // 4 % 32
    token = at // (across * 1024) * 8 + lane // 4
    column = at // 128 % (across * 8) * 32 + at % 4 * 8 + lane % 4 * 2
    inside = (token < tokens) & (column < columns)
    tl.store(out + at, tl.load(x + (token * columns + column) // 2, mask=inside, other=0))


def sparse24_mma(x: Tensor, values: Tensor, words: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    (tokens, columns), (down, across) = x.shape, values.shape[:2]
    wide = tokens > 8
    early = wide and _early(x.device)
    warps = 8 if across >= 32 and down < 512 else 4
    groups = -(-tokens // 16) * 2 if wide else 1
    if wide:
        seen = torch.empty(groups * across * 1024, dtype=torch.int32, device=x.device)
        launch(_prepare_kernel, (groups * across, 1), (x.view(torch.int32), seen), (tokens, columns, across), (early, 1024))
    else:
        seen = F.pad(x, (0, across * 256 - columns)) if columns != across * 256 else x
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    launch(
        _sparse24_mma_kernel, (down // 2, max(1, groups // 2)),
        (values, words, seen, values if bias is None else bias, y), (tokens, rows, across),
        (early, bias is not None, x.dtype == torch.float16, wide, warps), num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return y


# ---------------------------------------------------------------- padded_rows: one token


# Inline assembly, because tl.load would move the addresses through shared memory to change their layout.
_GATHER = tl.constexpr("{ .reg .pred p; setp.lt.u32 p, $2, $3; mov.u32 $0, 0; @p ld.global.u16 $0, [$1]; }")


@triton.jit
def _load_part(values, index, item, chunks, each, rows, HIGH: tl.constexpr, TURNS: tl.constexpr):
    """Loads a part of HIGH rows: weights and their columns, in TURNS pieces of 256."""
    row = item // chunks * HIGH + tl.arange(0, HIGH)
    begin = row.to(tl.int64)[:, None] * each
    held, found = (), ()
    for turn in tl.static_range(TURNS):
        place = (item % chunks * TURNS + turn) * 256 + tl.arange(0, 256)[None, :]
        inside = (place < each) & (row < rows)[:, None]
        held = held + (tl.load(values + begin + place, mask=inside, other=0.0),)  # noqa: RUF005 - Triton does not support unpacking
        found = found + (tl.load(index + begin + place, mask=inside, other=-1),)  # noqa: RUF005
    return held, found


@triton.jit
def _padded_rows_kernel(
    values, index, x, bias, y, rows, columns, each, chunks, groups,
    EARLY: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr, HIGH: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Computes rows, one warp each. With AHEAD, a program continues with further rows and loads them in advance."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    x += tl.program_id(1).to(tl.int64) * columns
    y += tl.program_id(1).to(tl.int64) * rows
    if AHEAD:
        held, found = _load_part(values, index, tl.program_id(0) * chunks, chunks, each, rows, HIGH, TURNS)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        total = tl.zeros([HIGH, 256], tl.float32)
        for chunk in range(chunks):
            if AHEAD:
                now, where = held, found
                after = tl.where(chunk + 1 < chunks, group * chunks + chunk + 1, (group + tl.num_programs(0)) * chunks)
                held, found = _load_part(values, index, after, chunks, each, rows, HIGH, TURNS)
                tl.debug_barrier()  # keeps the assembler from delaying the loads
            else:
                now, where = _load_part(values, index, group * chunks + chunk, chunks, each, rows, HIGH, TURNS)
                if EARLY:
                    tl.debug_barrier()
            if EARLY:
                tl.extra.cuda.gdc_wait()  # until the inputs are written
            for turn in tl.static_range(TURNS):
                column = where[turn].to(tl.int32) & 0xFFFF
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


def padded_rows(x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None) -> Tensor:
    (tokens, columns), (rows, each) = x.shape, values.shape
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    turns = 1 if each <= 256 else 2 if each <= 512 else 4
    high, groups, programs = 4, -(-rows // 4), 8 * _multiprocessors(x.device)
    ahead, early = groups > programs, _early(x.device)
    launch(
        _padded_rows_kernel, (programs if ahead else groups, tokens),
        (values, index, x, values if bias is None else bias, y), (rows, columns, each, -(-each // (256 * turns)), groups),
        (early, bias is not None, ahead, high, turns), num_warps=high, launch_pdl=early,
    )  # fmt: skip
    return y


# ---------------------------------------------------------------- input_sparse: one token


@triton.jit
def _next_rows(listed, first, count, TURNS: tl.constexpr, WARPS: tl.constexpr):
    """Returns the next rows to read: one for each warp, TURNS times."""
    found = ()
    for turn in tl.static_range(TURNS):
        at = first + turn * WARPS + tl.arange(0, WARPS)
        found = found + (tl.load(listed + at, mask=at < count, other=-1),)  # noqa: RUF005
    return found


@triton.jit
def _input_sparse_kernel(
    weight, x, listed, parts, rows, columns,
    EARLY: tl.constexpr, EACH: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sums the rows of the transposed weight whose input is not zero. The other rows are not read."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    out = tl.program_id(0) * 256 + tl.arange(0, 256)
    own = tl.program_id(1) * EACH + tl.arange(0, EACH)
    kept = tl.load(x + own, mask=own < columns, other=0.0) != 0
    listed += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * EACH
    tl.store(listed + tl.cumsum(kept.to(tl.int32), 0) - 1, own, mask=kept)
    count = tl.sum(kept.to(tl.int32))
    tl.debug_barrier()
    total = tl.zeros([WARPS, 256], tl.float32)
    after = _next_rows(listed, 0, count, TURNS, WARPS)
    for first in range(0, count, WARPS * TURNS):
        now, held = after, ()
        for turn in tl.static_range(TURNS):
            row = now[turn]
            place = weight + row.to(tl.int64)[:, None] * rows + out[None, :]
            held = held + (tl.load(place, mask=(row >= 0)[:, None] & (out < rows)[None, :], other=0.0),)  # noqa: RUF005
        after = _next_rows(listed, first + WARPS * TURNS, count, TURNS, WARPS)
        tl.debug_barrier()  # keeps the assembler from waiting for each row before loading the next
        for turn in tl.static_range(TURNS):
            factor = tl.load(x + now[turn], mask=now[turn] >= 0, other=0.0)
            total += held[turn].to(tl.float32) * factor.to(tl.float32)[:, None]
    tl.store(parts + tl.program_id(1).to(tl.int64) * rows + out, tl.sum(total, 0), mask=out < rows)


@triton.jit
def _fold_kernel(parts, bias, y, rows, pieces, EARLY: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Sums the partial results of `pieces` programs and adds the bias."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
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


def input_sparse(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    columns, rows = weight.shape
    each, turns, warps = 128 if columns <= 1 << 14 else 512, 8, 1
    across, pieces = -(-rows // 256), -(-columns // each)
    listed = torch.empty(across * pieces * each, dtype=torch.int32, device=x.device)
    parts = torch.empty(pieces, rows, dtype=torch.float32, device=x.device)
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    early = _early(x.device)
    sizes = early, each, turns, warps
    launch(_input_sparse_kernel, (across, pieces), (weight, x, listed, parts), (rows, columns), sizes, num_warps=warps)
    launch(
        _fold_kernel, (-(-rows // 32), 1), (parts, parts if bias is None else bias, y), (rows, pieces),
        (early, bias is not None, 128, 32), launch_pdl=early,
    )  # fmt: skip
    return y


# ---------------------------------------------------------------- dense_blocks: many tokens


@triton.jit
def _dense_blocks_kernel(
    x, values, index, starts, order, bias, y, tokens, rows, columns,
    BIAS: tl.constexpr, ENGINE: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes one row of blocks by TOKENS tokens, transposed, because tensor cores are faster with the long side last.

    With ENGINE, x, values and y are tensor descriptors, and the GPU's copy engine moves the tiles.
    """
    block_row = tl.load(order + tl.program_id(0))
    first = tl.program_id(1) * TOKENS
    begin, end = tl.load(starts + block_row), tl.load(starts + block_row + 1)
    token = first + tl.arange(0, TOKENS)
    inner, out = tl.arange(0, DEEP), tl.arange(0, HIGH)
    total = tl.zeros([HIGH, TOKENS], tl.float32)
    for piece in range(begin, end):
        column = tl.load(index + piece) * DEEP
        if ENGINE:
            seen = x.load([first, column])
            w = values.load([piece * HIGH, 0])
        else:
            place = x + token.to(tl.int64)[:, None] * columns + column + inner[None, :]
            seen = tl.load(place, mask=(token < tokens)[:, None], other=0.0)
            w = tl.load(values + piece.to(tl.int64) * (HIGH * DEEP) + out[:, None] * DEEP + inner[None, :])
        total = tl.dot(w, tl.trans(seen), total)
    if BIAS:
        total += tl.load(bias + block_row * HIGH + out).to(tl.float32)[:, None]
    if ENGINE:
        y.store([first, block_row * HIGH], tl.trans(total.to(y.dtype)))
    else:
        place = y + token.to(tl.int64)[:, None] * rows + block_row * HIGH + out[None, :]
        tl.store(place, tl.trans(total.to(y.dtype.element_ty)), mask=(token < tokens)[:, None])


def dense_blocks(
    x: Tensor, values: Tensor, index: Tensor, starts: Tensor, order: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    (tokens, columns), (_, high, deep) = x.shape, values.shape
    wide = 256 if high == 64 and tokens >= 2048 else 128 if tokens >= 128 else 64
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    grid = (len(order), -(-tokens // wide))
    engine = torch.cuda.get_device_capability(x.device) >= (9, 0)
    tiles: tuple[Any, Any, Any] = (x, values, y)
    if engine:
        from triton.tools.tensor_descriptor import TensorDescriptor

        tiles = (
            TensorDescriptor.from_tensor(x, [wide, deep]),
            TensorDescriptor.from_tensor(values.view(-1, deep), [high, deep]),
            TensorDescriptor.from_tensor(y, [wide, high]),
        )
    with torch.cuda.device(x.device):  # Triton launches on the current device
        _dense_blocks_kernel[grid](
            tiles[0], tiles[1], index, starts, order, values if bias is None else bias, tiles[2], tokens, rows, columns,
            bias is not None, engine, high, deep, wide, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y
