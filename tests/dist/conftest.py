import pytest
from pair import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    processes = Pair(tmp_path_factory.mktemp("meeting"))
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    processes = Pair(tmp_path_factory.mktemp("four"), world=4)
    yield processes
    processes.stop()
