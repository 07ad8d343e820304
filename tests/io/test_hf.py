"""Hugging Face models: what stays uniform loads with plain from_pretrained, what does not is said."""

import json

import pytest
import torch

import secateur as sc
from secateur import io
from secateur.surgery import shrink

transformers = pytest.importorskip("transformers")
IDS = torch.randint(0, 99, (2, 7), generator=torch.Generator().manual_seed(0))


def llama(**more):
    torch.manual_seed(0)
    more |= {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}
    config = transformers.LlamaConfig(num_hidden_layers=3, bos_token_id=1, eos_token_id=2, pad_token_id=0, **more)
    return transformers.LlamaForCausalLM(config).eval()


def answer(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("tied", [False, True])
def test_a_pruned_model_loads_with_plain_from_pretrained(tmp_path, tied):
    model = llama(tie_word_embeddings=tied)
    sc.prune_(model, sparsity=0.5, exclude=["*embed*", "lm_head*"])
    assert io.save(model, tmp_path)["from_pretrained"] is True
    assert torch.equal(answer(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()), answer(model))
    assert torch.equal(answer(io.load(tmp_path, lambda: llama(tie_word_embeddings=tied))), answer(model))


@pytest.mark.parametrize("asked", [{"depth": 0.67}, {"channels": 0.5, "scope": "tensor", "exclude": ["*.self_attn.*"]}])
def test_a_shrunk_model_with_uniform_layers_loads_with_plain_from_pretrained(tmp_path, asked):
    small, _ = shrink(llama(), {"input_ids": IDS}, **asked)
    assert io.save(small, tmp_path)["from_pretrained"] is True
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(answer(back), answer(small))
    assert back.num_parameters() == small.num_parameters() < llama().num_parameters()
    assert back.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 9)
    assert torch.equal(answer(io.load(tmp_path, llama)), answer(small))


def test_sizes_that_follow_from_others_are_found_too(tmp_path):
    """`n_inner` is None in the config: four times the width, until it is cut."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    small, _ = shrink(model, {"input_ids": IDS}, channels=0.5, scope="tensor", exclude=["*attn*"])
    assert io.save(small, tmp_path)["from_pretrained"] is True
    assert json.loads((tmp_path / "config.json").read_text())["n_inner"] == 64
    assert torch.equal(answer(transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()), answer(small))


def test_layers_of_different_sizes_are_said_not_to_fit_and_load_with_ours(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight *= 0.01
    small, _ = shrink(model, {"input_ids": IDS}, channels=0.7, exclude=["*.self_attn.*", "*embed*"])
    sizes = {layer.mlp.gate_proj.out_features for layer in small.model.layers}
    assert len(sizes) > 1
    said = io.save(small, tmp_path)["from_pretrained"]
    assert isinstance(said, str)
    assert said.startswith("no, only sc.load")
    assert not (tmp_path / "config.json").exists()
    assert torch.equal(answer(io.load(tmp_path, llama)), answer(small))


def test_a_packed_model_is_said_to_need_ours(tmp_path):
    assert io.save(llama(), tmp_path)["from_pretrained"] is True
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is packed" in io.save(llama(), tmp_path, packed=True)["from_pretrained"]
    assert not (tmp_path / "config.json").exists()  # with it, transformers would make the packed weights up
    (tmp_path / "config.json").write_text("{}")
    io.save(llama(), tmp_path, packed=True)
    assert {"config.json", "tokenizer.json"} < {p.name for p in tmp_path.iterdir()}  # not ours


def test_numbers_that_the_config_cannot_say_are_noticed(tmp_path):
    """Half of each head: the table of rotations keeps its frequencies, and no config makes such a table."""
    model = llama()
    model.model.rotary_emb.inv_freq *= 1.5
    said = io.save(model, tmp_path)["from_pretrained"]
    assert "inv_freq" in said


def test_a_model_of_two_dtypes_is_said_to_need_ours(tmp_path):
    """Plain from_pretrained would cast the one to the other, and round."""
    model = llama().to(torch.bfloat16)
    assert io.save(model, tmp_path)["from_pretrained"] is True
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    model.lm_head.float()
    assert "lm_head.weight in torch.float32" in io.save(model, tmp_path)["from_pretrained"]
    fresh = llama().to(torch.bfloat16)
    fresh.lm_head.float()
    assert torch.equal(io.load(tmp_path, fresh).lm_head.weight, model.lm_head.weight)
