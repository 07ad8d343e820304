"""`depth=` removes blocks: which ones, the numbers that change with them, exactness, and errors that change nothing."""

import copy

import pytest
import torch
from torch import nn

from secateur import io
from secateur.surgery import apply_cuts_, shrink, shrink_
from secateur.surgery.depth import remove


class Block(nn.Module):
    def __init__(self, place, width=8, gain=1.0):
        super().__init__()
        self.place, self.norm = place, nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)
        with torch.no_grad():
            self.down.weight.mul_(gain)
            self.down.bias.mul_(gain)

    def forward(self, x, seen=None):
        if seen is not None:
            seen[self.place] = x  # as a cache of keys and values does
        return x + self.down(torch.relu(self.up(self.norm(x)))), seen


class Net(nn.Module):
    """Blocks of which numbers 1 and 3 hardly do anything; it counts them by an attribute and keeps a list about them."""

    between = 0.0

    def __init__(self, gains=(1.0, 1e-3, 1.0, 1e-2, 1.0)):
        super().__init__()
        self.num_layers, self.layer_scales = len(gains), [1.0, 2.0, 3.0, 4.0, 5.0][: len(gains)]
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Block(i, gain=g) for i, g in enumerate(gains))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x, seen = self.first(x), [None] * self.num_layers
        for i in range(self.num_layers):
            x, _ = self.layers[i](x, seen=seen)
            x = x + self.between if self.between else x
        assert not any(s is None for s in seen)
        assert len(self.layer_scales) == self.num_layers
        return self.last(x)


def chain(**more):
    torch.manual_seed(0)
    return Net(**more).eval()


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Add(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(change)

    def forward(self, x):
        return x + self.linear((x - x.mean(-1, keepdim=True)).sign())


def predictor():
    """Three blocks that add to logits: much to all of them nearly alike, much to one, and a little to one."""
    parts = 2 + torch.eye(4) * 0.2, torch.eye(4), torch.eye(4).flip(0) * 0.5
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(*map(Add, parts)), nn.Identity()).eval()


@pytest.mark.parametrize(("criterion", "kept"), [("magnitude", [0, 1]), ("obs", [1, 2])])
def test_obs_removes_the_blocks_that_cost_the_loss_least(criterion, kept):
    torch.manual_seed(0)
    model = predictor()
    data = [torch.randn(2, 7, 3) for _ in range(3)]
    small, plan = shrink(model, data[0], criterion, depth=2 / 3, data=data)
    assert list(plan.cuts.drop.values()) == [[i for i in range(3) if i not in kept]]
    assert ("the increase of the loss" in str(plan)) == (criterion == "obs")
    if criterion == "obs":
        now, before = (torch.cat([m(x).detach() for x in data]).log_softmax(-1) for m in (small, model))
        growth = float((before.exp() * (before - now)).sum(-1).mean())
        assert float(plan.recipe.partition("(")[2].rstrip(")")) == pytest.approx(growth, rel=0.01)


def test_padding_does_not_count_in_the_loss_that_blocks_cost():
    class Masked(nn.Sequential):
        def forward(self, x, attention_mask=None):
            return super().forward(x)

    torch.manual_seed(0)
    model = Masked(*predictor())
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]])
    x = torch.randn(2, 7, 3)
    noise = torch.where(mask.bool()[..., None], x, torch.randn(2, 7, 3) * 50)
    plans = [shrink(model, {"x": x}, "obs", depth=2 / 3, data=[{"x": each, "attention_mask": mask}])[1] for each in (x, noise)]
    assert plans[0].recipe == plans[1].recipe


def test_blocks_of_a_model_without_logits_cannot_be_priced():
    class Named(nn.Sequential):
        def forward(self, x):
            return {"hidden": super().forward(x)}

    model, x = Named(*predictor()), torch.randn(2, 7, 3)
    with pytest.raises(ValueError, match="logits"):
        shrink(model, x, "obs", depth=2 / 3, data=[x])
    _, plan = shrink(model, x, "obs", depth=2 / 3, data=[x], loss=lambda output, target: output["hidden"].sum())
    assert "the change of the output" in plan.recipe


def test_blocks_that_change_the_output_least_are_removed():
    model = chain()
    before = model(X).detach()
    small, plan = shrink(model, X, depth=0.6)
    (row,) = [r for r in plan.groups if r.name == "layers"]
    assert row.members == ("layers.1", "layers.3")
    assert (row.before, row.after) == (5, 3)
    assert plan.cuts.drop == {"layers": [1, 3]}
    assert float((small(X).detach() - before).norm() / before.norm()) < 0.05
    assert torch.equal(model(X), before)
    assert len(model.layers) == 5
    assert "layers.1, layers.3" in str(plan)


