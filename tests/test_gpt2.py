"""GPT-2's linear layers (`transformers.pytorch_utils.Conv1D`) store their weight as (in, out).

The oracle is the same model with `nn.Linear` in their place.
"""

import copy

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.layers import input_first

transformers = pytest.importorskip("transformers")
from transformers.pytorch_utils import Conv1D  # noqa: E402


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval()


def with_linears(model: nn.Module) -> nn.Module:
    """A copy of the model with `nn.Linear` layers of the same weights."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, Conv1D):
                linear = nn.Linear(child.nx, child.nf)
                linear.weight, linear.bias = nn.Parameter(child.weight.detach().T.contiguous()), child.bias
                setattr(module, name, linear)
    return twin


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 50, (2, 8))} for _ in range(3)]


def loss(output, batch):
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


@pytest.mark.parametrize(
    "recipe",
    [
        {"pattern": "2:4"},
        {"sparsity": 0.5, "scope": "row"},
        {"pattern": "in", "sparsity": 0.25},
        {"pattern": "out", "sparsity": 0.25},
        {"pattern": "4x1", "sparsity": 0.5},
        {"criterion": "wanda", "pattern": "2:4", "data": batches()},
        {"criterion": "ria", "sparsity": 0.5, "data": batches()},
        {"criterion": "taylor", "sparsity": 0.5, "scope": "global", "data": batches(), "loss": loss},
        {"method": "sparsegpt", "pattern": "2:4", "data": batches()},
    ],
    ids=lambda recipe: "-".join(map(str, [v for k, v in recipe.items() if k not in ("data", "loss")])),
)
def test_gpt2_is_pruned_along_its_inputs_without_arguments(recipe):
    """`prune_` found no target; with `types=[Conv1D]`, 2:4 ran along the outputs and Wanda raised "not linear in it"."""
    model = gpt2()
    twin = with_linears(model)
    plan, expected = sc.prune_(model, **recipe), sc.prune_(twin, **recipe, exclude="lm_head")
    assert len(plan.masks) == 8
    for name, mask in plan.masks.items():
        assert torch.equal(mask.T, expected.masks[name]), name
        torch.testing.assert_close(model.get_parameter(name).T, twin.get_parameter(name), rtol=1e-4, atol=1e-5)


def test_a_pruner_trains_gpt2():
    """No layer of the blocks was a target, so `Pruner` raised."""
    model = gpt2()
    pruner = sc.Pruner(model, pattern="2:4")
    pruner.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    assert pruner.sparsity == 0.5
    groups = model.transformer.h[0].mlp.c_fc.weight.T.reshape(-1, 4)
    assert ((groups == 0).sum(1) == 2).all()
    pruner.finish()


def test_shrink_updates_the_sizes_that_gpt2_layers_hold():
    """`nx` kept the old number of inputs, and was reported as a number whose new value is not known."""
    model, data = gpt2(), batches()
    small, plan = sc.shrink(model, data[0], sc.wanda, channels=0.5, data=data, exclude=["*.wte", "*.wpe"])
    layers = {name: layer for name, layer in small.named_modules() if isinstance(layer, Conv1D)}
    assert {name: (layer.nx, layer.nf) for name, layer in layers.items()} == {
        name: tuple(layer.weight.shape) for name, layer in layers.items()
    }
    assert layers["transformer.h.0.mlp.c_proj"].nx < 64
    assert not [name for name in plan.skipped if name.endswith((".nx", ".nf"))]


def test_gates_know_the_features_of_gpt2_layers():
    """A gate that is not calibrated did not know how many inputs its layer has."""
    gates = sc.gate_(gpt2(), method="topk", sparsity=0.5)
    assert gates.gates["transformer.h.0.mlp.c_proj"].features == 64
    assert "the largest 32" in str(gates)


def test_compress_says_why_gpt2_layers_stay_dense():
    """The layers were missing from the table of `compress_`."""
    model = gpt2()
    sc.prune_(model, pattern="2:4")
    rows = {row.layer: row for row in sc.compress_(model, batches()[0]).rows}
    row = rows["transformer.h.0.mlp.c_fc"]
    assert "Conv1D is not a layer type that can be compressed" in row.reason
    assert (row.sparsity, row.pattern) == (0.5, "2:4")


def test_a_layer_of_the_same_name_from_elsewhere_is_not_taken_for_gpt2s():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

    with pytest.raises(ValueError, match="Conv1D is not among the types"):
        sc.prune_(Conv1D(), pattern="2:4")


def test_an_input_first_layer_of_the_users_own_has_input_norms(monkeypatch):
    """A layer that adds its bias, as GPT-2's does, was "not linear in it"."""

    class InOut(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.addmm(self.bias, x, self.weight)

    monkeypatch.setattr("secateur._layers._INPUT_FIRST", set())
    input_first(InOut)
    layer, x = InOut(), torch.randn(7, 5)
    scores = layer.weight.detach().abs() * x.norm(dim=0)[:, None]
    plan = sc.plan(layer, "wanda", sparsity=0.4, scope="row", data=[x], types=[InOut])
    assert torch.equal(plan.masks["weight"], scores >= scores.sort(0).values[2])
