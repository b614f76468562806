"""A study's results as files to keep: NAME.SCALE.json (rows, claims, trials, steps), .svg and .md.

The page says what the paper printed beside what was found here, and what was done otherwise.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import file_bytes, read_object
from ..runs.folder import replace_file
from ..studies.study import PAPERS, SCALES, Scale, Study, load, names
from .pareto_figure import pareto_figure, trained_points
from .results_figure import epochs_figure, results_figure
from .studies import claim_line, has_rates, has_rules, rows_shown, table

_RATES = (
    " Learning rates are the recipe's times the factor that the paper found for the network and its sparsity, in"
    " trainings of its own length."
)


def write_results(
    folder: Path, study: Study, found: dict[str, Any], trials: list[dict[str, Any]], steps: Sequence[Any] = ()
) -> list[Path]:
    """A study's report, its trials and measured steps -> the files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{study.name}.{found['scale']}"
    data, picture, page = (folder / f"{stem}.{suffix}" for suffix in ("json", "svg", "md"))
    replace_file(data, json.dumps(found | {"trials": trials, "steps": steps}, indent=1) + "\n")
    results_figure(picture, study, found)
    more = []
    if study.by_epoch and trials:
        more.append(folder / f"{stem}.epochs.svg")
        epochs_figure(more[-1], study, trials)
    if study.pareto and trained_points(found["rows"], study.quality):
        more.append(folder / f"{stem}.pareto.svg")
        pareto_figure(more[-1], study, found["rows"])
    replace_file(page, page_text(study, found, trials, [path.name for path in (picture, *more)], data.name))
    index = folder / "README.md"
    replace_file(index, index_text(folder))
    return [data, picture, page, index, *more]


def index_text(folder: Path) -> str:
    """A page of all studies: where each is in its paper, what of it is recorded in the folder, and the command."""
    lines = [
        "# Results of the studies",
        "",
        "Tables and figures of two papers, run again. `memory`: a step is counted by the paper's rules, predicted, and",
        "measured on the heap. `small`: trained in little; `full`: as in the paper. A page has the figures beside the",
        "paper's, the claims with their verdicts, and what was done otherwise.",
    ]
    studies = sorted(map(load, names()), key=_place)
    for key, paper in PAPERS.items():
        lines += ["", f"## {paper}", "", "| in the paper | study | recorded | command |", "| --- | --- | --- | --- |"]
        lines += [_index_line(study, folder) for study in studies if study.paper == key]
    return "\n".join([*lines, "", "Written by `shoestring study report NAME --output DIR` with each study.", ""])


def _place(study: Study) -> list[tuple[int, str]]:
    """The order of places in a paper: Figure 9 is before Figure 10."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", study.place)]


def _index_line(study: Study, folder: Path) -> str:
    there = [scale for scale in SCALES if (folder / f"{study.name}.{scale}.json").is_file()]
    recorded = ", ".join(_recorded(study.name, scale, folder) for scale in there) or "nothing yet"
    return f"| {study.place} | {study.title} | {recorded} | `shoestring study run {study.name}` |"


def _recorded(name: str, scale: str, folder: Path) -> str:
    """A link to the page, and how much of the study it has."""
    found = read_object(file_bytes(folder / f"{name}.{scale}.json"))
    rows = found["rows"]
    done = sum(bool(row["seeds"] if scale != "memory" else row["measured_bytes"]) for row in rows)
    some = f"{done} of {_count(len(rows), 'row')}" if done < len(rows) else _count(done, "row")
    trials = f", {_count(len(found['trials']), 'training')}" if found["trials"] else ""
    return f"[{scale}]({name}.{scale}.md): {some}{trials}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)


def page_text(
    study: Study, found: dict[str, Any], trials: list[dict[str, Any]], pictures: Sequence[str], data: str
) -> str:
    """The page in Markdown."""
    scale = study.scale(found["scale"])
    lines = [f"# {study.place}: {study.title}", "", f"{PAPERS[study.paper]}.", ""]
    lines += [study.about, ""] if study.about else []
    lines += [
        _done(study, found, scale, trials) + _clocked(found["rows"]) + (_RATES if has_rates(found) else ""),
        "",
        *(line for picture in pictures for line in (f"![{study.title}]({picture})", "")),
        *_markdown(table(study, found)),
    ]
    if found["claims"]:
        lines += ["", "## Claims", *(f"- {claim_line(claim)}" for claim in found["claims"])]
    failed = [f"- {row['label']}: {reason}" for row in found["rows"] for reason in row["failed"]]
    lines += ["", "## Failed", *failed] if failed else []
    command = f"shoestring study run {study.name} --scale {found['scale']}" + (" --data DIR" if scale else "")
    lines += ["", f"Made by `{command}`; all figures are in [{data}]({data}).", ""]
    return "\n".join(lines)


def _done(study: Study, found: dict[str, Any], scale: Scale | None, trials: list[dict[str, Any]]) -> str:
    """What was done here, and what the paper did instead."""
    name = found["scale"]
    if scale is None:
        counted = has_rules(study, found) and any(row["rules_bytes"] for row in found["rows"])
        ruled = "counted by the paper's rules, " if counted else ""
        merged = " Rows that have the same step are one." if len(rows_shown(found)) < len(found["rows"]) else ""
        return f"Nothing is trained: the memory is {ruled}predicted, and measured on the heap.{merged}"
    full = study.scale("full")
    are = "are" if len(trials) != 1 else "is"
    parts = [f"{_count(len(trials), 'trial')} {are} finished. Trained {_length(scale)}"]
    if full and name != "full":
        who = "the paper trained" if study.paper == "sohoni" else "the scale `full` trains"  # networks of our choice
        parts.append(f"{who} {_length(full)}")
    cpus = sorted({str(trial["environment"].get("cpu_model", "")) for trial in trials} - {""})
    parts += [f"CPU: {', '.join(cpus)}"] if cpus else []
    smaller = " The bytes are those of the smaller step: for the paper's sizes see the scale `memory`."
    return "; ".join(parts) + "." + (smaller if scale.image or scale.width else "")


def _clocked(rows: list[dict[str, Any]]) -> str:
    """Of which processor the times of steps are."""
    cpus = sorted({cpu for row in rows if (cpu := row.get("step_cpu"))})
    return f" The time of a step: one thread of {', '.join(cpus)}, medians." if cpus else ""


def _length(scale: Scale) -> str:
    time = f"{scale.epochs} epochs" if scale.epochs else f"{scale.updates} updates"
    size = f", images averaged to {scale.image} x {scale.image}" if scale.image else ""
    size += f", width {scale.width}" if scale.width else ""
    return f"{time} on {scale.data}{size}"


def _markdown(rows: list[list[str]]) -> list[str]:
    heads, *body = rows
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *body)]
