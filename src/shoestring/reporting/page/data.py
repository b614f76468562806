"""The data of a page: from a run folder, whatever state it is in, or from a study's report."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import ShoestringError
from ...planning.plan import Plan
from ...records import file_bytes
from ...runs.folder import RunFolder
from ...runs.log import Log
from ...runs.record import RunRecord, read_record
from ...techniques.words import in_words
from ..palette import LOOKS
from ..run_words import why_less
from .steps import steps_of

POINTS = 500  # of a curve
_NOT_QUALITY = ("update", "epoch", "loss", "lr", "skipped", "averaged", "quality")


def page_data(title: str, runs: Iterable[dict[str, Any]] = (), study: dict[str, Any] | None = None) -> dict[str, Any]:
    """The parts of a page -> all its data."""
    looks = {kind: {"label": look.label, "colour": look.colour} for kind, look in LOOKS.items()}
    return {"version": 1, "title": title, "runs": list(runs), "study": study, "looks": looks}


def run_data(path: Path) -> dict[str, Any]:
    """A run folder -> its part of a page; anything missing or damaged is mentioned in `notes` and is no error."""
    folder = RunFolder(path)
    notes: list[str] = []
    if not any(part.exists() for part in (folder.record_path, folder.plan_path, folder.log.path)):
        raise ShoestringError(f"{path} holds no run: name the folder of one (`shoestring train --run DIR` makes it)")
    record, plan = _record(folder, notes), _plan(folder, notes)
    lines = _log(folder.log, notes)
    update = max((line["update"] for line in lines), default=0)
    length = record.settings.get("updates") if record else None
    state = _state(folder, record, update, length)
    if record is not None and update < record.updates:
        notes.append(f"its log ends at update {update:,}, and {record.updates:,} were done: a part of it is lost")
    if not folder.saves.updates():
        notes.append("there is no save of it yet")
    steps, said = steps_of(path, record, plan)
    return {
        "name": str(path),
        "state": state,
        "update": update,
        "updates": length,
        "notes": notes + said,
        "record": _shown(record) if record else None,
        "techniques": _in_words(plan.techniques()) if plan else {},
        "reasons": list(plan.reasons) if plan else [],
        "steps": steps,
        "curves": _curves(lines, record),
    }


def with_fidelity(run: dict[str, Any], fidelity: dict[str, Any]) -> int:
    """Adds to what codecs store in a run the cosines of `shoestring fidelity --json` -> how many there were."""
    cosines = {(layer["module"], layer["codec"]): layer["cosine"] for layer in fidelity["layers"]}
    rows = run["steps"].get("lean", {}).get("stored", [])
    known = [row for row in rows if (row["module"], row["codec"]) in cosines]
    for row in known:
        row["cosine"] = cosines[row["module"], row["codec"]]
    return len(known)


def _shown(record: RunRecord) -> dict[str, Any]:
    """A record as JSON, with each technique's value in the words of the command line."""
    settings = {key: _in_words(value) for key, value in record.settings.items()}
    return record.to_json() | {"settings": settings, "why_less": why_less(record)}


def _in_words(value: Any) -> Any:
    """{"nonzero": {"nonzero": 30, "method": "set"}, "seed": 2} -> {"nonzero": "30,method=set", "seed": 2}"""
    if not isinstance(value, dict):
        return value
    return {name: in_words(part) if isinstance(part, dict) and part else part for name, part in value.items()}


def _record(folder: RunFolder, notes: list[str]) -> RunRecord | None:
    if not folder.record_path.exists():
        notes.append("its record is not written yet")
        return None
    try:
        record = read_record(folder.record_path, notes.append)
    except ShoestringError as error:
        notes.append(str(error))
        return None
    if isinstance(record.settings, dict) and isinstance(record.measured_peaks, list):
        return record
    notes.append(f"{folder.record_path} is damaged: its settings or peaks have another form")
    return None


def _plan(folder: RunFolder, notes: list[str]) -> Plan | None:
    try:
        return Plan.from_json(file_bytes(folder.plan_path).decode())
    except (OSError, ShoestringError, TypeError, ValueError) as error:
        notes.append(f"its plan cannot be read: {error}")
        return None


def _log(log: Log, notes: list[str]) -> list[dict[str, Any]]:
    """The readable lines of a log; a killed process may have left half a line."""
    if not log.path.is_file():
        notes.append("it has no log yet: no update was done")
        return []
    found = list(log.read())
    lines = [line.content for line in found if line.content is not None]
    if (found[-1].end if found else 0) < log.path.stat().st_size:
        notes.append("the last line of its log was cut off and is left out")
    if damage := log.damage():
        notes.append(damage)
    if not lines:
        notes.append("no update was done yet")
    return lines


