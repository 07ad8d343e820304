"""The text and the page of a report are functions of its document: rules for sentences, sections, size and time."""

import re
import time
from dataclasses import replace

import pytest
from documents import UGLY, bare, document, large, layer, metric, stage

from secateur.reports import Report, read
from secateur.reports.charts import mask_path, network
from secateur.reports.curves import curve
from secateur.reports.document import Call, Histogram, Line, Mask, Metric, Point, Reason, StageFigures, Sweep, Time
from secateur.reports.words import headline, how_measured, lede, notes, tiles


def ends(before: StageFigures, after: StageFigures, **changes):
    return document(stages=[before, after], **changes)


SLOWER = stage("", "", 1.5, 0).times

# --- sentences --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (stage("a", "", 1.0, 93.4), stage("b", "", 0.5, 90.3),
         "Half the FLOPs, half the size on disk when packed, half the time on one image. Accuracy 93.4 → 90.3 %."),
        (stage("a", "", 1.0, 93.4), stage("b", "", 0.4, 90.3),
         "2.5× fewer FLOPs, 2.5× smaller on disk when packed, 2.5× faster on one image. Accuracy 93.4 → 90.3 %."),
        (StageFigures("a", flops=100), StageFigures("b", flops=90), "1.1× fewer FLOPs. Accuracy not measured."),
        (StageFigures("a", bytes=100, metric=metric(90)), StageFigures("b", bytes=97, metric=metric(10)),
         "Nothing that was measured got smaller or faster; accuracy 90.0 → 10.0 %."),
        (StageFigures("a", bytes=100), StageFigures("b", bytes=200), "2.0× larger on disk when packed. Accuracy not measured."),
        (stage("a", "", 1.0, 93.4), replace(stage("b", "", 0.4, 90.3), bytes=None, times=SLOWER),
         "2.5× fewer FLOPs, but 1.5× slower on one image. Accuracy 93.4 → 90.3 %."),
        (stage("a", "", 1.0, 93.4), replace(stage("b", "", 0.4, 90.3), flops=None, times=SLOWER),
         "2.5× smaller on disk when packed, but 1.5× slower on one image. Accuracy 93.4 → 90.3 %."),
        (StageFigures("a", times=stage("a", "", 1.0, 0).times), StageFigures("b", times=SLOWER),
         "1.5× slower on one image. Accuracy not measured."),
        (StageFigures("a", bytes=300, metric=Metric("perplexity", 12.0, better="lower")),
         StageFigures("b", bytes=100, metric=Metric("perplexity", 13.5, better="lower")),
         "3.0× smaller on disk when packed. Perplexity 12.00 → 13.50."),
        (StageFigures("a", flops=9), StageFigures("b", flops=9, metric=metric(90)),
         "21.2 % of the weights are zero. Accuracy 90.0 %."),
    ],
)  # fmt: skip
def test_headline_says_what_was_gained_and_ends_with_the_metric(before, after, expected):
    rows = [layer(0, kept=1191)]  # of 1512
    assert " ".join(filter(None, headline(ends(before, after, layers=rows)))) == expected


def test_tiles_have_fixed_places_and_a_loss_of_accuracy_is_no_gain():
    names = ["Accuracy", "Parameters", "FLOPs for one image", "On disk, packed", "Time, one image"]
    found = tiles(document())
    assert [tile.name for tile in found] == names
    assert [tile.gain for tile in found] == [False, True, True, True, True]
    empty = tiles(ends(StageFigures("a"), StageFigures("b", parameters=5)))
    assert len(empty) == 5
    assert all(str(tile.now) == "–" for tile in empty)


def test_better_perplexity_is_lower():
    a, b = (
        StageFigures(name, metric=Metric("perplexity", value, better="lower")) for name, value in (("a", 12.0), ("b", 11.0))
    )
    assert tiles(ends(a, b))[0].gain
    assert not tiles(ends(b, a))[0].gain


def titles(made):
    return [note.title for note in notes(made, most=9)]


