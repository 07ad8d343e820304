"""Sparsifiers: what gets a mask, and which mask."""
