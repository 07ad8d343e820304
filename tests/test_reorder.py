"""reorder_: the same function, with channels in an order in which n:m keeps more."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.channel_order import _assigned, best_order, kept_score
from secateur.reorder import find_orders, reorder_


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        **{"num_key_value_heads": 2, "intermediate_size": 48, **changes},
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.arange(24).view(2, 12) % 31}


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.arange(24).view(2, 12)}


def bottleneck():
    parts = [nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16)]
    parts += [nn.Conv2d(16, 24, 1, bias=False), nn.GroupNorm(2, 24), nn.PReLU(24), nn.Conv2d(24, 8, 1)]
    model = nn.Sequential(*parts)
    nn.init.uniform_(model[1].running_mean)
    nn.init.uniform_(model[1].running_var, 0.5, 2)
    nn.init.normal_(model[5].weight)
    return model, torch.randn(2, 3, 6, 6)


def attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm = nn.MultiheadAttention(16, 2, batch_first=True), nn.LayerNorm(16)
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return x + self.down(F.gelu(self.up(self.norm(x))))

    return Block(), torch.randn(2, 5, 16)


MODELS = {"llama": llama, "gpt2": gpt2, "bottleneck": bottleneck, "attention": attention}


def made(which, dtype=torch.float64):
    torch.manual_seed(0)
    model, batch = MODELS[which]()
    batch = batch.to(dtype) if isinstance(batch, torch.Tensor) else batch
    return model.to(dtype).eval(), batch


def output(model, batch):
    with torch.no_grad():
        found = model(**batch) if isinstance(batch, dict) else model(batch)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:2"])
@pytest.mark.parametrize("which", MODELS)
def test_the_function_stays_the_same_and_undo_is_exact(which, pattern):
    model, batch = made(which)
    before, wanted = copy.deepcopy(model.state_dict()), output(model, batch)
    done = reorder_(model, pattern, data=[batch])
    assert done.orders
    assert not any("changes the output" in why for why in done.skipped.values())
    torch.testing.assert_close(output(model, batch), wanted, rtol=1e-10, atol=1e-10)
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert {order.reader for order in done.orders if order.after > order.before} <= set(moved)
    done.undo_(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


READERS = {
    "llama": {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")},
    "gpt2": {f"transformer.h.{i}.{name}.c_proj.weight" for i in (0, 1) for name in ("attn", "mlp")},
    "bottleneck": {"4.weight", "7.weight"},
    "attention": {"attention.out_proj.weight", "down.weight"},
}


@pytest.mark.parametrize("which", MODELS)
def test_the_inner_channels_are_found_without_names(which):
    model, batch = made(which)
    done = reorder_(model, data=[batch])
    assert {order.reader for order in done.orders} == READERS[which]
    assert all(order.after > order.before for order in done.orders)


def test_the_residual_stream_keeps_its_order():
    model, batch = made("llama")
    before = copy.deepcopy(model)
    reorder_(model, data=[batch], exclude="lm_head")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    up, old = (one.model.layers[0].mlp.up_proj.weight for one in (model, before))
    assert torch.equal(up.sum(1).sort().values, old.sum(1).sort().values)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, before.model.layers[0].self_attn.q_proj.weight)


def test_every_value_head_has_its_own_order_and_its_query_heads_share_it():
    model, batch = made("llama")
    done = find_orders(model, data=[batch])
    order = next(order for order in done.orders if order.reader.endswith("0.self_attn.o_proj.weight"))
    assert (order.units, order.orders) == (8, 2)
    value = order.indices["model.layers.0.self_attn.v_proj.weight", 0].view(2, 8)
    assert not torch.equal(value[0], value[1] - 8)
    read = order.indices[order.reader, 1].view(2, 2, 8)
    for head in (0, 1):
        assert torch.equal(read[head, 0] - 16 * head, value[head] - 8 * head)
        assert torch.equal(read[head, 1] - read[head, 0], torch.full((8,), 8))


def test_pruning_costs_less_in_the_new_order():
    model, batch = made("llama", torch.float32)
    for parameter in model.parameters():  # a few large weights in each row, as trained models have
        parameter.data *= parameter.data.abs().sqrt() * 30
    wanted = output(model, batch)
    errors = []
    for moved in (False, True):
        one = copy.deepcopy(model)
        if moved:
            reorder_(one, data=[batch])
        sc.prune_(one, sc.wanda, pattern="2:4", data=[batch], include="*.down_proj")
        errors.append(float((output(one, batch) - wanted).norm()))
    assert errors[1] < 0.95 * errors[0]


class Mixed(nn.Module):
    """Heads that are combined with each other, channel by channel."""

    def __init__(self, mix):
        super().__init__()
        self.heads, self.value, self.out, self.mix = 2, nn.Linear(6, 16), nn.Linear(16, 5), mix

    def forward(self, x):
        return self.out(self.mix(self.value(x).view(*x.shape[:-1], self.heads, -1)).flatten(-2))


@pytest.mark.parametrize(
    "mix",
    [
        lambda heads: heads * heads.flip(-2),
        lambda heads: (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads,
        lambda heads: heads * heads.sum(-2, keepdim=True),
    ],
)
def test_heads_that_are_combined_with_each_other_have_one_common_order(mix):
    torch.manual_seed(0)
    model, x = Mixed(mix).double(), torch.randn(4, 6).double()
    wanted = model(x).detach()
    done = reorder_(model, data=[x])
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)
    (order,) = done.orders
    assert order.orders == 1
    index = order.indices["out.weight", 1]
    assert torch.equal(index[8:] - 8, index[:8])


def test_where_the_order_matters_it_stays():
    model, x = Mixed(lambda heads: heads.cumsum(-1)), torch.randn(4, 6)
    done = reorder_(model, data=[x])
    assert done.orders == []
    assert "out.weight" in done.skipped


def test_weights_that_keep_their_order_are_named_with_the_reason():
    layers = [nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 4, 1)]
    model, x = nn.Sequential(*layers), torch.randn(2, 4, 9, 9)
    skipped = reorder_(model, "2:4", data=[x]).skipped
    assert skipped["1.weight"] == "its neighbouring weights are those of one kernel, not of different inputs"
    assert skipped["2.weight"] == "it is a grouped convolution, whose inputs are not reordered"
    assert skipped["4.weight"] == "its inputs can be reordered only within groups of 6, which is not a multiple of 4"


def test_experts_keep_their_order_with_the_reason():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).eval()
    skipped = reorder_(model, "2:4", data=[{"input_ids": torch.arange(24).view(2, 12)}]).skipped
    why = {reason for name, reason in skipped.items() if ".experts." in name}
    assert why == {"it holds the matrices of several experts; only the inputs of single matrices are reordered"}


def test_outputs_that_matter_to_the_loss_count_more():
    model, batch = made("llama", torch.float32)
    plain = find_orders(model, data=[batch])
    weighed = find_orders(model, data=[batch], curvature="diag")
    assert any(
        not torch.equal(one.indices[one.reader, 1], other.indices[other.reader, 1])
        for one, other in zip(plain.orders, weighed.orders, strict=True)
    )


def test_the_assignment_is_close_to_the_best():
    for seed in range(30):
        gain = torch.rand(6, 6, generator=torch.Generator().manual_seed(seed)) ** 3
        best = max(
            sum(float(gain[row, column]) for column, row in enumerate(rows)) for rows in itertools.permutations(range(6))
        )
        rows = _assigned(gain)
        assert sorted(rows.tolist()) == list(range(6))
        assert float(gain[rows, torch.arange(6)].sum()) > 0.95 * best
    assert _assigned(torch.zeros(4, 4)).tolist() == [0, 1, 2, 3]


def test_an_assignment_that_ends_early_is_whole(monkeypatch):
    gain = torch.rand(40, 40, generator=torch.Generator().manual_seed(0))
    found = []
    for rounds in (1, 5, 100):
        monkeypatch.setattr("secateur.channel_order._BIDS", rounds)
        rows = _assigned(gain)
        assert sorted(rows.tolist()) == list(range(40))
        found.append(float(gain[rows, torch.arange(40)].sum()))
    assert found == sorted(found)
    assert found[0] < found[2]


def test_orders_are_permutations_that_keep_nearly_as_much_as_the_best():
    for seed in range(10):
        scores = torch.rand(5, 8, generator=torch.Generator().manual_seed(seed)) ** 2
        order = best_order(scores, 2, 4)
        assert sorted(order.tolist()) == list(range(8))
        every = (torch.tensor([*one, *(i for i in range(8) if i not in one)]) for one in itertools.combinations(range(8), 4))
        assert kept_score(scores, order, 2, 4) > 0.95 * max(kept_score(scores, one, 2, 4) for one in every)


def test_gradients_move_with_their_weights():
    model, x = made("attention")
    output = model(x)
    output.square().sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    done = reorder_(model, data=[x])
    moved = model.down.weight.grad
    assert torch.equal(moved, before["down.weight"][:, done.orders[-1].indices["down.weight", 1]])
    done.undo_(model)
    assert all(torch.equal(parameter.grad, before[name]) for name, parameter in model.named_parameters())


def test_the_result_prints_and_counts():
    model, batch = made("llama")
    done = reorder_(model, data=[batch])
    assert "down_proj" in str(done)
    assert "other layers read its inputs too" in str(done)
    assert done.metrics()["groups"] == 4
    assert done.metrics()["kept_after"] > done.metrics()["kept_before"]
    assert len(done.to_dict()["layers"]) == 4
    assert "<table>" in done._repr_html_()


def test_what_does_not_fit_is_refused():
    model, batch = made("llama")
    with pytest.raises(ValueError, match="patterns n:m"):
        reorder_(model, "16x1", data=[batch])
    with pytest.raises(ValueError, match="pass data="):
        reorder_(model, "2:4")
    done = reorder_(model, data=[batch])
    with pytest.raises(ValueError, match="another model"):
        done.undo_(nn.Linear(4, 4))
    other, _ = llama(intermediate_size=64)
    state = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="entries, and the order has"):
        done.apply_(other)
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())


def test_weights_that_read_the_inputs_of_a_block_are_left_alone_for_that_reason():
    model, ids = llama()
    plan = sc.plan(model, method="flow", pattern="2:4", data=[ids])
    reason = plan.order.skipped["model.layers.0.self_attn.q_proj.weight"]
    assert reason == "it reads the inputs of the block or of the model, which keep their order"
