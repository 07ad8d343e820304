"""Orders of channels inside of blocks: the function of the whole model stays the same, wherever the plan is used."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import secateur as sc
from secateur.channel_groups import Order


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(2)), nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


READERS = ["blocks.0.down.weight", "blocks.1.down.weight"]


def made(net=Net, *args):
    torch.manual_seed(0)
    return net(*args).double(), [torch.randn(3, length, 8).double() for length in (9, 5, 12)]


def planned(model, data, **how):
    return sc.plan(model, data=data, **{"method": "flow", "pattern": "2:4", "exclude": "head", **how})


def readers(plan):
    return [order.reader for order in plan.order.orders]


@torch.no_grad()
def assert_same_function(plan, model, data):
    moved = copy.deepcopy(model)
    plan.order.move_(moved)
    for x in data:
        torch.testing.assert_close(moved(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_tensor_is_permuted_on_its_own_device():
    order = Order("weight", 8, 1, 0.0, 0.0, {("weight", 1): torch.arange(8)})
    with FakeTensorMode(allow_non_fake_inputs=True):  # as on a GPU: it raises where devices differ
        weight = torch.empty(4, 8, device="cuda")
        assert order.permuted({"weight": weight})["weight"].device == weight.device


def test_a_tensor_that_carries_the_channels_on_two_dims_is_permuted_on_both():
    index, weight = torch.tensor([2, 0, 1]), torch.randn(3, 3)
    order = Order("weight", 3, 1, 0.0, 0.0, {("weight", 0): index, ("weight", 1): index})
    assert torch.equal(order.permuted({"weight": weight})["weight"], weight[index][:, index])


@torch.no_grad()
def test_a_plan_is_applied_to_a_model_that_was_compiled_since():
    model, data = made()
    plan, compiled = planned(model, data), torch.compile(copy.deepcopy(model), backend="eager")
    assert readers(plan) == READERS
    plan.apply_(compiled)
    plan.apply_(model)
    assert torch.equal(compiled._orig_mod(data[0]), model(data[0]))


class Scaled(Block):
    """Its channels have factors that a state dict holds, or does not hold."""

    def __init__(self, kind):
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, 17.0), persistent=kind == "persistent")
        if kind == "attribute":
            scale = self.scale
            del self.scale
            self.scale = scale.double()

    def forward(self, x):
        return x + self.down(self.up(x).relu() * self.scale)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["persistent", "not persistent", "attribute"])
def test_a_state_dict_of_the_new_order_fits_a_new_model(kind):
    model, data = made(Net, lambda: Scaled(kind))
    plan, loaded = planned(model, data), copy.deepcopy(model)
    moved = copy.deepcopy(model)
    plan.order.move_(moved)
    loaded.load_state_dict(moved.state_dict())
    torch.testing.assert_close(loaded(data[0]), model(data[0]), rtol=1e-10, atol=1e-10)
    assert readers(plan) == (READERS if kind == "persistent" else [])
    if kind != "persistent":
        assert "'scale', which is in no state dict" in plan.order.skipped["blocks.0.down.weight"]


class Store:
    """As a cache is: an object that every block gets and writes to."""

    def __init__(self):
        self.kept = []


class Handing(Block):
    """Adds to its channels those that the block before left in a list, or in a cache."""

    def forward(self, x, store):
        h, kept = self.up(x).relu(), store.kept if isinstance(store, Store) else store
        if kept:
            h = h + kept[-1]
        kept.append(h)
        return x + self.down(h)


class Handed(Net):
    def __init__(self, kind):
        super().__init__(Handing)
        self.kind = kind

    def forward(self, x):
        store = self.kind()
        for block in self.blocks:
            x = block(x, store)
        return self.head(x)


class Tied(Net):
    """Reads a weight of its first block outside of it."""

    def forward(self, x):
        return super().forward(x + nn.functional.linear(x, self.blocks[0].up.weight)[..., :8])


@pytest.mark.parametrize(("net", "kept"), [((Handed, list), []), ((Handed, Store), []), ((Tied,), READERS[1:])])
def test_channels_that_are_read_outside_of_their_block_keep_their_order(net, kept):
    model, data = made(*net)
    plan = planned(model, data)
    assert_same_function(plan, model, data)
    assert readers(plan) == kept
    assert "more is read from the block" in plan.notes["channels of blocks.0"]


class Branching(Block):
    """Long inputs take another way, in which a second layer reads the channels."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(16, 8)

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h) + (self.extra(h) if x.shape[1] > 6 else 0)


def test_the_function_stays_the_same_for_long_and_for_short_batches():
    model, data = made(Net, Branching)
    plan = planned(model, data, exclude=["head", "*extra"])
    assert_same_function(plan, model, data)
    assert plan.order.skipped["blocks.0.down.weight"] == "moving its inputs changes the output of the model"


class Mixing(nn.Module):
    """Heads that are multiplied with each other, so that they need one common order. They add little to a large stream."""

    def __init__(self):
        super().__init__()
        self.heads, self.value, self.out = 2, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        heads = self.value(x.clamp(-3, 3)).view(*x.shape[:-1], self.heads, -1)
        return x + self.out((heads * heads.flip(-2)).flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_values_in_the_residual_stream_do_not_hide_a_change(dtype):
    model, data = made(Net, Mixing)
    large = 20_000 * torch.eye(8)[0]
    plan = planned(model.to(dtype), [(x + large).to(dtype) for x in data])
    assert [order.orders for order in plan.order.orders] == [1, 1]
    assert_same_function(plan, model.double(), [x + large for x in data])


class Scripted(Block):
    def __init__(self):
        super().__init__()
        self.act = torch.jit.script(nn.Sequential(nn.ReLU()))

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_plan_leaves_the_storage_of_every_weight_and_modules_of_torchscript_alone():
    model, data = made(Net, Scripted)
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert readers(planned(model, data)) == READERS
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before


def test_a_cache_in_the_calls_of_a_block_is_empty_in_each_attempt_to_trace_it():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    config = transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **sizes)
    model, data = transformers.MixtralForCausalLM(config).eval(), [{"input_ids": torch.arange(24).view(2, 12)}]
    plan = planned(model, data, exclude="lm_head")  # experts are chosen by values, which the first attempt does not compute
    assert readers(plan) == [f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)]


@torch.no_grad()
def test_a_plan_is_applied_again_after_training_that_kept_its_zeros():
    model, data = made()
    plan = planned(model, data).apply_(model)
    for name, weight in model.named_parameters():
        weight.add_(0.1 * plan.masks[name] if name in plan.masks else 0.1)
    trained = copy.deepcopy(model)
    plan.apply_(model)
    assert torch.equal(model.blocks[0].up.bias, trained.blocks[0].up.bias)
    assert torch.equal(model.blocks[0].up.weight, plan.weights["blocks.0.up.weight"])
