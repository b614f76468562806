"""A study's results as files to keep: NAME.SCALE.json (rows, claims, trials), .svg and .md.

The page says what the paper printed beside what was found here, and what was done otherwise.
"""

import json
from pathlib import Path
from typing import Any

from ..runs.folder import replace_file
from ..studies.study import PAPERS, Scale, Study
from .figures import figure_file
from .palette import ACCENT, INK, MUTED
from .studies import MB, claim_line, memory_cells, with_interval


def write_results(folder: Path, study: Study, found: dict[str, Any], trials: list[dict[str, Any]]) -> list[Path]:
    """A study's report and its trials -> the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{study.name}.{found['scale']}"
    data, picture, page = (folder / f"{stem}.{suffix}" for suffix in ("json", "svg", "md"))
    replace_file(data, json.dumps(found | {"trials": trials}, indent=1) + "\n")
    results_figure(picture, study, found)
    replace_file(page, page_text(study, found, trials, picture.name, data.name))
    return [data, picture, page]


def page_text(study: Study, found: dict[str, Any], trials: list[dict[str, Any]], picture: str, data: str) -> str:
    """The page in Markdown."""
    scale = study.scale(found["scale"])
    lines = [f"# {study.place}: {study.title}", "", f"{PAPERS[study.paper]}.", ""]
    lines += [study.about, ""] if study.about else []
    lines += [
        _done(study, found["scale"], scale, trials),
        "",
        f"![{study.title}]({picture})",
        "",
        *_table(study, found),
    ]
    if found["claims"]:
        lines += ["", "## Claims", *(f"- {claim_line(claim)}" for claim in found["claims"])]
    failed = [f"- {row['label']}: {reason}" for row in found["rows"] for reason in row["failed"]]
    lines += ["", "## Failed", *failed] if failed else []
    command = f"shoestring study run {study.name} --scale {found['scale']}" + (" --data DIR" if scale else "")
    lines += ["", f"Made by `{command}`; all figures are in [{data}]({data}).", ""]
    return "\n".join(lines)


def _done(study: Study, name: str, scale: Scale | None, trials: list[dict[str, Any]]) -> str:
    """What was done here, and what the paper did instead."""
    if scale is None:
        return "Nothing is trained: the memory is counted by the paper's rules, predicted, and measured on the heap."
    full = study.scale("full")
    parts = [f"{len(trials)} trials are finished. Trained {_length(scale)}"]
    if full and name != "full":
        parts.append(f"the paper trained {_length(full)}")
    cpus = sorted({str(trial["environment"].get("cpu_model", "")) for trial in trials} - {""})
    parts += [f"CPU: {', '.join(cpus)}"] if cpus else []
    return "; ".join(parts) + "."


def _length(scale: Scale) -> str:
    time = f"{scale.epochs} epochs" if scale.epochs else f"{scale.updates} updates"
    size = f", images averaged to {scale.image} x {scale.image}" if scale.image else ""
    size += f", width {scale.width}" if scale.width else ""
    return f"{time} on {scale.data}{size}"


def _table(study: Study, found: dict[str, Any]) -> list[str]:
    heads = ["", "paper, MB", "its rules, MB", "predicted, MB", "heap, MB"]
    if study.quality:
        heads += [f"paper: {study.quality}", f"here: {study.quality}", "seeds"]
    rows = []
    for row in found["rows"]:
        paper, quality = row["paper"], row["quality"]
        cells = memory_cells(row)
        if study.quality:
            cells.append(with_interval(paper.get(study.quality), paper.get("interval")))
            cells += [with_interval(quality.get(study.quality), quality.get("interval")), str(len(row["seeds"]) or "")]
        rows.append(cells)
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def results_figure(path: Path, study: Study, found: dict[str, Any]) -> None:
    """Memory of each row by the three countings; beside it the quality, as points from the first row's."""
    rows = found["rows"]
    trained = [row for row in rows if study.quality in row["quality"]]
    with figure_file(path, 11.0 if len(trained) > 1 else 6.4, 1.5 + 0.3 * len(rows)) as figure:
        left = 0.17 if len(trained) > 1 else 0.29
        bottom, height = 0.75 / (1.5 + 0.3 * len(rows)), 0.3 * len(rows) / (1.5 + 0.3 * len(rows))
        figure.text(0.012, 0.94, f"{study.place}: {study.title}", size=11.5, weight="bold", va="center")
        memory = figure.add_axes((left, bottom, 0.36 if len(trained) > 1 else 0.68, height))
        _memory(memory, rows)
        if len(trained) > 1:
            quality = figure.add_axes((0.6, bottom, 0.38, height))
            _quality(quality, rows, study.quality)


def _memory(axes: Any, rows: list[dict[str, Any]]) -> None:
    series = (
        ("paper", "o", MUTED, [row["paper"].get("memory_mb") for row in rows]),
        ("its rules", "x", INK, [_mb(row["rules_bytes"]) for row in rows]),
        ("measured heap", "D", ACCENT, [_mb(row["measured_bytes"]) for row in rows]),
    )
    for label, marker, colour, values in series:
        points = [(value, place) for place, value in enumerate(values) if value is not None]
        if points:
            fill = (
                {"facecolors": "none", "edgecolors": colour, "s": 60} if marker == "o" else {"color": colour, "s": 26}
            )
            axes.scatter(*zip(*points, strict=True), marker=marker, label=label, zorder=3, **fill)
    axes.set_xscale("log")
    _rows(axes, rows, "MB at the peak of a step", named=True)


def _quality(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    base = {"paper": rows[0]["paper"].get(name), "here": rows[0]["quality"].get(name)}
    for place, row in enumerate(rows):
        for label, values, colour, shift in (
            ("paper", row["paper"], MUTED, -0.12),
            ("here", row["quality"], ACCENT, 0.12),
        ):
            value, zero = values.get(name), base[label]
            if value is not None and zero is not None:
                axes.errorbar(
                    value - zero, place + shift, xerr=values.get("interval"), fmt="o", ms=4.5, color=colour, capsize=2
                )
    axes.plot([], [], "o", color=MUTED, label="paper")
    axes.plot([], [], "o", color=ACCENT, label="here, with its 95% interval")
    axes.axvline(0, color=MUTED, lw=0.8, ls=":")
    _rows(axes, rows, f"{name}: points from the first row", named=False)


def _rows(axes: Any, rows: list[dict[str, Any]], below: str, named: bool) -> None:
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows] if named else [""] * len(rows))
    axes.set(xlabel=below, ylim=(len(rows) - 0.5, -0.5))
    axes.grid(axis="y", lw=0.4, alpha=0.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8, borderaxespad=-1.6)


def _mb(size: int | None) -> float | None:
    return None if size is None else size / MB
