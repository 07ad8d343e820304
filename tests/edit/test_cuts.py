"""Cuts applied to a model, and the configs it shares with others."""

import types

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.edit import Attribute, Cuts, all_or_nothing, apply_cuts_, cuts, select_indices


class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.width, config.width)


class Outer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.whole, self.config = config, config.inner
        self.layers = nn.ModuleList(Inner(config.inner) for _ in range(2))


def config():
    return types.SimpleNamespace(name="x", inner=types.SimpleNamespace(width=6), other=types.SimpleNamespace(width=6))


KEPT = [0, 2, 4]
WIDTH = Cuts(
    tensors={f"layers.{i}.fc.{n}": k for i in (0, 1) for n, k in (("weight", {0: KEPT, 1: KEPT}), ("bias", {0: KEPT}))},
    shapes={f"layers.{i}.fc.{n}": s for i in (0, 1) for n, s in (("weight", (6, 6)), ("bias", (6,)))},
    attributes=[Attribute("config", "width", None, 6, 3)],
)


def test_a_cut_leaves_the_callers_config_alone():
    given = config()
    model = Outer(given)
    apply_cuts_(model, WIDTH)
    assert given.inner.width == 6
    assert Outer(given).layers[0].fc.weight.shape == (6, 6)


def test_a_config_inside_another_can_be_copied_for_one_module():
    given = config()
    model = Outer(given)
    cuts = Cuts(attributes=[Attribute("whole.other", "width", None, 6, 3, own=True)])
    apply_cuts_(model, cuts)
    assert model.whole.other.width == 3
    assert given.other.width == 6
    assert model.config is given.inner


def test_modules_that_shared_a_config_still_share_it():
    given = config()
    model = apply_cuts_(Outer(given), WIDTH)
    assert model.config.width == 3
    assert model.config is model.whole.inner is model.layers[0].config is model.layers[1].config
    assert model.whole.other is given.other  # nothing changes in it
    assert model.whole.name == "x"


def test_an_error_after_the_cut_brings_the_config_back():
    given = config()
    model = Outer(given)

    def fail():
        with all_or_nothing(model):
            apply_cuts_(model, WIDTH)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.config is given.inner
    assert given.inner.width == 6
    assert model.layers[1].fc.weight.shape == (6, 6)


def test_shrinking_in_place_leaves_the_config_of_the_caller_alone():
    transformers = pytest.importorskip("transformers")
    given = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    before = given.to_dict()
    model = transformers.LlamaForCausalLM(given).eval()
    ids = torch.arange(8).reshape(1, 8)
    sc.shrink_(model, {"input_ids": ids, "use_cache": False}, channels=0.5)
    assert given.to_dict() == before
    assert model.config.hidden_size < 16
    assert model(ids).logits.shape == (1, 8, 32)


@pytest.mark.parametrize("elements", [1, 100, 1 << 18])
@pytest.mark.parametrize("dims", [{0}, {1}, {0, 1}, {1, 3}, {0, 1, 2}])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_indices_are_selected_a_few_rows_at_a_time(elements, dims, layout, monkeypatch):
    monkeypatch.setattr(cuts, "slab_elements", lambda _: elements)
    tensor = torch.arange(7.0 * 6 * 5 * 4).view(7, 6, 5, 4).contiguous(memory_format=layout)
    kept = {d: [0, 2, 3] for d in dims}
    expected = tensor[torch.meshgrid(*(torch.tensor(kept.get(d, range(n))) for d, n in enumerate(tensor.shape)), indexing="ij")]
    found = select_indices(tensor, kept)
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(select_indices(tensor.requires_grad_(), kept), expected)
