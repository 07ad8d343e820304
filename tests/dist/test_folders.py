"""Several processes share the files of a folder: the result of one process, and another number of processes goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from where import DEVICE, several

import secateur as sc
from secateur import folder_walk, folders, io

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
    """The counts, and the files that this process wrote. `stop`: the journals stay, as of a run that was killed at its end."""
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
    assert len(list(target.glob("secateur.journal.*"))) == pair.world
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


# --- block by block: the processes split the batches ----------------------------------------------------------------

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 40}


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES)).eval()


def texts(numbers: list[int]) -> list[list[torch.Tensor]]:
    """The batches of each process, of which no two are alike."""
    drawn = iter(range(sum(numbers)))
    seeds = [[next(drawn) for _ in range(number)] for number in numbers]
    return [
        [torch.randint(40, (2, 12 + n), generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in own] for own in seeds
    ]


def walked(rank: int, source: str, target: str, method: str, numbers: list[int], stop: int | None) -> dict | str:
    """Prunes a folder block by block. `stop`: raises when so many blocks are done and the journal is written."""
    finished = folder_walk.FromFolder.finished

    def interrupted(self, number, feeds):
        finished(self, number, feeds)
        if number == stop:
            raise KeyboardInterrupt

    folder_walk.FromFolder.finished = interrupted
    how = {
        "method": method,
        "pattern": "2:4",
        "exclude": "lm_head",
        "into": llama,
        "data": texts(numbers)[rank],
        "device": DEVICE,
    }
    try:
        return sc.prune_folder(source, target, group=dist.group.WORLD, **how).to_dict()
    except (KeyboardInterrupt, ValueError, RuntimeError) as error:
        return str(error)
    finally:
        folder_walk.FromFolder.finished = finished


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder, max_shard_size="10KB")
    return folder


def pruned_alone(dense: Path, method: str, numbers: list[int]) -> nn.Module:
    model = llama().to(DEVICE)
    data = [batch for own in texts(numbers) for batch in own]
    sc.prune_(model, method=method, pattern="2:4", exclude="lm_head", data=data)
    return model


@pytest.mark.parametrize("numbers", [[2, 3], [3, 0]], ids=["unequal", "one without"])
@pytest.mark.parametrize("method", ["sparsegpt", "flow"])
def test_processes_split_the_batches_of_a_folder(pair, dense, tmp_path, method, numbers):
    """Sums are added in another order, so weights are equal to rounding; the masks of these data are the same."""
    numbers = numbers[: pair.world]
    one, *others = pair.both(walked, str(dense), str(tmp_path / "two"), method, numbers, None)
    assert all(other == one for other in others)
    assert one["sparsity"] == 0.5
    model = pruned_alone(dense, method, numbers)
    found = type(model).from_pretrained(tmp_path / "two").to(DEVICE)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name] == 0, tensor == 0), name
        torch.testing.assert_close(found.state_dict()[name], tensor)
    assert not list((tmp_path / "two").glob("secateur*"))


def test_processes_go_on_with_the_blocks_that_are_left(pair, dense, tmp_path):
    pair.both(walked, str(dense), str(tmp_path / "whole"), "flow", [2, 1], None)
    cut = tmp_path / "cut"
    pair.both(walked, str(dense), str(cut), "flow", [2, 1], 2)
    assert json.loads((cut / "secateur.journal.0.json").read_text())["blocks"] == 2
    before = (cut / "model-00001-of-00004.safetensors").stat().st_mtime_ns
    for text in pair.both(walked, str(dense), str(cut), "flow", [1, 2], None):
        assert "unfinished run with another data" in text
    pair.both(walked, str(dense), str(cut), "flow", [2, 1], None)
    assert (cut / "model-00001-of-00004.safetensors").stat().st_mtime_ns == before
    assert content(cut) == content(tmp_path / "whole")


def without_room(rank: int, source: str, target: str, method: str | None) -> str:
    """The first process cannot write."""
    of_blocks, of_slabs = folder_walk.write_tensors, folders._write_file

    def full(*_, **__):
        raise OSError("no space left on the disk")

    if rank == 0:
        folder_walk.write_tensors = folders._write_file = full
    how = {"method": method, "into": llama, "data": texts([1, 1])[rank]} if method else {"include": "*"}
    try:
        sc.prune_folder(source, target, group=dist.group.WORLD, sparsity=0.5, exclude="lm_head", **how)
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        folder_walk.write_tensors, folders._write_file = of_blocks, of_slabs
    return "nothing was raised"


@several("only one cannot write")
@pytest.mark.parametrize("method", [None, "sparsegpt"])
def test_all_processes_raise_if_one_of_them_cannot_write(pair, dense, tmp_path, method):
    own, other = pair.both(without_room, str(dense), str(tmp_path / "full"), method)
    assert "no space" in own
    assert "another process" in other


def elsewhere(rank: int, source: str, target: str) -> str:
    try:
        sc.prune_folder([source, "missing"][rank], target, sparsity=0.5, include="*", group=dist.group.WORLD)
    except (OSError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


@several("only one finds no folder")
def test_all_processes_raise_if_one_of_them_finds_no_folder(pair, dense, tmp_path):
    other, own = pair.both(elsewhere, str(dense), str(tmp_path / "out"))
    assert "another process" in other
    assert "missing" in own
