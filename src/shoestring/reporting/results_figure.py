"""The picture of a study: the memory of each row by the three countings, and the quality beside it."""

import itertools
from pathlib import Path
from typing import Any

from ..studies.study import Study
from .figures import figure_file, title_lines, write_title
from .palette import ACCENT, FAINT, INK, MUTED
from .studies import COUNTINGS, MB, PARTS, about_flops, about_parts, has_rules, rows_shown

_ROW, _TOP, _BOTTOM, _PANEL, _GAP = 0.3, 0.5, 0.6, 4.2, 0.45  # inches
_LETTER = 0.078  # inches of a letter of the rows' names
_WIDE = 3  # a scale is logarithmic if the largest is so many times the smallest


def results_figure(path: Path, study: Study, found: dict[str, Any]) -> None:
    """Memory of each row by the three countings; beside it the quality, as points from the first row's, or the FLOPs of
    a study that is about them."""
    rows = rows_shown(found)
    if about_parts(study) and any("rules_parts" in row for row in rows):
        return _pie(path, study, rows[0])
    trained = len([row for row in rows if study.quality in row["quality"]]) > 1
    beside = trained or about_flops(study)
    names = 0.3 + _LETTER * max(len(row["label"]) for row in rows)
    width = names + _PANEL + (_PANEL + _GAP if beside else 0) + 0.3
    title = f"{study.place}: {study.title}"
    top = _TOP + 0.22 * len(title_lines(title, width))
    height = top + _ROW * len(rows) + _BOTTOM
    about = "; ".join(f"{row['label']}: {_mb(row['measured_bytes'])} MB" for row in rows if row["measured_bytes"])
    with figure_file(path, width, height, title, f"Measured heap: {about}." if about else "") as figure:
        write_title(figure, title)
        panel = _BOTTOM / height, _PANEL / width, _ROW * len(rows) / height
        memory = figure.add_axes((names / width, *panel))
        _memory(memory, rows, has_rules(study, found))
        if beside:
            right = figure.add_axes(((names + _PANEL + _GAP) / width, *panel))
            _quality(right, rows, study.quality) if trained else _flops(right, rows)


def epochs_figure(path: Path, study: Study, trials: list[dict[str, Any]]) -> None:
    """The quality after each epoch, a line per training: those of a row have its colour."""
    title = f"{study.place}: {study.title}"
    labels = list(dict.fromkeys(trial["label"] for trial in trials))
    colours = dict(zip(labels, itertools.cycle((INK, ACCENT, MUTED)), strict=False))
    about = "; ".join(
        f"{trial['label']}: {', '.join(f'{value:.2f}' for value in trial['by_epoch'])}" for trial in trials
    )
    with figure_file(path, 7.2, 4.0, title, f"By epoch: {about}.") as figure:
        write_title(figure, title)
        axes = figure.add_axes((0.09, 0.13, 0.88, 0.66))
        for trial in trials:
            values = trial["by_epoch"]
            axes.plot(range(1, len(values) + 1), values, "o-", ms=3.5, color=colours[trial["label"]])
        for label in labels:
            axes.plot([], [], "o-", ms=3.5, color=colours[label], label=label)
        axes.set(
            xlabel="epoch", ylabel=f"{study.quality}, % of the test set" if study.quality == "accuracy" else "BLEU"
        )
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y", lw=0.7, color=FAINT)
        axes.legend(loc="lower right", frameon=False)


