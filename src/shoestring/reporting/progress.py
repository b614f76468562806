"""Progress of a long computation: a bar on a terminal, one line elsewhere, nothing if it is quick."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

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
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A title -> `advance(done, total)`, to be called along the way; output goes to stderr."""
    console, start = Console(file=sys.stderr), time.monotonic()
    bar = Progress(console=console, transient=True)
    task = bar.add_task(title, total=None)
    told = False
    with ExitStack() as stack:

        def advance(done: int, total: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total)
            if told or time.monotonic() - start < PATIENCE_SECONDS:
                return
            told = True
            if console.is_terminal:
                stack.enter_context(bar)
            else:
                _tell_once(title)

        yield advance


@cache
def _tell_once(title: str) -> None:
    """Work that comes in several parts, as calibration does, is told at the first."""
    print(f"shoestring: {title}", file=sys.stderr)
