import doctest
import io

import pytest

from shoestring import Plan
from shoestring.reporting import run_progress as module
from shoestring.reporting.run_progress import run_progress
from shoestring.reporting.run_words import plan_words, summary
from shoestring.runs.record import RunRecord
from shoestring.training.events import Evaluated, Evaluating, Replanned, Updated


class Terminal(io.StringIO):
    def isatty(self):
        return True


def update(number, peak_bytes=6_900_000):
    return Updated(number, 100, 1 + number // 50, 2, 1.25, 0.1, peak_bytes)


def terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_elsewhere_than_on_a_terminal_progress_is_plain_lines(monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", iter(range(0, 1000, 2)).__next__)
    file = io.StringIO()
    with run_progress(file, 7_000_000) as listener:
        for number in range(1, 8):
            listener(update(number))
        listener(Evaluated(7, 1, "accuracy", 61.5, True))
    first, last = file.getvalue().splitlines()  # one after ten seconds, one at the evaluation
    assert first == "epoch 1/2  update 6/100  loss 1.25  memory 6.900 MB of 7.000 MB  lr 0.1  3m 08s left"
    assert "accuracy 61.5% (best)" in last and "\x1b" not in file.getvalue()


def test_on_a_terminal_progress_is_a_bar_with_loss_quality_memory_and_time(monkeypatch):
    file = terminal(monkeypatch, columns=150)
    with run_progress(file, 7_000_000) as listener:
        listener(Evaluated(0, 1, "accuracy", 61.5, False))
        for number in range(1, 60):
            listener(update(number))
    for words in ("epoch 2/2", "59/100", "loss 1.25", "accuracy 61.5", "memory 6.900 MB of 7.000 MB"):
        assert words in file.getvalue()


def test_on_a_narrow_terminal_epoch_count_and_time_stay_whole_and_memory_goes_before_the_rate(monkeypatch):
    file = terminal(monkeypatch, columns=110)
    with run_progress(file, 7_000_000) as listener:
        listener(Evaluated(0, 1, "accuracy", 61.5, True))
        for number in range(1, 60):
            listener(Updated(number, 100, 1 + number // 50, 2, 1.25, 0.0008, 6_900_000, 0.04, "", 65536.0))
    last = file.getvalue().split("\r")[-1]
    for words in ("epoch 2/2", "59/100", "loss 1.25  accuracy 61.5% (best)  memory 6.900 MB of 7.000 MB"):
        assert words in last


def test_a_replanned_run_says_so_above_the_bar(monkeypatch):
    file = terminal(monkeypatch, columns=110)
    with run_progress(file, 7_000_000) as listener:
        listener(update(1))
        listener(Replanned(1, 7_100_000, {"microbatch": 5}))
    assert "a step needs 7.100 MB: continuing from update 1 with microbatch 5" in file.getvalue()


def test_memory_that_was_not_measured_is_not_told():
    file = io.StringIO()
    with run_progress(file) as listener:
        listener(update(1, peak_bytes=None))
        listener(Evaluated(1, 1, "[loss]", 2.0, False))
    assert "memory" not in file.getvalue() and "[loss] 2" in file.getvalue()


def test_a_run_tells_its_pace_its_loss_scale_and_what_that_skipped():
    file = io.StringIO()
    with run_progress(file) as listener:
        for number, skipped in ((1, "overflow"), (2, "overflow"), (3, "")):
            listener(Updated(number, 9, 1, 1, 1.25, 0.05, None, 0.25, skipped, 1024.0))
        listener(Evaluated(3, 1, "accuracy", 61.5, True))
    assert "lr 0.05  4 it/s  scale 1024  2 skipped" in file.getvalue()


def test_an_evaluation_shows_how_far_it_is_and_its_loss_is_told_from_the_one_trained_on(monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", iter(range(0, 1000, 6)).__next__)
    file = io.StringIO()
    with run_progress(file) as listener:
        listener(update(1))
        for done in (1, 2, 3):
            listener(Evaluating(1, 1, "loss", done, 12))
        listener(Evaluated(1, 1, "loss", 2.5, True))
    assert "evaluating valid loss 1 of 12" in file.getvalue()
    assert "loss 1.25  valid loss 2.5 (best)" in file.getvalue().splitlines()[-1]


def record(**changes):
    known = {"predicted_peak_bytes": 1000, "measured_peak_bytes": 1000, "updates": 9, "budget_bytes": 2000}
    return RunRecord("net", {}, {}, **(known | changes))


@pytest.mark.parametrize("changes, words", [
    ({}, "predicted 1.000 KB, measured 1.000 KB, within the budget of 2.000 KB"),
    ({"budget_bytes": None}, "predicted 1.000 KB, measured 1.000 KB"),
    ({"measured_peak_bytes": 800, "updates": 1}, "from the second on)"),
    ({"measured_peak_bytes": 800, "skipped": 9}, "the loss scale skipped the updates"),
    ({"measured_peak_bytes": 800}, "no batch that was measured was as large as the one planned for"),
    ({"over_budget": [[2, 2100]]}, "over the budget of 2.000 KB once, after update 2: 2.100 KB"),
    ({"out_of_memory": [[2, 1900], [3, 900]], "budget_bytes": None},
     "replanned; the system had less than a step needs 2 times, after update 2: 1.900 KB, after update 3: 900 B"),
])  # fmt: skip
def test_the_summary_says_the_whole_truth_about_memory(changes, words):
    (line,) = [line for line in summary(record(**changes)) if line.startswith("memory")]
    assert line.endswith(words) or (words in line and changes)
    assert ("within" in line) == (not changes or "updates" in changes or "measured_peak_bytes" in changes)


def test_the_plan_in_use_is_told_on_one_line_with_its_risk_and_its_cost():
    plan = Plan(precision="fp16", microbatch=10, budget_bytes=5_000_000, predicted_peak_bytes=4_306_000,
                predicted_time_ratio=0.88, object_bytes=170_000)  # fmt: skip
    words = (
        "precision fp16, microbatch 10 (risk neutral, predicted 4.306 MB of tensors + 170 KB of Python objects "
        "of 5.000 MB, 0.88x the time of plain training)"
    )
    assert plan_words(plan, "neutral") == words
    assert plan_words(Plan(), "exact") == "no technique: plain PyTorch"


def test_the_example_of_seconds_holds():
    assert doctest.testmod(module).failed == 0


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from shoestring.reporting.tensorboard import tensorboard

    with tensorboard(tmp_path) as listener:
        listener(update(1))
        listener(update(2, peak_bytes=None))
        listener(Evaluated(2, 1, "accuracy", 61.5, True))
    with tensorboard(tmp_path) as listener:
        listener(update(2))  # resumed after the first: the old second one is hidden
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2]
    assert found.Scalars("measured peak (MB)")[0].value == pytest.approx(6.9)
    assert set(found.Tags()["scalars"]) >= {"loss", "learning rate"}