def test_numbers_and_lists_are_adapted_to_the_removed_blocks():
    small, _ = shrink(chain(), X, depth=0.6)
    assert (small.num_layers, small.layer_scales) == (3, [1.0, 3.0, 5.0])
    assert [b.place for b in small.layers] == [0, 1, 2]


def test_verify_compares_with_the_blocks_skipped():
    small, plan = shrink(chain(), X, depth=0.6)
    found = plan.verify()
    assert found.moved
    assert found.max_error < 1e-12
    assert found.groups["layers"] < 1e-12
    with torch.no_grad():
        small.last.bias.add_(1)
    assert plan.verify().max_error > 1e-3


def test_the_change_is_measured_again_after_each_removal():
    """Block 1 adds what block 2 takes away: once one of them is gone, the other is the one to remove, not block 3."""
    model = chain(gains=(0.0, 0.0, 0.0, 0.0))
    with torch.no_grad():
        model.last.weight.copy_(torch.eye(4, 8))
        for block, feature, size in ((0, 2, 9.0), (1, 0, 1.0), (2, 0, -1.3), (3, 1, 1.1)):
            model.layers[block].down.bias[feature] = size
    _, first = shrink(model, X, depth=0.75)
    assert first.cuts.drop == {"layers": [1]}
    _, second = shrink(model, X, depth=0.5)
    assert second.cuts.drop == {"layers": [1, 2]}


def test_depth_comes_before_a_target_that_counts_from_the_whole_model():
    model = chain()
    small, plan = shrink(model, X, depth=0.8, params=0.5)
    params = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    assert params[1] / params[0] == pytest.approx(0.5, rel=0.02)
    assert plan.totals["params"] == tuple(params)
    assert plan.cuts.drop
    assert plan.cuts.tensors
    assert plan.verify().moved
    with pytest.raises(ValueError, match="remains already"):
        shrink(model, X, depth=0.2, params=0.9)


def test_ratios_by_name_mean_the_layers_of_the_whole_model():
    small, plan = shrink(chain(), X, depth=0.6, channels={"layers.4.up": 0.5, "layers.2.up.weight[0]": 0.25})
    assert plan.cuts.drop == {"layers": [1, 3]}
    assert [layer.up.out_features for layer in small.layers] == [16, 4, 8]


def test_a_fresh_model_is_cut_the_same_way(tmp_path):
    for asked in ({"depth": 0.6}, {"depth": 0.8, "params": 0.5}):
        small, plan = shrink(chain(), X, **asked)
        fresh = apply_cuts_(chain(), plan.cuts)
        fresh.load_state_dict(small.state_dict(), strict=True)
        assert torch.equal(fresh(X), small(X))
        io.save(small, tmp_path)
        assert torch.equal(io.load(tmp_path, chain)(X), small(X))


def test_in_place_with_an_optimizer_that_follows():
    for cut in (shrink, shrink_):
        model = chain().train()
        optimizer = torch.optim.Adam(model.parameters())
        model(X).sum().backward()
        optimizer.step()
        kept = optimizer.state[model.layers[2].up.weight]["exp_avg"].clone()
        small, _ = cut(model, X, depth=0.6, optimizer=optimizer)
        assert (small is model) == (cut is shrink_)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in small.parameters()}
        assert len(optimizer.state) == len(held)
        assert torch.equal(optimizer.state[small.layers[1].up.weight]["exp_avg"], kept)
        optimizer.zero_grad()
        small(X).sum().backward()
        optimizer.step()


def test_residual_blocks_of_a_convolutional_net_go_and_those_that_change_the_shape_stay():
    class Residual(nn.Module):
        def __init__(self, a, b, stride=1):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b)
            self.short = nn.Identity() if a == b else nn.Conv2d(a, b, 1, stride)

        def forward(self, x):
            return torch.relu(self.short(x) + self.norm(self.conv(x)))

    torch.manual_seed(0)
    stages = [nn.Sequential(Residual(a, b, s), Residual(b, b), Residual(b, b)) for a, b, s in ((8, 8, 1), (8, 16, 2))]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()
    x = torch.randn(2, 3, 12, 12)
    small, plan = shrink(model, x, depth=0.4)
    gone = {name for row in plan.groups for name in row.members}
    assert len(gone) == 3
    assert "2.0" not in gone
    assert "does not have the shape" in plan.skipped["2.0"]
    assert small(x).shape == model(x).shape
    assert plan.verify().max_error < 1e-12


