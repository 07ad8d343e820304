"""Runs a module in parts: up to one of its layers, and later on from there, without computing anything twice.

`record` runs a module once and writes down its operators as a `Tape`: what each reads and returns, when the weights of
interest are read, and which of them each input depends on. `Parts` repeats the calls of a module. A run can be saved where a
layer is about to be called, which keeps the tensors that later operators read. The next run executes the module's Python code
from its beginning, but the operators before that point return tensors of the right shape without computing them. A run that
reads one of those, or that does not follow the tape, begins again and computes everything.
"""

from .parts import Parts
from .recording import record
from .runs import Call, Enough, Made, Read, Sum, Tape

__all__ = ["Call", "Enough", "Made", "Parts", "Read", "Sum", "Tape", "record"]
