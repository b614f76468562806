"""The results of a study: its rows, and the paper's claims judged by them."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from ..records import file_bytes, matches, read_object
from .jobs import Store, identify
from .plans import model_of
from .runner import memory_job, step_jobs, time_job, training_jobs
from .study import LEARNED, QUALITIES, Row, Study

CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not confirmed", "not testable at this scale"
MB = 1e6
_MORE = ("flops_ratio", "rules_flops_ratio", "rules_parts", "predicted_parts")


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and the half-width of its 95% interval (1.96 standard errors); None with a single seed."""

    value: float
    interval: float | None
    count: int

    @classmethod
    def of(cls, values: list[float]) -> "Estimate | None":
        if not values:
            return None
        error = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.mean(values), error, len(values))

    def minus(self, other: "Estimate") -> "Estimate":
        known = self.interval is not None and other.interval is not None
        error = math.hypot(self.interval, other.interval) if known else None  # type: ignore[arg-type]
        return Estimate(self.value - other.value, error, min(self.count, other.count))


def report(study: Study, scale: str, store: Store, root: str | None = None) -> dict[str, Any]:
    """A study and the store of its jobs -> rows and claims, as far as they are done."""
    smaller = (sized := study.scale(scale)) is not None and bool(sized.image or sized.width)
    rows = [_row(study, row, scale, store, root) for row in study.rows]
    claims = [judge(claim, rows, smaller) for claim in study.claims]
    if smaller:  # the rules count the paper's own sizes: no figure to put beside the bytes of a smaller step
        rows = [row | {"rules_bytes": None} for row in rows]
    return {"study": study.name, "scale": scale, "title": study.title, "place": study.place, "smaller": smaller,
            "rows": rows, "claims": claims}  # fmt: skip


def trials(study: Study, scale_name: str, store: Store, root: str | None = None) -> list[dict[str, Any]]:
    """The finished trainings of a study, each with all that decides it (`job`) and the heap of its step."""
    scale = study.scale(scale_name)
    if scale is None:
        return []
    found = []
    for row in study.rows:
        memory = store.result(memory_job(study, row, scale)) or {}
        for job in training_jobs(study, row, scale, root):
            if (result := store.result(job)) is not None:
                peaks = {key: memory.get(key) for key in ("predicted_bytes", "measured_bytes")}
                found.append(_trial(study, row, job, result) | peaks)
    return found


def steps(study: Study, scale_name: str, store: Store) -> list[dict[str, Any]]:
    """The measured steps of a study's rows, each as its job and result; rows that share a step have one."""
    scale = study.scale(scale_name)
    jobs = {identify(job): job for row in study.rows for job in step_jobs(study, row, scale)}
    return [{"job": job, "result": result} for job in jobs.values() if (result := store.result(job)) is not None]


def import_results(path: Path, store: Store) -> int:
    """A results file -> how many of its trials and measured steps the store did not have yet."""
    try:
        file = read_object(file_bytes(path))
        found = [file["trials"], file.get("steps", [])]
        if not matches(found, list[list[dict[str, Any]]]):
            raise ValueError("its trials or steps are not a list of objects")
        pairs = [(one["job"], one["result"]) for some in found for one in some]
        if not matches([part for pair in pairs for part in pair], list[dict[str, Any]]):
            raise ValueError("a job or a result is no object")
    except OSError as error:
        raise ShoestringError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ShoestringError(
            f"{path} is no results file ({error}): make one with `shoestring study report NAME --output DIR`"
        ) from error
    return sum(store.adopt(job, result) for job, result in pairs)


def _trial(study: Study, row: Row, job: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": job["model"],
        "label": row.label,
        "settings": job["settings"],
        "seed": job["seed"],
        "epochs": job.get("epochs"),
        "updates": result["updates"],
        study.quality: result["quality"],
        "by_epoch": result["by_epoch"],
        "seconds": result["seconds"],
        "environment": result["environment"],
        "job": job,
        "result": result,
    }


def _row(study: Study, row: Row, scale_name: str, store: Store, root: str | None) -> dict[str, Any]:
    scale = study.scale(scale_name)
    memory = store.result(memory_job(study, row, scale)) or {}
    timed = (store.result(time_job(study, row, scale)) if study.pareto else None) or {}
    jobs = training_jobs(study, row, scale, root) if scale_name != "memory" and scale is not None else []
    trained = [(job, store.result(job)) for job in jobs]
    values = [result["quality"] for _, result in trained if result]
    estimate = Estimate.of(values)
    quality = {}
    if estimate:
        quality = {study.quality: estimate.value, "interval": estimate.interval, "values": values}
    return {
        "label": row.label,
        "settings": {"model": model_of(study, row)} | row.settings,
        "paper": row.paper,
        **{key: memory.get(key) for key in ("rules_bytes", "predicted_bytes", "measured_bytes")},
        **{key: memory[key] for key in _MORE if key in memory},
        "quality": quality,
        "seeds": [job["seed"] for job, result in trained if result],
        "lr_multiplier": jobs[0]["lr_multiplier"] if jobs else None,
        "step_seconds": timed.get("step_seconds"),
        "step_cpu": timed.get("environment", {}).get("cpu_model"),
        "failed": [reason for job in (*step_jobs(study, row, scale), *jobs) if (reason := store.reason(job))],
        "notes": memory.get("notes", {}),
    }


