"""How far a long piece of work is: a bar on a terminal, one line elsewhere, nothing if it is soon done."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

PATIENCE_SECONDS = 1.0


@contextmanager
def steps(title: str) -> Iterator[Callable[[str], None]]:
    """What is being done -> `tell(words)`, to be called with each step of it: a line that changes on a terminal, and
    lines elsewhere, from when it is not soon done; words go to stderr."""
    console, start = Console(file=sys.stderr), time.monotonic()
    told = 0
    with ExitStack() as stack:
        status = console.status(title) if console.is_terminal else None
        if status is not None:
            stack.enter_context(status)

        def tell(words: str) -> None:
            nonlocal told
            told += 1
            if status is not None:
                status.update(f"{title}, {told}: {escape(words)}")
            elif time.monotonic() - start > PATIENCE_SECONDS:
                print(f"shoestring: {title}, {told}: {words}", file=sys.stderr)

        yield tell


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """What is being done -> `advance(done, total)`, to be called as it goes on; words go to stderr."""
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
                print(f"shoestring: {title}", file=sys.stderr)

        yield advance
