"""`shrink(experts=)`: whole experts, by REAP."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import secateur as sc

transformers = pytest.importorskip("transformers")
TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def mixtral(experts=4, chosen=2):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **TEXT, intermediate_size=20, num_local_experts=experts, num_experts_per_tok=chosen, initializer_range=0.5
    )
    return transformers.MixtralForCausalLM(config).eval()


def qwen_moe(experts=4, chosen=2):
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        **TEXT, intermediate_size=20, moe_intermediate_size=12, shared_expert_intermediate_size=8, num_experts=experts,
        num_experts_per_tok=chosen, initializer_range=0.5,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config).eval()


class Routed(nn.Module):
    """Two experts for each token, from a list."""

    def __init__(self, width=6, experts=4, top_k=2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts, self.top_k = experts, top_k
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width)) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        gates, chosen = self.gate(flat).softmax(-1).topk(self.top_k)
        made = torch.zeros_like(flat)
        for number in range(self.num_experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                made.index_add_(0, rows, gates[rows, place, None] * self.experts[number](flat[rows]))
        return made.view_as(x)


def tokens(count=3, size=(4, 8)):
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(0, 40, size)} for _ in range(count)]


def saliency(model, data, layer):
    """REAP by its definition, token by token."""
    block, sums, counts = model.model.layers[layer].mlp, {}, {}

    def see(_, args):
        hidden = args[0].flatten(0, 1)
        _, weights, chosen = block.gate(hidden)
        for x, gates, numbers in zip(hidden, weights, chosen):
            for gate, number in zip(gates.tolist(), numbers.tolist()):
                up = block.experts.gate_up_proj[number] @ x
                left, right = up.chunk(2)
                out = block.experts.down_proj[number] @ (block.experts.act_fn(left) * right)
                sums[number] = sums.get(number, 0.0) + gate * float(out.norm())
                counts[number] = counts.get(number, 0) + 1

    hook = block.register_forward_pre_hook(see)
    with torch.no_grad():
        for batch in data:
            model(**batch)
    hook.remove()
    return {number: sums[number] / counts[number] for number in sums}


@pytest.mark.parametrize("make", [mixtral, qwen_moe])
def test_the_experts_with_the_least_gate_times_norm_are_removed(make):
    model, data = make(), tokens()
    small, plan = sc.shrink(model, data[0], sc.reap, experts=0.5, data=data)
    for layer in range(2):
        expected = saliency(model, data, layer)
        stay = sorted(sorted(expected, key=lambda e: -expected[e])[:2])
        old, new = model.model.layers[layer].mlp, small.model.layers[layer].mlp
        assert torch.equal(new.experts.down_proj, old.experts.down_proj[stay])
        assert torch.equal(new.experts.gate_up_proj, old.experts.gate_up_proj[stay])
        assert torch.equal(new.gate.weight, old.gate.weight[stay])
        assert new.experts.num_experts == 2
    assert all(group.why and group.unit == "expert" for group in plan.groups)
    assert plan.metrics()["exact"] is False
    assert plan.recipe == "reap, experts=0.5"
    with pytest.raises(ValueError, match="nothing to verify"):
        plan.verify()


@pytest.mark.parametrize(("make", "name"), [(mixtral, "num_local_experts"), (qwen_moe, "num_experts")])
def test_a_model_with_fewer_experts_is_saved_and_loaded(make, name, tmp_path):
    model, data = make(experts=4, chosen=3), tokens()
    small, _ = sc.shrink(model, data[0], experts=0.5, data=data)
    assert getattr(small.config, name) == 2
    assert small.config.num_experts_per_tok == 2  # at most as many as there are
    assert getattr(model.config, name) == 4
    sc.save(small, tmp_path / "a")
    again = sc.load(tmp_path / "a", make(experts=4, chosen=3))
    torch.testing.assert_close(again(**data[0]).logits, small(**data[0]).logits)
    small.save_pretrained(tmp_path / "b")
    other = type(small).from_pretrained(tmp_path / "b")
    torch.testing.assert_close(other(**data[0]).logits, small(**data[0]).logits)


def test_a_cut_in_place_equals_the_copy_and_is_undone():
    model, data = mixtral(), tokens()
    dense = copy.deepcopy(model)
    small, _ = sc.shrink(model, data[0], experts=0.75, data=data)
    cut, plan = sc.shrink_(model, data[0], experts=0.75, data=data, keep_dense=True)
    torch.testing.assert_close(cut(**data[0]).logits, small(**data[0]).logits)
    plan.undo_()
    assert torch.equal(model(**data[0]).logits, dense(**data[0]).logits)
    assert model.config.num_local_experts == 4


def test_experts_without_tokens_are_removed_first_and_named():
    model, data = mixtral(), tokens()
    router = model.model.layers[1].mlp.gate
    with torch.no_grad():  # all logits are equal, and top-k takes the same experts for every token
        router.weight.zero_()
        chosen = router(torch.randn(3, 16))[2].unique().tolist()
    assert len(chosen) == 2
    small, plan = sc.shrink(model, data[0], experts=0.5, data=data)
    idle = [e for e in range(4) if e not in chosen]
    assert f"experts {', '.join(map(str, idle))} of model.layers.1.mlp.experts" in plan.note
    assert plan.cuts.tensors["model.layers.1.mlp.gate.weight"][0] == chosen
    assert small(**data[0]).logits.isfinite().all()


def test_padding_counts_nowhere():
    model, data = mixtral(), tokens()
    padded = []
    for batch in data:
        ids = torch.cat([batch["input_ids"], torch.full((4, 30), 7)], 1)
        mask = torch.cat([torch.ones(4, 8), torch.zeros(4, 30)], 1).long()
        padded.append({"input_ids": ids, "attention_mask": mask})
    a, b = (sc.shrink(model, data[0], experts=0.5, data=each)[1] for each in (data, padded))
    assert a.cuts.tensors == b.cuts.tensors


def test_a_list_of_experts_loses_modules_and_rows_of_its_router(tmp_path):
    model = Routed()
    data = [torch.randn(5, 7, 6) for _ in range(3)]
    scores = torch.zeros(4, 2)
    for x in data:
        flat = x.flatten(0, 1)
        gates = model.gate(flat).softmax(-1)
        for token, chosen in enumerate(gates.topk(2).indices.tolist()):
            for e in chosen:
                scores[e] += torch.tensor([float((gates[token, e] * model.experts[e](flat[token]).norm()).detach()), 1.0])
    stay = sorted((scores[:, 0] / scores[:, 1]).topk(2).indices.tolist())
    small, plan = sc.shrink(model, data[0], "reap", experts=0.5, data=data)
    assert [torch.equal(small.experts[i][0].weight, model.experts[e][0].weight) for i, e in enumerate(stay)] == [True, True]
    assert torch.equal(small.gate.bias, model.gate.bias[stay])
    assert (small.num_experts, small.gate.out_features, len(small.experts)) == (2, 2, 2)
    assert "1 expert" in str(plan)
    sc.save(small, tmp_path / "a")
    again = sc.load(tmp_path / "a", Routed())
    torch.testing.assert_close(again(data[0]), small(data[0]))


def test_blocks_beside_a_classifier_are_no_experts():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match="no mixture"):
        sc.shrink(Net(), x, experts=0.5, data=[x, x])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass data="),
        ({"data": tokens(), "params": 0.5}, "experts= cannot be combined with params="),
        ({"data": tokens(), "exact_only": True}, "never exact"),
        ({"data": tokens(), "criterion": "wanda"}, "scored by reap"),
        ({"data": tokens(), "experts": 0.95}, "removes none of the 4 experts"),
        ({"data": tokens(), "exclude": "*.experts"}, "no mixture"),
        (
            {"data": tokens(), "exclude": "expert"},
            r"exclude='expert' matches no tensor and no module. Did you mean '\*.experts'",
        ),
        ({"data": tokens(), "exclude": "experts"}, r"did you mean '\*.experts'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        sc.shrink(mixtral(), tokens()[0], **{"experts": 0.5, **options})


def test_reap_scores_no_channels():
    with pytest.raises(ValueError, match="ask for experts=") as caught:
        sc.shrink(mixtral(), tokens()[0], "reap", params=0.5)
    assert str(caught.value).count("reap") == 1


def test_fewer_experts_and_then_fewer_channels():
    model, data = mixtral(), tokens()
    small, _ = sc.shrink(model, data[0], experts=0.5, data=data)
    smaller, plan = sc.shrink(small, data[0], params=0.7)
    assert plan.metrics()["params"] == pytest.approx(0.7, rel=0.02)
    assert smaller(**data[0]).logits.isfinite().all()
