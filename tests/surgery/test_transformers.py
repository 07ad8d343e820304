"""Hugging Face models: configs that follow a cut, and embeddings beside layers."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import secateur as sc

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
IDS = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False, rms_norm_eps=1e-3)).eval()


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_save_pretrained_keeps_the_eps_that_a_cut_changed(tmp_path, refit, in_place):
    model = llama()
    config = model.config
    options = {"params": 0.6, "multiple_of": 4, "scope": "tensor", "bias": False, "refit": refit, "data": [{"input_ids": IDS}]}
    small, _ = (sc.shrink_ if in_place else sc.shrink)(model, {"input_ids": IDS}, **options)
    assert small.config.hidden_size < 32
    small.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, small(IDS).logits)
    assert config.rms_norm_eps == 1e-3  # the config of the caller is not edited


def test_the_plan_names_an_eps_that_no_config_gives():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)).eval()  # norms over heads keep their eps
    _, plan = sc.shrink(model, {"input_ids": IDS}, channels={"model.embed_tokens": 0.75})
    assert "save with sc.save" in plan.skipped["model.norm.variance_epsilon"]


def test_wanda_scores_units_that_embeddings_carry_by_the_other_layers():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=16, bos_token_id=0)).eval()
    small, plan = sc.shrink(model, IDS, sc.wanda, params=0.7, data=[IDS])
    assert {g.name: g.after < g.before for g in plan.groups}["transformer.wte.weight[1]"]
    assert small.transformer.wpe.weight.shape[1] == small.transformer.wte.weight.shape[1]


def test_units_whose_weights_no_input_is_multiplied_with_are_skipped():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    _, plan = sc.shrink(model, IDS % 10, sc.wanda, channels=0.5, data=[IDS % 10])
    assert [g.name for g in plan.groups] == ["1.weight[0]"]
    assert "no input is multiplied with the weights" in plan.skipped["0.weight[1]"]
