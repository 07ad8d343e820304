"""A model in a folder is pruned block by block, in memory for one block, with the result of pruning it in memory."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import secateur as sc
from secateur import prune_folder
from secateur.methods import OnDevice, solve_all
from secateur.settings import Settings
from secateur.targeting import targets

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "methods"))
import zoo

transformers = zoo.transformers
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": zoo.VOCABULARY,
}


def config_of(**changes):
    return transformers.LlamaConfig(**{**CONFIG, **changes})


def settings(method="sparsegpt", pattern="2:4", **budget):
    return Settings.of("magnitude", pattern, None, budget.get("sparsity"), None, None, method, 0.0)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of(tie_word_embeddings=False)).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 2
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16), tmp_path


def into():
    return transformers.LlamaForCausalLM(config_of(tie_word_embeddings=False))


@pytest.mark.parametrize("method", ["sparsegpt", "flow"])
@pytest.mark.parametrize("outside", [False, True], ids=["blocks", "blocks and head"])
def test_the_files_are_those_of_pruning_the_model_in_memory(saved, method, outside):
    model, path = saved
    exclude = () if outside else "lm_head"
    how = {"pattern": "2:4", "method": method, "exclude": exclude}
    written = prune_folder(path / "dense", path / "pruned", into=into, data=zoo.TEXT, **how)
    plan = sc.prune_(model, data=zoo.TEXT, **how)
    found = transformers.AutoModelForCausalLM.from_pretrained(path / "pruned", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert written.metrics()["sparsity"] == plan.metrics()["sparsity"] == 0.5
    assert written.metrics()["tensors"] == plan.metrics()["tensors"] == 21 + outside
    assert not list((path / "pruned").glob("secateur*"))
    assert (path / "pruned" / "config.json").read_text() == (path / "dense" / "config.json").read_text()


FLOW = {"pattern": "2:4", "method": "flow", "exclude": "lm_head"}
CHILD = """
import os, sys, torch
sys.path[:0] = [{here!r}, {tests!r}]
from test_folder_walk import *
from secateur import folder_walk
done = 0
def finished(self, number, feeds, real=folder_walk.FromFolder.finished):
    real(self, number, feeds)
    if number == {stop}:
        os._exit(9)
folder_walk.FromFolder.finished = finished
prune_folder({source!r}, {target!r}, into=into, data=zoo.TEXT, **FLOW)
"""


@pytest.mark.parametrize("stop", [1, 2])
def test_a_killed_run_goes_on_where_it_was_and_writes_the_same_bytes(saved, stop):
    _, path = saved
    how = {"into": into, "data": zoo.TEXT, **FLOW}
    prune_folder(path / "dense", path / "whole", **how)
    here = os.path.dirname(__file__)
    script = CHILD.format(
        here=here, tests=os.path.join(here, "methods"), stop=stop, source=str(path / "dense"), target=str(path / "cut")
    )
    child = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=240)
    assert child.returncode == 9, child.stderr
    journal = json.loads((path / "cut" / "secateur.journal.0.json").read_text())
    assert journal["blocks"] == stop
    first = path / "cut" / "model-00001-of-00004.safetensors"
    before = first.stat().st_mtime_ns
    for other, change in {"recipe": {"method": "sparsegpt"}, "data": {"data": zoo.TEXT[1:]}}.items():
        with pytest.raises(ValueError, match=f"unfinished run with another {other}"):
            prune_folder(path / "dense", path / "cut", **{**how, **change})
    written = prune_folder(path / "dense", path / "cut", **how)
    assert first.stat().st_mtime_ns == before  # the blocks that were done are not written again
    names = sorted(file.name for file in (path / "whole").iterdir())
    assert sorted(file.name for file in (path / "cut").iterdir()) == names
    for name in names:
        assert (path / "cut" / name).read_bytes() == (path / "whole" / name).read_bytes(), name
    assert written.metrics()["tensors"] == 21


MEMORY = """
import sys, torch
from pathlib import Path
sys.path[:0] = [{here!r}, {tests!r}]
from peak_memory import peak
from test_folder_walk import *
folder, depth = Path({folder!r}), {depth}
def into():
    return transformers.LlamaForCausalLM(config_of(**WIDE, num_hidden_layers=depth))