def test_notes_follow_rules():
    calm = document(steps=[], reasons=[])
    assert titles(calm) == []
    slow = Time("one image", 0.0074, 0.007, 0.007, 0.008, 9)
    cases = {
        "1 layer is all zeros.": replace(calm, layers=[layer(0, kept=0), layer(1)]),
        "50 % fewer FLOPs, but 1 % less time for one image.": replace(
            calm, stages=[calm.stages[0], replace(calm.stages[-1], times=[slow])]
        ),
        "The cut is not exact in 2 of 8 groups.": replace(calm, steps=document().steps[:1]),
        "8 of 40 layers stay dense.": replace(calm, steps=document().steps[2:]),
        "No measurable change of accuracy.": replace(
            calm, stages=[calm.stages[0], replace(calm.stages[-1], metric=metric(92.9))]
        ),
        "FLOPs were not measured.": replace(
            calm, stages=[calm.stages[0], StageFigures("b", missing={"flops": "it does not run"})]
        ),
        "FLOPs and the time were not measured.": replace(
            calm, stages=[calm.stages[0], StageFigures("b", missing={"flops": "no", "times": "it does not run: no"})]
        ),
    }
    for title, made in cases.items():
        assert titles(made) == [title]


def test_time_is_compared_with_flops_on_the_inputs_where_they_differ_most():
    first, last = document().stages[0], document().stages[-1]
    slow = replace(last.times[1], median=0.9 * first.times[1].median)
    made = document(steps=[], reasons=[], stages=[first, replace(last, times=[last.times[0], slow])])
    (note,) = notes(made)
    assert note.title == "50 % fewer FLOPs, but 10 % less time for 16 images."
    assert note.text.endswith("It is 50 % less time for one image.")
    slower = replace(slow, median=1.3 * first.times[1].median)
    note = notes(replace(made, stages=[first, replace(first, times=[slower])]))[0]
    assert note.title == "The same FLOPs, but 30 % more time for 16 images."


def packing(objective):
    return Call("compress_", f"objective={objective}, 1 thread", {"compressed": 3, "layers": 4})


@pytest.mark.parametrize(("objective", "says"), [("speed", "measured faster"), ("size", "take fewer bytes")])
def test_the_text_says_by_what_the_formats_were_chosen(objective, says):
    made = document(steps=[packing(objective)], reasons=[])
    assert lede(made).startswith(f"3 of 4 layers were packed in sparse formats that {says}. ")
    assert next(note for note in notes(made) if "stay dense" in note.title).text.endswith(f"only in formats that {says}.")


def test_weights_remain_only_after_a_cut():
    prune = Call("prune_", "", {"sparsity": 0.5})
    cut = Call("shrink", "", {"params": 0.7, "groups": 2})
    again = "50 % of the weights were set to zero"
    assert lede(document(steps=[prune, prune])).startswith(f"{again}; then {again}.")
    assert "; then 50 % of the remaining weights were set to zero." in lede(document(steps=[cut, prune]))
    assert lede(document(steps=[Call("shrink", "", {"groups": 2})])).startswith("Channels were cut. ")


def test_a_cut_says_what_is_left():
    numbers = {"params": 0.7, "flops": 0.5, "groups": 2, "lists": 1, "blocks": 1}
    left = "which leaves 70 % of the parameters and 50 % of the FLOPs. "
    assert lede(document(steps=[Call("shrink", "", numbers)])).startswith(f"Channels were cut and 1 block removed, {left}")
    assert lede(document(steps=[Call("shrink", "", {**numbers, "groups": 1})])).startswith(f"1 block was removed, {left}")


def test_one_is_singular():
    made = document(
        1,
        steps=[
            Call("prune_", "", {"sparsity": 0.5, "tensors": 1}),
            Call("compress_", "", {"compressed": 1, "layers": 1}),
            Call("gate_", "", {"sparsity": 0.5, "gates": 1}),
        ],
    )
    assert lede(made).startswith("50 % of the weights in 1 tensor were set to zero; then 1 of 1 layer was packed")
    page = Report(made).html()
    assert not re.search(r"\b1 (layers|tensors|blocks|groups|threads|cores)\b", page)


def test_range_of_a_time_has_one_unit():
    time = Time("one image", 880e-6, 500e-6, 543e-6, 1.44e-3, 87)
    made = ends(StageFigures("a", times=[time]), StageFigures("b", times=[time]))
    assert tiles(made)[-1].foot.replace("\u2060", "") == "543–1440 µs in 80 % of 87 rounds"
    assert "<small>543–1440</small>" in Report(made).html().replace("\u2060", "")


def test_negative_metrics_have_a_minus_sign():
    a, b = (StageFigures(name, metric=Metric("score", value)) for name, value in (("a", -0.766), ("b", -0.5)))
    assert headline(ends(a, b))[1] == "Score −0.7660 → −0.5000."
    assert tiles(ends(a, b))[0].now.text == "−0.5000"


