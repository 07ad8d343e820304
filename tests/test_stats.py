"""Evidence is collected in one pass over the batches, and the model is unchanged afterwards."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.stats import collect


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=0.5)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(12, 4)

    def forward(self, x, scale=None):
        x = self.drop(self.norm(self.conv(x))).relu().flatten(1)
        return self.fc(x if scale is None else x * scale)


def data(n=2):
    return [(torch.randn(4, 1, 4, 4), torch.randint(0, 4, (4,))) for _ in range(n)]


def everything(model):
    """All that can be seen of a model: values bit by bit, gradients, flags, modes, hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        **{f"p {n}": (p.detach().clone().numpy().tobytes(), p.requires_grad, id(p)) for n, p in model.named_parameters()},
        **{f"g {n}": None if p.grad is None else p.grad.numpy().tobytes() for n, p in model.named_parameters()},
        **{f"b {n}": b.numpy().tobytes() for n, b in model.named_buffers()},
        **{f"m {n}": (m.training, *(len(getattr(m, h)) for h in hooks)) for n, m in model.named_modules()},
        "rng": torch.get_rng_state().numpy().tobytes(),
    }


CRITERIA = [sc.magnitude, sc.taylor, sc.fisher, sc.movement, sc.wanda, sc.ria, sc.lamp, sc.snip, sc.synflow, sc.random(1)]


@pytest.mark.parametrize("criterion", CRITERIA, ids=str)
def test_planning_leaves_the_model_as_it_was(criterion):
    model = Net()
    model.train()
    model.drop.eval()
    model.conv.weight.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    batches = data()
    before = everything(model)
    sc.plan(model, criterion, sparsity=0.5, data=batches, loss=F.cross_entropy)
    assert everything(model) == before


@pytest.mark.parametrize("criterion", [sc.taylor, sc.wanda, sc.synflow], ids=str)
def test_a_model_that_fails_on_the_data_is_left_as_it_was(criterion):
    model = Net()
    model.conv.weight.requires_grad_(False)
    batches = [*data(1), (torch.randn(4, 7), torch.zeros(4).long())]
    batches = batches[::-1] if criterion is sc.synflow else batches
    before = everything(model)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        sc.plan(model, criterion, sparsity=0.5, data=batches, loss=F.cross_entropy)
    assert everything(model) == before
    assert "not linear" not in str(caught.value)  # the batch is wrong, not the layer


def test_a_buffer_that_the_forward_pass_replaces_is_put_back():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + 1
            return self.fc(x)

    model = Counts()
    sc.plan(model, sc.wanda, sparsity=0.5, data=[torch.randn(2, 3)])
    assert float(model.seen) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_that_the_forward_pass_writes_to_is_put_back(fails):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            if fails:
                raise RuntimeError("broken")
            return self.fc(x)

    model = Counts()
    seen = model.seen
    with pytest.raises(ValueError, match="broken") if fails else contextlib.nullcontext():
        sc.plan(model, sc.wanda, sparsity=0.5, data=[torch.randn(2, 3)])
    assert model.seen is seen
    assert float(seen) == 0


def test_the_users_own_hooks_see_only_what_the_data_makes_them_see():
    model, seen = Net(), []
    model.fc.register_forward_hook(lambda _, args, output: seen.append(tuple(output.shape)))
    sc.plan(model, sc.wanda, sparsity=0.5, data=data(2))
    assert seen == [(4, 4), (4, 4)]


def test_planning_works_where_gradients_are_switched_off():
    model, batches = Net(), data()
    with torch.no_grad():
        quiet = sc.plan(model, sc.taylor, sparsity=0.5, data=batches, loss=F.cross_entropy)
    assert quiet.masks == sc.plan(model, sc.taylor, sparsity=0.5, data=batches, loss=F.cross_entropy).masks


def test_gradients_are_those_of_evaluation_mode():
    """Dropout and batch statistics would make the evidence a matter of chance."""
    model, batches = Net(), data()
    once = sc.plan(model.train(), sc.taylor, sparsity=0.5, data=batches, loss=F.cross_entropy).masks
    assert once == sc.plan(model.eval(), sc.taylor, sparsity=0.5, data=batches, loss=F.cross_entropy).masks