def test_blocks_that_cannot_be_removed_are_refused_with_the_reason():
    class Indexed(Net):
        def forward(self, x):
            x = self.first(x)
            for i in range(5):
                x, _ = self.layers[i](x)
            return self.last(x)

    torch.manual_seed(0)
    model = Indexed()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"without it the model does not run.*IndexError"):
        shrink(model, X, depth=0.6)
    assert model.num_layers == 5
    assert [b.place for b in model.layers] == [0, 1, 2, 3, 4]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_parallel_and_repeated_modules_are_no_blocks():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4))

        def forward(self, x):
            return sum(expert(x) for expert in self.experts)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block(0, 6)])

        def forward(self, x):
            return self.layers[0](self.layers[0](x)[0])[0]

    apart = chain()
    apart.between = 1.0
    for model, why in (
        (Experts(), "do not read its output"),
        (apart, "do not read its output"),
        (Twice(), "runs 2 times"),
        (nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), ""),
    ):
        with pytest.raises(ValueError, match=f"removes none of the 0 blocks.*{why}"):
            shrink(model, X, depth=0.5)


def test_excluded_blocks_stay_and_bad_fractions_are_refused():
    _, plan = shrink(chain(), X, depth=0.8, exclude=["layers.1"])
    assert plan.cuts.drop == {"layers": [3]}
    assert plan.skipped["layers.1"] == "excluded"
    with pytest.raises(ValueError, match=r"removes none of the 5 blocks.*0\.8 would remove one"):
        shrink(chain(), X, depth=0.95)
    for wrong in (0, 1.5, True, "half"):
        with pytest.raises(ValueError, match="is the fraction that remains"):
            shrink(chain(), X, depth=wrong)


def test_data_decides_where_it_is_given():
    """One block acts on what is above zero, one on what is below: which of them can go depends on what the model sees."""
    model = chain(gains=(0.0, 0.0, 1.0))
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(8, 6))
        for block, sign in ((model.layers[0], 1.0), (model.layers[1], -1.0)):
            block.norm = nn.Identity()
            block.up.weight.copy_(sign * torch.eye(16, 8))
            block.up.bias.zero_()
            block.down.weight.copy_(torch.eye(8, 16))
        model.first.bias.zero_()
    _, shown = shrink(model, X.abs(), depth=0.67)
    assert shown.cuts.drop == {"layers": [1]}
    _, seen = shrink(model, X.abs(), depth=0.67, data=[(-X.abs(), torch.zeros(3)), (-2 * X.abs(), torch.zeros(3))])
    assert seen.cuts.drop == {"layers": [0]}


# ---------------------------------------------------------------- numbers that are none


class Logs(Net):
    """The logarithm of what the blocks give: of negative numbers, unless block 1, which does little else, lifts them."""

    def __init__(self, gains=(0.0, 0.0, 0.05, 0.06)):
        super().__init__(gains)
        with torch.no_grad():
            self.first.weight.mul_(0.1)
            self.first.bias.fill_(-1.0)
            self.layers[1].down.bias.fill_(50.0)
            self.last.weight.abs_()
            self.last.bias.zero_()

    def forward(self, x):
        return super().forward(x).log()


def logs(**more):
    torch.manual_seed(0)
    return Logs(**more).eval()


def test_a_block_without_which_the_output_is_nan_stays():
    model = logs()
    assert bool(model(X).isfinite().all())
    small, plan = shrink(model, X, depth=0.5)
    assert 1 not in plan.cuts.drop["layers"]
    assert plan.skipped["layers.1"] == "without it the output is not finite where it was"
    assert bool(small(X).isfinite().all())
    with pytest.raises(ValueError, match=r"after 0 no other can .*layers\.1: without it the output is not finite"):
        shrink(model, X, depth=0.75, exclude=["layers.0", "layers.2", "layers.3"])