def test_the_text_counts_zeros_that_were_there_before():
    prune = Call("prune_", "", {"sparsity": 0.5, "kept": 50, "total": 100, "zeros": 80})
    assert lede(document(steps=[prune])).startswith("80 % of the weights are zero, some of them from before.")


def test_zeros_that_were_there_before_are_no_gain():
    a, b = StageFigures("a", parameters=100, nonzero=20), StageFigures("b", parameters=100, nonzero=20)
    tile = tiles(ends(a, b))[1]
    assert (tile.word, tile.gain) == ("unchanged", False)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([StageFigures("a", bytes=9), StageFigures("b", bytes=8)], "Every model was saved with packed=True."),
        (
            [StageFigures("a"), StageFigures("b", bytes=8)],
            "The models were saved with packed=True. – is what was not measured.",
        ),
    ],
    ids=["all", "some"],
)
def test_the_page_says_how_the_models_were_measured(stages, says):
    stages = [replace(one, nonzero=5) for one in stages]
    assert how_measured(document(stages=stages)) == says


@pytest.mark.parametrize(("device", "says"), [("cpu", "on 1 thread"), ("cuda", "on A GPU"), ("", "on A GPU")])
def test_the_page_names_the_device_that_held_the_model(device, says):
    made = document()
    made = replace(made, model=replace(made.model, device=device), machine=replace(made.machine, gpu="A GPU"))
    assert f"timed in turn {says}:" in how_measured(made)


def test_half_a_digit_is_rounded_up():
    made = ends(StageFigures("a", metric=metric(93.39)), StageFigures("b", metric=metric(90.55)))
    assert headline(made)[1] == "Accuracy 93.4 → 90.6 %."


def test_at_most_three_notes_the_worst_first():
    made = document(layers=[layer(i, kept=0 if i == 3 else 900) for i in range(20)])
    assert [note.title for note in notes(made)] == [
        "1 layer is all zeros.",
        "The cut is not exact in 2 of 8 groups.",
        "4 of 20 layers stay dense.",
    ]


# --- pictures ---------------------------------------------------------------------------------------------------------------


def test_large_models_get_one_column_for_each_block():
    few, many = network(document(40)), network(large(1000))
    assert [len(column.layers) for column in few.columns] == [1] * 40
    assert not few.blocks
    assert many.blocks
    assert len(many.columns) == 999 // 7 + 1 + 1  # the last block is not complete, and the head is a column of its own
    assert sorted(i for column in many.columns for i in column.layers) == list(range(1000))
    assert many.tracks[1].range  # the shares of weights inside a block differ


def test_columns_are_grouped_by_name_with_a_gap_between():
    net = network(document(40))
    groups = [column.group for column in net.columns]
    assert list(dict.fromkeys(groups)) == ["layer1", "layer2"]
    gaps = [b.x - a.x for a, b in zip(net.columns, net.columns[1:])]
    assert [i for i, gap in enumerate(gaps) if gap > 1] == [19]


def labels_of(names):
    return network(document(layers=[layer(i, name) for i, name in enumerate(names)])).labels


def test_names_on_the_axis_leave_out_what_they_share_and_do_not_collide():
    names = ["model.embed", *(f"model.layers.{i}.q" for i in range(30)), "model.norm"]
    assert [label.text for label in labels_of(names)] == ["embed", "layers", "norm"]
    crowded = labels_of([f"a_rather_long_part_{i}.conv" for i in range(12)])
    assert 1 < len(crowded) < 12


def test_large_groups_are_named_before_single_layers():
    names = ["vit.embeddings.cls_token", *(f"vit.layers.{i}.{part}" for i in range(3) for part in "qkvo"), "classifier"]
    assert "vit.layers.0" in [label.text for label in labels_of(names)]


def test_many_layers_without_groups_are_one_picture():
    net = network(document(layers=[layer(i, f"{i}.0") for i in range(200)]))
    assert net.width == 200
    assert net.tracks[0].before.count("M") == 1
    assert not net.blocks  # each column is one layer
    assert 5 < len(net.labels) < 40


@pytest.mark.parametrize("number", [1, 3])
def test_few_layers_are_not_drawn_wider_than_they_are_high(number):
    net = network(document(layers=[layer(i, f"fc{i}") for i in range(number)]))
    assert net.width == 16
    assert net.columns[-1].x + 1 <= 16