def test_a_batch_is_a_tensor_a_mapping_or_a_pair():
    model = Net()
    x, y = data(1)[0]
    found, _ = sc.targets(model)

    def norms(batch):
        return collect(model, found, {"input_norm"}, [batch], None)["fc.weight"]["input_norm"]

    plain = norms(x)
    for batch in ({"x": x}, (x, y), [x, y], ((x,), y), ([x], y), ({"x": x}, y)):
        assert torch.equal(norms(batch), plain)
    assert torch.allclose(norms(((x, 2.0), y)), 2 * plain)


def test_the_loss_gets_the_batch_itself_when_it_is_no_pair():
    model, seen = Net(), []

    def loss(output, batch):
        seen.append(batch)
        return output.square().mean()

    x = torch.randn(2, 1, 4, 4)
    sc.plan(model, sc.taylor, sparsity=0.5, data=[x, {"x": x}], loss=loss)
    assert seen[0] is x
    assert seen[1].keys() == {"x"}


def test_one_pass_over_an_iterator_feeds_several_needs():
    both = (sc.taylor + sc.wanda) * sc.fisher
    model, batches = Net(), data(3)
    once = sc.plan(model, both, sparsity=0.5, data=iter(batches), loss=F.cross_entropy)
    assert once.masks == sc.plan(model, both, sparsity=0.5, data=batches, loss=F.cross_entropy).masks


# --- what is missing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", [sc.wanda, sc.taylor, sc.synflow, sc.fisher, sc.magnitude + sc.wanda], ids=str)
def test_missing_data_is_an_error_that_says_what_to_pass(criterion):
    with pytest.raises(ValueError, match="pass data="):
        sc.plan(Net(), criterion, sparsity=0.5, loss=F.cross_entropy)


@pytest.mark.parametrize("criterion", [sc.taylor, sc.fisher, sc.movement], ids=str)
def test_a_missing_loss_is_an_error_that_says_what_to_pass(criterion):
    with pytest.raises(ValueError, match="pass loss="):
        sc.plan(Net(), criterion, sparsity=0.5, data=data())


@pytest.mark.parametrize("criterion", [sc.wanda, sc.synflow, sc.taylor], ids=str)
def test_an_iterator_that_is_used_up_is_an_error_that_says_so(criterion):
    with pytest.raises(ValueError, match="gave no batch"):
        sc.plan(Net(), criterion, sparsity=0.5, data=iter([]), loss=F.cross_entropy)


@pytest.mark.parametrize(("shape", "hinted"), [((16,), True), ((2, 1, 4), False)])
def test_a_batch_of_one_axis_that_does_not_run_gets_a_hint(shape, hinted):
    with pytest.raises(ValueError, match=r"does not run on a batch .*The model is unchanged") as caught:
        sc.plan(Net(), sc.wanda, sparsity=0.5, data=[torch.randn(shape)])
    assert ("The batch axis may be missing" in str(caught.value)) == hinted


def test_a_value_error_of_the_model_names_the_keys_of_the_batch():
    class Picky(Net):
        def forward(self, **inputs):
            raise ValueError("You must specify x")

    with pytest.raises(
        ValueError, match=r"Picky does not run on a batch .*ValueError: You must specify x.* are 'text'"
    ) as caught:
        sc.plan(Picky(), sc.wanda, sparsity=0.5, data=[{"text": ["a story"]}])
    assert "'text' must be tensors" in str(caught.value)


def test_arrays_in_a_batch_are_named():
    with pytest.raises(ValueError, match="'x' must be tensors"):
        sc.plan(Net(), sc.wanda, sparsity=0.5, data=[{"x": torch.randn(2, 1, 4, 4).numpy()}])


@pytest.mark.parametrize("given", [torch.randn(2, 1, 4, 4), {"x": 1}, "data", 5, data])
def test_data_that_is_no_iterable_of_batches_is_refused(given):
    with pytest.raises(TypeError, match=r"data= is an iterable of batches"):
        sc.plan(Net(), sc.wanda, sparsity=0.5, data=given)