def metric_of(row: Mapping[str, Any], metric: str) -> Estimate | None:
    """A row's figure: accuracy, bleu, rules_mb, predicted_mb, measured_mb, flops_percent, rules_flops_percent, or the
    share of a part, such as rules_activations_percent."""
    if metric in row["quality"]:
        return Estimate(row["quality"][metric], row["quality"]["interval"], len(row["seeds"]))
    if metric.endswith("_mb"):
        value = row.get(metric.removesuffix("_mb") + "_bytes")
        return None if value is None else Estimate(value / MB, None, 1)
    if metric.endswith("flops_percent"):
        ratio = row.get(metric.removesuffix("percent") + "ratio")
        return None if ratio is None else Estimate(100 * (ratio - 1), None, 1)
    if metric.endswith("_percent"):
        counting, part = metric.removesuffix("_percent").split("_")
        parts = row.get(f"{counting}_parts")
        return None if parts is None else Estimate(100 * parts[part] / sum(parts.values()), None, 1)
    return None


OF_A_STEP = ("predicted_mb", "measured_mb")


def judge(claim: Mapping[str, Any], rows: list[dict[str, Any]], smaller: bool = False) -> dict[str, Any]:
    """A claim and the rows -> what the paper says, what was found, and the verdict. With smaller images or a narrower
    network than the paper's, the bytes of a step are no evidence for or against it."""
    found, missing = None, ""
    if not smaller or claim["metric"] not in OF_A_STEP:
        found = _every(claim, rows) if claim.get("every") else _one(claim, rows)
        missing = "" if claim["metric"] in QUALITIES else "a row of it is not measured yet"
    verdict, note = (NOT_TESTABLE, missing) if found is None else _verdict(claim, found)
    return {
        "claim": claim["claim"],
        "metric": claim["metric"],
        "paper": claim.get("paper"),
        "ours": None if found is None else found.value,
        "interval": None if found is None else found.interval,
        "verdict": verdict,
        "note": note,
    }


def _one(claim: Mapping[str, Any], rows: list[dict[str, Any]]) -> Estimate | None:
    by_label = {row["label"]: row for row in rows}
    found = metric_of(by_label[claim["row"]], claim["metric"])
    for word in ("minus", "over"):
        if found is not None and word in claim:
            other = metric_of(by_label[claim[word]], claim["metric"])
            if other is None:
                return None
            found = found.minus(other) if word == "minus" else Estimate(found.value / other.value, None, 1)
    return found


def _every(claim: Mapping[str, Any], rows: list[dict[str, Any]]) -> Estimate | None:
    """The largest ratio of our figure to the paper's over all rows that have both; with a bound below too, the one that
    is farthest from 1."""
    pairs = [(metric_of(row, claim["metric"]), row["paper"].get("memory_mb")) for row in rows]
    ratios = [found.value / printed for found, printed in pairs if found is not None and printed]
    complete = ratios and len(ratios) == sum(bool(printed) for _, printed in pairs)
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1) if "at_least" in claim else ratio, default=1.0)
    return Estimate(farthest, None, 1) if complete else None


def _verdict(claim: Mapping[str, Any], found: Estimate) -> tuple[str, str]:
    """Confirmed if the bound holds; with intervals, if it holds at the interval's worse end too."""
    value, printed = found.value, claim.get("paper", 1.0)
    if "digits" in claim:
        return (CONFIRMED if round(value, claim["digits"]) == printed else NOT_CONFIRMED), ""
    if "percent" in claim:
        return (CONFIRMED if abs(value / printed - 1) <= claim["percent"] / 100 else NOT_CONFIRMED), ""
    low, high = claim.get("at_least", -math.inf), claim.get("at_most", math.inf if "at_least" in claim else 1.0)
    holds = low <= value <= high
    if found.interval is None and claim["metric"] in LEARNED:  # one draw confirms nothing
        return NOT_CONFIRMED, f"it {'holds' if holds else 'does not hold'} for a single seed, which has no interval"
    if found.interval is None:
        return (CONFIRMED if holds else NOT_CONFIRMED), ""
    surely = low <= value - found.interval and value + found.interval <= high
    if surely:
        return CONFIRMED, ""
    return NOT_CONFIRMED, "the bound holds for the mean, but not at the interval's end" if holds else ""
