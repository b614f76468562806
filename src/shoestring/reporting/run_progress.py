"""Progress of a run: a bar on a terminal, plain lines elsewhere; both are listeners of the loop."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ..techniques.words import described
from ..training.events import Evaluated, Evaluating, Event, Listener, Replanned, Updated
from ..units import format_bytes
from .run_words import quality_name, quality_words

LINE_SECONDS = 10.0  # between two plain lines, except for evaluations


class Words:
    """The state of a run so far, in words."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.now: Updated | None = None
        self.quality = self.evaluating = ""
        self.skipped = 0
        self.pace = 0.0  # seconds per update, smoothed

    def hear(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.now, self.evaluating = event, ""
            self.skipped += bool(event.skipped)
            self.pace = 0.9 * self.pace + 0.1 * event.seconds if self.pace else event.seconds
        elif isinstance(event, Evaluating):
            part = f" {event.done:,} of {event.total:,}" if event.total else ""
            self.evaluating = f"evaluating {quality_name(event.name)}{part}"
        elif isinstance(event, Evaluated):
            best = " (best)" if event.is_best else ""
            self.quality = f"{quality_name(event.name)} {quality_words(event.name, event.quality)}{best}"
            self.evaluating = ""

    @property
    def epoch(self) -> str:
        return f"epoch {self.now.epoch}/{self.now.epochs}" if self.now else ""

    @property
    def figures(self) -> str:
        if self.now is None:
            return "  ".join(filter(None, (self.evaluating, self.quality)))
        now = self.now
        parts = (
            self.evaluating,
            f"loss {now.loss:.4g}",
            self.quality,
            self.memory,  # before what may be cut off on a narrow terminal
            f"lr {now.lr:.3g}",
            f"{1 / self.pace:.3g} it/s" if self.pace else "",
            f"scale {now.scale:g}" if now.scale is not None else "",
            f"{self.skipped:,} skipped" if self.skipped else "",
        )
        return "  ".join(filter(None, parts))

    @property
    def memory(self) -> str:
        if self.now is None or self.now.peak_bytes is None:
            return ""
        budget = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        return f"memory {format_bytes(self.now.peak_bytes)}{budget}"


class Lines:
    """A line at each evaluation, and at most every LINE_SECONDS between."""

    def __init__(self, file: TextIO, budget_bytes: int | None) -> None:
        self.file, self.words = file, Words(budget_bytes)
        self.first: tuple[int, float] | None = None  # an update and its time, to estimate the pace
        self.told = time.monotonic()

    def __call__(self, event: Event) -> None:
        self.words.hear(event)
        now = time.monotonic()
        if isinstance(event, Updated) and self.first is None:
            self.first = event.update, now
        if isinstance(event, Replanned):
            print(_replanned(event), file=self.file, flush=True)
        late = isinstance(event, Updated | Evaluating) and now - self.told > LINE_SECONDS
        if isinstance(event, Evaluated) or late:
            self.told = now
            print(self._line(now), file=self.file, flush=True)

    def _line(self, now: float) -> str:
        update = self.words.now
        if update is None:
            return self.words.figures
        return "  ".join(
            [self.words.epoch, f"update {update.update}/{update.updates}", self.words.figures, self._left(now)]
        )

    def _left(self, now: float) -> str:
        update = self.words.now
        if update is None or self.first is None or update.update == self.first[0]:
            return ""
        pace = (now - self.first[1]) / (update.update - self.first[0])
        return f"{format_seconds(pace * (update.updates - update.update))} left"


class Figures(ProgressColumn):
    """What is known of the run, cut off where the terminal ends."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class Bar:
    """A bar of updates with loss, quality, memory against the budget and the time left."""

    def __init__(self, bar: Progress, budget_bytes: int | None) -> None:
        self.bar, self.words = bar, Words(budget_bytes)
        self.task = bar.add_task("starting", total=None, figures="", count="")

    def __call__(self, event: Event) -> None:
        self.words.hear(event)
        if isinstance(event, Replanned):
            self.bar.console.print(_replanned(event), markup=False, highlight=False, soft_wrap=True)
        if update := self.words.now:
            self.bar.update(
                self.task,
                description=self.words.epoch,
                completed=update.update,
                total=update.updates,
                count=f"{update.update:,}/{update.updates:,}",
                figures=self.words.figures,
            )


def _replanned(event: Replanned) -> str:
    words = described(event.techniques.items())
    return f"a step needs {format_bytes(event.used_bytes)}: continuing from update {event.update:,} with {words}"


@contextmanager
def run_progress(file: TextIO, budget_bytes: int | None = None) -> Iterator[Listener]:
    """An output stream and the budget -> a listener that shows the run's progress."""
    console = Console(file=file)
    if not console.is_terminal:
        yield Lines(file, budget_bytes)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[count]}"),
        Figures(table_column=Column(no_wrap=False)),  # so that it gives way before the others
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as bar:
        yield Bar(bar, budget_bytes)


def format_seconds(seconds: float) -> str:
    """Seconds -> "2h 05m", "3m 20s" or "12s".

    >>> format_seconds(7500), format_seconds(200), format_seconds(11.7)
    ('2h 05m', '3m 20s', '12s')
    """
    whole = math.ceil(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"
