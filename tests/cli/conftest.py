"""`shoestring(...)` runs the command line in this process; `user(...)` writes a file as a user would."""

import sys
from dataclasses import dataclass

import pytest

from shoestring.cli.main import main

FOOTER = """
import torch
from torch import nn
from shoestring import SGD, Task

def loss(model, batch):
    return model(batch).square().mean()

def make(**changes):
    fields = dict(model=nn.Linear(4, 2), loss=loss, batch=torch.zeros(8, 4), optimizer=SGD(lr=0.1))
    return Task(**(fields | changes))
"""


@dataclass(frozen=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a refusal; anything else on either stream fails the test."""
        assert self.out == "" and self.err.startswith("shoestring: ") and self.err.count("\n") == 1, self
        return self.err.removeprefix("shoestring: ").strip()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache folder of the tests' own: what is on the machine neither helps nor is touched."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def shoestring(capfd, monkeypatch, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a user's folder stays on the path of one test only
    monkeypatch.delenv("SHOESTRING_TRACEBACK", raising=False)

    def run(*arguments) -> Answer:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            code = error.code
        return Answer(code, *capfd.readouterr())

    return run


@pytest.fixture
def user(tmp_path):
    """Lines of Python -> MODEL, as `file.py:function`, of a file that has them and then FOOTER."""

    def write(lines: str, function: str = "task") -> str:
        path = tmp_path / "mine.py"
        path.write_text(lines + FOOTER)
        return f"{path}:{function}"

    return write
