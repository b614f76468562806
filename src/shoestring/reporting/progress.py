"""Progress of a long computation: a bar on a terminal, one line elsewhere, nothing if it is quick."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.status import Status

PATIENCE_SECONDS = 1.0
LINE_SECONDS = 10.0


@contextmanager
def steps(title: str) -> Iterator[Callable[[str], None]]:
    """A title -> `tell(words)`, to be called at each step: one status line on a terminal, and elsewhere a line once it
    takes longer than PATIENCE_SECONDS and then now and again; all on stderr."""
    console, due = Console(file=sys.stderr), time.monotonic() + PATIENCE_SECONDS
    told = 0
    with ExitStack() as stack:
        status = console.status(title) if console.is_terminal else None
        if status is not None:
            stack.enter_context(status)
            _shown.append(status)
            stack.callback(_shown.remove, status)

        def tell(words: str) -> None:
            nonlocal told, due
            told += 1
            if status is not None:
                status.update(f"{title}, {told}: {escape(words)}")
            elif time.monotonic() > due:
                due = time.monotonic() + LINE_SECONDS
                print(f"shoestring: {title}, {told}: {words}", file=sys.stderr)

        yield tell


@contextmanager
def progress(title: str, before: str = "") -> Iterator[Callable[[int, int], None]]:
    """A title -> `advance(done, total)`, to be called along the way: a bar with the time left on a terminal, elsewhere
    a line and then now and again how far it is; all on stderr. `before` says what is done until the first call."""
    console, start = Console(file=sys.stderr), time.monotonic()
    bar = Progress(console=console, transient=True)
    task = bar.add_task(title, total=None)
    due = start + PATIENCE_SECONDS
    with ExitStack() as stack:
        silence = stack.enter_context(ExitStack())
        if before:
            silence.enter_context(waiting(before))

        def advance(done: int, total: int) -> None:
            nonlocal due
            silence.close()
            bar.update(task, completed=done, total=total)
            now = time.monotonic()
            if now < due or bar.live.is_started:
                return
            if console.is_terminal:
                stack.enter_context(_alone())
                stack.enter_context(bar)
            elif not _tell_once(title):
                left = (now - start) / done * (total - done)
                print(f"shoestring: {title}: {done:,} of {total:,}, about {left:.0f} s left", file=sys.stderr)
            due = now + LINE_SECONDS

        yield advance


_told: set[str] = set()
_shown: list[Status] = []  # the status lines on the terminal, of which there is at most one


@contextmanager
def _alone() -> Iterator[None]:
    """A bar takes the place of the status line while it is there: both would be drawn over each other."""
    for status in _shown:
        status.stop()
    try:
        yield
    finally:
        for status in _shown:
            status.start()


def _tell_once(title: str) -> bool:
    """Work that comes in several parts, as calibration does, is named at the first; whether it is now."""
    if title in _told:
        return False
    _told.add(title)
    print(f"shoestring: {title}", file=sys.stderr)
    return True


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """Says after LINE_SECONDS what is still being done, if it is: work that cannot tell how far it is."""
    timer = Timer(LINE_SECONDS, lambda: print(f"shoestring: still {words}", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
