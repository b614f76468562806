"""Predicted against measured: the rows of the comparison, and their table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..units import format_bytes


@dataclass(frozen=True)
class Comparison:
    """One model's predicted and measured peak of tensor bytes; of workspace, and of both together, if known."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    predicted_workspace: int | None = None
    measured_workspace: int | None = None
    predicted_peak: int | None = None
    measured_peak: int | None = None

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.01 is one percent too many."""
        return self.predicted_bytes / self.measured_bytes - 1


_LABELS = {"bytes": "", "workspace": "workspace ", "peak": "both "}


def comparison_table(rows: Sequence[Comparison]) -> str:
    """Rows -> a Markdown table whose columns also align in a terminal; a figure that no row has gets no column."""
    known = [part for part in _LABELS if any(_pair(row, part)[1] is not None for row in rows)]
    header = ["model", *(word for part in known for word in (f"{_LABELS[part]}predicted", "measured", "error"))]
    cells = [[row.name, *(cell for part in known for cell in _cells(*_pair(row, part)))] for row in rows]
    widths = [max(len(line[place]) for line in (header, *cells)) for place in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(line, widths) for line in (header, rule, *cells))


def _pair(row: Comparison, part: str) -> tuple[int | None, int | None]:
    return getattr(row, f"predicted_{part}"), getattr(row, f"measured_{part}")


def _cells(predicted: int | None, measured: int | None) -> list[str]:
    """Two sizes -> both and the relative error as text; empty if unknown."""
    if predicted is None or measured is None:
        return ["", "", ""]
    error = error_words(predicted / measured - 1) if measured else ""
    return [format_bytes(predicted), format_bytes(measured), error]


def error_words(error: float) -> str:
    """A relative error in words; what rounds to nothing has no sign of its own."""
    return f"{round(error, 5) + 0.0:+.3%}"


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    pairs = list(zip(cells, widths, strict=True))
    return "| " + " | ".join([f"{pairs[0][0]:<{pairs[0][1]}}", *(f"{c:>{w}}" for c, w in pairs[1:])]) + " |"
