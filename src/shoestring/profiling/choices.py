"""Choices: branches of a step on a number that a trace cannot know, and which way each was taken.

A place in the code that reads such a number gets one answer per trace: all layers of a LayerDrop go the same way.
`profile` traces both ways and keeps the one that needs more memory.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..ambient import Ambient
from ..patching import ForAllThreads

_LIBRARIES = ("torch.", "shoestring.", "numpy.", "random")
_PATIENCE = 1000  # times that one place may ask, after which a loop may be waiting for the other answer
_BELOW_ONE = 1 - 2.0**-24


class Choices:
    """The answer for each place: that of `answers` if given, else True. `asked` has the places met, and why."""

    def __init__(self, answers: Mapping[str, bool] | None = None) -> None:
        self.answers = dict(answers or {})
        self.asked: dict[str, str] = {}
        self._times: dict[str, int] = {}

    def choose(self, why: str) -> bool:
        """Asked by the code that runs now -> the answer of its place."""
        place = here()
        self.asked.setdefault(place, why)
        self._times[place] = times = self._times.get(place, 0) + 1
        answer = self.answers.get(place, True)
        return answer if times <= _PATIENCE else answer ^ bool(times % 2)

    def flipped(self, place: str) -> "Choices":
        return Choices(self.answers | {place: not self.answers.get(place, True)})

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, single random numbers of Python and NumPy are choices in this thread; afterwards both generators are
        as before."""
        with Ambient.during(choices=self), _draws_replaced:
            yield


@ForAllThreads
@contextmanager
def _draws_replaced() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        homes: list[tuple[Any, tuple[str, ...]]] = [(random, ("random", "uniform"))]
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            homes.append((numpy.random, ("rand", "random", "random_sample", "uniform")))
        for home, names in homes:
            for name in names:
                draw = getattr(home, name)
                stack.callback(setattr, home, name, draw)
                setattr(home, name, _chosen(draw, name == "uniform"))
        yield


def _chosen(draw: Callable, bounded: bool) -> Callable:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        choices = Ambient.now().choices
        if choices is None or kwargs or (args and not (bounded and len(args) == 2)):
            return draw(*args, **kwargs)
        low, high = args if bounded and args else (0.0, 1.0)
        return low + (high - low) * (_BELOW_ONE if choices.choose("a random draw") else 0.0)

    return chosen


def here() -> str:
    """The place in the user's code, or a library's, that is running: "file:line"."""
    frame = sys._getframe(1)
    while frame.f_back and f"{frame.f_globals.get('__name__', '')}.".startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short(place: str) -> str:
    """A place for messages: the file's name without its folders."""
    return Path(place).name
