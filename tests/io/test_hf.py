"""Hugging Face models: from_pretrained loads what a config can describe; for the others `save` returns the reason."""

import json

import pytest
import torch
from saving import saved_until

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
    """`n_inner` is None in the config, which means four times the width; after the cut it needs a value."""
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
    assert "Mostly a config fits if whole layers are removed (depth=)" in said
    assert not (tmp_path / "config.json").exists()
    assert torch.equal(answer(io.load(tmp_path, llama)), answer(small))


def test_a_packed_model_is_said_to_need_ours(tmp_path):
    assert io.save(llama(), tmp_path)["from_pretrained"] is True
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is packed" in io.save(llama(), tmp_path, packed=True)["from_pretrained"]
    assert not (tmp_path / "config.json").exists()  # with it, transformers would invent the packed weights
    (tmp_path / "config.json").write_text("{}")
    io.save(llama(), tmp_path, packed=True)
    assert {"config.json", "tokenizer.json"} < {p.name for p in tmp_path.iterdir()}  # not ours


def test_numbers_that_the_config_cannot_say_are_noticed(tmp_path):
    """A table of rotary frequencies that no config produces, as after cutting half of each head."""
    model = llama()
    model.model.rotary_emb.inv_freq *= 1.5
    said = io.save(model, tmp_path)["from_pretrained"]
    assert "inv_freq" in said
    assert "layers are removed" not in said  # advice for models that were cut


def test_adapters_are_to_be_merged_first(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert io.save(model, tmp_path)["from_pretrained"].endswith("has adapters; merge them first (sc.merge_lora_(model))")
    assert io.save(sc.merge_lora_(model), tmp_path)["from_pretrained"] is True


def test_a_model_of_two_dtypes_is_said_to_need_ours(tmp_path):
    """from_pretrained would cast one dtype to the other, and round."""
    model = llama().to(torch.bfloat16)
    assert io.save(model, tmp_path)["from_pretrained"] is True
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    model.lm_head.float()
    assert "lm_head.weight in torch.float32" in io.save(model, tmp_path)["from_pretrained"]
    fresh = llama().to(torch.bfloat16)
    fresh.lm_head.float()
    assert torch.equal(io.load(tmp_path, fresh).lm_head.weight, model.lm_head.weight)


def test_loading_leaves_the_config_of_the_factory_alone(tmp_path):
    config = llama().config
    before = config.to_dict()
    small, _ = shrink(llama(), {"input_ids": IDS}, channels=0.5, scope="tensor")
    io.save(small, tmp_path)
    for _ in range(2):  # the second call builds the full model again
        assert torch.equal(answer(io.load(tmp_path, lambda: transformers.LlamaForCausalLM(config).eval())), answer(small))
        assert config.to_dict() == before


def test_a_folder_without_a_config_is_not_taken_for_a_hugging_face_folder(tmp_path):
    """transformers would build a model of default size, gigabytes, and fill it with random numbers."""
    model = llama()
    assert io.save(model, tmp_path)["from_pretrained"] is True
    said = io.save(model, tmp_path, packed=True)
    assert {p.name for p in tmp_path.iterdir()} == {"secateur.safetensors", "secateur.json", "generation_config.json"}
    for kind in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
        with pytest.raises((OSError, ValueError), match=r"no file named model\.safetensors|Unrecognized model"):
            kind.from_pretrained(tmp_path)
    assert torch.equal(answer(io.load(tmp_path, llama)), answer(model))
    assert io.dense_state_dict(tmp_path).keys() == model.state_dict().keys()
    assert said["from_pretrained"].startswith("no, only sc.load")
    assert io.save(model, tmp_path)["from_pretrained"] is True  # the other way round
    assert not (tmp_path / "secateur.safetensors").exists()
    assert torch.equal(answer(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()), answer(model))


def test_a_crash_between_the_two_names_of_the_tensor_file_leaves_one_of_the_models(tmp_path):
    old, new = llama(), llama()
    sc.prune_(new, sparsity=0.5)
    for stop in range(4):
        io.save(old, tmp_path)
        assert saved_until(stop, new, tmp_path, packed=True) == (stop == 3)
        assert torch.equal(answer(io.load(tmp_path, llama)), answer(old if stop < 2 else new))


def test_save_pretrained_refuses_what_from_pretrained_would_fill_with_random_weights(tmp_path):
    model = llama()
    sc.prune_(model, sparsity=0.9, exclude=["*embed*", "lm_head*"])
    dense = answer(model)
    sc.compress_(model, {"input_ids": IDS}, objective="size")
    assert any(isinstance(module, sc.execute.Compressed) for module in model.modules())
    for whole in (model, model.model):
        with pytest.raises(ValueError, match=r"compressed layers.*sc\.decompress_\(model\).*sc\.save"):
            whole.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    model.state_dict()  # outside save_pretrained nothing changes
    sc.decompress_(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(answer(transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()), dense)


def test_a_model_with_soft_masks_saves_as_the_plain_model(tmp_path):
    model = llama(tie_word_embeddings=True)
    config = model.config
    pruner = sc.Pruner(model, sparsity=0.5, ste=True, include=["*proj*", "*embed*"])
    pruner.step()
    with pytest.raises(ValueError, match=r"ste=True.*pruner\.finish\(\)"):
        model.save_pretrained(tmp_path)
    assert io.save(model, tmp_path / "soft")["from_pretrained"] is True
    before = answer(model)
    names = set(model.state_dict())
    for back in (
        io.load(tmp_path / "soft", lambda: transformers.LlamaForCausalLM(config).eval()),
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "soft").eval(),
    ):
        assert torch.equal(answer(back), before)
    assert set(model.state_dict()) == names  # the model itself keeps its soft masks
    pruner.finish()
    io.save(model, tmp_path / "hard")
    soft, hard = io.dense_state_dict(tmp_path / "soft"), io.dense_state_dict(tmp_path / "hard")
    assert soft.keys() == hard.keys() == model.state_dict().keys()
    assert all(torch.equal(soft[name], hard[name]) for name in hard)
