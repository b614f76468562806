"""A study's results in words: a table of its rows beside what the paper printed, and its claims judged."""

from typing import Any

from ..studies.study import PAPERS, Study

MB = 1e6


def lines(study: Study, found: dict[str, Any]) -> list[str]:
    """The results of `studies.results.report` -> the lines of a page."""
    heads = ["", "paper, MB", "by its rules", "predicted", "on the heap"]
    heads += [f"paper's {study.quality}", study.quality] if study.quality else []
    table = [heads, *(_cells(study, row) for row in found["rows"])]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    body = [_aligned(row, widths) for row in table]
    claims = ["  " + claim_line(claim) for claim in found["claims"]]
    title = f"{study.place}: {study.title}, scale {found['scale']}"
    return [title, PAPERS[study.paper], "", *body, "", *(["claims"] if claims else []), *claims]


def _aligned(cells: list[str], widths: list[int]) -> str:
    first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join([first.strip().ljust(widths[0]), *rest]).rstrip()


def _cells(study: Study, row: dict[str, Any]) -> list[str]:
    paper, quality = row["paper"], row["quality"]
    cells = memory_cells(row)
    if study.quality:
        printed = with_interval(paper.get(study.quality), paper.get("interval"))
        cells += [printed, with_interval(quality.get(study.quality), quality.get("interval"), len(row["seeds"]))]
    return cells


def memory_cells(row: dict[str, Any]) -> list[str]:
    """A row's label, and its MB: the paper's, by its rules, predicted, and on the heap."""
    printed = row["paper"].get("memory_mb")
    counted = [bytes_in_mb(row[key]) for key in ("rules_bytes", "predicted_bytes", "measured_bytes")]
    return [row["label"], "" if printed is None else f"{printed:g}", *counted]


def bytes_in_mb(size: int | None) -> str:
    return "" if size is None else f"{size / MB:.2f}" if size < 100 * MB else f"{size / MB:.1f}"


def with_interval(value: float | None, interval: float | None, seeds: int | None = None) -> str:
    if value is None:
        return ""
    count = f" ({seeds} seed{'s' if seeds != 1 else ''})" if seeds else ""
    return f"{value:.2f}" + (f" ± {interval:.2f}" if interval is not None else "") + count


def claim_line(claim: dict[str, Any]) -> str:
    ours = "" if claim["ours"] is None else f"ours {with_interval(claim['ours'], claim['interval'])}; "
    paper = "" if claim["paper"] is None else f"paper {claim['paper']:g}; "
    note = f" ({claim['note']})" if claim["note"] else ""
    return f"{claim['verdict']}: {claim['claim']} [{(paper + ours).rstrip('; ')}]{note}"
