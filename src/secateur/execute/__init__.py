"""Compressed models: pruned layers in sparse formats, chosen by measurement, and back again."""

from . import csr, gpu, mosaic, pairs, single, tiled
from .choose import compress_, decompress_, places, same_bits, ties
from .find import zeros_of
from .formats import FORMATS
from .layers import Compressed, why_not
from .result import Compression
from .timing import Bench, bench

__all__ = [
    "Bench", "Compressed", "Compression", "bench", "compress_", "csr", "decompress_", "gpu", "mosaic", "pairs", "single",
    "tiled",
    "FORMATS", "places", "same_bits", "ties", "why_not", "zeros_of",  # for secateur.io
]  # fmt: skip
