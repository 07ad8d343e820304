"""distill_: a pruned model comes closer to the dense one, its zeros stay, and nothing changes where that fails."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.distill import Distilled, _order, distill_
from secateur.logits import divergence as divergence_and_gradient
from secateur.progress import Progress
from secateur.teaching import can_write, write


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 6))


def batches(count=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(16, 8, generator=draw) for _ in range(count)]


def pruned(sparsity=0.6):
    dense = net()
    model = copy.deepcopy(dense)
    sc.prune_(model, sparsity=sparsity)
    return model, dense


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config).eval()


def divergence(model, teacher, data):
    with torch.no_grad():
        return sum(
            float(F.kl_div(model(x).log_softmax(-1), teacher(x).log_softmax(-1), log_target=True, reduction="batchmean"))
            for x in data
        ) / len(data)


def test_the_model_comes_closer_to_the_teacher_and_its_zeros_stay():
    model, dense = pruned()
    zeros = {name: tensor == 0 for name, tensor in model.state_dict().items()}
    before = divergence(model, dense, batches(4, seed=9))
    done = distill_(model, dense, batches(), steps=60, lr=1e-2)
    assert done.improved
    assert done.after < 0.5 * done.before
    assert divergence(model, dense, batches(4, seed=9)) < 0.6 * before
    for name in ("0.weight", "3.weight"):
        assert torch.equal(model.state_dict()[name] == 0, zeros[name])
    assert not torch.equal(model[2].weight, dense[2].weight)


def test_the_held_out_distance_is_that_of_the_returned_weights():
    model, dense = pruned()
    held = batches(2, seed=5)
    done = distill_(model, dense, batches(), steps=24, lr=1e-2, holdout=held)
    assert done.after == pytest.approx(divergence(model, dense, held), rel=1e-5)
    assert done.after == min(distance for _, distance in done.looks)
    assert done.kept_step == min(done.looks, key=lambda look: look[1])[0]


def test_the_model_is_unchanged_where_the_held_out_batches_get_worse():
    model, dense = pruned()
    before = copy.deepcopy(model.state_dict())

    def away(output, wanted):  # training leads away from the teacher
        return (output - wanted).square().mean() * (-1 if torch.is_grad_enabled() else 1)

    done = distill_(model, dense, batches(), steps=40, lr=1e-2, loss=away)
    assert not done.improved
    assert done.after == done.before
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "unchanged" in str(done)


def test_training_stops_when_it_gets_worse_twice_in_a_row():
    def worse(*distances):
        looks = [(step, distance) for step, distance in enumerate(distances, 1)]
        return Distilled("", 1.0, 1.0, 0, looks, [], 0).getting_worse

    assert not worse(1.2)
    assert worse(1.2, 1.3)
    assert not worse(1.2, 1.1)
    assert not worse(0.9, 0.95)
    assert worse(0.9, 0.95, 0.96)
    model, dense = pruned()
    held, steps = batches(2, seed=5), []

    def loss(output, wanted):  # the held-out batches get worse, whatever the model does
        steps.append(1)
        return (output - wanted).square().mean() if torch.is_grad_enabled() else torch.tensor(float(len(steps)))

    done = distill_(model, dense, batches(), steps=40, loss=loss, holdout=held)
    assert len(done.training) == 30
    assert not done.improved


def test_the_rate_rises_over_the_warmup_and_falls_along_a_cosine():
    model, at = nn.Linear(1, 1, bias=False), []

    def slope(output, wanted):  # its gradient is always 1, so a step of Adam moves the weight by the rate
        if torch.is_grad_enabled():
            at.append(model.weight.item())
        return output.mean()

    with torch.no_grad():
        model.weight.fill_(0.5)
    distill_(model, nn.Linear(1, 1), [torch.ones(1, 1)] * 4, steps=12, lr=1e-2, warmup=4, loss=slope)
    cosine = [0.5 * (1 + math.cos(math.pi * step / 12)) for step in range(12)]
    rates = [1e-2 * min(1, (step + 1) / 4) * part for step, part in enumerate(cosine)]
    moved = [a - b for a, b in itertools.pairwise([*at, model.weight.item()])]
    assert moved == pytest.approx(rates, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_held_out_batches_get_worse_it_goes_back_and_on_at_half_the_rate(dtype):
    model, at = nn.Linear(1, 1, bias=False).to(dtype), []

    def slope(output, wanted):  # training lowers the weight, and the held-out batch wants it to stay where it is
        if torch.is_grad_enabled():
            at.append(model.weight.item())
        return output.mean() if torch.is_grad_enabled() else (output - 0.5).square().mean()

    with torch.no_grad():
        model.weight.fill_(0.5)
    data = [torch.ones(1, 1, dtype=dtype)] * 4
    done = distill_(model, nn.Linear(1, 1).to(dtype), data, steps=8, lr=0.1, warmup=0, loss=slope)
    assert at[0] == at[4] == at[6] == 0.5  # looks after the fourth and the sixth step
    assert 0.09 < at[0] - at[1] < 0.11
    assert 0.005 < at[4] - at[5] < 0.007  # Adam begins with 0.24 of the rate, which is 0.025 by then
    assert not done.improved


def test_where_the_held_out_batches_get_a_little_worse_it_goes_on():
    """That is the noise of the rate. Going back would lose the steps that were taken."""
    model, at = nn.Linear(1, 1, bias=False), []

    def slope(output, wanted):
        if torch.is_grad_enabled():
            at.append(model.weight.item())
        return output.mean() if torch.is_grad_enabled() else 1 + 0.05 * (output - 0.5).abs().mean()

    with torch.no_grad():
        model.weight.fill_(0.5)
    done = distill_(model, nn.Linear(1, 1), [torch.ones(1, 1)] * 4, steps=8, lr=0.1, warmup=0, loss=slope)
    assert at == sorted(at, reverse=True)
    assert model.weight.item() == 0.5  # and yet no look was better
    assert not done.improved


def test_a_rate_that_is_too_high_is_halved_until_it_helps():
    model, dense = pruned()
    done = distill_(model, dense, batches(), steps=40, lr=1.0)
    assert done.looks[0][1] > done.before > 2 * done.after


def test_undo_is_exact_and_needs_the_old_values():
    model, dense = pruned()
    before = copy.deepcopy(model.state_dict())
    done = distill_(model, dense, batches(), lr=1e-2, keep_dense=True)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    done.undo_(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    again = distill_(model, dense, batches(), lr=1e-2)
    with pytest.raises(ValueError, match="keep_dense=True"):
        again.undo_(model)


def test_flags_gradients_modes_and_random_numbers_are_restored():
    model, dense = pruned()
    model.train()
    model[0].bias.requires_grad_(False)
    model[3].weight.grad = torch.ones_like(model[3].weight)
    bias, state = model[0].bias.clone(), torch.get_rng_state()
    distill_(model, dense, batches(), lr=1e-2)
    assert torch.equal(model[0].bias, bias)
    assert torch.equal(torch.get_rng_state(), state)
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True, True, True]
    assert torch.equal(model[3].weight.grad, torch.ones(6, 32))
    assert model[0].weight.grad is None
    assert model.training


def test_a_failure_in_the_middle_leaves_the_model_as_it_was():
    model, dense = pruned()
    before = copy.deepcopy(model.state_dict())
    calls = []

    def loss(output, wanted):
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("enough")
        return (output - wanted).square().mean()

    with pytest.raises(RuntimeError, match="enough"):
        distill_(model, dense, batches(), lr=1e-2, loss=loss)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_other_distances_and_other_parameters_can_be_chosen():
    model, dense = pruned()
    before = copy.deepcopy(model)
    done = distill_(
        model, dense, batches(), lr=1e-2, loss=lambda output, wanted: (output - wanted).square().mean(), include="0"
    )
    assert done.improved
    assert torch.equal(model[3].weight, before[3].weight)
    assert not torch.equal(model[0].weight, before[0].weight)
    assert done.tensors == 2


def test_the_masks_of_a_pruner_can_be_kept_instead_of_all_zeros():
    dense = net()
    model = copy.deepcopy(dense)
    with torch.no_grad():
        model[0].weight[:, 0] = 0  # zero by chance; the pruner does not prune it
    pruner = sc.Pruner(model, sparsity=0.5, include="3.weight")
    pruner.step()
    distill_(model, dense, batches(), lr=1e-2, pruner=pruner)
    assert bool((model[0].weight[:, 0] != 0).any())
    assert torch.equal(model[3].weight == 0, ~pruner.masks["3.weight"])


def test_every_pass_over_the_batches_has_an_order_of_its_own():
    orders = []
    for seed in (0, 0, 1):
        drawn = list(_order(range(8), 20, torch.Generator().manual_seed(seed)))
        assert sorted(drawn[:8]) == sorted(drawn[8:16]) == list(range(8))
        assert len(set(drawn[16:])) == 4
        assert drawn[:8] != drawn[8:16] != list(range(8)) != drawn[:8]
        orders.append(drawn)
    assert orders[0] == orders[1] != orders[2]


def test_the_result_is_the_same_for_the_same_seed():
    found = []
    for seed in (0, 0, 1):
        model, dense = pruned()
        distill_(model, dense, batches(), steps=8, lr=1e-2, seed=seed)
        found.append(model[0].weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_language_models_keep_embedding_and_head(dtype):
    dense = llama().to(dtype)
    model = copy.deepcopy(dense)
    sc.prune_(model, pattern="2:4", exclude="lm_head")
    data = [
        {"input_ids": torch.randint(31, (2, 9)), "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3])} for _ in range(6)
    ]
    done = distill_(model, dense, data, steps=24, lr=2e-3)
    assert done.improved
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(model.get_parameter(name), dense.get_parameter(name))
    weight = model.model.layers[0].mlp.down_proj.weight
    assert weight.dtype == dtype
    assert bool((weight.view(16, -1, 4).ne(0).sum(-1) <= 2).all())


def texts(count=4):
    draw = torch.Generator().manual_seed(1)
    there = torch.tensor([[1] * 17, [1] * 12 + [0] * 5])
    return [{"input_ids": torch.randint(31, (2, 17), generator=draw), "attention_mask": there} for _ in range(count)]


def test_the_teacher_writes_text_for_the_steps_after_the_first_pass():
    dense = llama()
    model, seen = copy.deepcopy(dense), []
    sc.prune_(model, sparsity=0.5, exclude="lm_head")
    before = copy.deepcopy(model)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]) if torch.is_grad_enabled() else None, with_kwargs=True
    )
    data, state = texts(), torch.get_rng_state()
    done = distill_(model, dense, data, steps=7, lr=1e-3)
    known = [any(torch.equal(ids, batch["input_ids"]) for batch in data) for ids in seen]
    assert known.count(True) == 3  # one of four is held out
    assert known.count(False) == done.written == 4
    assert all(any(torch.equal(ids[:, 0], batch["input_ids"][:, 0]) for batch in data) for ids in seen)
    assert torch.equal(torch.get_rng_state(), state)
    assert "the teacher wrote 4 of the training batches and 1 of the held-out batches" in str(done)
    again = copy.deepcopy(before)
    assert distill_(again, dense, data, steps=7, lr=1e-3).looks == done.looks
    assert distill_(copy.deepcopy(before), dense, data, steps=3, lr=1e-3).written == 0
    without = distill_(copy.deepcopy(before), dense, data, steps=7, lr=1e-3, generate=False)
    assert without.written == without.written_held == 0


def test_new_text_is_held_out_beside_batches_that_pruning_has_used():
    dense = llama()
    model, seen = copy.deepcopy(dense), []
    sc.prune_(model, sparsity=0.5, exclude="lm_head")
    before = copy.deepcopy(model)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: None if torch.is_grad_enabled() else seen.append(kwargs), with_kwargs=True
    )
    data = texts(8)
    done = distill_(model, dense, data, steps=4, holdout=0.25)
    looks = 1 + len(done.looks)
    known = [any(torch.equal(batch["input_ids"], each["input_ids"]) for each in data) for batch in seen]
    assert done.written_held == 2
    assert known == [True, True, False, False] * looks
    given = distill_(before, dense, data, steps=1, holdout=seen[:4])
    assert given.before == done.before
    assert given.written_held == 0


def test_progress_counts_the_steps_and_the_batches_that_are_written(monkeypatch):
    dense, counts = llama(), {}

    class Counted(Progress):
        def __init__(self, task, total=None, **options):
            super().__init__(task, total, **options)
            self.task, counts[task] = task, [total, 0]

        def __call__(self, what):
            counts[self.task][1] += 1
            super().__call__(what)

    for module in ("secateur.distill", "secateur.progress"):
        monkeypatch.setattr(f"{module}.Progress", Counted)
    model = copy.deepcopy(dense)
    sc.prune_(model, sparsity=0.5, exclude="lm_head")
    distill_(model, dense, texts(), steps=7)
    assert counts["distill"] == [7, 7]
    assert counts["distill, writing text"] == [5, 5]  # one of them is held out


def test_written_text_goes_on_from_the_beginnings_of_sequences():
    dense, data = llama(), texts()
    data[0] = {"input_ids": data[0]["input_ids"], "attention_mask": data[0]["attention_mask"].flip(1)}  # padding on the left
    made = list(write(dense, data))
    assert [each["input_ids"].shape for each in made] == [(2, 17)] * 4
    for old, new in zip(data, made, strict=True):
        first = [row[there.bool()][0] for row, there in zip(old["input_ids"], old["attention_mask"], strict=True)]
        assert new["input_ids"][:, 0].tolist() == [int(token) for token in first]
        assert bool(new["attention_mask"].all())
    assert can_write(dense, data)
    assert not can_write(dense, [{**data[0], "position_ids": torch.arange(17)[None]}])
    assert not can_write(dense, [torch.randn(2, 17)])
    assert not can_write(nn.Linear(2, 2), data)


def test_padding_does_not_count():
    dense = llama().double()
    model = copy.deepcopy(dense)
    sc.prune_(model, sparsity=0.5, exclude="lm_head")
    ids = torch.randint(31, (1, 6))
    padded = {
        "input_ids": torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], 1),
        "attention_mask": torch.tensor([[1] * 6 + [0] * 4]),
    }
    whole = [{"input_ids": ids, "attention_mask": torch.ones(1, 6, dtype=torch.long)}]
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    first = distill_(one, dense, whole, holdout=whole, steps=4, lr=1e-3)
    second = distill_(other, dense, [padded], holdout=[padded], steps=4, lr=1e-3)
    assert first.before == pytest.approx(second.before, rel=1e-5)
    assert first.after == pytest.approx(second.after, rel=1e-4)


def test_the_gradient_of_the_divergence_is_that_of_autograd():
    torch.manual_seed(0)
    logits, wanted = torch.randn(2, 5, 7, requires_grad=True), torch.randn(2, 5, 7)
    wanted[..., 3] = -torch.inf  # a class that the teacher excludes
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 3:] = False
    with torch.no_grad():
        logits[1, 4], wanted[1, 4] = torch.nan, torch.nan  # as attention gives it for padding that sees no token
    total, count, gradient = divergence_and_gradient(logits.detach(), wanted, valid, gradient=True)
    p = wanted.softmax(-1)
    each = torch.where(p > 0, p * (p.log() - logits.log_softmax(-1)), 0).sum(-1)[valid]
    assert count == 8
    assert total == pytest.approx(float(each.detach().sum()), rel=1e-5)
    (slow,) = torch.autograd.grad(each.mean(), logits)
    torch.testing.assert_close(gradient[valid], slow[valid])
    assert not gradient[~valid].any()


def test_the_result_prints_and_counts():
    model, dense = pruned()
    done = distill_(model, dense, batches(), steps=8, lr=1e-2)
    assert "held out" in str(done)
    assert done.metrics()["steps"] == 8
    assert done.to_dict()["looks"][0][0] == 4
    assert "<table>" in done._repr_html_()


class Writing(nn.Module):
    """Overwrites, in place, a tensor that the backward pass needs, as recurrent models do with their states."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x):
        y = self.first(x).exp()
        z = self.second(y)
        y.mul_(0)
        return z


