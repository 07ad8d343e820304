"""The criterion "obs": what the removal of units costs the loss, with and without a new fit of the weights that stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.curvature import curvature
from secateur.surgery.calibrate.surgeon import unit_costs
from secateur.targeting import targets
from secateur.trace import trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture
def known():
    model = Net().double()
    data = [torch.randn(40, 6, dtype=torch.float64) for _ in range(3)]
    return model, data


def moments(model, data):
    """H of the second layer by its definition, and G as `curvature` draws it."""
    inner = torch.cat([torch.tanh(model.first(x)).detach() for x in data])
    chosen, _ = targets(model)
    return inner.T @ inner / len(inner), curvature(model, chosen, data).G["second.weight"]


def costs(model, data, repair):
    traced = trace(model, (data[0],), {})
    group = next(g for g in traced.prunable if g.size == 5)
    return unit_costs(traced, [group], data, repair)[group]


def test_the_first_unit_to_go_costs_what_its_part_of_the_output_costs_the_loss(known):
    model, data = known
    H, G = moments(model, data)
    W = model.second.weight.detach()
    each = torch.stack([(W[:, j] @ G @ W[:, j]) * H[j, j] / 2 for j in range(5)])
    found = costs(model, data, "none")
    assert found.argmin() == each.argmin()
    gone = found.sort().indices[:4]  # all but the last: together they cost what the loss of all their parts costs
    parts = W[:, gone] @ H[gone][:, gone]
    assert float(found[gone].sum()) == pytest.approx(float(((G @ W[:, gone]) * parts).sum() / 2), rel=1e-5)


def test_with_a_new_fit_the_cost_is_that_of_least_squares(known):
    model, data = known
    H, G = moments(model, data)
    H = H + 1e-4 * H.diagonal().mean() * torch.eye(5)
    W = model.second.weight.detach()
    each = []
    for j in range(5):
        kept = [i for i in range(5) if i != j]
        new = torch.zeros_like(W)
        new[:, kept] = torch.linalg.solve(H[kept][:, kept], H[kept] @ W.T).T
        each.append(float(torch.trace(G @ (W - new) @ H @ (W - new).T) / 2))
    found = costs(model, data, "refit")
    assert int(found.argmin()) == each.index(min(each))
    assert float(found.min()) == pytest.approx(min(each), rel=1e-5)


def test_curvature_at_the_inputs_is_that_of_the_outputs_through_the_weight(known):
    model, data = known
    chosen, _ = targets(model)
    outputs, inputs = (curvature(model, chosen, data, kind=kind) for kind in ("fisher", "inputs"))
    for target in chosen:
        W = target.weight
        torch.testing.assert_close(inputs.G[target.name], W.T @ outputs.G[target.name] @ W)


def test_units_that_the_loss_ignores_go_first():
    model = Net()
    with torch.no_grad():
        model.second.weight[:, 3] = 1.0  # a shift of all logits alike, which the loss does not see
        model.second.weight[:, 3] *= 10
    data = [torch.randn(64, 6) for _ in range(4)]
    _, plan = sc.shrink(model, data[0], "obs", channels={"first": 0.8}, data=data)
    assert plan.cuts.tensors["first.weight"][0] == [0, 1, 2, 4]
    assert plan.recipe.startswith("obs, ")
    assert plan.arguments["criterion"] == "obs"


def test_all_kinds_of_units_of_a_decoder_compete():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True)).eval()
    data = [{"input_ids": torch.randint(0, 40, (4, 12))} for _ in range(3)]
    scored, left = {}, {}
    traced = trace(llama, (), data[0])
    for group, answer in unit_costs(traced, traced.prunable, data, "refit").items():
        (left if isinstance(answer, str) else scored)[group] = answer
    assert set(left.values()) == {"obs: no weight reads these units"}  # queries and keys inside a head
    assert {group.size for group in scored} == {32, 48, 4, 8}  # stream, MLP, heads, values in a head
    small, plan = sc.shrink(llama, data[0], "obs", params=0.7, data=data, refit=True)
    assert plan.metrics()["params"] == pytest.approx(0.7, rel=0.02)
    assert small(**data[0]).logits.isfinite().all()


def test_obs_without_data_says_what_to_pass():
    with pytest.raises(ValueError, match="data="):
        sc.shrink(Net(), torch.randn(2, 6), "obs", channels=0.5)
