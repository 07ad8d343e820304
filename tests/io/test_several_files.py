"""A model in several files with an index: written, read, replaced by one file and back, and refused where damaged."""

import json

import pytest
import torch
from safetensors.torch import load_file
from saving import build, pruned, refused, resign, same, saved_until

import secateur as sc
from secateur import io
from secateur.io import files

INDEX = "model.safetensors.index.json"
MOST = 1000  # bytes; the largest tensor has 23,040


def listed(folder):
    return {file.name for file in folder.iterdir()}


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def test_names_of_files_are_chosen_when_no_other_save_is_running(tmp_path, monkeypatch):
    """Two saves into a new folder that choose the same names would replace each other's files in place."""
    alone = io.alone

    def after_another(folder):
        monkeypatch.undo()
        with monkeypatch.context() as patch:
            patch.setattr(io, "rename", files.rename)  # this save is not interrupted
            sc.save(build(1), folder, max_file_bytes=MOST)
        before.update({file.name: file.stat().st_ino for file in shards(folder)})
        return alone(folder)

    before = {}
    monkeypatch.setattr(io, "alone", after_another)
    assert not saved_until(3, build(2), tmp_path, max_file_bytes=MOST)
    assert len(before) > 1
    assert {name: (tmp_path / name).stat().st_ino for name in before} == before
    assert same(sc.load(tmp_path, build), build(1))


@pytest.mark.parametrize("packed", [False, True])
def test_files_have_at_most_so_many_bytes_and_load_as_one_model(tmp_path, packed):
    model = pruned()
    sc.save(model, tmp_path, packed=packed, max_file_bytes=MOST)
    state = {}
    for file in shards(tmp_path):
        own = load_file(file)
        assert len({name.partition("#")[0] for name in own}) == 1 or sum(tensor.nbytes for tensor in own.values()) <= MOST
        state |= own
    index = json.loads((tmp_path / INDEX).read_text())
    assert {name: tmp_path / file for name, file in index["weight_map"].items()} == {
        name: file for file in shards(tmp_path) for name in load_file(file)
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert same(sc.load(tmp_path, build), model)
    assert all(torch.equal(sc.dense_state_dict(state)[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(sc.dense_state_dict(tmp_path)[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_that_fits_is_one_file_without_an_index(tmp_path):
    sc.save(pruned(), tmp_path, max_file_bytes=1 << 20)
    assert listed(tmp_path) == {"model.safetensors", "secateur.json"}
    for most in (0, -1, 1.5, True, "5GB"):
        with pytest.raises(ValueError, match="max_file_bytes"):
            sc.save(pruned(), tmp_path, max_file_bytes=most)


def test_old_files_and_an_old_index_are_not_left_beside_new_ones(tmp_path):
    before = set()
    for most in (MOST, 2 * MOST, MOST, None, MOST, None):
        model = pruned(0.5)
        sc.save(model, tmp_path, max_file_bytes=most)
        index = tmp_path / INDEX
        assert index.exists() == (most is not None)
        named = set(json.loads(index.read_text())["weight_map"].values()) if most else {"model.safetensors"}
        assert {file.name for file in shards(tmp_path)} == named
        assert most is None or not named & before  # one of several files never replaces another
        assert same(sc.load(tmp_path, build), model)
        before = named


@pytest.mark.parametrize(("old_most", "new_most"), [(None, MOST), (MOST, MOST), (MOST, None)])
def test_a_crash_between_any_two_steps_leaves_the_old_model_or_the_new_one(tmp_path, old_most, new_most):
    old, new = pruned(0.5), pruned(0.9)
    found, stop = [], 0
    while not found or not found[-1]:
        sc.save(old, tmp_path, max_file_bytes=old_most)
        whole = saved_until(stop, new, tmp_path, max_file_bytes=new_most)
        model = sc.load(tmp_path, build)
        assert same(model, new) or same(model, old)
        found.append(whole)
        stop += 1
    assert same(model, new)
    assert len(found) > 2
    sc.save(new, tmp_path)
    assert listed(tmp_path) == {"model.safetensors", "secateur.json"}  # nothing of the crashes is left


def test_damaged_missing_and_foreign_files_are_refused(tmp_path):
    sc.save(pruned(), tmp_path, max_file_bytes=MOST)
    last = shards(tmp_path)[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(tmp_path, build(2), "is damaged: its bytes")
    last.write_bytes(content[:-1])
    refused(tmp_path, build(2), "cut short")
    last.unlink()
    refused(tmp_path, build(2), "is not beside it")
    last.write_bytes(content)
    outside = tmp_path.parent / "model.safetensors"
    outside.write_bytes(content)
    resign(tmp_path, lambda data: data["files"][-1].update(name="../model.safetensors"))
    refused(tmp_path, build(2), "as sc.save gives them")
    resign(tmp_path, lambda data: data["files"].pop())
    refused(tmp_path, build(2), "do not list the same tensors")
    resign(tmp_path, lambda data: data["files"].clear())
    refused(tmp_path, build(2), "different names")


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def llama(tied=True):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def test_from_pretrained_reads_several_files(tmp_path):
    model = llama()
    sc.prune_(model, pattern="2:4")
    assert sc.save(model, tmp_path, max_file_bytes=MOST)["from_pretrained"] is True
    assert len(shards(tmp_path)) > 2
    assert same(type(model).from_pretrained(tmp_path), model)
    assert sc.save(model, tmp_path, packed=True, max_file_bytes=MOST)["from_pretrained"] is not True
    assert not (tmp_path / INDEX).exists()  # from_pretrained does not take the folder for one of its own
    assert same(sc.load(tmp_path, llama), model)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("size", ["10KB", "1GB"])
def test_load_reads_what_save_pretrained_wrote(tmp_path, size, tied):
    model = llama(tied)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).exists() == (size == "10KB")

    def other():
        model = llama(tied)
        torch.nn.init.normal_(model.lm_head.weight)
        return model

    found = sc.load(tmp_path, other)
    assert same(found, model)
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    refused(tmp_path, llama(tied).double(), "build the model in that dtype")
    refused(tmp_path, build(), "has no .*which the file holds")


def test_a_packed_file_that_lost_its_manifest_is_refused(tmp_path):
    sc.save(pruned(), tmp_path, packed=True)
    (tmp_path / "secateur.json").unlink()
    refused(tmp_path, build(2), "has lost the secateur.json")
