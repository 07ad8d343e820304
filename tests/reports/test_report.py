"""`report` and the `report` method of results: what the document says is what the models and the calls say."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.execute import Compressed
from secateur.reports import Report
from secateur.reports.document import wilson


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 24, 3, padding=1)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.conv2(self.conv1(x).relu()).relu().mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 8), scale

    def forward(self, x):
        return x + self.scale * self.fc(x)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(scale) for scale in (0.9, 0.1, 0.8, 0.2, 0.7, 0.3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def rows(report):
    return {row.name: row for row in report.document.layers}


def stages(report):
    return {stage.name: stage for stage in report.document.stages}


# --- one result -------------------------------------------------------------------------------------------------------------


def test_plan_is_applied_to_a_copy(model, images):
    before = copy.deepcopy(model.state_dict())
    plan = sc.plan(model, sparsity=0.5)
    report = plan.report(before=model, example_inputs=images, seconds=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for line in plan.layers:
        assert rows(report)[line.name.removesuffix(".weight")].kept == line.kept
    found = stages(report)
    assert list(found) == ["dense", "pruned"]
    assert found["dense"].nonzero == sum(p.numel() for p in model.parameters())
    assert found["dense"].nonzero - found["pruned"].nonzero == plan.metrics()["pruned"]


def test_plan_without_a_model_reports_its_masks(model):
    plan = sc.plan(model, sparsity=0.5, pattern="2:4", include="head.weight")
    report = plan.report()
    (row,) = report.document.layers
    assert (row.name, row.before, row.kept, row.pattern) == ("head", [10, 24], 120, "2:4")
    assert report.document.stages == []
    assert report.document.masks[0].bits.count("1") == 120
    assert "50.0 % of the weights are set to zero" in str(report)
    assert "This is a plan: no model was passed" in str(report)
    assert sc.Recipe.parse(report.document.recipe).run(model).model.head.weight.count_nonzero() == 120


def test_pruning_in_place_is_undone_on_a_copy_if_the_dense_values_were_kept(model):
    dense = copy.deepcopy(model.state_dict())
    plan = sc.plan(model, sparsity=0.5).apply_(model, keep_dense=True)
    pruned = copy.deepcopy(model.state_dict())
    report = plan.report(after=model)
    assert stages(report)["dense"].nonzero == sum(int(dense[name].count_nonzero()) for name, _ in model.named_parameters())
    assert all(torch.equal(tensor, pruned[name]) for name, tensor in model.state_dict().items())
    plan.undo_(model)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in model.state_dict().items())


def test_cut_reports_shapes_and_flops_before_and_after(model, images):
    small, cut = sc.shrink(model, images, flops=0.5)
    report = cut.report(seconds=0)
    found = stages(report)
    assert (found["dense"].flops, found["shrunk"].flops) == cut.totals["flops"]
    assert (found["dense"].parameters, found["shrunk"].parameters) == cut.totals["params"]
    for name, row in rows(report).items():
        assert row.before == list(model.get_submodule(name).weight.shape)
        assert row.after == list(small.get_submodule(name).weight.shape)
        assert row.flops_after < row.flops_before
    assert sum(row.flops_before for row in report.document.layers) == found["dense"].flops


def test_flops_of_a_tied_weight_are_those_of_all_its_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model = Tied()
    report = sc.report(before=model, after=copy.deepcopy(model), example_inputs=torch.zeros(1, 4, dtype=torch.long), seconds=0)
    (row,) = report.document.layers
    assert row.flops_after == report.document.stages[0].flops == 2 * 4 * 8 * 20


def test_flops_of_weights_with_names_of_their_own_are_those_of_their_module():
    single = nn.Linear(8, 4)
    report = sc.plan(single, sparsity=0.5).report(before=single, example_inputs=torch.randn(1, 8), seconds=0)
    assert rows(report)["weight"].flops_after == report.document.stages[0].flops == 2 * 8 * 4
    shared = nn.GRU(8, 4)
    report = sc.report(before=shared, after=shared, example_inputs=torch.randn(3, 1, 8), seconds=0)
    assert report.document.stages[0].flops > 0
    assert {row.flops_after for row in report.document.layers} == {None}  # two weights share them


def test_removed_blocks_are_told_from_the_blocks_that_take_their_numbers():
    torch.manual_seed(0)
    model = Deep().eval()
    small, cut = sc.shrink(model, torch.randn(4, 8), depth=0.5)
    (gone,) = cut.cuts.drop.values()
    report = cut.report(seconds=0)
    stay = [i for i in range(6) if i not in gone]
    for i in range(6):
        row = rows(report)[f"blocks.{i}.fc"]
        if i in gone:
            assert row.after is None
            assert row.kept == row.flops_after == 0
        else:
            weight = small.blocks[stay.index(i)].fc.weight
            assert row.after == [8, 8]
            assert row.hist.after == row.hist.before
            assert torch.equal(weight, model.blocks[i].fc.weight)


def test_gates_are_reported_and_measured_without_them(model, images):
    gates = sc.gate_(model, sparsity=0.5, at=["conv2", "head"], data=[images])

    def count(each):
        return sum(len(module._forward_pre_hooks) for module in each.modules())

    report = gates.report(example_inputs=images, seconds=0, evaluate=count, metric="gates")
    assert {name: row.gate is not None for name, row in rows(report).items()} == {"conv1": False, "conv2": True, "head": True}
    assert [stage.metric.value for stage in report.document.stages] == [0, 2]
    assert len(model.conv2._forward_pre_hooks) == 1


def test_bench_alone_reports_times(model, images):
    report = sc.bench({"a": model, "b": copy.deepcopy(model)}, images, seconds=0.01).report()
    assert [stage.name for stage in report.document.stages] == ["a", "b"]
    assert all(stage.times[0].median > 0 for stage in report.document.stages)


def test_two_models_are_compared_without_any_result(model, images):
    pruned = copy.deepcopy(model)
    sc.prune_(pruned, sparsity=0.75, pattern="1:4", include="conv2.weight")
    report = sc.report(before=model, after=pruned, seconds=0)
    assert rows(report)["conv2"].pattern == "1:4"
    assert rows(report)["conv2"].zeros == 0.75
    assert rows(report)["conv1"].pattern == "dense"


def test_channels_that_are_all_zero_do_not_count(model):
    plan = sc.plan(model, sparsity=0.5, pattern="out", include="conv1.weight")
    assert rows(plan.report(before=model))["conv1"].channels == [16, 8]


def test_weights_that_cannot_be_read_are_listed_with_the_reason(model):
    broken = copy.deepcopy(model)
    broken.head = nn.Linear(24, 10, device="meta")
    report = sc.report(before=broken, after=broken, disk=False)
    assert rows(report).keys() == {"conv1", "conv2"}
    assert [(r.reason, r.names) for r in report.document.reasons] == [("on the meta device", ["head.weight"])]


def test_weights_that_are_not_finite_get_no_histogram_or_a_partial_one(model):
    broken = copy.deepcopy(model)
    broken.conv1.weight.data[0, 0, 0, 0] = torch.nan
    broken.conv2.weight.data.fill_(torch.nan)
    report = sc.report(before=model, after=broken)
    assert sum(rows(report)["conv1"].hist.after) <= broken.conv1.weight.numel() - 1
    assert sum(rows(report)["conv2"].hist.after) == 0
    assert report.html()


def test_compiled_model_is_reported_as_the_model_inside(model, images):
    compiled = torch.compile(copy.deepcopy(model))
    report = sc.report(before=model, after=compiled, example_inputs=images, seconds=0)
    assert report.document.model.kind == "Net"
    assert [stage.flops for stage in report.document.stages] == [report.document.stages[0].flops] * 2
    assert rows(report).keys() == {"conv1", "conv2", "head"}


# --- several results --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipeline(model, images):
    small, cut = sc.shrink(model, images, flops=0.6)
    plan = sc.prune_(small, sparsity=0.9)
    packed = sc.compress_(small, images, objective="size")
    return small, (cut, plan, packed)


def test_results_are_joined_and_undone_step_by_step(model, images, pipeline):
    small, results = pipeline
    seen = []

    def evaluate(each):
        seen.append(sum(isinstance(module, Compressed) for module in each.modules()))
        return 0.5

    report = sc.report(*results, before=model, after=small, example_inputs=images, evaluate=evaluate, seconds=0)
    found = stages(report)
    assert list(found) == ["dense", "shrunk", "pruned", "compressed"]
    assert seen[:2] == [0, 0]  # the dense and the pruned model
    assert seen[2] > 0
    assert len(seen) == 3  # the shrunk model was pruned in place and is gone
    assert (found["shrunk"].parameters, found["shrunk"].flops) == tuple(
        int(results[0].totals[k][1]) for k in ("params", "flops")
    )
    assert found["shrunk"].metric is None
    assert found["pruned"].nonzero == found["compressed"].nonzero < found["shrunk"].parameters
    assert [step.kind for step in report.document.steps] == ["shrink", "prune_", "compress_"]
    for row in results[2].rows:
        assert rows(report)[row.layer].format == (row.format or "")
        assert rows(report)[row.layer].bytes_after == row.after
    assert any(isinstance(module, Compressed) for module in small.modules())


def test_formats_that_were_chosen_for_their_size_are_not_called_fast(model, images, pipeline):
    small, results = pipeline
    text = str(sc.report(*results, before=model, after=small, example_inputs=images, seconds=0))
    assert "layers were packed in sparse formats that take fewer bytes" in text
    assert "faster" not in text
    assert "smaller on disk when packed" in text


def test_zeros_of_a_model_that_is_gone_are_not_made_up(model):
    sc.prune_(model, sparsity=0.5)
    report = sc.prune_(model, sparsity=0.8).report(after=model, seconds=0)
    gone, left = stages(report)["dense"], stages(report)["pruned"]
    assert gone.parameters == left.parameters
    assert gone.nonzero is None


def test_training_after_pruning_is_a_step_of_its_own(model, images):
    teacher = copy.deepcopy(model)
    plan = sc.prune_(model, sparsity=0.5)
    pruned = copy.deepcopy(model.state_dict())
    trained = sc.distill_(model, teacher, data=[images] * 4, steps=4, keep_dense=True)
    report = sc.report(plan, trained, before=teacher, after=model, disk=False)
    assert list(stages(report)) == ["dense", "pruned", "distilled"]
    assert stages(report)["pruned"].nonzero == sum(int(pruned[name].count_nonzero()) for name, _ in model.named_parameters())
    assert ("trained for" if trained.improved else "did not improve") in str(report)


def test_curves_of_sensitivity_are_a_sweep(model):
    found = sc.sensitivity(model, lambda each: float(each.head.weight.abs().sum()), levels=(0.5,))
    report = sc.report(before=model, after=model, sweep=found.sweep(), metric="size", disk=False)
    assert {line.label for line in report.document.sweep.lines} == set(found.curves)
    assert "How far it could go" in report.html()


def test_copies_that_were_kept_give_every_stage_its_figures(model, images, pipeline):
    small, results = pipeline
    cut_only, _ = sc.shrink(model, images, flops=0.6)
    report = sc.report(
        *results, stages={"dense": model, "cut": cut_only, "pruned": sc.decompress_(copy.deepcopy(small)), "packed": small},
        example_inputs=images, other_inputs={"1 image": images[:1]}, evaluate=lambda _: 0.5, seconds=0.01,
    )  # fmt: skip
    for stage in report.document.stages:
        assert None not in (stage.metric, stage.bytes, stage.flops, stage.nonzero)
        assert [time.input for time in stage.times] == ["2 images", "1 image"]
    assert [stage.how for stage in report.document.stages] == ["", "sc.shrink", "sc.prune_", "sc.compress_"]


def test_bytes_are_those_that_save_writes(model, images, pipeline, tmp_path):
    small, results = pipeline
    report = sc.report(*results, before=model, after=small, seconds=0)
    sc.save(small, tmp_path / "packed", packed=True)
    size = sum(file.stat().st_size for file in (tmp_path / "packed").iterdir())
    assert abs(stages(report)["compressed"].bytes - size) < 100  # the manifest has the time in it
    assert sc.report(*results, before=model, after=small, seconds=0, disk=False).document.stages[0].bytes is None


def test_models_keep_mode_hooks_and_values(model, images):
    model.train()
    before = copy.deepcopy(model.state_dict())
    sc.plan(model, sparsity=0.5).report(before=model, example_inputs=images, evaluate=lambda _: 1.0, seconds=0.01)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_reasons_that_differ_in_a_name_alone_are_one(model):
    plan = sc.plan(model, sparsity=0.5)
    plan.skipped = {"conv1.bias": "it follows conv1.bias", "conv2.bias": "it follows conv2.bias (see (b))", "x": "other"}
    found = {reason.reason: reason.names for reason in plan.report().document.reasons}
    assert found == {"it follows another layer": ["conv1.bias", "conv2.bias"], "other": ["x"]}


def test_figure_that_cannot_be_measured_is_missing_with_the_reason(model, images):
    report = sc.plan(model, sparsity=0.5).report(before=model, example_inputs=torch.randn(2, 5, 8, 8), seconds=0.01)
    stage = report.document.stages[0]
    assert stage.flops is None
    assert not stage.times
    assert "RuntimeError" in stage.missing["flops"]
    assert "not measured" in report.html()


def test_two_batches_as_example_inputs_are_answered_with_what_they_should_be(model, images):
    shown = str(sc.plan(model, sparsity=0.5).report(before=model, example_inputs=[images, images], seconds=0.01))
    assert "FLOPs and the time were not measured. Stage pruned: ValueError: " in shown
    assert "does not run on the example inputs" in shown
    assert "Example inputs are a tensor, a tuple of positional arguments, or a mapping of keyword arguments" in shown


# --- the metric -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "shown"), [(0.5, 50.0), (50.0, 50.0), (torch.tensor(0.5), 50.0)])
def test_accuracy_is_a_share_or_in_percent(model, given, shown):
    report = sc.plan(model, sparsity=0.5).report(before=model, evaluate=lambda _: given, samples=100)
    metric = report.document.stages[-1].metric
    assert (metric.value, metric.unit, metric.better) == (shown, "%", "higher")
    assert metric.low < 50 < metric.high


def test_evaluate_may_return_its_own_interval(model):
    report = sc.plan(model, sparsity=0.5).report(before=model, evaluate=lambda _: (12.5, 12.0, 13.0), metric="perplexity")
    metric = report.document.stages[-1].metric
    assert (metric.value, metric.low, metric.high, metric.better, metric.unit) == (12.5, 12.0, 13.0, "lower", "")


@pytest.mark.parametrize("given", [float("nan"), float("inf"), (1.0, 2.0)])
def test_value_that_is_no_metric_is_refused(model, given):
    with pytest.raises(ValueError, match="evaluate returned"):
        sc.plan(model, sparsity=0.5).report(before=model, evaluate=lambda _: given)


@pytest.mark.parametrize(("right", "samples"), [(0, 10), (9, 10), (500, 1000), (9027, 10000)])
def test_interval_holds_the_shares_that_the_score_test_accepts(right, samples):
    low, high = (share / 100 for share in wilson(100 * right / samples, samples))
    for share in torch.linspace(0.0005, 0.9995, 1000).tolist():
        distance = abs(right / samples - share) / math.sqrt(share * (1 - share) / samples)
        assert (distance < 1.96) == (low < share < high)


def test_recipe_is_the_one_that_the_model_remembers(model):
    report = sc.plan(model, sparsity=0.5, pattern="4x1").report(before=model)
    assert sc.Recipe.parse(report.document.recipe).to_dict()["stages"] == [{"prune": {"sparsity": 0.5, "pattern": "4x1"}}]
    assert "sparsity: 0.5" in report.html()


# --- files ------------------------------------------------------------------------------------------------------------------


def test_json_and_page_read_back_and_render_the_same_bytes(model, images, tmp_path):
    report = sc.plan(model, sparsity=0.5).report(
        tmp_path / "new" / "out.html", before=model, example_inputs=images, seconds=0.01
    )
    report.save(tmp_path / "out.json")
    for file in (tmp_path / "new" / "out.html", tmp_path / "out.json"):
        again = Report.load(file)
        assert again.document == report.document
        assert again.html() == report.html()
    assert json.loads((tmp_path / "out.json").read_text())["schema"] == 1


def test_json_leaves_out_what_was_not_measured(model):
    found = sc.plan(model, sparsity=0.5).report().to_dict()
    assert found.keys() == {"schema", "model", "layers", "machine", "made", "steps", "reasons", "masks", "recipe"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "schema 9; this version of secateur reads schema 1"),
        ({"layers": None}, r"`array`, got `null` - at `\$.layers`"),
        ({"machine": {}}, "missing required field `cpu`"),
        ({"note": float("nan")}, "not the JSON of a report"),  # Python's json writes and reads NaN
    ],
)
def test_json_that_is_no_report_is_refused_with_the_field(model, tmp_path, change, message):
    report = sc.plan(model, sparsity=0.5).report()
    (tmp_path / "bad.json").write_text(json.dumps({**report.to_dict(), **change}))
    with pytest.raises(ValueError, match=message):
        Report.load(tmp_path / "bad.json")


def test_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "bad.html").write_text("<p>hello")
    with pytest.raises(ValueError, match="not the JSON of a report"):
        Report.load(tmp_path / "bad.html")


def test_failed_write_leaves_nothing_behind(model, tmp_path):
    (tmp_path / "out.html").mkdir()
    with pytest.raises(IsADirectoryError):
        sc.plan(model, sparsity=0.5).report(tmp_path / "out.html")
    assert [file.name for file in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: sc.report(), ValueError, "nothing to report"),
        (lambda m: sc.report(before=m), ValueError, "nothing to report"),
        (sc.report, TypeError, "not a Net; models are passed as before= and after="),
        (lambda m: sc.plan(m, sparsity=0.5).report("out.txt"), ValueError, "must end in .html"),
        (lambda m: sc.plan(m, sparsity=0.5).report(before=m, stages={"a": m}), ValueError, "leave before= and after= out"),
        (lambda m: sc.plan(m, sparsity=0.5).report(before="x"), TypeError, "before= must be a torch.nn.Module, not str"),
        (lambda m: sc.compress_(m, torch.randn(1, 3, 8, 8)).report(), ValueError, "pass after="),
        (lambda m: sc.plan(m, sparsity=0.5).report(sweep={"line": []}), ValueError, "Did you mean 'lines'"),
        (lambda m: sc.plan(m, sparsity=0.5).report(before=m, evaluate=lambda _: 1, better="up"), ValueError, "'higher' or"),
    ],
)
def test_mistakes_are_named(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)


def test_sweep_takes_shares_and_percent_alike(model):
    line = {"label": "2:4", "points": [{"sparsity": 0.5, "value": 0.75}, {"sparsity": 0.25, "value": 0.875}]}
    plan = sc.plan(model, sparsity=0.5)
    shares = plan.report(sweep={"lines": [line], "dense": 0.9, "samples": 100}).document.sweep
    assert [(point.sparsity, point.value) for point in shares.lines[0].points] == [(0.25, 87.5), (0.5, 75.0)]
    assert shares.dense == 90.0
    points = [{"sparsity": p["sparsity"], "top1": 100 * p["value"]} for p in line["points"]]
    percent = plan.report(sweep={"lines": [{**line, "points": points}], "dense": 90.0, "images": 100}).document.sweep
    assert percent == shares


def test_alternatives_show_the_same_layer(model):
    plan = sc.plan(model, sparsity=0.5)
    other = sc.plan(model, sparsity=0.5, pattern="2:4", exclude="conv1.weight")
    masks = plan.report(before=model, alternatives={"2:4": other}).document.masks
    assert [mask.label for mask in masks] == ["unstructured", "2:4"]
    assert len({mask.layer for mask in masks}) == 1
    assert all(masks[1].bits[i : i + 4].count("1") == 2 for i in range(0, len(masks[1].bits), 4))


def test_notebook_shows_the_page_in_a_frame(model):
    shown = sc.plan(model, sparsity=0.5).report()._repr_html_()
    assert shown.startswith("<iframe")
    assert 'sandbox="allow-scripts"' in shown
    assert "<script" not in shown  # everything inside is escaped