def test_two_outputs_that_are_nan_do_not_verify_a_cut():
    """What goes without harm on some inputs does harm on others; then equality of what is left is not reported as exact."""
    model = logs()
    with torch.no_grad():
        model.first.bias.fill_(1.0)
        model.first.weight.copy_(torch.ones(8, 6))
        model.layers[1].down.weight.zero_()
    _, plan = shrink(model, X.abs(), depth=0.75, exclude=["layers.0", "layers.2", "layers.3"])
    assert plan.cuts.drop == {"layers": [1]}
    assert plan.verify().max_error < 1e-12
    found = plan.verify(-X.abs() - 1)
    assert bool(model(-X.abs() - 1).isfinite().all())
    assert found.max_error == found.groups["layers"] == float("inf")
    assert "not finite where it was" in str(found)


def test_values_that_were_never_finite_are_not_compared():
    class Masked(Net):
        def forward(self, x):
            return super().forward(x).index_fill(-1, torch.tensor([0]), -torch.inf)

    torch.manual_seed(0)
    model = Masked().eval()
    _, plan = shrink(model, X, depth=0.6)
    assert plan.cuts.drop == {"layers": [1, 3]}
    model.last.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="returns no finite number on the example inputs"):
        shrink(model, X, depth=0.6)


def test_blocks_of_a_model_that_is_nan_in_float64_are_verified_in_its_own_dtype():
    class OnlyInFloat32(Net):
        def forward(self, x):
            return super().forward(x) * (torch.nan if x.dtype == torch.float64 else 1.0)

    torch.manual_seed(0)
    small, plan = shrink(OnlyInFloat32().eval(), X, depth=0.6)
    found = plan.verify()
    assert (found.dtype, found.moved) == ("float32", True)
    assert found.max_error < 1e-5
    assert "not in float64" in str(found)
    small.last.bias.data.add_(1)
    assert plan.verify().max_error > 1e-3


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize("asked", [{"channels": 0.5}, {"depth": 0.6}, {"depth": 0.6, "params": 0.4}])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": torch.compile(chain(), backend="eager")}, ValueError, "the model is compiled"),
        ({"model": 3}, TypeError, "wants a torch.nn.Module, got int"),
        ({"example_inputs": torch.randn(3, 7)}, ValueError, "Net does not run on the example inputs"),
        ({"exclude": "layer.1"}, ValueError, "exclude='layer.1' matches no tensor and no module. Did you mean 'layers.1'"),
        ({"exclude": None}, TypeError, "exclude=None must be a name or glob such as"),
        ({"exclude": 5}, TypeError, "exclude=5 must be a name or glob such as"),
        ({"exclude": [5]}, TypeError, "exclude=.5. must be a name or glob such as"),
        ({"criterion": 5}, TypeError, "a criterion is an expression .*not int"),
        ({"criterion": "foo"}, ValueError, "cannot read the criterion 'foo'"),
        ({"data": 5}, TypeError, "data= is an iterable of batches, not int"),
        ({"data": X}, TypeError, "data= is an iterable of batches, not one Tensor; pass .batch."),
        ({"data": [], "reestimate": True, "norm": True}, ValueError, "data= gave no batch"),
    ],
)
def test_arguments_get_the_same_errors_with_and_without_depth(asked, given, error, message):
    model = chain()
    given = {"model": model, "example_inputs": X} | given
    if given.pop("norm", False):
        model.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval()
    before = copy.deepcopy(model.state_dict())
    for cut in (shrink, shrink_):
        with pytest.raises(error, match=message):
            cut(**given, **asked)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert len(model.layers) == 5


def test_the_error_for_data_that_does_not_run_names_data():
    with pytest.raises(ValueError, match="Net does not run on batch 1 of data=: RuntimeError"):
        shrink(chain(), X, depth=0.6, data=[X, torch.randn(3, 7)])


def test_depth_one_removes_nothing():
    model = chain()
    small, plan = shrink(model, X, depth=1)
    assert small is not model
    assert torch.equal(small(X), model(X))
    assert not plan.cuts.drop
    assert plan.verify().max_error == 0
    one, _ = shrink(model, X, depth=1, params=0.5)
    two, _ = shrink(model, X, params=0.5)
    assert torch.equal(one(X), two(X))
    with pytest.raises(ValueError, match="is the fraction that remains"):
        shrink(model, X, depth=True, params=0.5)


def test_the_list_that_is_excluded_keeps_its_blocks():
    with pytest.raises(ValueError, match=r"layers\.0: excluded; layers\.1: excluded"):
        shrink(chain(), X, depth=0.6, exclude="layers")