def test_a_model_without_a_backward_pass_is_named():
    model, dense = Writing(), Writing()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"the backward pass of Writing failed: .*'use_cache': False"):
        distill_(model, dense, batches())
    with pytest.raises(ValueError, match=r"the backward pass of Writing failed: .*method='flow'"):
        sc.prune_(model, method="loss", pattern="2:4", data=batches())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_teacher_with_zeros_of_its_own_may_teach_a_model_made_in_another_way():
    torch.manual_seed(0)
    model, teacher = (nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 5)) for _ in range(2))
    with torch.no_grad():
        teacher[0].weight[30:] = 0  # rows of tokens that no text has
    assert distill_(model, teacher, [torch.randint(30, (4, 6)) for _ in range(8)], steps=4).training


def test_a_model_in_distributed_data_parallel_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    model, dense = pruned()
    try:
        with pytest.raises(ValueError, match=r"without DistributedDataParallel; pass the module under it \(\.module\)"):
            distill_(nn.parallel.DistributedDataParallel(model), dense, batches())
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_work_is_refused():
    model, dense = pruned()
    with pytest.raises(ValueError, match="before pruning"):
        distill_(model, model, batches())
    with pytest.raises(
        ValueError, match=r"teacher= has weights with many zeros .*'0.weight', 2 in all.*distill_\(pruned, dense"
    ):
        distill_(dense, model, batches())
    with pytest.raises(ValueError, match="more, smaller batches"):
        distill_(model, dense, batches(1))
    with pytest.raises(ValueError, match=r"holdout=1\.5"):
        distill_(model, dense, batches(), holdout=1.5)
    with pytest.raises(ValueError, match="steps=0"):
        distill_(model, dense, batches(), steps=0)
    with pytest.raises(ValueError, match="matches no parameter"):
        distill_(model, dense, batches(), exclude="nothing")
    with pytest.raises(ValueError, match="the teacher"):
        distill_(model, nn.Sequential(nn.Linear(8, 5)), batches())
    with pytest.raises(ValueError, match="none requires a gradient"):
        distill_(model.requires_grad_(False), dense, batches())


def test_batches_that_the_teacher_writes_together_are_counted_when_they_are_done(monkeypatch):
    dense = llama()
    data = [{"input_ids": torch.randint(0, 31, (4, 6))} for _ in range(3)]
    reported, written = [], dense.generate
    monkeypatch.setattr(Progress, "__call__", lambda self, what: reported.append((self._row.task, what)))

    def generate(**arguments):
        assert not any(task == "distill, writing text" for task, _ in reported)
        return written(**arguments)

    monkeypatch.setattr(dense, "generate", generate)
    distill_(copy.deepcopy(dense), dense, data, steps=4)
    assert [what for task, what in reported if task == "distill, writing text"][:2] == ["batch 1", "batch 2"]
