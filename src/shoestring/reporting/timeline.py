"""A ledger -> its last step in a given number of columns: what the terminal and the figures draw."""

from dataclasses import dataclass
from itertools import pairwise

from ..ledger import Ledger, Phase

_BETWEEN_STEPS = (Phase.BUILD, Phase.UPDATE)


@dataclass(frozen=True)
class Span:
    """Columns from `first` up to, not including, `end` belong to a phase."""

    phase: Phase
    first: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Live bytes in each column by category and in all, with the phases and the column of the peak."""

    parts: dict[str, list[int]]
    totals: list[int]
    spans: list[Span]
    peak_column: int
    microbatches: int


def timeline(ledger: Ledger, most_columns: int, stretch: bool = False) -> Timeline:
    """A ledger's last step in `most_columns` columns (fewer if it has fewer events, unless stretched).

    Each column shows its moment of most bytes, so that no peak is lost.
    """
    totals, phases = ledger.timeline(), _phases(ledger)
    start, end = _last_step(ledger, phases)
    columns = most_columns if stretch else min(most_columns, end - start)
    edges = [start + column * (end - start) // columns for column in range(columns + 1)]
    times = [max(range(low, max(low + 1, high)), key=totals.__getitem__) for low, high in pairwise(edges)]
    shown = [totals[time] for time in times]
    return Timeline(
        parts={str(kind): [sizes[t] for t in times] for kind, sizes in ledger.stacked_timeline().items()},
        totals=shown,
        spans=_spans([phases[time] for time in times]),
        peak_column=max(range(len(shown)), key=shown.__getitem__),
        microbatches=sum(span.phase == Phase.FORWARD for span in _spans(phases[start:end])),
    )


def _phases(ledger: Ledger) -> list[Phase]:
    """The phase at each event: that of the last birth. Recomputation is part of the backward pass."""
    born = {entry.born: entry.phase for entry in ledger.entries if entry.phase != Phase.BUILD}
    phases: list[Phase] = []
    now = Phase.BUILD
    for time in range(ledger.time + 1):
        now = born.get(time, now)
        phases.append(Phase.BACKWARD if now == Phase.RECOMPUTE else now)
    return phases


def _last_step(ledger: Ledger, phases: list[Phase]) -> tuple[int, int]:
    """From the event after the last but one update to the first death of what the step had found alive."""
    changes = [time for time in range(1, len(phases)) if phases[time] != phases[time - 1]]
    start = max((time for time in changes if phases[time - 1] in _BETWEEN_STEPS), default=0)
    last_birth = max(entry.born for entry in ledger.entries)
    found = (entry.died for entry in ledger.entries if entry.born < start)
    return start, min((died for died in found if died and died > last_birth), default=len(phases))


def _spans(phases: list[Phase]) -> list[Span]:
    starts = [column for column, phase in enumerate(phases) if column == 0 or phase != phases[column - 1]]
    return [Span(phases[a], a, b) for a, b in zip(starts, [*starts[1:], len(phases)], strict=True)]
