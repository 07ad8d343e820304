"""A model is run one block at a time, with the outputs that the whole model has."""

import copy
import threading

import pytest
import torch
from torch import nn

from secateur import blocks, stream


class Block(nn.Module):
    """Takes keyword arguments, writes to a cache, and returns a tuple, as decoder blocks do."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.layer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *, scale, cache=None, bias=None):
        y = self.layer(self.inner(x).relu()) * scale
        if cache is not None:
            cache.append(y)
            assert len(cache) <= 4, "a cache was written to twice"
        bias = y.mean() if bias is None else bias
        return x + y + bias, bias


class Decoder(nn.Module):
    """`bias` is computed by the first block and read by all others. `glue` is done to the stream between blocks."""

    def __init__(self, width=6, depth=4, glue=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.glue, self.runs = glue, 0

    def forward(self, ids, use_cache=True):
        self.runs += 1
        x, bias, cache = self.embed(ids), None, [] if use_cache else None
        for layer in self.layers:
            x, bias = layer(x if self.glue is None else self.glue(x), scale=torch.tensor(0.5), cache=cache, bias=bias)
        return {"logits": self.head(x)}


IDS = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7], [8, 9, 10, 0]])]
BATCHES = {"tensors": IDS, "mappings": [{"ids": ids} for ids in IDS], "pairs": [(ids, ids) for ids in IDS]}


def inputs_of(model, module, batches):
    """What a module receives first when the whole model runs: the slow reference."""
    seen = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return seen


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("glue", [None, lambda x: 2 * x], ids=["chained", "changed in between"])
@torch.no_grad()
def test_each_block_gets_the_inputs_that_the_changed_blocks_before_it_produce(kind, glue):
    model = Decoder(glue=glue)
    for replay, layer in zip(stream.stream(model, list(model.layers), BATCHES[kind]), model.layers, strict=True):
        assert replay.module is layer
        wanted = inputs_of(model, layer, IDS)
        for (args, _), x in zip(replay.calls, wanted, strict=True):
            torch.testing.assert_close(args[0], x)
        layer.layer.weight.mul_(-1)  # seen by all that follow


@torch.no_grad()
def test_blocks_that_feed_each_other_need_one_run_of_the_model():
    model = Decoder()
    for _ in stream.stream(model, list(model.layers), [{"ids": ids, "use_cache": False} for ids in IDS]):
        pass
    assert model.runs == len(IDS) + 1  # and one of a single sample, in which blocks return zeros


@torch.no_grad()
def test_blocks_that_get_one_object_need_another_run_of_the_first_batch():
    model = Decoder()
    for _ in stream.stream(model, list(model.layers), IDS):
        pass
    assert model.runs == len(IDS) + 2


@pytest.mark.parametrize("bare", [True, False], ids=["tensors", "tuples"])
def test_blocks_that_run_again_after_the_last_one_are_recorded_in_every_run(bare):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) if bare else Block(4) for _ in range(2))

        def forward(self, x):
            for _ in range(3):
                for layer in self.layers:
                    x = layer(x) if bare else layer(x, scale=0.5)[0]
            return x

    model, batches = Again(), [torch.randn(2, 4), torch.randn(3, 4)]
    with torch.no_grad():
        assert stream.Chain.of(model, list(model.layers), batches) == "they run more than once"
        for replay in stream.stream(model, list(model.layers), batches):
            assert [len(args[0]) for args, _ in replay.calls] == [2, 2, 2, 3, 3, 3]
            assert replay.batches == [0, 0, 0, 1, 1, 1]


@torch.no_grad()
def test_layers_with_other_code_between_them_need_two_runs_of_the_first_batch_and_one_of_the_others():
    model = Decoder()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    layers = [*layers[1:], layers[0]]  # the head is called last
    model.runs = 0
    for replay, layer in zip(stream.stream(model, layers, IDS), layers, strict=True):
        runs, wanted = model.runs, inputs_of(model, layer, IDS)
        model.runs = runs
        for (args, _), x in zip(replay.calls, wanted, strict=True):
            assert torch.equal(args[0], x)
        layer.weight.mul_(-1)
    assert model.runs <= len(IDS) + 3  # two of them end at the second layer: they look for blocks that feed each other
    assert not paused_runs()


def paused_runs():
    return [thread for thread in threading.enumerate() if thread.name == "secateur paused run"]


class Router(nn.Module):
    """Which of two layers comes first depends on the data."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        first, second = (self.one, self.two) if x[0, 0] > 0 else (self.two, self.one)
        return second(first(x).relu())


@torch.no_grad()
def test_a_batch_that_calls_the_modules_in_another_order_is_served_too():
    model, batches = Router(), [torch.ones(2, 4), -torch.ones(3, 4)]
    for replay, layer in zip(stream.stream(model, [model.one, model.two], batches), (model.one, model.two), strict=True):
        for (args, _), x in zip(replay.calls, inputs_of(model, layer, batches), strict=True):
            assert torch.equal(args[0], x)
        layer.weight.mul_(-1)


