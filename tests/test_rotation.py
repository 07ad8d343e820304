"""`rotate_`: the residual stream in other coordinates, with the same function."""

from __future__ import annotations

import copy

import pytest
import torch

import secateur as sc

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}


def decoder(tied=False, **sizes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **sizes, num_key_value_heads=2, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(0.5 + torch.rand_like(p))
    return model


def batches(count=3):
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 40, (4, 12))} for _ in range(count)]


def test_the_turned_model_computes_the_same_function():
    model, data = decoder(), batches()
    dense = copy.deepcopy(model)
    result = sc.rotate_(model, data=data)
    assert result.flattened == ()
    assert result.channels == 32
    assert len(result.norms) == 5
    other = {"input_ids": torch.randint(0, 40, (3, 9))}
    torch.testing.assert_close(model(**other).logits, dense(**other).logits, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(model.model.embed_tokens.weight, dense.model.embed_tokens.weight, atol=1e-2)
    assert result.importance == sorted(result.importance, reverse=True)


def test_channels_that_one_direction_of_the_stream_needs_are_removed_at_no_cost():
    """All layers read and write a subspace of the stream, in no coordinate's direction: the turned model shows it."""
    model, data = decoder(), batches()
    torch.manual_seed(2)
    basis = torch.linalg.qr(torch.randn(32, 32))[0][:, :24]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.fill_(1.5)
            elif name.endswith(("embed_tokens.weight",)):
                p.copy_(p @ basis @ basis.T)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                p.copy_(basis @ basis.T @ p)
    dense = copy.deepcopy(model)
    sc.rotate_(model, data=data)
    small, plan = sc.shrink(model, data[0], "obs", channels={"model.embed_tokens": 0.75}, data=data)
    assert small.config.hidden_size == 24
    torch.testing.assert_close(small(**data[1]).logits, dense(**data[1]).logits, atol=1e-4, rtol=1e-3)
    assert [group.after for group in plan.groups if group.before == 32] == [24]


def test_a_tied_output_layer_flattens_the_last_norm_and_says_by_how_much():
    model, data = decoder(tied=True), batches()
    dense = copy.deepcopy(model)
    result = sc.rotate_(model, data=data)
    assert result.flattened == ("model.norm.weight",)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    now, before = (each(**data[0]).logits.detach() for each in (model, dense))
    assert result.change == pytest.approx(float((now - before).norm() / before.norm()), rel=1e-2)
    assert result.change > 0.01
    flat = decoder(tied=True)
    with torch.no_grad():
        flat.model.norm.weight.copy_(model.model.norm.weight)
    torch.testing.assert_close(model(**data[0]).logits, flat(**data[0]).logits, atol=1e-5, rtol=1e-4)


def test_a_tied_output_layer_whose_norm_cannot_be_flattened_is_refused_and_the_model_is_unchanged():
    """The weight of the last norm has both signs, as that of SmolLM2-135M: no number stands for it."""
    model, data = decoder(tied=True), batches()
    with torch.no_grad():
        model.model.norm.weight[::2] *= -1
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"tied to the embedding reads the output of the norm of model\.norm\.weight"):
        sc.rotate_(model, data=data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_norms_that_subtract_the_mean_are_refused_and_the_model_is_unchanged():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, tie_word_embeddings=False)
    model, data = transformers.GPT2LMHeadModel(config).eval(), batches()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"cannot be rotated.*for decoders.*RMS norms.*use shrink without it"):
        sc.rotate_(model, data=data)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_without_norms_has_no_stream():
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    with pytest.raises(ValueError, match="no residual stream"):
        sc.rotate_(net, data=[torch.randn(8, 6)])


def test_a_turned_and_shrunk_decoder_is_saved_and_loaded(tmp_path):
    model, data = decoder(tied=True), batches()
    sc.rotate_(model, data=data)
    small, _ = sc.shrink(model, data[0], "obs", params=0.7, data=data, bias=False)
    sc.save(small, tmp_path / "small")
    again = sc.load(tmp_path / "small", decoder(tied=True))
    torch.testing.assert_close(again(**data[0]).logits, small(**data[0]).logits)
