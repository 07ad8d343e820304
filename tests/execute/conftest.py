"""Caches the kernels of these tests in pytest's cache folder, so that only the first run compiles them."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if config.cache is not None:
        os.environ.setdefault("SECATEUR_CACHE", str(config.cache.mkdir("kernels")))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
