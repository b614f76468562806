"""What `shoestring train` says before the first update and after the last: the plan, its cost, and the memory."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..techniques.words import described
from ..units import format_bytes

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..runs.record import RunRecord

WIDTH = 10  # of the names in front


def row(name: str, words: str) -> str:
    return f"{name:<{WIDTH - 1}} {words}"


def plan_words(plan: "Plan", risk: str) -> str:
    """The techniques of a plan, what they may change, and their predicted cost, on one line."""
    words = described(plan.techniques().items()) or "no technique: plain PyTorch"
    known = [f"risk {risk}"] if plan.techniques() else []
    if plan.predicted_peak_bytes is not None:
        budget = f" of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else ""
        objects = f" + {format_bytes(plan.object_bytes, 2)} of Python objects" if plan.object_bytes else ""
        known.append(f"predicted {format_bytes(plan.predicted_peak_bytes)} of tensors{objects}{budget}")
    if plan.predicted_time_ratio is not None:
        known.append(f"{plan.predicted_time_ratio:.2f}x the time of plain training")
    return f"{words} ({', '.join(known)})" if known else words


def summary(record: "RunRecord", already: bool = False) -> Iterator[str]:
    """The record of a run that has ended, line by line; `already`: it had before, and nothing was trained."""
    ended = "was finished already: " if already else ""
    updates = "update" if record.updates == 1 else "updates"
    skipped = f", {record.skipped:,} of them skipped by the loss scale" if record.skipped else ""
    yield f"{record.task}: {ended}{record.updates:,} {updates} in {record.seconds:,.1f} s{skipped}"
    if record.quality is not None and record.best_quality is not None:
        yield row(quality_name(record.quality_name), _quality(record))
    if record.measured_peak_bytes is not None and record.predicted_peak_bytes is not None:
        yield row("memory", _memory(record, record.predicted_peak_bytes, record.measured_peak_bytes))


def quality_name(name: str) -> str:
    """The name of what a run is judged by; a loss is told from the one that is trained on."""
    return "valid loss" if name == "loss" else name


def quality_words(name: str, value: float) -> str:
    """A quality in digits; an accuracy is a percentage."""
    return f"{value:.1f}%" if name == "accuracy" else f"{value:.4g}"


def _quality(record: "RunRecord") -> str:
    assert record.quality is not None and record.best_quality is not None
    last, best = (quality_words(record.quality_name, value) for value in (record.quality, record.best_quality))
    averaged = record.averaged_quality
    more = f", averaged {quality_words(record.quality_name, averaged)}" if averaged is not None else ""
    return f"{last} (best: {best} at update {record.best_update:,}{more})"


def _memory(record: "RunRecord", predicted: int, measured: int) -> str:
    words = f"predicted {format_bytes(predicted)}, measured {format_bytes(measured)}"
    if reason := why_less(record):
        words += f" (less: {reason})"
    is_over, is_short = record.over_budget, record.out_of_memory
    if is_over or is_short:
        words += " since it was replanned"
    if record.budget_bytes:
        budget = format_bytes(record.budget_bytes)
        words += f"; over the budget of {budget} {_when(is_over)}" if is_over else f", within the budget of {budget}"
    return words + (f"; the system had less than a step needs {_when(is_short)}" if is_short else "")


def _when(found: list[list[int]]) -> str:
    """Updates and bytes -> how often it was, and when."""
    times = "once" if len(found) == 1 else f"{len(found)} times"
    return f"{times}, {', '.join(f'after update {update:,}: {format_bytes(size)}' for update, size in found)}"


def why_less(record: "RunRecord") -> str:
    """Why clearly less was measured than predicted; "" if it was not."""
    predicted, measured = record.predicted_peak_bytes, record.measured_peak_bytes
    if predicted is None or measured is None or measured >= 0.99 * predicted:
        return ""
    if record.updates < 2:
        return "the optimizer's state is made by the first update and needs its memory from the second on"
    if record.skipped >= record.updates - 1:
        return "the loss scale skipped the updates, so there is no optimizer state yet"
    return "no batch that was measured was as large as the one planned for"
