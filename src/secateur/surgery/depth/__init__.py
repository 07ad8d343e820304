"""Removes whole blocks: which modules are blocks, which of them change the output least, and the model without them."""

from .remove import RemovedBlocks, copied_without, remove_blocks, skipping

__all__ = ["RemovedBlocks", "copied_without", "remove_blocks", "skipping"]