def _pie(path: Path, study: Study, row: dict[str, Any]) -> None:
    """The parts of a step's memory by the rules and in our trace, as bars of equal length."""
    title = f"{study.place}: {study.title}"
    bars = [(words, row[f"{counting}_parts"]) for counting, words in COUNTINGS.items() if f"{counting}_parts" in row]
    shares = {part: [100 * parts[part] / sum(parts.values()) for _, parts in bars] for part in PARTS}
    about = "; ".join(f"{words}: {_said(parts)}" for words, parts in bars)
    with figure_file(path, 7.2, 2.3, title, f"{about}.") as figure:
        write_title(figure, title)
        axes = figure.add_axes((0.15, 0.25, 0.82, 0.42))
        before = [0.0] * len(bars)
        for part, colour in zip(PARTS, (INK, MUTED, ACCENT), strict=True):
            axes.barh(range(len(bars)), shares[part], left=before, color=colour, height=0.6, label=part)
            for place, (share, start) in enumerate(zip(shares[part], before, strict=True)):
                if share > 12:
                    axes.text(start + share / 2, place, f"{share:.1f}%", ha="center", va="center", color="white")
            before = [start + share for start, share in zip(before, shares[part], strict=True)]
        axes.set_yticks(range(len(bars)), [f"{words}\n{_mb(sum(parts.values())):,.1f} MB" for words, parts in bars])
        axes.set(xlabel="% of the peak of a step", xlim=(0, 100), ylim=(len(bars) - 0.5, -0.5))
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)


def _said(parts: dict[str, int]) -> str:
    return ", ".join(f"{part} {_mb(size):,.2f} MB" for part, size in parts.items())


def _memory(axes: Any, rows: list[dict[str, Any]], ruled: bool) -> None:
    series = [("measured heap", "D", ACCENT, [_mb(row["measured_bytes"]) for row in rows])]
    if ruled:
        series = [
            ("paper", "o", MUTED, [row["paper"].get("memory_mb") for row in rows]),
            ("paper's rules", "x", INK, [_mb(row["rules_bytes"]) for row in rows]),
            *series,
        ]
    memory_scale(axes, _points(axes, series))
    _rows(axes, rows, "MB at the peak of a step", named=True)


def _flops(axes: Any, rows: list[dict[str, Any]]) -> None:
    series = [
        ("paper's rules", "x", INK, [_more(row.get("rules_flops_ratio")) for row in rows]),
        ("our trace", "D", ACCENT, [_more(row.get("flops_ratio")) for row in rows]),
    ]
    _points(axes, series)
    _rows(axes, rows, "% more FLOPs than plain training", named=False)


def _points(axes: Any, series: list[tuple[str, str, str, list[float | None]]]) -> list[float]:
    """Draws each series' values by row -> all values."""
    seen: list[float] = []
    for label, marker, colour, values in series:
        points = [(value, place) for place, value in enumerate(values) if value is not None]
        seen += [value for value, _ in points]
        if points:
            fill = (
                {"facecolors": "none", "edgecolors": colour, "s": 60} if marker == "o" else {"color": colour, "s": 26}
            )
            axes.scatter(*zip(*points, strict=True), marker=marker, label=label, zorder=3, **fill)
    return seen


def memory_scale(axes: Any, values: list[float]) -> None:
    """From 0, or logarithmic where the values are far apart; with plain numbers either way."""
    if values and max(values) > _WIDE * min(values):
        from matplotlib.ticker import LogLocator

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5) if max(values) < 100 * min(values) else (1,)))
        axes.minorticks_off()
    else:
        axes.set_xlim(0, 1.1 * max(values, default=1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def _quality(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    for label, kind, colour, shift in (("paper", "paper", MUTED, -0.12), ("here", "quality", ACCENT, 0.12)):
        zero = rows[0][kind].get(name)
        if zero is None:
            continue
        found = [(row[kind], place) for place, row in enumerate(rows) if row[kind].get(name) is not None]
        for values, place in found:
            point = values[name] - zero, place + shift
            axes.errorbar(*point, xerr=values.get("interval"), fmt="o", ms=4.5, color=colour, capsize=2)
        interval = ", with its 95% interval" if any(values.get("interval") for values, _ in found) else ""
        axes.plot([], [], "o", color=colour, label=f"{label}{interval}")
    axes.axvline(0, color=MUTED, lw=0.8, ls=":")
    axes.locator_params(axis="x", nbins=5)
    _rows(axes, rows, f"{name}: points from the first row", named=False)


def _rows(axes: Any, rows: list[dict[str, Any]], below: str, named: bool) -> None:
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows] if named else [""] * len(rows), color=INK)
    axes.set(xlabel=below, ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", lw=0.7, color=FAINT)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)


def _more(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * (ratio - 1)


def _mb(size: int | None) -> float | None:
    return None if size is None else round(size / MB, 3)
