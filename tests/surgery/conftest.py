"""A clock that moves only when a test moves it, for tests of measured latency."""

import pytest


class Clock:
    """Stands for the module `time` in the package's clock."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = thread_time = perf_counter

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("secateur.display.time", made)
    return made