def _state(folder: RunFolder, record: RunRecord | None, update: int, length: Any) -> str:
    if record is not None and record.finished:
        return f"finished after {update:,} updates"
    of = f"{update:,} of {length:,} updates" if isinstance(length, int) else f"{update:,} updates"
    if folder.is_locked():
        return f"still going: {of} were done when this page was written"
    return f"not finished: it was stopped or killed after {of}; `shoestring train ... --resume` goes on with it"


def _curves(lines: list[dict[str, Any]], record: RunRecord | None) -> dict[str, Any]:
    """Loss, learning rate and quality by update; each thinned to `POINTS`, with the range that a point stands for."""
    name = record.quality_name if record else ""
    if not name:  # the first figure that an evaluation logged
        name = next((key for line in lines if "loss" not in line for key in line if key not in _NOT_QUALITY), "")
    pairs = [pair for pair in (record.measured_peaks if record else ()) if _is_pair(pair)]
    peaks = [{"update": update, "bytes": size} for update, size in pairs]
    return {
        "quality_name": name,
        "loss": thinned(_series(lines, "loss")),
        "lr": thinned(_series(lines, "lr")),
        "quality": thinned(_series(lines, name)),
        "memory": thinned(_series(peaks, "bytes")),
    }


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, int) for part in value)


def _series(lines: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(line["update"], line[key]) for line in lines if isinstance(line.get(key), int | float)]


def thinned(points: list[tuple[int, float]], most: int = POINTS) -> list[dict[str, float]]:
    """Points -> at most `most` of them: each has the last place, the mean and the range of its neighbours."""
    count = min(most, len(points))
    edges = [place * len(points) // count for place in range(count + 1)] if count else []
    rows = []
    for low, high in pairwise(edges):
        values = [value for _, value in points[low:high]]
        mean = sum(values) / len(values)
        rows.append({"x": points[high - 1][0], "y": mean, "low": min(values), "high": max(values)})
    return rows


def study_data(found: dict[str, Any], where: str = "the study's report") -> dict[str, Any]:
    """A study's report -> its part of a page; refuses what has another form."""
    rows, claims = found.get("rows"), found.get("claims", [])
    if not isinstance(rows, list) or not all(map(_is_row, rows)) or not _are_claims(claims):
        raise ShoestringError(f"{where} is no report of a study: make one with `shoestring study report NAME --json`")
    return {
        "name": found.get("study", ""),
        "scale": found.get("scale", ""),
        "title": found.get("title", ""),
        "place": found.get("place", ""),
        "rows": [_row(row, bool(found.get("smaller"))) for row in rows],
        "claims": claims,
    }


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("settings"), dict):
        return False
    return all(isinstance(row.get(key) or {}, dict) for key in ("paper", "quality"))


def _are_claims(claims: Any) -> bool:
    return isinstance(claims, list) and all(isinstance(claim, dict) for claim in claims)


def _row(row: dict[str, Any], smaller: bool) -> dict[str, Any]:
    """A row with the figures of both: bytes, and the quality by its name, ours and as printed. The paper's bytes are no
    figure to put beside those of a smaller step."""
    paper, quality = row.get("paper") or {}, row.get("quality") or {}
    names = [key for key in quality if key not in ("interval", "values")]
    printed = [key for key in paper if key not in ("memory_mb", "interval")]
    settings = row["settings"]
    label = row.get("label") or ", ".join(f"{key} {value}" for key, value in settings.items())
    megabytes = None if smaller else paper.get("memory_mb")
    return {
        "label": label,
        "settings": settings,
        "quality_name": next(iter(names + printed), ""),
        "quality": quality.get(names[0]) if names else None,
        "interval": quality.get("interval"),
        "seeds": len(row.get("seeds") or ()),
        "lr_multiplier": row.get("lr_multiplier"),
        "step_seconds": row.get("step_seconds"),
        "step_cpu": str(row.get("step_cpu") or ""),
        **{key: row.get(key) for key in ("rules_bytes", "predicted_bytes", "measured_bytes")},
        "paper_bytes": megabytes * 1e6 if isinstance(megabytes, int | float) else None,
        "paper_quality": paper.get(printed[0]) if printed else None,
        "paper_interval": paper.get("interval"),
        "failed": list(row.get("failed") or ()),
    }
