"""Long work shows its progress: a bar in terminals and notebooks, lines elsewhere, and nothing where it is turned off."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import secateur as sc
from secateur import progress
from secateur.display import interleaved, time_left
from secateur.progress import Progress, track


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Progress that shows after a moment, and is on."""
    monkeypatch.setattr(progress, "AFTER", 0.05)
    monkeypatch.setattr(progress, "FRAME", 0.02)
    monkeypatch.delenv("SECATEUR_PROGRESS", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    end = time.monotonic() + 30
    while progress._board._drawing and time.monotonic() < end:  # the thread of an earlier test sleeps for an old FRAME
        time.sleep(0.01)
    yield
    sc.set_progress(None)
    assert not progress._board.rows


def work(items=4, seconds=0.12, **options):
    with Progress("refit", items, every=0.05, **options) as report:
        for number in range(items):
            report(f"layer{number}")
            time.sleep(seconds)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_lines_name_the_item_the_count_and_the_remaining_time(capsys):
    work()
    shown = lines(capsys)
    assert shown
    assert all(re.fullmatch(r"secateur: refit: layer\d, \d of 4 \(\d+ s(, about \d+ s left)?\)", line) for line in shown)
    assert any("left" in line for line in shown)


def test_work_that_ends_soon_shows_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 30.0)
    work()
    assert not lines(capsys)


@pytest.mark.parametrize("how", ["quiet", "set_progress", "environment", "rank"])
def test_progress_is_off_where_it_was_turned_off(how, capsys, monkeypatch):
    if how == "set_progress":
        sc.set_progress(False)
    elif how == "environment":
        monkeypatch.setenv("SECATEUR_PROGRESS", "0")
    elif how == "rank":
        monkeypatch.setenv("RANK", "1")
    work(quiet=how == "quiet")
    assert not lines(capsys)


def test_set_progress_overrides_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("SECATEUR_PROGRESS", "0")
    sc.set_progress(True)
    work()
    assert lines(capsys)


def test_lines_go_to_the_logger_where_it_has_a_handler(capsys, caplog):
    with caplog.at_level(logging.INFO, logger="secateur"):
        work()
    assert not lines(capsys)
    assert any("refit: layer" in record.message for record in caplog.records)
    assert {record.name for record in caplog.records} == {"secateur"}


def test_a_line_names_the_work_around_it(capsys):
    with Progress("shrink") as outer:
        outer("repairing")
        work()
    assert any(line.startswith("secateur: shrink, refit: layer") for line in lines(capsys))


def test_an_error_inside_closes_the_progress(capsys):
    def nested():
        report = Progress("inner", 3)  # without a with statement, and held by the traceback
        report("a")
        raise KeyError("stop")

    with pytest.raises(KeyError), Progress("outer"):
        nested()
    assert not progress._board.rows


def test_a_loop_that_is_left_early_closes_the_progress():
    for item in track([1, 2, 3], "loop"):
        if item == 2:
            break
    assert not progress._board.rows


def test_one_thread_draws_all_loops_and_ends_after_them(monkeypatch):
    def drawing():
        return [thread for thread in threading.enumerate() if thread.name == "secateur progress"]

    monkeypatch.setattr(progress, "AFTER", 0.3)
    work(1)
    first = drawing()
    work(1)
    assert len(first) == 1
    assert drawing() == first
    time.sleep(0.6)
    assert not drawing()


class Broken(logging.Handler):
    def emit(self, record):
        raise RuntimeError("cannot be written")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_loops_are_shown_again_after_one_could_not_be_drawn(capsys):
    logger, broken = logging.getLogger("secateur"), Broken(logging.INFO)
    before = logger.level
    logger.addHandler(broken)
    logger.setLevel(logging.INFO)
    try:
        work()
    finally:
        logger.removeHandler(broken)
        logger.setLevel(before)
    capsys.readouterr()
    work()
    assert lines(capsys)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(3, 2))


def test_data_of_unknown_length_is_counted_without_a_total():
    loader = DataLoader(Stream())
    with pytest.raises(TypeError):
        len(loader)
    assert len(list(track(loader, "scores"))) == 3
    assert progress._length(loader) is None
    assert progress._length([1, 2]) == 2


def test_nothing_is_drawn_inside_a_timed_run(monkeypatch):
    inside, drawn = threading.Event(), []
    monkeypatch.setattr(progress._board, "draw", lambda: drawn.append(inside.is_set()))

    def once(run):
        inside.set()
        time.sleep(0.05)  # several frames
        inside.clear()
        return 0.0

    with Progress("bench"):
        interleaved([None], lambda found, _: len(found[0]) == 3, once=once, warm_up=0)
    assert drawn.count(False) >= 3
    assert True not in drawn


def test_work_that_ends_by_the_clock_shows_the_time_that_is_left():
    with Progress("bench", quiet=True) as report:
        row = report._row
        assert row.times(row.begin + 3) == "3 s"
        report.remains(60)
        row.begin, row.end = 100.0, 110.0
        assert row.times(104.0) == "4 s, about 6 s left"
        assert row.times(120.0) == "20 s, about 0 s left"
        assert row.reached(104.0) == (4.0, 10.0)
        assert row.reached(120.0) == (10.0, 10.0)