def test_paused_runs_have_the_modes_of_the_caller_and_end_with_the_stream():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for mode, dtype, grad in (
        (torch.no_grad(), torch.float32, False),
        (torch.enable_grad(), torch.float32, True),
        (torch.autocast("cpu", torch.bfloat16), torch.bfloat16, True),
    ):
        with mode:
            replays = stream.stream(model, [model[0], model[2]], [torch.randn(2, 4)])
            next(replays)
            x = next(replays).calls[0][0][0]
            assert paused_runs()
            replays.close()
        assert (x.dtype, x.requires_grad) == (dtype, grad)
    assert not paused_runs()
    assert not any(m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_outputs_are_those_of_the_model_and_repeat():
    model = Decoder()
    wanted = [
        layer(*args, **kwargs)[0] for layer in model.layers[:1] for args, kwargs in stream.record(model, layer, IDS).calls
    ]
    (replay,) = stream.stream(model, [model.layers[0]], IDS)
    for _ in range(2):  # a cache is empty each time
        for (x, _), y in zip(replay.run(), wanted, strict=True):
            torch.testing.assert_close(x, y)


@torch.no_grad()
def test_a_block_that_writes_to_its_input_gets_it_anew():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(InPlace(), nn.Identity()), nn.Sequential(InPlace(), nn.Identity()))
    x = torch.randn(2, 3)
    first, second = (r for r in stream.stream(model, [model[1], model[2]], [x]))
    for replay, times in ((first, 2), (second, 4)):
        for _ in range(2):
            torch.testing.assert_close(next(iter(replay.run())), times * model[0](x))


def test_the_whole_model_is_a_block_too():
    model = Decoder()
    (replay,) = stream.stream(model, [model], IDS)
    assert [tuple(out["logits"].shape) for out in replay.run()] == [(1, 3, 11), (2, 4, 11)]


def test_a_model_that_fails_says_on_which_batch_and_leaves_no_hooks():
    model = Decoder()
    with pytest.raises(ValueError, match="does not run on a batch"):
        list(stream.stream(model, list(model.layers), [torch.tensor([[99]])]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_a_decoder_of_transformers_is_streamed_with_its_masks_positions_and_cache():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=30
    )
    model = transformers.LlamaForCausalLM(config).eval()
    batches = [
        {"input_ids": torch.randint(0, 30, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)},
        {"input_ids": torch.randint(0, 30, (1, 5))},
    ]
    layers = list(model.model.layers)
    for replay, layer in zip(stream.stream(model, layers, batches), layers, strict=True):
        changed = copy.deepcopy(model)
        for (args, kwargs), batch in zip(replay.calls, batches, strict=True):
            hidden = changed(**batch, output_hidden_states=True).hidden_states[layers.index(layer)]
            torch.testing.assert_close(args[0] if args else kwargs["hidden_states"], hidden)
        layer.mlp.down_proj.weight.mul_(0.3)


# --- finding blocks ---------------------------------------------------------------------------------------------------


def test_blocks_of_a_sequential_count_where_they_have_children():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = blocks.repeated_blocks(model, names, lists=(nn.ModuleList, nn.Sequential))
    assert [block.module for block in found] == [*model[1], model]
    assert [block.names for block in found] == [["1.0.0"], ["1.1.0"], ["1.2.0"], ["0"]]
    (whole,) = blocks.repeated_blocks(model, names)
    assert whole.module is model


def test_a_model_that_splits_what_its_layers_return_is_linked_by_running_them():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            heads = self.second(self.first(x)).unflatten(-1, (2, 4))
            return self.third(heads.flatten(-2))

    model, batches = Split(), [torch.randn(3, 6), torch.randn(5, 6)]
    layers = [model.first, model.second, model.third]
    for layer, replay in zip(layers, stream.stream(model, layers, batches), strict=True):
        assert [call[0][0].shape[1] for call in replay.calls] == [layer.in_features] * 2


class Reusing(nn.Linear):
    """Returns the same memory at every call."""

    def forward(self, x):
        self.room = getattr(self, "room", torch.empty_like(x))
        return self.room.copy_(super().forward(x))


def test_a_block_that_returns_its_own_memory_feeds_the_next_what_it_returned_for_each_batch():
    model = nn.Sequential(Reusing(3, 3), Reusing(3, 3))
    batches = [torch.randn(2, 3) for _ in range(3)]
    with torch.no_grad():
        got = [[args[0].clone() for args, _ in replay.calls] for replay in stream.stream(model, list(model), batches)][1]
        for x, seen in zip(batches, got, strict=True):
            torch.testing.assert_close(seen, model[0](x), rtol=0, atol=0)


class Halving(nn.Module):
    """Takes an image as a list of positions with its size, and returns a smaller one with its size."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x, size):
        image = self.layer(x).unflatten(1, size)[:, ::2, ::2]
        return image.flatten(1, 2), tuple(image.shape[1:3])


@torch.no_grad()
def test_numbers_that_blocks_return_are_those_of_each_block():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages = nn.ModuleList(Halving(4) for _ in range(3))

        def forward(self, x):
            size, x = x.shape[1:3], x.flatten(1, 2)
            for stage in self.stages:
                x, size = stage(x, tuple(size))
            return x

    model, batches = Stages(), [torch.randn(2, 8, 8, 4), torch.randn(1, 16, 8, 4)]
    for i, replay in enumerate(stream.stream(model, list(model.stages), batches)):
        assert [size for (_, size), _ in replay.calls] == [(8 >> i, 8 >> i), (16 >> i, 8 >> i)]
        for output in replay.run():
            assert output[0].isfinite().all()
