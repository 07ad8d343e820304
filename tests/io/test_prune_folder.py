"""`prune_folder` leaves in the files what `prune_` leaves in the loaded model, in little memory, and goes on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import secateur as sc
from secateur import folders, prune_folder
from secateur.digits import READ
from secateur.io import BadFile, Folder, Journal

OPERATIONS = {
    "tensor": {"sparsity": 0.5},
    "global": {"sparsity": 0.6, "scope": "global"},
    "global count": {"count": 37, "scope": "global"},
    "row": {"sparsity": 0.5, "scope": "row"},
    "row, erk": {"sparsity": 0.5, "scope": "row", "spread": sc.erk},
    "row, by name": {"sparsity": 0.5, "scope": "row", "spread": {"0.weight": 0.9}},
    "row, 2x2-1": {"pattern": "2x2-1", "sparsity": 0.1, "scope": "row"},
    "2:4": {"pattern": "2:4"},
    "16x1/2:4": {"pattern": "16x1/2:4"},
    "4x4": {"pattern": "4x4", "sparsity": 0.5},
    "3x5 with rests": {"pattern": "3x5", "sparsity": 0.5},
    "4x4-3": {"pattern": "4x4-3", "sparsity": 0.1},
    "out, global": {"pattern": "out", "sparsity": 0.05, "scope": "global"},
    "in": {"pattern": "in", "sparsity": 0.5},
    "erk": {"sparsity": 0.7, "spread": sc.erk},
    "by name": {"sparsity": 0.5, "spread": {"0.weight": 0.9}},
    "owl": {"sparsity": 0.7, "spread": sc.owl()},
    "random": {"criterion": sc.random(5), "sparsity": 0.5, "scope": "global"},
    "square": {"criterion": sc.weight**2, "sparsity": 0.5, "scope": "global"},
}


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 33), nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3)
    )


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 24).round() / 24)  # many ties
    return model


def write(folder, model: nn.Module, files: int) -> None:
    """A folder as Hugging Face writes it: one file, or several with an index, in another order than the model's."""
    folder.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    (folder / "config.json").write_text("{}")
    if files == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(state, reverse=True)
    parts = {f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files] for i in range(files)}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("files", "elements"), [(1, 64), (3, READ)], ids=["slabs of few rows", "several files"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_files_hold_what_prune_leaves_in_the_model(tmp_path, monkeypatch, operation, files, elements):
    monkeypatch.setattr(folders, "READ", elements)
    arguments = dict(OPERATIONS[operation])
    criterion = arguments.pop("criterion", sc.magnitude)
    write(tmp_path / "dense", made(), files)
    counts = prune_folder(tmp_path / "dense", tmp_path / "sparse", criterion, into=build, **arguments)
    model = made()
    plan = sc.prune_(model, criterion, **arguments)
    found = read(tmp_path / "sparse")
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
    assert counts.metrics()["kept"] == plan.metrics()["kept"]
    assert {x.name: x.kept for x in counts.layers} == {x.name: x.kept for x in plan.layers}
    assert {file.name for file in (tmp_path / "sparse").iterdir()} == {file.name for file in (tmp_path / "dense").iterdir()}


@pytest.mark.parametrize("how", [{"scope": "global"}, {"scope": "row"}, {"pattern": "2x2"}], ids=str)
def test_powers_that_are_equal_by_rounding(tmp_path, how):
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(1 + torch.rand(parameter.shape) / 10_000)
    write(tmp_path / "dense", model, 1)
    prune_folder(tmp_path / "dense", tmp_path / "sparse", sc.magnitude**0.5, sparsity=0.5, into=build, **how)
    sc.prune_(model, sc.magnitude**0.5, sparsity=0.5, **how)
    assert all(torch.equal(read(tmp_path / "sparse")[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype(tmp_path, dtype):
    write(tmp_path / "dense", made(dtype), 2)
    prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.6, scope="global", into=build)
    model = made(dtype)
    sc.prune_(model, sparsity=0.6, scope="global")
    assert all(torch.equal(read(tmp_path / "sparse")[name], tensor) for name, tensor in model.state_dict().items())


def test_tensors_can_be_named_instead_of_building_the_model(tmp_path):
    write(tmp_path / "dense", made(), 2)
    counts = prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, include=["0.weight", "2.*"])
    assert {x.name for x in counts.layers} == {"0.weight", "2.weight"}
    assert counts.metrics()["pruned"] == (24 * 40 + 40 * 33) // 2
    with pytest.raises(ValueError, match=r"into=.*include="):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_float8_or_integers_are_not_pruned(tmp_path, dtype):
    model = made()
    model[2].weight.requires_grad_(False).data = (model[2].weight * 24).to(dtype)
    write(tmp_path / "dense", model, 1)
    with pytest.raises(ValueError, match=rf"'2.weight' is stored as {dtype} .* cannot be ranked; exclude it"):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", pattern="2:4", into=build, exclude=["3", "4"])
    assert not (tmp_path / "sparse").exists()
    counts = prune_folder(tmp_path / "dense", tmp_path / "sparse", pattern="2:4", include=["0.weight", "2.weight"])
    assert [one.name for one in counts.layers] == ["0.weight"]
    assert counts.skipped == {"2.weight": f"{dtype} values cannot be ranked"}


@pytest.mark.parametrize("scope", ["tensor", "global", "row"])
def test_a_folder_without_such_tensors_is_copied(tmp_path, scope):
    write(tmp_path / "dense", made(), 2)
    counts = prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, scope=scope, include="1.num_batches_tracked")
    assert counts.metrics()["total"] == 0
    for file in (tmp_path / "dense").iterdir():
        assert (tmp_path / "sparse" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside the source"])
def test_subfolders_are_copied_except_for_weights(tmp_path, inside):
    source = tmp_path / "dense"
    write(source, made(), 1)
    for name in ("1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/deep/x.txt", "training_args.bin", ".git/HEAD"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target = (source if inside else tmp_path) / "sparse"
    result = prune_folder(source, target, sparsity=0.5, into=build)
    found = {file.relative_to(target).as_posix() for file in target.rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/deep/x.txt"}
    assert (target / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    left = "2_Dense/model.safetensors, training_args.bin"
    assert result.notes == {"files": f"not copied, because they hold weights: {left}"}


def test_old_weights_of_the_target_are_taken_away(tmp_path):
    write(tmp_path / "sparse", made(), 3)
    write(tmp_path / "dense", made(), 1)
    prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, into=build, overwrite=True)
    assert {file.name for file in (tmp_path / "sparse").iterdir()} == {"model.safetensors", "config.json"}


@pytest.mark.parametrize("files", [1, 3])
def test_a_target_that_holds_a_model_is_refused_and_stays_as_it_was(tmp_path, files):
    write(tmp_path / "dense", made(), files)
    prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, into=build)
    before = {file.name: file.read_bytes() for file in (tmp_path / "sparse").iterdir()}
    with pytest.raises(FileExistsError, match=r"holds a model already \(model.safetensors.*overwrite=True"):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.9, into=build)
    assert {file.name: file.read_bytes() for file in (tmp_path / "sparse").iterdir()} == before
    prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.9, into=build, overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "sparse").iterdir()} != before