def test_excluded_names_mean_the_same_layers_after_earlier_blocks_were_removed():
    model = chain()
    small, plan = shrink(model, X, depth=0.6, params=0.4, exclude=iter(["layers.4.up", "layers.1.up"]))
    assert plan.cuts.drop == {"layers": [1, 3]}
    assert torch.equal(small.layers[2].up.weight, model.layers[4].up.weight)
    assert small.layers[0].up.out_features < 16


def test_latency_is_relative_to_the_whole_model(clock):
    class Slow(Block):
        def forward(self, x, seen=None):
            clock.advance(0.03)
            return super().forward(x, seen)

    model = chain()
    for block in model.layers:
        block.__class__ = Slow
    _, plan = shrink(model, X, depth=0.6, latency=0.6, floor=1)
    whole, small = plan.totals["latency"]
    assert whole == pytest.approx(0.15)
    assert small / whole == pytest.approx(0.6)


# ---------------------------------------------------------------- repairs


def test_statistics_of_normalisations_are_estimated_anew_where_blocks_went():
    """A block that lifts what passes goes; the normalisation behind it learns that its inputs lie lower."""
    for cut in (shrink, shrink_):
        model = chain()
        with torch.no_grad():
            model.layers[1].down.bias.fill_(3.0)
        model.last = nn.Sequential(nn.BatchNorm1d(8), model.last).eval()
        old = copy.deepcopy(model)
        batches = [torch.randn(64, 6) for _ in range(2)]
        small, plan = cut(model, X, depth=0.8, exclude=["layers.0", "layers.2", "layers.3", "layers.4"], data=batches)
        assert torch.equal(small.last[0].running_mean, old.last[0].running_mean)
        small, plan = cut(
            copy.deepcopy(old),
            X,
            depth=0.8,
            exclude=["layers.0", "layers.2", "layers.3", "layers.4"],
            data=iter(batches),
            reestimate=True,
        )
        assert plan.cuts.drop == {"layers": [1]}
        seen = []
        small.last[0].register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach()))
        for batch in batches:
            small(batch)
        assert torch.allclose(small.last[0].running_mean, torch.cat(seen).mean(0), atol=1e-5)
        assert torch.allclose(small.last[0].running_var, torch.cat(seen).var(0), rtol=1e-4)
        found = plan.verify(original=old)
        assert found.recut is not None
        assert found.recut < 1e-12
        assert found.max_error > 1e-3


def test_a_refit_is_refused_where_no_layer_loses_inputs():
    with pytest.raises(ValueError, match=r"refit=True .* depth= alone .* or for reestimate=True"):
        shrink(chain(), X, depth=0.6, refit=True, data=[X])
    small, plan = shrink(chain(), X, depth=0.8, params=0.5, refit=True, data=[torch.randn(64, 6)])
    assert plan.cuts.drop
    assert small(X).shape == (3, 4)


# ---------------------------------------------------------------- blocks that are held by name


class Step(Block):
    def forward(self, x, scale=1.0):
        return super().forward(x * scale)[0]


