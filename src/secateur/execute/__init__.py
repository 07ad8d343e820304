"""Compressed models: pruned layers in sparse formats, chosen by measurement, and back again."""

from . import amx_tiles, csr, gpu, pairs, single, tiled
from .choose import compress_
from .layers import Compressed
from .restore import decompress_
from .result import Compression
from .timing import Bench, bench

__all__ = [
    "Bench", "Compressed", "Compression", "amx_tiles", "bench", "compress_", "csr", "decompress_", "gpu", "pairs", "single",
    "tiled",
]  # fmt: skip
