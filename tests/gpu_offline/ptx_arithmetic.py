"""The arithmetic of PTX on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ptx_program import UNSIGNED

Array = np.ndarray


def bf16_to_float(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(value: Array) -> Array:
    """Rounds to the nearest bfloat16, ties to even."""
    bits = value.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


def float_to_e4m3(value: Array) -> Array:
    """Rounds to the nearest float8_e4m3fn, ties to even; larger numbers than 448 become 448."""
    size = np.minimum(np.abs(value.astype(np.float64)), 448.0)
    exponent = np.maximum(np.where(size > 0, np.frexp(size)[1] - 1, -6), -6)
    code = (exponent + 6) * 8 + np.rint(np.ldexp(np.nan_to_num(size), 3 - exponent))
    return np.where(np.isnan(value), 0x7F, code.astype(np.uint8) | np.signbit(value).astype(np.uint8) << 7).astype(np.uint8)


def _shift(left: bool) -> Callable[..., Array]:
    def run(a: Array, b: Array) -> Array:
        size = 8 * a.dtype.itemsize
        far, by = b >= size, np.minimum(b, size - 1).astype(a.dtype)
        if left:
            return np.where(far, 0, a << by).astype(a.dtype)
        return np.where(far & (a.dtype.kind == "u"), 0, a >> by).astype(a.dtype)

    return run


def divide(a: Array, b: Array) -> Array:
    return (np.sign(a) * np.sign(b) * (np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64)))).astype(a.dtype)


def _extract(a: Array, start: Array, length: Array) -> Array:
    """The bit field bfe, for fields inside of the word."""
    size = 8 * a.dtype.itemsize
    up = (size - start.astype(np.int64) - length).astype(np.uint64)
    wide = a.view(UNSIGNED[a.dtype.itemsize]) << up.astype(UNSIGNED[a.dtype.itemsize])
    return wide.view(a.dtype) >> (size - length.astype(np.int64)).astype(a.dtype)


def _permute(a: Array, b: Array, select: Array) -> Array:
    """prmt: each nibble of `select` picks a byte of b:a, or its sign."""
    both, out = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        nibble = select >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return out


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out, lut = np.zeros_like(a), int(np.ravel(table)[0])
    for i in range(8):
        if lut >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _dot(a: Array, b: Array, c: Array) -> Array:
    """dp4a: the sum of the products of four bytes, added to c."""
    return c + (a[:, None].view(np.uint8).astype(c.dtype) * b[:, None].view(np.uint8)).sum(1, dtype=c.dtype)


PLAIN: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "mov": lambda a: a, "cvta": lambda a: a, "shl": _shift(True), "shr": _shift(False), "bfe": _extract, "prmt": _permute,
    "lop3": _lop3, "mad": lambda a, b, c: a * b + c, "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "dp4a": _dot, "rem": lambda a, b: a - divide(a, b) * b,
}  # fmt: skip
COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
