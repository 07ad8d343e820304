"""`Pruner.hold`: zeros that are in a model already stay through fine-tuning, whatever made them."""

import pytest
import torch
from torch import nn

import secateur as sc

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model, optimizer, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).sub(1).square().mean().backward()
        optimizer.step()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


RECIPES = {
    "unstructured": {"sparsity": 0.7, "scope": "global"},
    "2:4": {"pattern": "2:4"},
    "blocks": {"sparsity": 0.5, "pattern": "4x1"},
    "rows": {"sparsity": 0.5, "pattern": "out"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_that_are_there_stay_through_training(name, tmp_path):
    """A loaded model had to be pruned again with its own recipe, or fine-tuning filled the zeros."""
    model = net()
    sc.prune_(model, **RECIPES[name])
    sc.save(model, tmp_path)
    again = sc.load(tmp_path, net)
    zeros = {key: p == 0 for key, p in again.named_parameters() if p.dim() > 1}
    optimizer = adam(again)
    pruner = sc.Pruner.hold(again).attach(optimizer)
    train(again, optimizer)
    for key, p in again.named_parameters():
        if key in zeros:
            assert torch.equal(p == 0, zeros[key])
        else:
            assert (p != 0).all()
    assert pruner.finish().metrics()["sparsity"] == pytest.approx(model_sparsity(model))


def model_sparsity(model):
    held = [p for p in model.parameters() if p.dim() > 1 and (p == 0).any()]
    return sum(int((p == 0).sum()) for p in held) / sum(p.numel() for p in held)


def test_masks_are_never_made_anew():
    model = net()
    sc.prune_(model, sparsity=0.5)
    pruner = sc.Pruner.hold(model)
    masks = pruner.masks
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.add_(torch.randn(16, 6))
        pruner.step()
        pruner.verify()
    assert pruner.masks is masks


def test_layers_of_every_type_are_held_and_biases_train():
    """By their type alone, embeddings would not be targets."""
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 4))
    nn.init.zeros_(model[1].bias)
    sc.prune_(model, sparsity=0.5, types=[nn.Embedding, nn.Linear])
    pruner = sc.Pruner.hold(model)
    assert set(pruner.masks) == {"0.weight", "1.weight"}
    assert "vector" in pruner.skipped["1.bias"]


def test_a_tensor_that_is_all_zero_is_held_only_by_name():
    """The second matrix of a low-rank adapter starts at zero; held, it would never train."""
    model = net()
    nn.init.zeros_(model[4].weight)
    sc.prune_(model, sparsity=0.5, include="0")
    pruner = sc.Pruner.hold(model)
    assert set(pruner.masks) == {"0.weight"}
    assert pruner.skipped["2.weight"] == "no zeros"
    assert "name it in include=" in pruner.skipped["4.weight"]
    assert set(sc.Pruner.hold(model, include=["0.weight", "4.weight"]).masks) == {"0.weight", "4.weight"}
    assert set(sc.Pruner.hold(model, include="4.weight").masks) == {"4.weight"}


def test_targets_are_chosen_as_everywhere():
    model = net()
    sc.prune_(model, sparsity=0.5)
    assert set(sc.Pruner.hold(model, exclude="0").masks) == {"2.weight", "4.weight"}
    assert set(sc.Pruner.hold(model, include="2").masks) == {"2.weight"}
    with pytest.raises(ValueError, match="matches no parameter"):
        sc.Pruner.hold(model, include="9")


def test_a_model_without_zeros_has_nothing_to_hold():
    with pytest.raises(ValueError, match="no tensor of the model has zeros to hold"):
        sc.Pruner.hold(net())


def test_a_run_that_holds_can_be_resumed():
    model = net()
    sc.prune_(model, sparsity=0.5)
    pruner = sc.Pruner.hold(model)
    pruner.step()
    again = net()
    again.load_state_dict(model.state_dict())
    resumed = sc.Pruner.hold(again)
    resumed.load_state_dict(pruner.state_dict())
    assert resumed.masks == pruner.masks
    with pytest.raises(ValueError, match=r"another recipe: kind is HeldZeros in the state and Recipe here"):
        sc.Pruner(again, sparsity=0.0).load_state_dict(pruner.state_dict())


def test_a_held_model_can_be_cut():
    model = net()
    sc.prune_(model, sparsity=0.5)
    optimizer = adam(model)
    pruner = sc.Pruner.hold(model).attach(optimizer)
    sc.shrink_(model, X, channels=0.5, optimizer=optimizer)
    train(model, optimizer)
    pruner.verify()


def test_a_mapping_of_tensors_can_be_held():
    tensor = torch.randn(4, 4) * torch.eye(4)
    pruner = sc.Pruner.hold({"codebook": tensor})
    tensor += 1
    pruner.step()
    assert int((tensor != 0).sum()) == 4


def test_its_print_and_plan_say_that_zeros_were_there():
    model = net()
    sc.prune_(model, sparsity=0.5)
    pruner = sc.Pruner.hold(model)
    assert repr(pruner).startswith("Pruner(zeros that were there before; step 0, 3 tensors, 50.00% sparse")
    assert pruner.plan().recipe == "zeros that were there before"
