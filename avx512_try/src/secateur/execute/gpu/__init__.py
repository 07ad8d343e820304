"""Formats for GPUs: two of four, lists of columns, blocks, gated inputs. Triton and cuSPARSELt are loaded when one is run."""

from . import bricks, cusparselt, plain

__all__ = ["bricks", "cusparselt", "plain"]