def test_layer_that_is_far_wider_does_not_flatten_the_others():
    rows = [layer(i, f"block.{i}") for i in range(9)] + [layer(9, "head", channels=[32000, 32000])]
    track = network(document(layers=rows)).tracks[0]
    assert "up to 16" in track.remark
    assert "wider ones" in track.remark


def test_mask_path_draws_every_weight_that_stays_once():
    mask = Mask("x", "y", 3, 5, "110110000011111", 0.4)
    cells = {
        (int(x) + i, int(y)) for x, y, run in re.findall(r"M(\d+) (\d+)\.5h(\d+)", mask_path(mask)) for i in range(int(run))
    }
    assert cells == {(i % 5, i // 5) for i, bit in enumerate(mask.bits) if bit == "1"}


def test_curve_names_few_lines_all_and_of_many_the_worst():
    few = curve(document().sweep)
    assert [line.label for line in few.lines] == ["unstructured", "2:4"]
    assert few.lines[0].dots[1].here
    assert few.band
    assert "60 % and 80 % zeros: 85.8 % becomes 19.9 %" in few.say
    lines = [Line(f"layer{i}", [Point(0.0, 90.0), Point(0.5, 90.0 - i)]) for i in range(30)]
    many = curve(Sweep(lines, 90.0))
    assert sorted(line.label for line in many.lines if line.label) == ["layer27", "layer28", "layer29"]


@pytest.mark.parametrize("values", [[1.0], [0.0], [5.0, 5.0], [1.0, 1e5], [-3.0, 2.0], [99.97, 100.0]])
def test_every_value_lies_inside_the_curve(values):
    points = [Point(i / 10, value) for i, value in enumerate(values)]
    drawn = curve(Sweep([Line("a", points)]))
    assert all(0 <= dot.y <= 100 and 0 <= dot.x <= 100 for line in drawn.lines for dot in line.dots)
    assert len(drawn.y_ticks) >= 2


# --- the page ---------------------------------------------------------------------------------------------------------------


def test_page_is_a_function_of_the_document():
    for made in (document(), bare(), large(200), document(layers=[layer(i, name) for i, name in enumerate(UGLY)])):
        page = Report(made).html()
        assert page == Report(made).html()
        again = read(made.to_json())
        assert again == made
        assert Report(again).html() == page


def test_sections_without_figures_are_left_out():
    whole, empty = Report(document()).html(), Report(bare()).html()
    sections = set(re.findall(r'<h2 id="(h-\w+)"', whole))
    assert sections == {"h-net", "h-steps", "h-curve", "h-pat", "h-hist", "h-lay", "h-left", "h-rec"}
    assert set(re.findall(r'<h2 id="(h-\w+)"', empty)) == {"h-net", "h-lay", "h-rec"}


def test_report_without_layers_is_a_page_too():
    page = Report(document(layers=[], masks=[], reasons=[])).html()
    assert 'id="h-lay"' not in page
    assert "Half the FLOPs" in page


def test_names_are_escaped_everywhere():
    rows = [layer(i, name, hist=layer(0).hist) for i, name in enumerate(UGLY)]
    made = document(layers=rows, masks=[Mask(UGLY[1], UGLY[0], 1, 1, "1", 0.0)], note=UGLY[0], recipe=UGLY[0])
    made = replace(made, model=replace(made.model, name=UGLY[0], data=UGLY[1]))
    page = Report(made).html()
    assert "<script>window" not in page
    assert ".<wbr>very_long_name" in page
    assert "<img" not in page
    assert page.count("</script>") == 2


@pytest.mark.parametrize("names", ["short", "long"])
def test_thousand_layers_take_less_than_two_seconds_and_one_and_a_half_megabytes(names):
    made = large(1000)
    if names == "long":
        made = replace(made, layers=[replace(row, name=f"model.{'decoder_' * 5}{row.name}") for row in made.layers])
    Report(bare()).html()  # compiles the template
    begin = time.process_time()
    page = Report(made).html()
    assert time.process_time() - begin < 2
    assert len(page.encode()) < 1.5e6


def test_terminal_has_the_headline_the_steps_and_the_layers():
    made = document(4)
    text = str(Report(made))
    assert text.startswith("ResNet-56: Half the FLOPs")
    assert "compressed   90.30 %" in text
    assert all(row.name in text for row in made.layers)
    assert "shrink left alone, 2: the model returns it" in text


def test_values_have_four_digits():
    """A perplexity of 8.410 was shown as 8.41 beside 3.162, and 12,345 as 1.234e+04."""
    a, b = (StageFigures("", metric=Metric("perplexity", value, better="lower")) for value in (3.1623, 8.4101))
    made = ends(a, b)
    assert headline(made)[1] == "Perplexity 3.162 → 8.410."
    assert [tiles(made)[0].now.text, tiles(made)[0].before, tiles(made)[0].change] == ["8.410", "from 3.162", "+5.248"]
    assert ">3.162</td>" in Report(made).html()
    far = ends(a, StageFigures("b", metric=Metric("perplexity", 12345.6, better="lower")))
    assert headline(far)[1] == "Perplexity 3.162 → 12,346."


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (5.0, 1e20, ["1.000e+20", "from 5.000", "+1.000e+20"]),  # a perplexity after too much pruning was written out
        (0.0, 0.05, ["0.05000", "from 0", "+0.05000"]),  # the change was +0
        (1000.4, 1000.1, ["1,000", "from 1,000", "−0.3"]),  # the change was −0
        (9.99996, 1e-15, ["1.000e-15", "from 10.00", "−10.00"]),
        (-0.0, -5, ["−5.000", "from 0", "−5.000"]),
    ],
)
def test_values_that_are_large_or_small_or_zero(before, after, shown):
    a, b = (StageFigures("", metric=Metric("perplexity", value, better="lower")) for value in (before, after))
    tile = tiles(ends(a, b))[0]
    assert [tile.now.text, tile.before, tile.change] == shown