def test_a_target_with_a_model_that_transformers_cannot_read_is_refused_too(tmp_path):
    write(tmp_path / "dense", made(), 1)
    sc.save(made(), tmp_path / "saved")
    # The name of the weights of a cut model of Hugging Face that no config describes.
    (tmp_path / "saved" / "model.safetensors").rename(tmp_path / "saved" / "secateur.safetensors")
    before = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    with pytest.raises(FileExistsError, match=r"holds a model already \(secateur.json\)"):
        prune_folder(tmp_path / "dense", tmp_path / "saved", sparsity=0.5, into=build)
    assert {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()} == before
    prune_folder(tmp_path / "dense", tmp_path / "saved", sparsity=0.5, into=build, overwrite=True)
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"model.safetensors", "config.json"}


@pytest.mark.parametrize("when", ["before the journal", "after the journal"])
def test_a_run_that_stops_around_its_journal_goes_on(tmp_path, monkeypatch, when):
    write(tmp_path / "dense", made(), 1)
    call = lambda target: prune_folder(tmp_path / "dense", tmp_path / target, sparsity=0.5, into=build)  # noqa: E731
    own = Journal.write

    def stop(self, **known):
        if when == "after the journal":
            own(self, **known)
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        call("sparse")
    monkeypatch.undo()
    call("sparse")
    call("whole")
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "sparse" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("which", [{"include": "0.wieght"}, {"include": "*", "exclude": ["2.*", "5.*"]}], ids=str)
def test_names_that_match_no_tensor_are_refused(tmp_path, which):
    write(tmp_path / "from", made(), 1)
    with pytest.raises(ValueError, match=r"(include='0.wieght'|exclude='5.\*') matches no tensor"):
        prune_folder(tmp_path / "from", tmp_path / "to", sparsity=0.5, **which)
    assert not (tmp_path / "to").exists()


