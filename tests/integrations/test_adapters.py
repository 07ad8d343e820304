"""LoRA adapters of PEFT: not pruned by default, and merged without filling zeros."""

import pytest
import torch
from torch import nn

import secateur as sc

peft = pytest.importorskip("peft")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def with_adapters(model, **options):
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def test_adapters_are_no_targets_unless_they_are_named():
    model = with_adapters(build())
    plan = sc.plan(model, sparsity=0.5)
    assert sorted(plan.masks) == ["base_model.model.0.base_layer.weight", "base_model.model.2.base_layer.weight"]
    assert "adapter" in plan.skipped["base_model.model.0.lora_A.default.weight"]
    name = "base_model.model.0.lora_A.default.weight"
    assert sorted(sc.plan(model, sparsity=0.5, include=name).masks) == [name]


def test_a_wildcard_does_not_select_adapters():
    assert all("lora" not in name for name in sc.plan(with_adapters(build()), sparsity=0.5, include="*").masks)


@pytest.mark.parametrize("dora", [False, True])
def test_merging_keeps_the_zeros(dora):
    model = build()
    sc.prune_(model, pattern="2:4")
    kept = [model[i].weight != 0 for i in (0, 2)]
    biases = [model[i].bias.detach().clone() for i in (0, 2)]
    adapted = with_adapters(model, use_dora=dora)
    deltas = [] if dora else [adapted.base_model.model[i].get_delta_weight("default") for i in (0, 2)]
    before = [model[i].base_layer.weight.detach().clone() for i in (0, 2)]
    plain = sc.merge_lora_(adapted)
    assert type(plain[0]) is nn.Linear
    assert not any("lora" in name for name, _ in plain.named_parameters())
    for number, i in enumerate((0, 2)):
        assert torch.equal(plain[i].weight != 0, kept[number])
        assert torch.equal(plain[i].bias, biases[number])
        if deltas:
            torch.testing.assert_close(plain[i].weight, (before[number] + deltas[number]) * kept[number])
    assert all(layer.pattern == "2:4" for layer in sc.summary(plain).layers)


def test_gpt2_merges_along_the_right_axis():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    sc.prune_(model, pattern="2:4")
    config = peft.LoraConfig(target_modules=["c_attn", "c_fc"], r=2, init_lora_weights=False, fan_in_fan_out=True)
    plain = sc.merge_lora_(peft.get_peft_model(model, config))
    found = {layer.name: layer.pattern for layer in sc.summary(plain).layers}
    assert found["transformer.h.0.attn.c_attn.weight"] == found["transformer.h.0.mlp.c_fc.weight"] == "2:4"


def test_a_model_without_adapters_is_refused():
    with pytest.raises(TypeError, match="Sequential has no adapters"):
        sc.merge_lora_(build())


def test_adapters_that_were_merged_before_are_refused():
    model = with_adapters(build())
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged already"):
        sc.merge_lora_(model)
