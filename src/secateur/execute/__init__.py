"""Compressed models: pruned layers in sparse formats, chosen by measurement, and back again."""

from ..values import GROUPS, Values
from . import amx_tiles, bitmask, csr, expand, gpu, pairs, quads, single, tiled, windows
from .choose import compress_
from .find import zeros_of
from .formats import FORMATS, OPERATORS, find_format
from .layers import Compressed, why_not
from .restore import decompress_, places, same_bits, ties
from .result import Compression
from .timing import Bench, bench

__all__ = [
    "Bench", "Compressed", "Compression", "amx_tiles", "bench", "bitmask", "compress_", "csr", "decompress_", "expand", "gpu",
    "pairs", "quads", "single", "tiled", "windows",
    "FORMATS", "GROUPS", "Values", "find_format", "places", "same_bits", "ties", "why_not", "zeros_of",  # for secateur.io
    "OPERATORS",  # for secateur.torch_ops
]  # fmt: skip
