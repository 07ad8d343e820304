"""Lets every test compile as if it were the first one."""

import sys

import pytest


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile refuses code that was compiled too often, such as `nn.Sequential.forward` in other tests."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def each_report_drawn(monkeypatch):
    """Every report of a loop is drawn at once, where otherwise a thread draws now and then."""
    from secateur import progress

    report = progress.Progress.__call__

    def drawn(self, what):
        report(self, what)
        progress._board._next = 0.0
        progress._board.draw()

    monkeypatch.delenv("SECATEUR_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setitem(progress.Progress.__init__.__kwdefaults__, "every", 0.0)
    monkeypatch.setattr(progress.Progress, "__call__", drawn)