def test_files_of_a_run_that_was_given_up_do_not_pass_for_those_of_the_next(tmp_path, monkeypatch):
    """The journal names a file before the file gets its name, and an old file has the same size."""
    write(tmp_path / "dense", made(), 3)
    call = lambda target, sparsity: prune_folder(tmp_path / "dense", tmp_path / target, sparsity=sparsity, into=build)  # noqa: E731
    own, wrote = Journal.write, []

    def stop(self, **known):
        own(self, **known)
        wrote.append(known)
        if len(wrote) in (3, 4):
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        call("sparse", 0.9)
    (tmp_path / "sparse" / "secateur.journal.0.json").unlink()  # as the error for another recipe says
    with pytest.raises(KeyboardInterrupt):
        call("sparse", 0.5)
    call("sparse", 0.5)
    call("whole", 0.5)
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "sparse" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_folder_that_another_process_writes_to_is_refused(tmp_path, monkeypatch):
    """Two runs at a time would leave files of both."""
    write(tmp_path / "dense", made(), 2)
    call = lambda sparsity: prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=sparsity, into=build)  # noqa: E731
    own, said = Journal.write, []

    def meanwhile(self, **known):
        own(self, **known)
        monkeypatch.undo()
        left = set(self.target.iterdir())
        for sparsity in (0.5, 0.9):
            with pytest.raises(FileExistsError, match="another process writes to") as error:
                call(sparsity)
            said.append(error)
        assert set(self.target.iterdir()) == left

    monkeypatch.setattr(Journal, "write", meanwhile)
    assert call(0.5).metrics()["sparsity"] == pytest.approx(0.5, abs=0.01)
    assert len(said) == 2
    assert not list((tmp_path / "sparse").glob("secateur*"))


def test_a_model_that_was_written_since_the_call_began_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "dense", made(), 2)
    call = lambda sparsity: prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=sparsity, into=build)  # noqa: E731
    begin = Journal.begin

    def after_another(self):
        monkeypatch.undo()
        call(0.9)
        begin(self)

    monkeypatch.setattr(Journal, "begin", after_another)
    with pytest.raises(FileExistsError, match="holds a model already"):
        call(0.5)
    model = made()
    sc.prune_(model, sparsity=0.9)
    assert all(torch.equal(read(tmp_path / "sparse")[name], tensor) for name, tensor in model.state_dict().items())


