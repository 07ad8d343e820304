"""Writing is all or nothing."""

import pytest
import safetensors.torch
import torch
from saving import build, pruned, same
from torch import nn

from secateur import io
from secateur.io import files


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    old, new = build(1), build(2)
    io.save(old, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    as_bytes, count = files.as_bytes, iter(range(99))

    def full(tensor):
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return as_bytes(tensor)

    monkeypatch.setattr(files, "as_bytes", full)
    with pytest.raises(OSError, match="No space left") as found:
        io.save(new, tmp_path)
    assert any("is as it was before" in note for note in found.value.__notes__)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert same(io.load(tmp_path, build), old)


def test_a_crash_between_any_two_steps_leaves_the_old_model_or_the_new_one(tmp_path, monkeypatch):
    old, new = pruned(0.5), pruned(0.9)
    rename = files.rename
    for stop in range(4):
        io.save(old, tmp_path)
        done = []

        def crash(a, b, done=done, stop=stop):
            if len(done) == stop:
                raise KeyboardInterrupt
            done.append(b)
            rename(a, b)

        monkeypatch.setattr(io, "rename", crash)
        if stop < 3:
            with pytest.raises(KeyboardInterrupt):
                io.save(new, tmp_path)
        else:
            io.save(new, tmp_path)
        monkeypatch.setattr(io, "rename", rename)
        found = io.load(tmp_path, build)
        assert same(found, old if stop < 2 else new)
        assert not list(tmp_path.glob("*.tmp"))


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
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        io.save(build(), tmp_path / "file")
    assert not (tmp_path / "out").exists()
