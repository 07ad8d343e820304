import pytest
from pair import Pair
from where import SINGLE


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Two processes, or a single one (see `where`)."""
    processes = Pair(tmp_path_factory.mktemp("meeting"), world=1 if SINGLE else 2)
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def four(request, tmp_path_factory):
    """Four processes, or the single one of `pair`."""
    if SINGLE:
        yield request.getfixturevalue("pair")
        return
    processes = Pair(tmp_path_factory.mktemp("four"), world=4)
    yield processes
    processes.stop()
