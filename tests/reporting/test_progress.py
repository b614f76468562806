import io
from typing import ClassVar

import pytest

from shoestring.reporting import progress as module
from shoestring.reporting.progress import progress, steps, waiting


def test_short_work_says_nothing(capsys):
    with progress("measuring") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_once_what_it_does_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(module, "_told", set())
    with progress("measuring") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capsys.readouterr() == ("", "shoestring: measuring\n")
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 100)
    with progress("measuring") as advance:  # a short part of the same work
        advance(1, 2)
    assert capsys.readouterr() == ("", "")


def test_longer_work_says_now_and_again_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(module, "LINE_SECONDS", 0)
    monkeypatch.setattr(module, "_told", set())
    times = iter([0.0, 2.0, 4.0, 6.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    with progress("measuring") as advance:
        for done in (1, 2, 3):
            advance(done, 2000)
    told = capsys.readouterr().err.splitlines()
    assert told[1:] == [f"shoestring: measuring: {n} of 2,000, about {s} s left" for n, s in ((2, 3996), (3, 3994))]


def test_work_that_cannot_tell_how_far_it_is_is_named_after_a_while(capsys, monkeypatch):
    class Late:  # the time is over at once, unless it is cancelled before anybody looks
        timers: ClassVar = []

        def __init__(self, seconds, call):
            self.call = call

        def start(self):
            self.timers.append(self)

        def cancel(self):
            self.timers.remove(self)

    monkeypatch.setattr(module, "Timer", Late)
    with waiting("importing loop.py"):
        for timer in Late.timers:
            timer.call()
    assert capsys.readouterr().err == "shoestring: still importing loop.py\n" and not Late.timers
    with progress("measuring", before="tracing") as advance:
        assert len(Late.timers) == 1
        advance(1, 2)
        assert not Late.timers  # from now on there is a bar


def test_a_bar_takes_the_place_of_the_status_line(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    monkeypatch.setattr(module.sys, "stderr", Terminal())
    with steps("planning") as tell:
        tell("this")
        (status,) = module._shown
        assert status._live.is_started
        with progress("measuring") as advance:
            advance(1, 2)
            assert not status._live.is_started
        assert status._live.is_started
    assert not module._shown


def test_an_error_inside_comes_through():
    with pytest.raises(KeyError), progress("measuring"):
        raise KeyError
