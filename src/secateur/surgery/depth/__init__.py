"""Removes whole blocks."""

from .remove import shrunk_in_depth, verify_blocks

__all__ = ["shrunk_in_depth", "verify_blocks"]
