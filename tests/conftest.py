"""Lets every test compile as if it were the first one."""

import sys

import pytest


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile refuses code that was compiled too often, such as `nn.Sequential.forward` in other tests."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
