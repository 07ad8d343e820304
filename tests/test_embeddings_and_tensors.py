"""Embeddings, and tensors that are in no module, are pruned like any weight."""

import pytest
import torch
from torch import nn

import secateur as sc


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(40, 8, **options)
        self.bag = nn.EmbeddingBag(20, 8, mode="mean", **{k: v for k, v in options.items() if k == "sparse"})
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.table(x).mean(1) + self.bag(x % 20))


@pytest.mark.parametrize("choice", [{"types": [nn.Embedding, nn.EmbeddingBag]}, {"include": ["table", "bag"]}])
def test_embeddings_are_pruned_when_named_or_typed(choice):
    model = Words()
    plan = sc.prune_(model, sparsity=0.5, **choice)
    assert list(plan.masks) == ["table.weight", "bag.weight"]
    assert int((model.table.weight == 0).sum()) == 160
    assert int((model.bag.weight == 0).sum()) == 80
    assert "head.weight" in plan.skipped


def test_whole_rows_of_an_embedding_go_by_their_mean_magnitude():
    model = Words()
    weakest = model.table.weight.detach().abs().mean(1).argsort()[:10]
    sc.prune_(model, pattern="out", count=10, include="table")
    gone = (model.table.weight == 0).all(1).nonzero().reshape(-1)
    assert sorted(gone.tolist()) == sorted(weakest.tolist())
    assert int((model.table.weight == 0).sum()) == 80


@pytest.mark.parametrize("pattern", ["1x4", "2x2", "2:4", "1x4-2", "in"])
def test_blocks_and_dimensions_of_an_embedding_go_together(pattern):
    model = Words()
    budget = {} if ":" in pattern else {"sparsity": 0.25}
    plan = sc.prune_(model, pattern=pattern, include="table", **budget)
    assert plan.metrics()["sparsity"] == pytest.approx(0.5 if ":" in pattern else 0.25)
    assert torch.equal(model.table.weight != 0, plan.masks["table.weight"])


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_is_pruned_by_gradients_dense_or_sparse(sparse):
    torch.manual_seed(0)
    model = Words(sparse=sparse)
    batch = (torch.arange(90).view(18, 5) % 30, torch.randint(0, 4, (18,)))
    plan = sc.plan(
        model, sc.taylor, sparsity=0.25, pattern="out", include="table", data=[batch], loss=nn.functional.cross_entropy
    )
    rows = plan.masks["table.weight"].all(1)
    assert not rows[30:].any(), "rows that no batch looked up have no gradient and go first"
    assert rows[:30].all()


