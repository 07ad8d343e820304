"""Formats for one input row (up to four), where the time is that of reading the weights from memory.

`gather`: any pattern; `runs`: blocks along a row; `panels`: blocks of rows; `columns`: a dense weight whose inputs are partly
zero (`gate_`); `dense`: all weights, in fewer bits. `bitmask` and `windows` have their own files. Values may be stored in half
precision or in fewer bits with scales (`Values`); sums are always float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..values import GROUPS, KINDS
from .find import Zeros, fill, owners
from .formats import PLAIN, Buffers, Format, FormatOptions, Scales, Use, register
from .native import build
from .native.build import Kernel
from .tiled import DTYPES, as_float, kernels_for, scratch

FEW = 4  # input rows up to which these formats are tried
MORE = 32  # the same for values in fewer bits; with more rows, the matrix is unpacked for a dense product
GROUP = 8  # weights that a vector instruction multiplies at once
COLUMNS = 1 << 16  # most columns, because column numbers have two bytes
UNIT = 64  # columns of `dense` that the kernel multiplies together
BY_ROW = tuple(KINDS)  # values with one scale for each row
BY_GROUP = tuple(f"{kind}/{group}" for kind in KINDS for group in GROUPS)


def usable(use: Use, *features: str) -> bool:
    few = FEW if use.values is None else MORE
    return use.kind == "linear" and use.device == "cpu" and max(use.rows) <= few and build.has(*features)


def padded(x: Tensor, multiple: int = GROUP) -> Tensor:
    """Returns the inputs as contiguous float32, with zeros up to a multiple of this number of columns."""
    more = -x.shape[1] % multiple
    return x if x.dtype == torch.float32 and not more and x.is_contiguous() else F.pad(x.float(), (0, more)).contiguous()


def by_rows(
    kernel: Kernel, held: Sequence[int], x: Tensor, bias: Tensor | None, rows: int, seen: Tensor | None = None
) -> Tensor:
    """Runs the kernel on each row of `seen`, by default the padded inputs, and returns the results in the dtype of x.

    `held` are the kernel's arguments after the addresses of inputs, bias and results.
    """
    seen, threads = padded(x) if seen is None else seen, torch.get_num_threads()
    batch, width = seen.shape
    extra = as_float(bias, rows)
    y = seen.new_empty_strided((batch, rows), (rows, 1))
    one, each, out = seen.data_ptr(), extra.data_ptr(), y.data_ptr()
    for i in range(batch):
        build.run(kernel, (one + i * width * 4, each, out + i * rows * 4, *held), threads)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def stored_as(x: Tensor, values: Tensor, scales: Scales | None) -> tuple[str, int] | None:
    """Returns what kernels are generated for: the kind of the values, and the columns of a scale (see `native.single`).

    None if no kernel can multiply these tensors.
    """
    if scales is None:
        return (DTYPES[values.dtype], -1) if kernels_for(x, values) else None
    here = (
        len(x) <= MORE
        and kernels_for(x, x)
        and values.is_cpu
        and (scales.values.kind != "float8_e4m3fn" or build.reads_halves())
    )
    return (scales.values.kind, scales.values.group) if here else None


def scales_of(scales: Scales | None) -> tuple[int, int]:
    """Returns the address of the scales and their number in each row, the last arguments of a kernel."""
    return (0, 0) if scales is None else (scales.bits.data_ptr(), scales.bits.shape[1])


def _starts(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _unsigned(numbers: Tensor) -> Tensor:
    """Returns two-byte numbers, which torch stores with a sign, as int64 without one."""
    return numbers.long() & 0xFFFF


def _linear(
    kernel: str,
    x: Tensor,
    buffers: Buffers,
    bias: Tensor | None,
    rows: int,
    options: FormatOptions,
    scales: Scales | None = None,
) -> Tensor | None:
    """The product by a kernel that takes the number of rows, or of panels of `options[0]` rows, and all buffers."""
    stored = stored_as(x, buffers[0], scales)
    if stored is None:
        return None
    held = rows // (options[0] if options else 1), *map(Tensor.data_ptr, buffers), *scales_of(scales)
    return by_rows(build.kernel(f"single.{kernel}", *options, *stored), held, x, bias, rows)


# ---------------------------------------------------------------- gather


def _gather_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if usable(use) and zeros.sparsity > 0.5 and matrix.shape[1] <= COLUMNS:
        yield ()


def _gather_pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    row, column = (matrix != 0).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(matrix))
    place = torch.arange(len(row), device=row.device)
    rank = place - (counts.cumsum(0) - counts)[row]
    leader = column[place - rank % GROUP] if len(row) else column
    far = (column - leader) // 256  # columns more than a byte away start another group
    new = torch.ones(len(row), dtype=torch.bool, device=row.device)
    new[1:] = (rank % GROUP == 0)[1:] | (far[1:] != far[:-1]) | (row[1:] != row[:-1])
    group = new.cumsum(0) - 1
    begins = new.nonzero().flatten()
    lane = place - begins[group]
    values = matrix.new_zeros((len(begins), GROUP))
    index = matrix.new_zeros((len(begins), GROUP), dtype=torch.uint8)
    values[group, lane] = matrix[row, column]
    index[group, lane] = (column - column[begins][group]).to(torch.uint8)
    first = column[begins].to(torch.int16)
    return values.flatten(), index.flatten(), first, _starts(torch.bincount(row[begins], minlength=len(matrix)))


def _gather_unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, index, first, starts = buffers
    row = owners(starts, len(first))
    column = _unsigned(first).unsqueeze(1) + index.view(-1, GROUP)
    matrix = torch.zeros(rows, columns, dtype=values.dtype, device=values.device)
    kept = values.view(-1, GROUP) != 0  # the others are padding
    matrix[row.unsqueeze(1).expand_as(column)[kept], column[kept]] = values.view(-1, GROUP)[kept]
    return matrix


GATHER = register(
    Format(
        "gather", ("values", "index", "first", "starts"), _gather_fits, _gather_pack, _gather_unpack,
        partial(_linear, "gather"), takes=(PLAIN, *BY_ROW),
    )
)  # fmt: skip

# ---------------------------------------------------------------- runs


def _runs_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if usable(use) and zeros.sparsity > 0.1 and matrix.shape[1] <= COLUMNS and fill(matrix != 0, 1, GROUP) > 0.6:
        yield ()


def _runs_pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    rows, columns = matrix.shape
    parts = F.pad(matrix, (0, -columns % GROUP)).view(rows, -1, GROUP)
    row, part = (parts != 0).any(-1).nonzero(as_tuple=True)
    return parts[row, part].flatten(), (part * GROUP).to(torch.int16), _starts(torch.bincount(row, minlength=rows))


def _runs_unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, first, starts = buffers
    parts = torch.zeros(rows, -(-columns // GROUP), GROUP, dtype=values.dtype, device=values.device)
    row = owners(starts, len(first))
    parts[row, _unsigned(first) // GROUP] = values.view(-1, GROUP)
    return parts.flatten(1)[:, :columns].contiguous()


RUNS = register(
    Format(
        "runs", ("values", "first", "starts"), _runs_fits, _runs_pack, _runs_unpack, partial(_linear, "runs"),
        takes=(PLAIN, *BY_ROW, *BY_GROUP),
    )
)  # fmt: skip

# ---------------------------------------------------------------- panels


def _panels_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if usable(use) and zeros.sparsity > 0.1 and matrix.shape[1] <= COLUMNS:
        yield from ((height,) for height in (16, 8) if fill(matrix != 0, height, 1) > 0.6)


def _panels_pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    (height,) = options
    tall = matrix.reshape(-1, height, matrix.shape[1])
    panel, column = (tall != 0).any(1).nonzero(as_tuple=True)
    counts = torch.bincount(panel, minlength=len(tall))
    return tall[panel, :, column].flatten(), column.to(torch.int16), _starts(counts)


def _panels_unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    (height,), (values, index, starts) = options, buffers
    panel = owners(starts, len(index))
    tall = torch.zeros(rows // height, columns, height, dtype=values.dtype, device=values.device)
    tall[panel, _unsigned(index)] = values.view(-1, height)
    return tall.transpose(1, 2).reshape(rows, columns)


PANELS = register(
    Format(
        "panels", ("values", "index", "starts"), _panels_fits, _panels_pack, _panels_unpack, partial(_linear, "panels"),
        allowed=((16,), (8,)), takes=(PLAIN, *BY_ROW),
    )
)  # fmt: skip

# ---------------------------------------------------------------- columns


def _columns_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if usable(use) and use.input_zeros >= 0.25 and max(use.rows) == 1:
        yield ()


def columns_pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    return (matrix.t().contiguous(),)


def columns_unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    return buffers[0].t().contiguous()


def _columns_linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    (weight,) = buffers
    if len(x) != 1 or not kernels_for(x, weight):
        return F.linear(x, weight.t().to(x.dtype), bias)
    threads, inputs = torch.get_num_threads(), x.shape[1]
    width = max(512, -(-rows // threads // 8) * 8)
    memory = scratch(threads * (inputs + 1) * 2)
    body = build.kernel("single.columns", DTYPES[weight.dtype])
    held = inputs, weight.data_ptr(), rows, width, memory.data_ptr(), (inputs + 1) * 8
    return by_rows(body, held, x, bias, rows)


BY_COLUMNS = register(Format("columns", ("values",), _columns_fits, columns_pack, columns_unpack, _columns_linear))

# ---------------------------------------------------------------- dense, in fewer bits


def _dense_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if usable(use):
        yield ()


def _dense_pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    return (F.pad(matrix, (0, -matrix.shape[1] % UNIT)).contiguous(),)


def _dense_unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    return buffers[0][:, :columns].contiguous()


def _dense_linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    (values,), stored = buffers, stored_as(x, buffers[0], scales)
    if stored is None:
        return None
    held = rows, values.data_ptr(), -(-x.shape[1] // UNIT), *scales_of(scales)
    return by_rows(build.kernel("single.dense", *stored), held, x, bias, rows, padded(x, UNIT))


DENSE = register(
    Format("dense", ("values",), _dense_fits, _dense_pack, _dense_unpack, _dense_linear, takes=(*BY_ROW, *BY_GROUP))
)
