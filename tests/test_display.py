"""Tables, notes and the clock that every result shares."""

import pytest

from secateur.display import (
    Table,
    Timing,
    after,
    format_seconds,
    interleaved,
    notes_by_reason,
    thread_time,
    wall_time,
)


def test_a_table_with_totals_title_and_notes():
    table = Table(
        ("tensor", "shape", "kept"),
        [("a.weight", "4x8", "16"), ("b", "", "1,000")],
        [("in all", "", "1,016")],
        right=[2],
        title="magnitude",
        notes=["skipped, 1: excluded (c)"],
    )
    assert str(table) == "\n".join(
        [
            "magnitude",
            "tensor    shape   kept",
            "----------------------",
            "a.weight  4x8       16",
            "b                1,000",
            "----------------------",
            "in all           1,016",
            "skipped, 1: excluded (c)",
        ]
    )


def test_a_table_without_rules_totals_or_title():
    assert str(Table(("layer", "now"), [("a", "1"), ("bc", "20")], right=[1], ruled=False)) == (
        "layer  now\na        1\nbc      20"
    )


def test_a_table_without_rows_has_its_header_and_totals():
    assert str(Table(("a", "b"), [], [("all", "0")], right=[1])) == "a    b\n------\n------\nall  0"


def test_a_row_that_does_not_fit_the_header_is_refused():
    with pytest.raises(ValueError, match="zip"):
        str(Table(("a", "b"), [("1", "2"), ("3",)]))


def test_html_is_escaped():
    table = Table(("<i>", "b"), [("<script>", "&")], [("all", "2")], title="w > 0", notes=["1 < 2"])
    assert table.html("1 note <") == (
        "<table><caption>w &gt; 0</caption><thead><tr><th>&lt;i&gt;</th><th>b</th></tr></thead>"
        "<tbody><tr><td>&lt;script&gt;</td><td>&amp;</td></tr><tr><td>all</td><td>2</td></tr></tbody></table>"
        "<details><summary>1 note &lt;</summary><ul><li>1 &lt; 2</li></ul></details>"
    )


def test_html_notes_may_name_what_they_speak_of():
    html = Table(("a",), [("1",)], notes=["for text only"]).html("left", [("<x>", "a & b")])
    assert html.endswith("<ul><li><code>&lt;x&gt;</code>: a &amp; b</li></ul></details>")
    assert "for text only" not in html
    assert "<details>" not in Table(("a",), [("1",)]).html("left")


def test_notes_are_grouped_by_reason():
    reasons = {**dict.fromkeys("abcde", "one axis"), "f": "excluded"}
    assert notes_by_reason("skipped", reasons) == [
        "skipped, 5: one axis (a, b, c, d, ...)",
        "skipped, 1: excluded (f)",
    ]


def test_runs_take_turns_and_each_comes_first_equally_often():
    order = []

    def once(run):
        order.append(run)
        return float(ord(run))

    timings = interleaved("abc", lambda found, spent: len(found[0]) == 3, once=once, warm_up=1)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert [timing.seconds for timing in timings] == [(97.0,) * 3, (98.0,) * 3, (99.0,) * 3]


@pytest.mark.parametrize(
    ("spent", "rounds", "enough"), [(9.0, 4, False), (0.5, 5, False), (0.5, 7, True), (2.0, 5, True), (1.9, 5, False)]
)
def test_a_measurement_ends_after_its_seconds_within_its_rounds(spent, rounds, enough):
    found = [[0.1] * rounds, [0.1] * rounds]
    assert after(1.0, rounds=(5, 7))(found, spent) is enough


def test_clocks_count_the_call_itself():
    def work():
        return sum(range(200_000))

    for clock in (wall_time, thread_time):
        assert 0 < clock(lambda: None) < clock(work) < 10


def test_a_timing_reports_median_best_and_spread():
    timing = Timing(tuple(n * 1e-3 for n in range(1, 22)))
    assert (timing.best, timing.median, timing.spread) == (1e-3, 11e-3, (3e-3, 19e-3))
    assert str(timing) == "11.0 ms (best 1.00 ms, 3.00 ms to 19.0 ms, 21 rounds)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.5, "1.50 s"), (0.9996, "1.00 s"), (0.05, "50.0 ms"), (123e-6, "123 µs"), (2e-9, "0.00 µs")]
)
def test_seconds_have_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text