def test_a_pruner_keeps_zeros_in_an_embedding_with_sparse_gradients():
    torch.manual_seed(0)
    model = Words(sparse=True)
    pruner = sc.Pruner(model, sparsity=0.5, include=["table", "bag"])
    optimizer = torch.optim.SparseAdam([model.table.weight, model.bag.weight], lr=0.1)
    pruner.attach(optimizer)
    before = model.table.weight.detach().clone()
    for _ in range(3):
        model(torch.randint(0, 40, (16, 5))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pruner.verify()
    assert not torch.equal(model.table.weight, before)
    assert int((model.table.weight == 0).sum()) == 160


def test_tensors_that_are_in_no_module_are_pruned_as_a_mapping():
    tensors = {"a.b": torch.randn(8, 8), "codebook": torch.randn(4, 6, 2)}
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    plan = sc.prune_(tensors, sparsity=0.5)
    for name, tensor in tensors.items():
        assert int((tensor == 0).sum()) == tensor.numel() // 2
        assert torch.equal(tensor, kept[name] * plan.masks[name])
    assert not plan.skipped


def test_one_tensor_alone_is_pruned_in_place():
    tensor = torch.randn(6, 8)
    plan = sc.prune_(tensor, pattern="2:4")
    assert list(plan.masks) == ["tensor"]
    assert ((tensor == 0).view(-1, 4).sum(1) == 2).all()


def test_a_model_and_its_weights_as_a_mapping_are_pruned_alike():
    model = nn.Sequential(nn.Linear(16, 8), nn.Conv2d(3, 4, 3))
    weights = {name: w.detach().clone() for name, w in model.named_parameters() if w.ndim > 1}
    for options in ({"scope": "global", "sparsity": 0.7}, {"pattern": "2x2", "count": 3}, {"pattern": "2:4"}):
        assert sc.plan(model, **options).masks == sc.plan(weights, **options).masks


def test_a_plan_for_tensors_is_applied_and_undone():
    tensors = {"w": torch.randn(8, 8)}
    before = tensors["w"].clone()
    plan = sc.plan(tensors, sparsity=0.5)
    assert torch.equal(tensors["w"], before)
    plan.apply_(tensors, keep_dense=True)
    assert int((tensors["w"] == 0).sum()) == 32
    plan.undo_(tensors)
    assert torch.equal(tensors["w"], before)


def test_tensors_are_pruned_while_they_are_trained():
    w = torch.randn(8, 8, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)
    pruner = sc.Pruner({"w": w}, sparsity=sc.linear(0.5, end=4))
    pruner.attach(optimizer)
    for _ in range(5):
        (w - 1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    pruner.finish()
    assert int((w == 0).sum()) == 32


@pytest.mark.parametrize(("pattern", "wanted"), [("unstructured", 8), ("1x4", 8), ("2:4", 8), ("1x4-2", 8)])
def test_a_vector_is_one_row(pattern, wanted):
    vector = torch.randn(16)
    scores = vector.abs().view(4, 4)
    budget = {} if ":" in pattern else {"sparsity": 0.5}
    (mask,) = sc.plan(vector, pattern=pattern, **budget).masks.values()
    assert mask.shape == (16,)
    assert int((~mask).sum()) == wanted
    if pattern == "1x4":
        assert set((~mask).view(4, 4).all(1).nonzero().reshape(-1).tolist()) == set(scores.mean(1).argsort()[:2].tolist())
    elif pattern != "unstructured":
        assert ((~mask).view(4, 4).sum(1) == 2).all()


def test_a_bias_is_one_row_too():
    model = nn.Sequential(nn.Linear(4, 16))
    (mask,) = sc.plan(model, pattern="2:4", include="0.bias").masks.values()
    assert (mask.view(4, 4).sum(1) == 2).all()


def test_a_scalar_tensor_is_one_element():
    assert sc.plan(torch.tensor(2.0), sparsity=1.0).metrics()["pruned"] == 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"w": [1.0]}, TypeError, "'w' is a list"),
        ({3: torch.ones(2, 2)}, TypeError, "names to tensors"),
        ([torch.ones(2, 2)], TypeError, "mapping of names to tensors"),
        ({"w": torch.ones(2, 2, requires_grad=True) * 2}, ValueError, "'w' is computed"),
        ({"w": torch.ones(2, 2, dtype=torch.int32)}, ValueError, "cannot be ranked"),
        ({}, ValueError, "nothing to prune"),
    ],
)
def test_what_is_no_tensor_to_prune_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        sc.prune_(given, sparsity=0.5)


def test_evidence_from_data_needs_a_model():
    with pytest.raises(TypeError, match="running a model"):
        sc.prune_({"w": torch.randn(4, 4)}, sc.wanda, sparsity=0.5, data=[torch.randn(2, 4)])


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    "mapping",
    [
        lambda model: model.state_dict(),
        lambda model: dict(model.state_dict()),
        lambda model: dict(model.named_parameters()),
        lambda model: dict(nn.Linear(4, 4).named_parameters()),
        lambda model: {name: t for name, t in model.state_dict().items() if "bias" not in name and "running" not in name},
    ],
    ids=["state dict", "plain dict", "parameters", "one layer", "weights and scales"],
)
def test_a_state_dict_is_not_taken_for_tensors_of_their_own(mapping):
    """Every entry was a target, so BatchNorm statistics and biases of the live model became zero."""
    model = normed()
    given = mapping(model)
    before = {name: tensor.clone() for name, tensor in given.items()}
    for prune in (sc.prune_, sc.plan, sc.Pruner):
        with pytest.raises(ValueError, match="Pass the model itself, or name the tensors to prune in include="):
            prune(given, sparsity=0.5)
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


def test_named_tensors_of_a_state_dict_are_pruned_and_vectors_are_left():
    """`include=` matched statistics and biases too."""
    model = normed()
    plan = sc.prune_(model.state_dict(), sparsity=0.5, include="*")
    assert sorted(plan.masks) == ["0.weight", "3.weight"]
    assert "statistics" in plan.skipped["1.running_var"]
    assert int((model[3].weight == 0).sum()) == 16
    assert (model[1].running_var == 1).all()
    assert list(sc.plan(model.state_dict(), sparsity=0.5, include="1.weight").masks) == ["1.weight"]


def test_a_plan_for_a_model_is_applied_to_its_state_dict():
    model = normed()
    plan = sc.plan(model, sparsity=0.5)
    plan.apply_(model.state_dict())
    assert plan.masks == sc.Masks({name: model.get_parameter(name) != 0 for name in plan.masks})
