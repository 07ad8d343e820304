"""Saving replaces the old files completely or leaves them as they were."""

import itertools
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from saving import build, pruned, same, saved_until
from torch import nn

from secateur import io
from secateur.io import files


@pytest.mark.parametrize("room", [0, 100, 10_000, 24_000])
def test_no_room_for_the_new_files_leaves_the_old_ones(tmp_path, room):
    old = build(1)
    io.save(old, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as found:
            io.save(build(2), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert any("is as it was before" in note for note in found.value.__notes__)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert same(io.load(tmp_path, build), old)


ON_A_DISK = """
import pathlib, subprocess, sys, torch
from torch import nn
import secateur as sc
disk = pathlib.Path(sys.argv[1])
old, new = nn.Linear(200, 200), nn.Linear(200, 200)
sc.save(old, disk / "model")
(disk / "other").write_bytes(bytes(800_000))
for change, words in ((["true"], "No space left"), (["mount", "-o", "remount,ro", str(disk)], "Read-only file system")):
    subprocess.run(change, check=True)
    try:
        sc.save(new, disk / "model")
        raise SystemExit("saved")
    except OSError as error:
        assert words in str(error) and "is as it was before" in error.__notes__[0], (error, error.__notes__)
    assert sorted(p.name for p in (disk / "model").iterdir()) == ["model.safetensors", "secateur.json"]
    assert torch.equal(sc.load(disk / "model", nn.Linear(200, 200)).weight, old.weight)
"""


def test_a_disk_that_is_full_or_cannot_be_written_leaves_the_old_files(tmp_path):
    mount = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-ec",
        'mount -t tmpfs -o size=1m none "$0" && exec "$@"',
        str(tmp_path),
    ]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    done = subprocess.run([*mount, sys.executable, "-c", ON_A_DISK, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_crash_between_any_two_steps_leaves_the_old_model_or_the_new_one(tmp_path):
    old, new = pruned(0.5), pruned(0.9)
    for stop in range(4):
        io.save(old, tmp_path)
        assert saved_until(stop, new, tmp_path) == (stop == 3)
        found = io.load(tmp_path, build)
        assert same(found, old if stop < 2 else new)
        assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("most", [None, 3000], ids=["one file", "several"])
def test_two_crashes_in_a_row_leave_a_model_that_was_saved(tmp_path, most):
    models = [build(seed) for seed in range(3)]
    for stop in itertools.product(range(8), range(8)):
        folder = tmp_path / "-".join(map(str, stop))
        io.save(models[0], folder, max_file_bytes=most)
        last = [0]
        for number, until in enumerate(stop, 1):
            saved_until(until, models[number], folder, max_file_bytes=most)
            found = io.load(folder, build)
            last = [n for n in (*last, number) if same(found, models[n])]
            assert len(last) == 1, (stop, number)


SAVER = """
import sys, torch
from torch import nn
import secateur as sc
model = nn.ParameterList(torch.ones(1 << 22) for _ in range(4))
while True:
    sc.save(model, sys.argv[1])
"""


def test_what_a_killed_save_left_goes_with_the_next_and_nothing_else_does(tmp_path):
    io.save(build(1), tmp_path)
    theirs = ["notes.tmp", "model.safetensors.tmp", "model.safetensors.77-0123abcd.tmp", "secateur.json.bak"]
    for name in theirs:
        (tmp_path / name).write_text("mine")
    with subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)]) as process:
        left = []
        while process.poll() is None and not left:
            left = list(tmp_path.glob("model.safetensors.secateur-*"))
            time.sleep(0.001)
        process.kill()  # it has just begun to write 64 MB
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.secateur-*.tmp"))
    io.save(build(2), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "secateur.json", *theirs}
    assert same(io.load(tmp_path, build), build(2))


def test_a_save_waits_for_the_one_that_is_running_and_leaves_its_files(tmp_path):
    other = threading.Thread(target=io.save, args=(build(1), tmp_path))
    with files.alone(tmp_path):
        mine = tmp_path / "model.safetensors.secateur-0123abcd.tmp"
        mine.write_text("half")
        other.start()
        other.join(0.3)
        assert other.is_alive()
        assert mine.exists()
        mine.unlink()
    other.join(30)
    assert same(io.load(tmp_path, build), build(1))


def test_while_two_save_a_load_gives_one_of_their_models(tmp_path):
    def filled(value):
        return nn.ParameterList(torch.full((1000,), value) for _ in range(4))

    def save_often(value):
        for _ in range(30):
            io.save(filled(value), tmp_path)

    io.save(filled(1.0), tmp_path)
    with ThreadPoolExecutor() as pool:
        savers, seen = [pool.submit(save_often, value) for value in (1.0, 2.0)], set()
        while not all(saver.done() for saver in savers):
            found = io.load(tmp_path, lambda: filled(0.0))
            values = {value for each in found.parameters() for value in each.tolist()}
            assert len(values) == 1
            seen |= values
    assert [saver.result() for saver in savers] == [None, None]
    assert seen == {1.0, 2.0}


def test_writing_holds_one_tensor_at_a_time(tmp_path):
    alive, most = [0], [0]

    def entry(i):
        def data():
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            tensor = torch.full((1000,), float(i))
            weak = tensor.untyped_storage()
            import weakref

            weakref.finalize(weak, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

        return files.Entry(torch.float32, (1000,), data)

    files.write_tensors(tmp_path / "f", {f"t{i}": entry(i) for i in range(8)}, {})
    found = safetensors.torch.load_file(tmp_path / "f")
    assert all(bool((found[f"t{i}"] == i).all()) for i in range(8))
    assert most[0] <= 2


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    for model, words in (
        (Extra(), "only tensors can be saved"),
        (build().to("meta"), "on the meta device"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex128)]), "complex128"),
        (build().state_dict(), "a torch.nn.Module, not OrderedDict"),
    ):
        with pytest.raises(TypeError, match=words):
            io.save(model, tmp_path / "out")
    with pytest.raises(TypeError, match="what prune_ or shrink returned, not str"):
        io.save(build(), tmp_path / "out", plan="mine")  # type: ignore[arg-type]
    odd = build()
    odd.register_buffer("__metadata__", torch.ones(1))
    with pytest.raises(ValueError, match="'__metadata__' means something else"):
        io.save(odd, tmp_path / "out")
    odd.register_buffer("__metadata__", None)
    odd.register_buffer("half\ud800", torch.ones(1))
    with pytest.raises(ValueError, match="has characters that no file can hold"):
        io.save(odd, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        io.save(build(), tmp_path / "file")
    for path, wanted in (("x/model.safetensors", "x"), ("x/small.safetensors", "x/small")):
        with pytest.raises(ValueError, match=f"names a file; save.* writes a folder .*such as '{tmp_path / wanted}'"):
            io.save(build(), tmp_path / path)
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "out").exists()
    for name in ("model.safetensors", "secateur.json"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(ValueError, match=f"{name}/{name} is a folder.*Nothing was written"):
            io.save(build(), tmp_path / name)
        assert len(list((tmp_path / name).iterdir())) == 1