def test_the_remaining_time_does_not_grow_while_one_item_is_worked_on():
    with Progress("refit", 4, quiet=True) as report:
        row = report._row
        report("a")
        assert row.times(row.begin + 30) == "30 s"
        report("b")
        report("c")
        row.begin, row.since = 100.0, 120.0  # two items in 20 seconds
        assert row.times(120.0) == "20 s, about 20 s left"
        assert row.times(125.0) == "25 s, about 15 s left"
        assert row.times(150.0) == "50 s, about 10 s left"  # the last item


@pytest.mark.parametrize(
    ("rounds", "spent", "left"),
    [
        (10, 1.0, 3.0),  # two runs of 2 seconds
        (1, 3.0, 12.0),  # at least 5 rounds, of 3 seconds each
        (499, 0.5, 0.5 / 499),  # at most 500 rounds
    ],
)
def test_the_time_that_a_measurement_still_takes(rounds, spent, left):
    assert time_left([[0.0] * rounds] * 2, spent, 2.0, (5, 500)) == pytest.approx(left)


def test_calls_of_the_package_show_what_they_work_on(capsys, each_report_drawn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    data = [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(4)]
    sc.prune_(model, sc.taylor, sparsity=0.5, data=data, loss=nn.functional.cross_entropy)
    assert "scores from data: batch" in capsys.readouterr().err
    sc.shrink(model, data[0][0], channels=0.5)
    assert "shrink: " in capsys.readouterr().err
    sc.shrink(model, data[0][0], sc.reconstruction, channels=0.5, data=data)
    assert re.search(r"shrink, scores: 0\.weight, 1 of \d", capsys.readouterr().err)
    sc.bench(model, data[0][0], seconds=0.3)
    assert re.search(r"bench: model \(\d+ s, about \d+ s left\)", capsys.readouterr().err)


# --- real terminals and notebooks ------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from secateur import progress
from secateur.progress import Progress
progress.AFTER, progress.FRAME = 0.1, 0.05
with Progress("shrink") as outer:
    outer("repairing")
    with Progress("refit", 8) as report:
        for number in range(8):
            report(f"layer[{number}].weight")
            time.sleep(0.1)
print("done")
"""


def in_terminal(code, **variables):
    """Runs code in a process whose output is a real (pseudo) terminal, and returns what it wrote."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", **variables}
    with subprocess.Popen([sys.executable, "-c", code], stdout=follower, stderr=follower, env=env) as process:
        os.close(follower)
        found = b""
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            found += part
    os.close(leader)
    assert process.returncode == 0, found.decode()
    return found.decode()


def test_a_terminal_shows_a_bar_that_disappears():
    shown = in_terminal(SCRIPT)
    assert "━" in shown
    assert "shrink: repairing" in shown
    assert "refit: layer[6].weight" in shown  # brackets are no markup
    assert re.search(r"7 of 8", shown)
    assert re.search(r"about \d+ s left", shown)
    assert shown.endswith("done\r\n")
    assert "\x1b[2K" in shown  # the bar was erased


def test_a_terminal_shows_nothing_when_progress_is_off():
    assert in_terminal(SCRIPT, SECATEUR_PROGRESS="0") == "done\r\n"


def test_rich_is_imported_only_to_draw_a_bar():
    code = "import sys; from secateur.progress import Progress; Progress('a').close(); print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_notebook_shows_a_bar():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT.replace("print", "time.sleep(0.2); print"))])
    seen = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] in ("display_data", "update_display_data"):
                seen.append(msg["content"]["data"].get("text/html", ""))
            return super().process_message(msg, cell, cell_index)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the kernel's own libraries
        Client(book, timeout=120).execute()
    assert any('<progress max="8" value="6">' in page and "layer[6].weight" in page for page in seen)
    assert seen[-1] == ""  # gone at the end


def test_a_pruner_reports_new_masks(caplog):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pruner = sc.Pruner(model, sparsity=sc.linear(0.5, start=1, end=2))
    with caplog.at_level(logging.INFO, logger="secateur"):
        for _ in range(3):
            pruner.step()
    assert [record.message for record in caplog.records][
        -1
    ] == "step 2: new masks (abs(weight), unstructured, sparsity 0.5, scope tensor)"
    pruner.finish()


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_metrics_of_every_result_are_written_to_tensorboard_and_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    inputs = torch.randn(4, 8)
    small, cut = sc.shrink(model, inputs, channels=0.5)
    results = [cut, sc.prune_(small, sparsity=0.5), sc.summary(small), sc.gate_(small, data=[inputs], sparsity=0.5)]
    results[-1].undo_()
    results.append(sc.compress_(small, inputs, objective="size"))
    with SummaryWriter(tmp_path) as writer:
        for result in results:
            assert json.loads(json.dumps(result.metrics())) == result.metrics()
            for name, value in result.metrics().items():
                writer.add_scalar(f"{type(result).__name__}/{name}", value, global_step=3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for result in results:
        for name, value in result.metrics().items():
            (found,) = events.Scalars(f"{type(result).__name__}/{name}")
            assert (found.step, found.value) == (3, pytest.approx(float(value), rel=1e-6))
    assert "Plan/sparsity/0.weight" in events.Tags()["scalars"]
