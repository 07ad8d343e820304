"""Several processes share the files of a folder: the result of one process, and another number of processes goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import secateur as sc
from secateur import folders, io

pytestmark = pytest.mark.dist
CUT = {"sparsity": 0.6, "scope": "global", "include": "*"}


def write(folder: Path) -> None:
    """Five files of different sizes, with many equal weights."""
    folder.mkdir()
    torch.manual_seed(0)
    where = {}
    for number, rows in enumerate((8, 40, 16, 24, 32)):
        tensors = {f"{number}.{i}.weight": (torch.randn(rows, 20) * 4).round() / 4 for i in range(2)}
        save_file(tensors, folder / f"model-{number}.safetensors")
        where |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text("{}")


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def pruned(rank: int, source: str, target: str, stop: bool) -> tuple[dict, list[str]]:
    """The counts, and the files that this process wrote. `stop`: the journals stay, as if the run had been killed at its end."""
    wrote, write_file, remove = [], folders._write_file, io.Journal.remove

    def note(job, cuts, file, out):
        wrote.append(file)
        return write_file(job, cuts, file, out)

    folders._write_file = note
    if stop:
        io.Journal.remove = lambda self: None
    try:
        return sc.prune_folder(source, target, group=dist.group.WORLD, **CUT).to_dict(), wrote
    finally:
        folders._write_file, io.Journal.remove = write_file, remove


def test_two_processes_share_the_files_and_give_what_one_gives(pair, tmp_path):
    write(tmp_path / "dense")
    one = sc.prune_folder(tmp_path / "dense", tmp_path / "one", **CUT).to_dict()
    found = pair.both(pruned, str(tmp_path / "dense"), str(tmp_path / "two"), False)
    assert content(tmp_path / "two") == content(tmp_path / "one")
    for counts, wrote in found:
        assert {**counts, "path": ""} == {**one, "path": ""}
        assert wrote
    names = [name for _, wrote in found for name in wrote]
    assert sorted(names) == sorted(f"model-{i}.safetensors" for i in range(5))  # each by one process


def test_one_process_goes_on_with_what_two_left(pair, tmp_path):
    write(tmp_path / "dense")
    target = tmp_path / "two"
    pair.both(pruned, str(tmp_path / "dense"), str(target), True)
    assert len(list(target.glob("secateur.journal.*"))) == 2
    whole = content(target)
    (target / "model-3.safetensors").unlink()
    before = {file.name: file.stat().st_mtime_ns for file in target.glob("*.safetensors")}
    sc.prune_folder(tmp_path / "dense", target, **CUT)
    assert content(target) == {name: text for name, text in whole.items() if "journal" not in name}
    assert {name: (target / name).stat().st_mtime_ns for name in before} == before  # only the missing file is written


def other(rank: int, source: str, target: str) -> str:
    try:
        sc.prune_folder(source, target, group=dist.group.WORLD, **{**CUT, "sparsity": 0.5})
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_an_unfinished_run_of_another_recipe_is_refused_on_all(pair, tmp_path):
    write(tmp_path / "dense")
    pair.both(pruned, str(tmp_path / "dense"), str(tmp_path / "two"), True)
    for text in pair.both(other, str(tmp_path / "dense"), str(tmp_path / "two")):
        assert "unfinished run with another recipe" in text
