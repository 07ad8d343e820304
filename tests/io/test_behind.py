"""Files that are written in another thread hold what was given, and errors of the disk are raised."""

import errno
import fcntl
import hashlib
import os
import resource
import shutil
import subprocess
import sys

import pytest

from secateur.io import replacing_file, writing_behind
from secateur.io.behind import BLOCK

CONTENT = hashlib.shake_128(b"secateur").digest(4097) * (3 * BLOCK // 4097 + 2)


def put(file, size, piece):
    with writing_behind(file) as write:
        for begin in range(0, size, piece):
            write(CONTENT[begin : min(begin + piece, size)])
            write(b"")


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 4095, 3 * BLOCK + 4097])
@pytest.mark.parametrize("piece", [100_003, 2 * BLOCK + 5])
def test_a_file_holds_all_pieces(tmp_path, size, piece):
    with (tmp_path / "f").open("wb") as file:
        put(file, size, piece)
    assert (tmp_path / "f").read_bytes() == CONTENT[:size]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="there is no O_DIRECT")
def test_whole_blocks_pass_the_page_cache_and_the_rest_does_not(tmp_path, monkeypatch):
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    written, own = [], os.write

    def noted(handle, data):
        written.append((len(data), bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)))
        return own(handle, data)

    with (tmp_path / "f").open("wb") as file:
        monkeypatch.setattr(os, "write", noted)
        put(file, 2 * BLOCK + 5, 1 << 20)
    assert written == [(BLOCK, True), (BLOCK, True), (5, False)]


def test_a_file_that_has_bytes_already_is_appended_to(tmp_path):
    """A direct write at this position is refused."""
    with (tmp_path / "f").open("wb") as file:
        file.write(b"head")
        put(file, 2 * BLOCK + 1, 1 << 20)
    assert (tmp_path / "f").read_bytes() == b"head" + CONTENT[: 2 * BLOCK + 1]


ON_A_DISK = """
import errno, os, pathlib, sys
from secateur.io import writing_behind
from secateur.io.behind import BLOCK
path = pathlib.Path(sys.argv[1]) / "f"
try:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    raise SystemExit("direct writes are not refused")
except OSError as error:
    assert error.errno == errno.EINVAL, error
with path.open("wb") as file, writing_behind(file) as write:
    write(bytes(range(256)) * (BLOCK // 128) + b"tail")
assert path.read_bytes() == bytes(range(256)) * (BLOCK // 128) + b"tail"
"""


def test_a_file_system_without_direct_writes(tmp_path):
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-ec", 'mount -t ramfs none "$0" && exec "$@"', str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    done = subprocess.run([*mount, sys.executable, "-c", ON_A_DISK, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [1, BLOCK, 3 * BLOCK + 1])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_an_error(size):
    with open("/dev/full", "wb") as file, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        put(file, size, 1 << 20)


def replace(path, size, error=None):
    with replacing_file(path) as file:
        put(file, size, 1 << 20)
        if error is not None:
            raise error


@pytest.mark.parametrize("room", [100, BLOCK + 100, 2 * BLOCK])
def test_no_room_leaves_the_old_file_and_nothing_else(tmp_path, room):
    (tmp_path / "f").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace(tmp_path / "f", 3 * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("f", "old")]


def test_an_error_of_the_caller_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "f").write_text("old")
    with pytest.raises(KeyError, match="mine"):
        replace(tmp_path / "f", 2 * BLOCK + 1, KeyError("mine"))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("f", "old")]
    replace(tmp_path / "f", 2 * BLOCK + 1)
    assert (tmp_path / "f").read_bytes() == CONTENT[: 2 * BLOCK + 1]
