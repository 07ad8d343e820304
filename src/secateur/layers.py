"""Layer types of your own: how Secateur reads the weight of a layer that torch does not define."""

from ._layers import input_first

__all__ = ["input_first"]