class Named(nn.Module):
    """Four blocks as attributes, two of which hardly do anything; beside them what is called more than once, or by others."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.one, self.two, self.three, self.four = (Step(i, gain=g) for i, g in enumerate((1.0, 1e-3, 1e-2, 1.0)))

    def forward(self, x):
        x = self.two(x=self.one(self.first(x), scale=0.5))
        return self.last(self.four(self.three(x)))


def test_blocks_that_are_attributes_are_removed(tmp_path):
    torch.manual_seed(0)
    model = Named().eval()
    small, plan = shrink(model, X, depth=0.5, channels=0.4)
    (row,) = [r for r in plan.groups if r.name == "the model"]
    assert row.members == ("two", "three")
    assert (row.before, row.after) == (4, 2)
    assert not list(small.two.parameters())
    assert len(list(model.two.parameters())) == 6
    found = plan.verify()
    assert found.max_error < 1e-6 or not plan.metrics()["exact"]
    assert found.moved
    io.save(small, tmp_path)
    again = io.load(tmp_path, into=Named).eval()
    assert torch.equal(again(X), small(X))
    with pytest.raises(ValueError, match="plan= removes modules of the model and this model holds them"):
        io.save(model, tmp_path, plan=plan)


def test_attributes_that_are_not_a_row_of_blocks_stay():
    class Branches(Named):
        def forward(self, x):
            x = self.first(x)
            return self.last(self.one(x) + self.two(x) + self.three(x) + self.four(x))

    with pytest.raises(ValueError, match=r"removes none of the 0 blocks.*its neighbours do not read its output"):
        shrink(Branches(), X, depth=0.5)


def test_an_optimizer_follows_where_attributes_go():
    model = Named()
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    small, _ = shrink_(model, X, depth=0.5, optimizer=optimizer)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in small.parameters()}
    assert len(optimizer.state) == len(list(small.parameters()))


# ---------------------------------------------------------------- blocks that return more than one tensor


class Scaled(Block):
    def forward(self, x):
        y, _ = super().forward(x)
        return y, (self.up(x).square().mean(-1, keepdim=True) + 1).log()


class Determinants(nn.Module):
    """Blocks that return a second tensor, as normalizing flows return log-determinants. The model uses it, or not."""

    def __init__(self, uses):
        super().__init__()
        self.first, self.last, self.uses = nn.Linear(6, 8), nn.Linear(8, 4), uses
        self.layers = nn.ModuleList(Scaled(i, gain=g) for i, g in enumerate((1.0, 1e-3, 1.0)))

    def forward(self, x):
        x, total = self.first(x), torch.zeros(len(x), 1)
        for layer in self.layers:
            x, determinant = layer(x)
            total = total + determinant
        return (self.last(x), total) if self.uses else self.last(x)


@pytest.mark.parametrize("options", [{}, {"params": 0.5}], ids=str)
@pytest.mark.parametrize("uses", [False, True])
def test_a_removed_block_whose_other_output_the_model_uses_is_not_exact(uses, options):
    torch.manual_seed(0)
    model = Determinants(uses).eval()
    _, plan = shrink(model, X, depth=0.67, **options)
    row = next(row for row in plan.groups if row.name == "layers")
    assert (row.why is None) is not uses
    found = plan.verify()
    assert (found.groups["layers"] > 1e-3) is uses
    assert not uses or ("not exact" in str(plan) and not plan.metrics()["exact"])


def test_exact_only_keeps_blocks_whose_other_output_the_model_uses():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"no other can be removed \(layers\.0: exact_only: a removed block also returned"):
        shrink(Determinants(True).eval(), X, depth=0.67, exact_only=True)
    _, plan = shrink(Determinants(False).eval(), X, depth=0.67, exact_only=True)
    assert plan.cuts.drop == {"layers": [1]}


# ---------------------------------------------------------------- blocks in front of a removed one


class Stack(nn.Module):
    """Blocks in a list, which count their calls. `features`: the model also uses what the blocks return."""

    def __init__(self, features=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(16))
        self.head, self.features = nn.Linear(6, 3), features

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x = block(x)
            total = total + x
        return self.head(total if self.features else x)


def counted(model, monkeypatch, skip):
    calls = []
    for block in model.blocks:
        block[0].register_forward_hook(lambda *_: calls.append(1))
    with monkeypatch.context() as patch:
        if not skip:
            patch.setattr(remove, "can_skip", lambda *_: False)
        found = remove.remove_blocks(model, ((torch.randn(4, 6),), {}), 0.9, batches=[((torch.randn(5, 6),), {})] * 2)
    return found, len(calls)


def test_blocks_in_front_of_a_removed_one_are_not_run_again(monkeypatch):
    torch.manual_seed(1)
    short, few = counted(Stack(), monkeypatch, skip=True)
    torch.manual_seed(1)
    whole, many = counted(Stack(), monkeypatch, skip=False)
    assert short.cuts.drop == whole.cuts.drop
    assert short.effect == whole.effect
    assert few < 0.75 * many


def test_whole_models_are_run_where_the_model_reads_what_every_block_returns(monkeypatch):
    assert not remove.can_skip(Stack(features=True), {"blocks": list(range(16))}, [((torch.randn(4, 6),), {})])
    torch.manual_seed(1)
    short, _ = counted(Stack(features=True), monkeypatch, skip=True)
    torch.manual_seed(1)
    whole, _ = counted(Stack(features=True), monkeypatch, skip=False)
    assert (short.cuts.drop, short.effect) == (whole.cuts.drop, whole.effect)


class Signs(nn.Module):
    """Returns a mask beside its output."""

    def __init__(self):
        super().__init__()
        self.inner = chain()

    def forward(self, x):
        y = self.inner(x)
        return y, y > 0


def test_outputs_that_are_masks_are_compared_too():
    _, plan = shrink(Signs().eval(), X, depth=0.6)
    assert plan.cuts.drop == {"inner.layers": [1, 3]}
