"""The picture of what memory buys: the quality of a study's trained rows by their measured heap, and the front of those
that none beats in both."""

from pathlib import Path
from typing import Any

from ..studies.study import Study
from .figures import figure_file, write_title
from .palette import ACCENT, FAINT, INK, MUTED
from .results_figure import memory_scale
from .studies import MB

_CLOSE = 0.045  # of the axes' height: names nearer to each other than that are moved apart


def trained_points(rows: list[dict[str, Any]], quality: str) -> list[dict[str, Any]]:
    """The rows with a measured heap and a quality, by their heap."""
    points = [row for row in rows if row["measured_bytes"] and row["quality"].get(quality) is not None]
    return sorted(points, key=lambda row: row["measured_bytes"])


def front(points: list[dict[str, Any]], quality: str) -> list[dict[str, Any]]:
    """Of points by their heap those that are better than all smaller ones."""
    best: list[dict[str, Any]] = []
    for row in points:
        if not best or row["quality"][quality] > best[-1]["quality"][quality]:
            best.append(row)
    return best


def pareto_figure(path: Path, study: Study, rows: list[dict[str, Any]]) -> None:
    points = trained_points(rows, study.quality)
    best = front(points, study.quality)
    title = f"{study.place}: {study.title}"
    about = "; ".join(f"{row['label']}: {_mb(row):,.4g} MB, {row['quality'][study.quality]:.2f}" for row in points)
    with figure_file(path, 7.2, 4.6, title, f"{study.quality} by measured heap: {about}.") as figure:
        write_title(figure, title)
        axes = figure.add_axes((0.09, 0.115, 0.88, 0.72))
        axes.step([*map(_mb, best)], [row["quality"][study.quality] for row in best], where="post", color=ACCENT, lw=1)
        for row in points:
            value, interval = row["quality"][study.quality], row["quality"].get("interval")
            colour = ACCENT if row in best else MUTED
            axes.errorbar(_mb(row), value, yerr=interval, fmt="o", ms=5, color=colour, capsize=2, zorder=3)
        memory_scale(axes, [*map(_mb, points)])
        axes.set_xlim(right=_mb(points[-1]) * (2.4 if axes.get_xscale() == "log" else 1.4))  # names stand to the right
        unit = ", % of the test set" if study.quality == "accuracy" else ""
        axes.set(xlabel="MB at the peak of a step, measured", ylabel=f"{study.quality}{unit}")
        axes.grid(axis="y", lw=0.7, color=FAINT)
        _name(axes, points, best, study.quality)
        axes.plot([], [], "-o", color=ACCENT, ms=5, label="none takes less and is better")
        if any(row["quality"].get("interval") for row in points):
            axes.errorbar([], [], yerr=[], fmt="o", ms=5, color=MUTED, capsize=2, label="with its 95% interval")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8, borderaxespad=0.2)


def _name(axes: Any, points: list[dict[str, Any]], best: list[dict[str, Any]], quality: str) -> None:
    """Names to the right of the points, above the front and below it; from the top down, moved where they would cover
    each other."""
    low, high = axes.get_ylim()
    last: list[tuple[float, float]] = []
    for row in sorted(points, key=lambda row: -row["quality"][quality]):
        height = (row["quality"][quality] - low) / (high - low)
        for size, taken in last:
            if abs(height - taken) < _CLOSE and 1 / 4 < size / _mb(row) < 4:
                height = taken - _CLOSE
        last.append((_mb(row), height))
        side = "bottom" if row in best else "top"
        axes.text(1.05 * _mb(row), low + height * (high - low), row["label"], size=7.5, color=INK, va=side)


def _mb(row: dict[str, Any]) -> float:
    return row["measured_bytes"] / MB
