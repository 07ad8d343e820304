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

    def drawn(report):
        def call(self, *args):
            report(self, *args)
            progress._board._next = 0.0
            progress._board.draw()

        return call

    monkeypatch.delenv("SECATEUR_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setitem(progress.Progress.__init__.__kwdefaults__, "every", 0.0)
    for report in ("__call__", "remains"):
        monkeypatch.setattr(progress.Progress, report, drawn(getattr(progress.Progress, report)))
