import doctest
import io

import pytest

from shoestring.reporting import run_progress as module
from shoestring.reporting.run_progress import run_progress
from shoestring.training.events import Evaluated, Updated


class Terminal(io.StringIO):
    def isatty(self):
        return True


def update(number, peak_bytes=6_900_000):
    return Updated(number, 100, 1 + number // 50, 2, 1.25, 0.1, peak_bytes)


def test_elsewhere_than_on_a_terminal_progress_is_plain_lines(monkeypatch):
    monkeypatch.setattr(module.time, "monotonic", iter(range(0, 1000, 2)).__next__)
    file = io.StringIO()
    with run_progress(file, 7_000_000) as listener:
        for number in range(1, 8):
            listener(update(number))
        listener(Evaluated(7, 1, "accuracy", 61.5, True))
    first, last = file.getvalue().splitlines()  # one after ten seconds, one at the evaluation
    assert first == "epoch 1/2  update 6/100  loss 1.25  memory 6.900 MB of 7.000 MB  3m 08s left"
    assert "accuracy 61.5 (best)" in last and "\x1b" not in file.getvalue()


def test_on_a_terminal_progress_is_a_bar_with_loss_quality_memory_and_time(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with run_progress(file, 7_000_000) as listener:
        listener(Evaluated(0, 1, "accuracy", 61.5, False))
        for number in range(1, 60):
            listener(update(number))
    for words in ("epoch 2/2", "59/100", "loss 1.25", "accuracy 61.5", "memory 6.900 MB of 7.000 MB"):
        assert words in file.getvalue()


def test_memory_that_was_not_measured_is_not_told():
    file = io.StringIO()
    with run_progress(file) as listener:
        listener(update(1, peak_bytes=None))
        listener(Evaluated(1, 1, "[loss]", 2.0, False))
    assert "memory" not in file.getvalue() and "[loss] 2" in file.getvalue()


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