data = [torch.randint(0, 40, (2, 16)) for _ in range(2)]
how = {{"data": data, "method": "sparsegpt", "pattern": "2:4"}}
prune_folder(
    folder / "small", folder / "out", into=lambda: transformers.LlamaForCausalLM(config_of()), overwrite=True, **how
)
before = peak()
prune_folder(folder / str(depth), folder / f"pruned{{depth}}", into=into, exclude="lm_head", **how)
print(before, peak())
"""
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
BLOCK = 4 * (4 * 512 * 512 + 3 * 512 * 1408 + 2 * 512)  # bytes in float32


def test_memory_is_that_of_one_block_and_does_not_grow_with_depth(tmp_path):
    transformers.LlamaForCausalLM(config_of()).save_pretrained(tmp_path / "small")
    here, peaks = os.path.dirname(__file__), {}
    # The allocator of glibc keeps freed tensors of up to 32 MB for later; those of large models are larger.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    for depth in (2, 6):
        model = transformers.LlamaForCausalLM(config_of(**WIDE, num_hidden_layers=depth))
        model.save_pretrained(tmp_path / str(depth), max_shard_size="30MB")
        del model
        script = MEMORY.format(here=here, tests=os.path.join(here, "methods"), folder=str(tmp_path), depth=depth)
        command = [sys.executable, "-c", script]
        child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280, env=environment)
        assert child.returncode == 0, child.stderr
        before, after = map(int, child.stdout.split()[-2:])
        peaks[depth] = after - before
    grams = 8 * (1408 * 1408 * 6)  # sums and factors in float64
    assert peaks[2] < 4 * BLOCK + grams
    assert peaks[6] - peaks[2] < BLOCK  # the model grew by four blocks


def test_a_block_at_a_time_on_a_device_gives_the_same_solutions():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of(tie_word_embeddings=False)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found, _ = targets(model)
    plain, moved, answers = [], [], []
    for seen, home in ((plain, None), (moved, OnDevice(torch.device("cpu")))):
        method = settings("sparsegpt").method

        def solve(target, evidence, seen=seen, method=method):
            seen.append((target.name, evidence))
            problem = sc.methods.LayerProblem(target.name, target.layout.matrix(target.weight), H=evidence["gram"])
            return method.solve(problem, settings().pattern, sc.methods.Amount(), None)

        answers.append(solve_all(model, found, frozenset({"gram", "cross", "residual"}), zoo.TEXT, solve, {}, home))
    assert [name for name, _ in plain] == [name for name, _ in moved]
    for (name, one), (_, other) in zip(plain, moved):
        assert one.keys() == other.keys()
        for kind in set(one) - {"tokens", "stage"}:
            assert torch.equal(one[kind], other[kind]), (name, kind)
    assert all(torch.equal(answers[0][name].weight, answers[1][name].weight) for name in answers[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_done_one_block_at_a_time_is_refused(saved):
    _, path = saved
    how = {"into": into, "data": zoo.TEXT, "method": "sparsegpt", "pattern": "2:4"}

    def deeper():
        return transformers.LlamaForCausalLM(config_of(num_hidden_layers=4))

    def sharing():
        model = into()
        model.model.layers[2].mlp.down_proj = model.model.layers[0].mlp.down_proj
        return model

    def refused(kind, words, source=path / "dense", target=path / "pruned", **changes):
        with pytest.raises(kind, match=words):
            prune_folder(source, target, **{**how, **changes})
        assert not (path / "pruned").exists()

    refused(ValueError, "one block at a time", pattern="unstructured", sparsity=0.5, spread="owl")
    refused(ValueError, "another folder", target=path / "dense")
    refused(ValueError, "has no tensor", into=deeper)
    refused(ValueError, "block by block", into=None)
    refused(ValueError, r"several blocks share 'model.layers.0.mlp.down_proj.weight'", into=sharing)
    refused(ValueError, "data=", data=None)
    refused(FileNotFoundError, "neither model.safetensors", source=path)


def test_wrong_arguments_are_named(saved, tmp_path):
    source, build = saved[1] / "dense", into
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
    wrong = [
        (build(), {"into": build}, TypeError, r"source= is the folder of a model, not LlamaForCausalLM"),
        (tmp_path / "none", {"into": build}, FileNotFoundError, "none does not exist"),
        (source, {"into": build()}, TypeError, r"into= is a function .* not LlamaForCausalLM"),
        (source, {"into": "llama"}, TypeError, r"into= is a function .* not str"),
        (source, {"into": torch.nn.Linear}, TypeError, r"into= is a function without arguments .* lambda: Linear\(...\)"),
        (source, {"into": config_of}, TypeError, r"into= must build a torch\.nn\.Module, and returned LlamaConfig"),
        (source, {"into": build, "method": "flow", "data": batch}, TypeError, r"not one dict; pass \[batch\]"),
    ]
    for folder, given, kind, message in wrong:
        with pytest.raises(kind, match=message):
            prune_folder(folder, tmp_path / "out", sparsity=0.5, **given)
    assert not (tmp_path / "out").exists()


def test_a_model_with_one_block_to_prune_is_refused_with_the_reason(saved):
    _, path = saved
    how = {"into": into, "data": zoo.TEXT, "method": "flow", "pattern": "2:4", "include": "model.layers.0.*"}
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no list in which two blocks have layers to prune.* use prune_"):
        prune_folder(path / "dense", path / "pruned", **how)


def test_blocks_that_read_what_others_left_in_a_cache_are_refused_with_the_reason(tmp_path):
    zoo.gemma3n().save_pretrained(tmp_path / "dense")
    how = {"pattern": "2:4", "method": "flow", "include": "model.layers.*_proj*"}
    with pytest.raises(ValueError, match="block 2 reads tensors that block 0 left in an argument, such as a cache"):
        prune_folder(tmp_path / "dense", tmp_path / "pruned", into=zoo.gemma3n, data=zoo.TEXT, **how)
    assert not (tmp_path / "pruned").exists()


def test_an_embedding_that_encoder_and_decoder_share_is_found_under_the_name_in_the_files(tmp_path):
    zoo.t5().save_pretrained(tmp_path / "dense")
    how = {"pattern": "2:4", "method": "flow", "include": "decoder.block.*"}
    prune_folder(tmp_path / "dense", tmp_path / "pruned", into=zoo.t5, data=zoo.PAIRS, **how)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "dense")
    sc.prune_(model, data=zoo.PAIRS, **how)
    found = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "pruned").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_experts_that_transformers_renames_are_refused_with_what_to_do(tmp_path):
    zoo.mixtral().save_pretrained(tmp_path / "dense")
    how = {"pattern": "2:4", "method": "flow", "into": zoo.mixtral, "data": zoo.TEXT}
    with pytest.raises(ValueError, match=r"has no tensor '.*experts.*load such a model with from_pretrained and use prune_"):
        prune_folder(tmp_path / "dense", tmp_path / "pruned", **how)


class Counting(torch.nn.Module):
    """A block that counts its calls."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x + self.fc(x).relu()