class Transposed(nn.Module):
    """Rows of these weights are their second axis, which a folder alone does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.ConvTranspose1d(8, 8, 1, bias=False), nn.ConvTranspose1d(8, 8, 1, bias=False)


def test_a_run_that_reads_tensors_as_other_matrices_does_not_go_on(tmp_path, monkeypatch):
    write(tmp_path / "dense", Transposed(), 1)
    call = lambda **how: prune_folder(tmp_path / "dense", tmp_path / "sparse", pattern="2:4", **how)  # noqa: E731
    monkeypatch.setattr(Journal, "remove", lambda self: None)
    call(include="*")
    with pytest.raises(ValueError, match="unfinished run with another choice of tensors"):
        call(into=Transposed)
    call(include="*")


@pytest.mark.parametrize("twice", [False, True], ids=["not listed", "in two files"])
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, twice):
    write(tmp_path / "dense", made(), 2)
    index = tmp_path / "dense" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    file = listed["weight_map"].pop("0.weight")
    if twice:
        save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "dense" / "other.safetensors")
        listed["weight_map"]["0.weight"] = "other.safetensors"
    index.write_text(json.dumps(listed))
    with pytest.raises(BadFile, match=f"{file} holds '0.weight'.* lists in {'other' if twice else 'no file'}"):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, include="*")
    assert not (tmp_path / "sparse").exists()


@pytest.mark.skipif(os.name != "posix", reason="files are told apart by their inodes")
def test_all_files_are_on_the_disk_before_the_journal_goes(tmp_path, monkeypatch):
    write(tmp_path / "dense", made(), 2)
    synced, missing, fsync, remove = set(), [], os.fsync, Journal.remove

    def note(handle):
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def look(self):
        for file in (self.target, *self.target.iterdir()):
            if file.stat().st_ino not in synced:
                missing.append(file.name)
        remove(self)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Journal, "remove", look)
    prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, into=build)
    assert not missing


def test_save_takes_an_old_index_away(tmp_path):
    write(tmp_path / "model", made(), 3)
    sc.save(made(), tmp_path / "model")
    assert not list(tmp_path.glob("model/*index*")) + list(tmp_path.glob("model/*-of-*"))
    sc.load(tmp_path / "model", build)


def test_a_criterion_that_needs_data_is_answered_with_the_methods_that_work(tmp_path):
    write(tmp_path / "dense", made(), 1)
    with pytest.raises(NotImplementedError, match="method='sparsegpt' or 'flow', with into= and data="):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", criterion="wanda", sparsity=0.5)
    assert not (tmp_path / "sparse").exists()


@pytest.mark.parametrize("criterion", [sc.wanda, sc.lamp], ids=str)
def test_what_needs_data_or_whole_tensors_is_refused(tmp_path, criterion):
    write(tmp_path / "dense", made(), 1)
    with pytest.raises(NotImplementedError, match="prune_"):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", criterion, sparsity=0.5, into=build)
    assert not (tmp_path / "sparse").exists()


def test_a_count_that_is_too_large_for_a_row_leaves_the_old_model(tmp_path):
    write(tmp_path / "dense", made(), 1)
    write(tmp_path / "sparse", made(), 1)
    with pytest.raises(ValueError, match="cannot be pruned from each row"):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", count=99, scope="row", into=build, overwrite=True)
    assert (tmp_path / "sparse" / "model.safetensors").exists()


def test_nan_is_refused(tmp_path):
    model = made()
    with torch.no_grad():
        model[2].weight[3, 3] = torch.nan
    write(tmp_path / "dense", model, 2)
    with pytest.raises(ValueError, match="NaN"):
        prune_folder(tmp_path / "dense", tmp_path / "sparse", sparsity=0.5, into=build)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, check=False
    )


KILLED = """
    import json, os, sys
    from pathlib import Path
    from secateur import folders, io
    source, target, how = sys.argv[1], Path(sys.argv[2]), {"sparsity": 0.5, "scope": "global", "include": "*"}
    write, copy, wrote = folders._write_file, io.Folder.copy_rest, []

    def note(job, cuts, file, out):
        wrote.append(file)
        return write(job, cuts, file, out)

    def dies(job, cuts, file, out):
        if len(wrote) == stop:
            out.write(job.folder.header(file))
            out.flush()
            os._exit(9)
        return note(job, cuts, file, out)

    def dies_at_the_end(*_):
        os._exit(9)

    found = []
    for stop in range(4):
        if os.fork() == 0:
            folders._write_file = dies
            io.Folder.copy_rest = dies_at_the_end
            folders.prune_folder(source, target / str(stop), **how)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 9
        folders._write_file = note
        folders.prune_folder(source, target / str(stop), **how)
        found.append(len(wrote))
        wrote.clear()
    print(json.dumps(found))
