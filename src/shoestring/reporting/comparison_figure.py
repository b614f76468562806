"""Predicted against measured as a picture: each prediction a dot in the ring of its measurement."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..units import format_bytes
from .comparison import Comparison, error_words
from .figures import HALO, figure_file, round_bytes
from .palette import ACCENT, FAINT, INK, MUTED

TITLE = "Predicted (dot) in measured (ring) peaks of memory"
_NUMBER: dict[str, Any] = {"va": "center", "size": 8.5, "bbox": HALO}


def comparison_figure(path: str | Path, rows: Sequence[Comparison]) -> None:
    """Rows -> predicted and measured peaks on a logarithmic scale, with their sizes and errors."""
    labels = list(_labels(rows))
    names = 0.2 + 0.075 * max(map(len, labels))  # inches that the longest name takes
    width, height = names + 6.2, 1.15 + 0.32 * len(rows)
    about = "; ".join(f"{label} {format_bytes(row.measured_bytes)}" for label, row in zip(labels, rows, strict=True))
    with figure_file(path, width, height, TITLE, f"{about}.") as figure:
        figure.text(0.15 / width, 1 - 0.28 / height, TITLE, size=12, weight="bold", va="center")
        axes = figure.add_axes((names / width, 0.4 / height, 5.0 / width, 1 - 1.05 / height))
        _peaks(axes, rows)
        axes.set_yticks(range(len(rows)), labels, color=INK)
        axes.text(1.18, -0.9, "error", transform=axes.get_yaxis_transform(), ha="right", color=MUTED, va="center")
        for place, row in enumerate(rows):
            words = error_words(row.error)
            axes.text(1.18, place, words, transform=axes.get_yaxis_transform(), ha="right", va="center", size=8.5)


def _labels(rows: Sequence[Comparison]) -> Iterator[str]:
    """The rows' names; one that is indented, under a model, with the model's."""
    model = ""
    for row in rows:
        if not row.name.startswith(" "):
            model = row.name.split(",")[0]
        yield f"{model}, {row.name.strip()}" if row.name.startswith(" ") and model else row.name.strip()


def _peaks(axes: Any, rows: Sequence[Comparison]) -> None:
    places = range(len(rows))
    measured, predicted = [row.measured_bytes for row in rows], [row.predicted_bytes for row in rows]
    axes.scatter(measured, places, s=95, facecolors="white", edgecolors=INK, linewidths=1.2, zorder=2)
    axes.scatter(predicted, places, s=30, color=ACCENT, zorder=3)
    for place, size in enumerate(measured):
        axes.annotate(format_bytes(size), (size, place), (9, 0), textcoords="offset points", **_NUMBER)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: round_bytes(size))
    axes.minorticks_off()
    axes.set(xlim=(min(measured + predicted) / 1.6, max(measured + predicted) * 4), ylim=(len(rows) - 0.4, -0.6))
    axes.yaxis.grid(True, color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
