"""A study's results in words: a table of its rows beside what the paper printed, and its claims judged."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..studies.runner import UNMEASURED
from ..studies.study import PAPERS, Study

MB = 1e6
PARTS = ("model", "optimizer", "activations")
COUNTINGS = {"rules": "paper's rules", "predicted": "traced"}
_SAME_STEP = (*UNMEASURED, "length")  # settings that change no byte of a step


def lines(study: Study, found: dict[str, Any]) -> list[str]:
    """The results of `studies.results.report` -> the lines of a page."""
    rows = table(study, found)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    body = [_aligned(row, widths) for row in rows]
    claims = ["  " + claim_line(claim) for claim in found["claims"]]
    title = f"{study.place}: {study.title}, scale {found['scale']}"
    return [title, PAPERS[study.paper], "", *body, "", *(["claims"] if claims else []), *claims]


def _aligned(cells: list[str], widths: list[int]) -> str:
    first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()


def rows_shown(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows. Where nothing is trained, those of the same step, as of one network at many learning rates, are one."""
    if found["scale"] != "memory":
        return found["rows"]
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        step = {key: value for key, value in row["settings"].items() if key not in _SAME_STEP}
        alike.setdefault(repr(sorted(step.items())), []).append(row)
    return [rows[0] if len(rows) == 1 else rows[0] | {"label": _of_step(rows[0]["label"])} for rows in alike.values()]


def _of_step(label: str) -> str:
    """A row's label without the settings that change no byte of its step."""
    parts = [part for part in label.split(", ") if not part.startswith(_SAME_STEP)]
    return ", ".join(parts) or "every row"


def table(study: Study, found: dict[str, Any]) -> list[list[str]]:
    """The heads, and the cells of each row; columns without a figure are left out, and the paper's bytes where they are
    not those of the step."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [("", lambda row: row["label"])]
    if has_rules(study, found):
        columns += [
            ("paper, MB", lambda row: f"{row['paper']['memory_mb']:g}" if "memory_mb" in row["paper"] else ""),
            ("paper's rules, MB", lambda row: bytes_in_mb(row["rules_bytes"])),
        ]
    columns += [
        ("predicted, MB", lambda row: bytes_in_mb(row["predicted_bytes"])),
        ("heap, MB", lambda row: bytes_in_mb(row["measured_bytes"])),
    ]
    if study.pareto:
        columns.append(("step, CPU s", lambda row: f"{seconds:.3f}" if (seconds := row.get("step_seconds")) else ""))
    if about_flops(study):
        columns += [
            ("paper's rules, FLOPs", lambda row: _times(row.get("rules_flops_ratio"))),
            ("traced, FLOPs", lambda row: _times(row.get("flops_ratio"))),
        ]
    if about_parts(study):
        for counting, words in COUNTINGS.items():
            for part in PARTS:
                columns.append((f"{words}: {part}, MB", partial(_part, f"{counting}_parts", part)))
    if has_rates(found):
        columns.append(("learning rate", lambda row: f"x {row['lr_multiplier']:g}"))
    if name := study.quality:
        columns += [
            (f"paper: {name}", lambda row: _quality(row["paper"], name)),
            (f"here: {name}", lambda row: _quality(row["quality"], name)),
            ("seeds", lambda row: str(len(row["seeds"]) or "")),
        ]
    rows = rows_shown(found)
    columns = [(head, cell) for head, cell in columns if not head or any(cell(row) for row in rows)]
    return [[head for head, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]


def _quality(values: dict[str, Any], name: str) -> str:
    return with_interval(values.get(name), values.get("interval"), name)


def has_rules(study: Study, found: dict[str, Any]) -> bool:
    """Whether the study's paper has rules that count its steps: they are of the paper's own sizes."""
    return study.paper == "sohoni" and not found["smaller"]


def has_rates(found: dict[str, Any]) -> bool:
    """Whether rows were trained at different learning rates, which may be all of a difference in quality."""
    return len({row.get("lr_multiplier") for row in found["rows"]}) > 1


def about_flops(study: Study) -> bool:
    return any(claim["metric"].endswith("flops_percent") for claim in study.claims)


def about_parts(study: Study) -> bool:
    """Whether the study is about the parts of a step's memory."""
    return any(claim["metric"].endswith("activations_percent") for claim in study.claims)


def _part(counting: str, part: str, row: dict[str, Any]) -> str:
    return bytes_in_mb(row.get(counting, {}).get(part))


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}x"


def bytes_in_mb(size: int | None) -> str:
    return "" if size is None else f"{size / MB:.2f}" if size < 100 * MB else f"{size / MB:.1f}"


def with_interval(value: float | None, interval: float | None, metric: str = "") -> str:
    if value is None:
        return ""
    digits = 4 if metric == "cosine" else 2
    return f"{value:.{digits}f}" + (f" ± {interval:.{digits}f}" if interval is not None else "")


def claim_line(claim: dict[str, Any]) -> str:
    metric = claim.get("metric", "")
    ours = "" if claim["ours"] is None else f"ours {with_interval(claim['ours'], claim['interval'], metric)}; "
    paper = "" if claim["paper"] is None else f"paper {claim['paper']:g}; "
    figures = f" [{(paper + ours).rstrip('; ')}]" if paper + ours else ""
    note = f" ({claim['note']})" if claim["note"] else ""
    return f"{claim['verdict']}: {claim['claim']}{figures}{note}"
