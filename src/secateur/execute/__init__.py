"""Compressed models: pruned layers in sparse formats, chosen by measurement, and back again."""

from . import csr, gpu, mosaic, pairs, single, tiled
from .choose import compress_, decompress_
from .layers import Compressed
from .result import Compression
from .timing import Bench, bench

__all__ = [
    "Bench", "Compressed", "Compression", "bench", "compress_", "csr", "decompress_", "gpu", "mosaic", "pairs", "single",
    "tiled",
]  # fmt: skip
