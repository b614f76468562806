import pytest

from shoestring.reporting import progress as module
from shoestring.reporting.progress import progress


def test_short_work_says_nothing(capsys):
    with progress("measuring") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capsys.readouterr() == ("", "")


def test_long_work_says_once_what_it_does_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    for _ in range(2):  # parts of one work
        with progress("measuring") as advance:
            advance(1, 2)
            advance(2, 2)
    assert capsys.readouterr() == ("", "shoestring: measuring\n")


def test_an_error_inside_comes_through():
    with pytest.raises(KeyError), progress("measuring"):
        raise KeyError