"""


def test_a_run_that_is_killed_in_any_file_goes_on(tmp_path):
    """In the first, second or third file, or after them; files that were written are not written again."""
    folder = tmp_path / "dense"
    folder.mkdir()
    tensors = {f"{i}.weight": torch.randn(64 * (i + 1), 64) for i in range(3)}
    where = {name: f"{name[0]}.safetensors" for name in tensors}
    for name, tensor in tensors.items():
        save_file({name: tensor}, folder / where[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    done = run(KILLED, str(folder), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [3, 2, 1, 0]
    sc.prune_(tensors, sparsity=0.5, scope="global", include="*")
    for stop in range(4):
        assert all(torch.equal(read(tmp_path / str(stop))[name], tensor) for name, tensor in tensors.items())
        names = {file.name for file in (tmp_path / str(stop)).iterdir()}
        assert names == {*where.values(), "model.safetensors.index.json"}


def test_memory_does_not_grow_with_the_files(tmp_path):
    """Two slabs, one of which is being written, are 16 MB here; the files have 200 MB in two tensors."""
    folder = tmp_path / "dense"
    folder.mkdir()
    torch.manual_seed(3)  # three weights lie at the cut, and one of them goes
    save_file({f"{i}.weight": torch.randn(5000, 5000) for i in range(2)}, folder / "model.safetensors")
    code = """
        import sys
        sys.path.insert(0, sys.argv[3])
        from peak_memory import peak
        import torch
        import secateur as sc
        from secateur import prune_folder
        sc.prune_({"warm": torch.randn(64, 64)}, sparsity=0.5)
        before = peak()
        counts = prune_folder(sys.argv[1], sys.argv[2], sparsity=0.5, scope="global", include="*")
        assert counts.metrics()["pruned"] == counts.metrics()["total"] // 2
        print((peak() - before) / 2**20)
    """
    done = run(code, str(folder), str(tmp_path / "sparse"), str(Path(__file__).parents[1]))
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 16 + 64


def test_half_precision_reads_a_folder_twice(tmp_path, monkeypatch):
    """Once to count and once to write; of the ties at the cut, only the tensor that the cut goes through is read again."""
    folder = tmp_path / "dense"
    folder.mkdir()
    tensors = {f"{i}.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(8)}
    save_file(tensors, folder / "model.safetensors")
    numbers, read_from = [], Folder._read

    def reading(self, name, begin, number):
        numbers.append(number)
        return read_from(self, name, begin, number)

    monkeypatch.setattr(Folder, "_read", reading)
    sc.prune_folder(folder, tmp_path / "sparse", sparsity=0.5, scope="global", include="*")
    assert sum(numbers) <= (2 * 8 + 2) * 64 * 64
    sc.prune_(tensors, sparsity=0.5, scope="global", include="*")
    assert all(torch.equal(read(tmp_path / "sparse")[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.9])
def test_ties_of_half_precision_are_found_in_one_more_pass_over_one_tensor(tmp_path, monkeypatch, sparsity):
    """One pass over it finds which slab the cut goes through; after that, only that slab is read."""
    folder = tmp_path / "dense"
    folder.mkdir()
    torch.manual_seed(1)
    tensors = {f"{i}.weight": torch.randn(3 * READ // 1024, 1024).bfloat16() for i in range(2)}
    save_file(tensors, folder / "model.safetensors")
    numbers, read_from = [], Folder._read

    def reading(self, name, begin, number):
        numbers.append(number)
        return read_from(self, name, begin, number)

    monkeypatch.setattr(Folder, "_read", reading)
    sc.prune_folder(folder, tmp_path / "sparse", sparsity=sparsity, scope="global", include="*")
    assert sum(numbers) <= (2 * 6 + 3 + 1) * READ
    sc.prune_(tensors, sparsity=sparsity, scope="global", include="*")
    assert all(torch.equal(read(tmp_path / "sparse")[name], tensor) for name, tensor in tensors.items())