def test_buffers_that_blocks_write_to_are_those_of_the_source(tmp_path):
    model = torch.nn.Sequential(Counting(), Counting())
    (tmp_path / "dense").mkdir()
    save_file(model.state_dict(), tmp_path / "dense" / "model.safetensors")
    how = {"sparsity": 0.5, "method": "sparsegpt", "data": [torch.randn(9, 8) for _ in range(3)]}
    prune_folder(tmp_path / "dense", tmp_path / "pruned", into=lambda: torch.nn.Sequential(Counting(), Counting()), **how)
    sc.prune_(model, **how)
    found = sc.load(tmp_path / "pruned", into=torch.nn.Sequential(Counting(), Counting())).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_old_weights_of_the_target_are_removed_before_the_first_block_is_written(saved):
    _, path = saved
    transformers.LlamaForCausalLM(config_of()).save_pretrained(path / "pruned", max_shard_size="40KB")
    old = {file.name for file in (path / "pruned").glob("*.safetensors")}
    how = {"into": into, "method": "sparsegpt", "pattern": "2:4", "overwrite": True}
    with pytest.raises(ValueError, match="NaN"):
        prune_folder(path / "dense", path / "pruned", data=[torch.full((1, 4), torch.nan)], **how)
    assert {file.name for file in (path / "pruned").glob("*.safetensors")} == old
    prune_folder(path / "dense", path / "pruned", data=zoo.TEXT, **how)
    index = json.loads((path / "pruned" / "model.safetensors.index.json").read_text())
    left = {file.name for file in (path / "pruned").glob("*.safetensors")}
    assert left == set(index["weight_map"].values())
    assert not old & left


@pytest.mark.parametrize(("include", "moved"), [("*.q_proj", False), ("*.down_proj", True)])
def test_the_result_says_that_channels_got_another_order_if_any_did(saved, include, moved):
    _, path = saved
    how = {"into": into, "data": zoo.TEXT, "method": "flow", "pattern": "2:4", "include": include}
    written = prune_folder(path / "dense", path / "pruned", **how)
    assert ("channels" in written.notes) == moved