def test_a_share_that_is_none_is_shown():
    """A loss that exploded, from an evaluate that was taken for one of accuracy, ended the report."""
    a, b = (StageFigures("", metric=Metric("accuracy", value, "%")) for value in (91.0, 1e300))
    assert headline(ends(a, b))[1] == "Accuracy 91.0 → 1.000e+300 %."
    assert "1.000e+300" in Report(ends(a, b)).html()


def test_numbers_that_did_not_change_are_shown_once():
    row = layer(0, after=[16, 16, 3, 3], channels=[16, 16], kept=2304, bytes_after=9216, format="")
    page = Report(document(1, layers=[row])).html()
    assert "2,304</td>" in page.replace("<td", "</td><td").replace("\n", "")
    assert "of 2,304" not in page
    assert "9,216 →" not in page
    same = StageFigures("a", parameters=2304, nonzero=2304)
    assert tiles(ends(same, replace(same, name="b")))[1].foot == "2,304, none of them zero"


def test_weights_that_did_not_change_have_no_histograms():
    same = layer(0, hist=Histogram(0.3, [1, 4, 9], [1, 4, 9]))
    assert "Weights, before and after" not in Report(document(1, layers=[same])).html()
    assert "Weights, before and after" in Report(document(1, layers=[same, layer(1)])).html()


def test_a_tied_weight_counts_as_one_layer_that_stays_dense():
    """The note said that 2 of 1 layers have no zeros."""
    names = ["embed", "head"]
    made = document(
        1,
        layers=[layer(0, "embed", format="")],
        steps=[Call("compress_", "objective=speed", {"compressed": 0, "layers": 2})],
        reasons=[Reason("Layers that stay dense", "compress_", "no weight is zero", names)],
    )
    (note,) = [note for note in notes(made) if "dense" in note.title]
    assert (note.title, note.text.split(".")[0]) == ("1 of 1 layer stays dense.", "No weight is zero: 1")
    assert lede(made).startswith("No layer was packed, because no sparse format measured faster.")


def test_gates_without_compress_say_that_they_save_no_time():
    gate = Call("gate_", "", {"sparsity": 0.5, "gates": 1})
    packed = Call("compress_", "", {"compressed": 1, "layers": 1})
    assert "Gates alone save no time." in [note.title for note in notes(document(steps=[gate]))]
    assert "Gates alone save no time." not in [note.title for note in notes(document(steps=[gate, packed]))]


def test_one_costly_layer_does_not_flatten_the_others():
    """The output layer of a small language model has a hundred times the FLOPs of the others."""
    plain = {"format": "", "dense_us": None, "sparse_us": None}
    rows = [layer(i, **plain, flops_before=100.0, flops_after=100.0) for i in range(6)]
    rows.append(layer(6, **plain, flops_before=11000.0, flops_after=11000.0))
    track = network(document(layers=rows)).tracks[-1]
    assert (track.name, track.remark) == ("FLOPs", "up to 100; larger ones fill the height")