def test_text_as_data_is_to_be_tokenized():
    with pytest.raises(TypeError, match="not one str; tokenize the text"):
        sc.plan(Net(), sc.wanda, sparsity=0.5, data="a story")


def test_a_function_as_data_is_to_be_called():
    with pytest.raises(TypeError, match="not function; call it and pass what it returns"):
        sc.plan(Net(), sc.wanda, sparsity=0.5, data=lambda: iter(data()))


@pytest.mark.parametrize("batch", [5, "x", (1, 2, 3), None])
def test_a_batch_that_is_none_of_the_three_is_refused(batch):
    with pytest.raises(TypeError, match=r"a batch is a tensor, a mapping or a pair .*tokenize texts first"):
        sc.plan(Net(), sc.wanda, sparsity=0.5, data=[batch])


@pytest.mark.parametrize("loss", [5, "mse", lambda o, t: 0.5, lambda o, t: o, lambda o, t: None])
def test_a_loss_that_gives_no_number_to_differentiate_is_refused(loss):
    with pytest.raises((TypeError, ValueError), match="loss"):
        sc.plan(Net(), sc.taylor, sparsity=0.5, data=data(), loss=loss)


def test_a_layer_the_data_never_reaches_is_named():
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(3, 3)

    for criterion in (sc.wanda, sc.taylor, sc.synflow):
        with pytest.raises(ValueError, match=r"'spare\.weight'"):
            sc.plan(Unused(), criterion, sparsity=0.5, data=data(), loss=F.cross_entropy)


def test_a_gradient_that_is_one_number_spread_out_is_evidence_like_any_other():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc.weight.sum() * x.mean()

    model = Summed()
    plan = sc.plan(model, sc.taylor, sparsity=0.5, data=[torch.ones(2)], loss=lambda output, _: output)
    assert plan.masks == sc.plan(model, sparsity=0.5).masks


def test_sparse_gradients_of_an_embedding_are_evidence_too():
    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
    batches = [(torch.arange(10), torch.randn(10, 4))]
    kwargs = {"sparsity": 0.5, "include": ["0", "1"], "data": batches, "loss": F.mse_loss}
    sparse = sc.plan(model, sc.taylor, **kwargs)
    model[0].sparse = False
    assert sparse.masks == sc.plan(model, sc.taylor, **kwargs).masks


def test_a_loader_over_inputs_alone_is_data():
    inputs = torch.randn(8, 3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=4)
    model = nn.Linear(3, 5)
    wanted = sc.plan(model, sc.wanda, sparsity=0.5, data=list(inputs.split(4))).masks
    assert sc.plan(model, sc.wanda, sparsity=0.5, data=loader).masks == wanted


@pytest.mark.parametrize("features", ["positions", "rows"])
def test_input_norms_leave_padding_out(features):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x, attention_mask):
            x = self.first(x)
            return self.second(x if features == "positions" else x.flatten(0, 1))

    model, x = Tokens(), torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    found, _ = sc.targets(model)

    def norms(x, mask):
        table = collect(model, found, {"input_norm"}, [{"x": x, "attention_mask": mask}], None)
        return table["first.weight"]["input_norm"], table["second.weight"]["input_norm"]

    there = x[mask.bool()][None]
    added = torch.where(mask == 1, 0.0, -torch.inf)
    for each in (mask, mask.bool(), mask.float(), added, added.clamp(min=-1e9)):
        for padded, alone in zip(norms(x, each), norms(there, torch.ones(1, 5)), strict=True):
            assert torch.allclose(padded, alone)
    for padded, alone in zip(norms(x, torch.zeros(2, 4)), norms(x, torch.ones(2, 4)), strict=True):  # nothing is excluded
        assert torch.allclose(padded, alone)


def test_a_convolution_reads_no_positions_along_its_channels():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 5, 1)

        def forward(self, x, attention_mask):
            return self.conv(x)

    model, x = Net(), torch.randn(2, 4, 4)
    found, _ = sc.targets(model)
    batch = {"x": x, "attention_mask": torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])}
    measured = collect(model, found, {"input_norm"}, [batch], None)["conv.weight"]["input_norm"]
    assert torch.allclose(measured, x.square().sum((0, 2)).sqrt())
