"""Predicted against measured: the rows of the comparison, and their table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..units import format_bytes


@dataclass(frozen=True)
class Comparison:
    """One model's predicted and measured peak of tensor bytes, and of workspace where both are known."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    predicted_workspace: int | None = None
    measured_workspace: int | None = None

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.01 is one percent too many."""
        return self.predicted_bytes / self.measured_bytes - 1


def comparison_table(rows: Sequence[Comparison]) -> str:
    """Rows -> a Markdown table whose columns also align in a terminal."""
    header = ["model", "predicted", "measured", "error"]
    workspace = any(row.measured_workspace is not None for row in rows)
    header += ["workspace predicted", "measured"] if workspace else []
    cells = [_cells(row, workspace) for row in rows]
    widths = [max(len(line[place]) for line in (header, *cells)) for place in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(line, widths) for line in (header, rule, *cells))


def _cells(row: Comparison, workspace: bool) -> list[str]:
    sizes = format_bytes(row.predicted_bytes), format_bytes(row.measured_bytes)
    extra = (row.predicted_workspace, row.measured_workspace) if workspace else ()
    return [row.name, *sizes, f"{row.error:+.2%}", *("" if s is None else format_bytes(s) for s in extra)]


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    pairs = list(zip(cells, widths, strict=True))
    return "| " + " | ".join([f"{pairs[0][0]:<{pairs[0][1]}}", *(f"{c:>{w}}" for c, w in pairs[1:])]) + " |"
