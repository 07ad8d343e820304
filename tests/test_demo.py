"""The demo prints what it measured: the real demo, trained for fewer epochs."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)
    del sys.modules["demo"]


@pytest.fixture(scope="module")
def printed(demo, tmp_path_factory):
    return demo.main(epochs=3, report=tmp_path_factory.mktemp("demo") / "report.html")


@pytest.fixture(scope="module")
def rows(printed):
    return {row.name: row for row in printed[0]}


@pytest.fixture(scope="module")
def smaller(printed):
    return {row.name: row for row in printed[1]}


def zeros(model):
    return sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1)


def test_each_row_prunes_what_its_name_says(rows):
    weights = sum(p.numel() for p in rows["dense"].model.parameters() if p.ndim > 1)
    for name, row in rows.items():
        share = {"50": 0.5, "80": 0.8, "90": 0.9, "95": 0.95}
        asked = next((value for text, value in share.items() if f"{text} %" in name), None)
        if asked is not None:
            assert zeros(row.model) == pytest.approx(asked * weights, abs=3), name  # rounded tensor by tensor


def test_two_of_four_rows_hold_the_pattern(rows):
    for name in ("one-shot 2:4", "2:4, fine-tuned"):
        linear = rows[name].model[7].weight
        assert (linear.reshape(-1, 4).count_nonzero(1) <= 2).all()


def test_counts_in_the_table_are_those_of_the_plan(rows):
    for row in rows.values():
        if row.plan is not None:
            assert row.nonzero() == f"{row.plan.metrics()['kept']:,}"


def test_dense_model_is_not_touched_by_the_other_rows(rows):
    assert zeros(rows["dense"].model) == 0


def test_training_makes_the_dense_model_good(rows):
    assert float(rows["dense"].accuracy().rstrip("%")) > 90


def test_table_names_every_row_and_column(demo, rows):
    text = demo.table(list(rows.values()))
    assert len({len(line) for line in text.splitlines()[:2]}) == 1
    assert all(name in text for name in rows)
    assert all(column in text.splitlines()[0] for column in demo.COLUMNS)


def test_plan_says_what_was_left_alone_and_why(rows):
    text = str(rows["gradual 95 %, global"].plan)
    assert "BatchNorm2d is not among the types" in text
    assert "a vector (bias or scale)" in text


def test_same_seed_gives_the_same_model(demo, rows):
    digits = demo.Digits.load()
    model = demo.build()
    demo.train(model, digits, 3)
    expected = rows["dense"].model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


# --- the second table -----------------------------------------------------------------------------------------------


def test_second_table_has_files_and_milliseconds_of_every_variant(demo, smaller):
    text = demo.table(list(smaller.values()), demo.SIZES)
    lines = dict(zip(smaller, text.splitlines()[2:], strict=True))
    assert all(line.startswith(name) for name, line in lines.items())
    assert all(" kB" in line and " ms" in line for line in lines.values())
    for word in ("unstructured", "2:4", "structured,", "compressed"):
        assert any(word in name for name in smaller)


def test_files_on_disk_are_smaller(smaller):
    dense = smaller["dense"].bytes
    assert 4 * 1_124_874 < dense < 4 * 1_124_874 + 10_000
    assert smaller["unstructured 95 %"].bytes < 0.1 * dense
    assert smaller["2:4"].bytes < 0.55 * dense
    assert smaller["structured, a quarter of the units"].bytes < 0.1 * dense


def test_variants_are_what_their_names_say(smaller):
    wide = {name: row.model for name, row in smaller.items()}
    weights = sum(p.numel() for p in wide["dense"].parameters() if p.ndim > 1)
    assert zeros(wide["unstructured 95 %"]) == pytest.approx(0.95 * weights, abs=3)
    assert (wide["2:4"][3].weight.reshape(-1, 4).count_nonzero(1) <= 2).all()
    narrow = wide["structured, a quarter of the units"]
    assert narrow[1].out_features + narrow[3].out_features == 512
    assert not zeros(wide["dense"])


def test_compressed_variants_compute_what_their_originals_do(smaller):
    images = smaller["dense"].digits.test[0]
    for name in ("unstructured 95 %", "2:4"):
        with torch.inference_mode():
            torch.testing.assert_close(
                smaller[f"{name}, compressed"].model(images), smaller[name].model(images), rtol=1e-3, atol=1e-3
            )


def test_rows_that_are_not_faster_are_marked(demo, smaller):
    dense = smaller["dense"]
    row = demo.Smaller("x", dense.model, None, 0.0, dense.digits, 1, dense.timing, dense)
    assert row.verdict() == "not faster"
    for row in smaller.values():
        gain = dense.timing.best / row.timing.best
        assert row.verdict() == ("" if row is dense else f"{gain:.1f}x" if gain > 1.05 else "not faster")


def test_report_shows_the_steps_of_the_last_row(printed):
    page = printed[2].read_text(encoding="utf-8")
    assert "<!doctype html>" in page.lower()
    for word in ("dense", "shrunk", "pruned", "compressed", "A network on digits"):
        assert word in page
