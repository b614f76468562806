"""Replanning in the middle of a run: smaller microbatches of the same batch, for the same model and optimizer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ..errors import OverBudget, ShoestringError
from ..profiling import profile
from ..task import Task
from ..techniques.microbatch import split_of, weighing
from ..techniques.microbatch.pieces import ByExamples, ByTokens, Split
from .apply import LeanTask


def predicted_bytes(lean: LeanTask, batch: Any, scratch_bytes: int = 0) -> int:
    """The predicted peak of a step on a batch that the plan was not made for. The scratch of operators is assumed to be
    the plan's, or what was measured since, whichever is more."""
    scratch = max(lean.plan.predicted_bytes.get("workspace", 0), scratch_bytes)
    return profile(lean.task.with_(batch=batch), brief=True).peak_bytes + scratch


def smaller_microbatches(lean: LeanTask, batch: Any, used_bytes: int, limit_bytes: int) -> LeanTask:
    """A lean task, a batch on which a step took `used_bytes`, and the budget -> the task with microbatches that fit.

    Gradients are accumulated over the same batch, so the effective batch size stays; batch norm sees fewer examples
    at a time. The bytes that a trace does not see (scratch inside operators, a loss that allocates by its data) are
    assumed to stay as they are; or, if nothing fits then, to shrink with the microbatch: the next step is measured.
    """
    task = lean.task.with_(batch=batch)
    unseen = max(0, used_bytes - profile(task, brief=True).peak_bytes)
    now = _present(task)
    items = _weighing(task, now)
    peak_of = cache(lambda split: _peak(task, split))  # a trace each: the first that fits is the last that is made
    for left in (lambda size: 1.0, lambda size: size / now.size):
        for split in _smaller(now):
            if (peak := peak_of(split)) is None:
                continue
            if (expected := round(peak + unseen * left(split.size))) <= limit_bytes:
                value = _resized(lean.plan.microbatch, split.size)
                plan = lean.plan.with_(microbatch=value, predicted_peak_bytes=expected, predicted_bytes={})
                plan = plan.with_(predicted_time_ratio=None)  # of the plan before
                settings = lean.task.settings | {"microbatch": value}
                return lean.continued_as(lean.task.with_(**items, split=split, settings=settings), plan)
    raise OverBudget("no smaller microbatch fits either: plan the run anew with `shoestring plan`, or raise the budget")


def smaller_pieces(task: Task, batch: Any) -> Iterator[Split]:
    """A task and a batch -> ways to cut batches into ever smaller pieces than now; none if they cannot be cut."""
    try:
        yield from _smaller(_present(task.with_(batch=batch)))
    except ShoestringError:
        return


def _resized(value: Any, size: int) -> Any:
    """A plan's microbatch with another size."""
    return {**value, "size": size} if isinstance(value, Mapping) else size


def _weighing(task: Task, split: Split) -> dict[str, Any]:
    try:
        return weighing(task, split)
    except ShoestringError as error:
        raise OverBudget(f"smaller microbatches do not help: {error}") from error


def _peak(task: Task, split: Split) -> int | None:
    """None if such microbatches are refused: a sentence is longer, or the optimizer takes only one."""
    try:
        return profile(task.with_(split=split), brief=True).peak_bytes
    except ShoestringError:
        return None


def _present(task: Task) -> Split:
    """How the task is split now; one that is not, as a single microbatch."""
    now: Any = task.split
    if not isinstance(now, ByExamples | ByTokens):
        now = split_of(task, 1)
        now = replace(now, size=now.measure(task.batch))
    return now


def _smaller(now: Split) -> Iterator[Split]:
    """Splits of half the present size, a quarter, and so on, down to one."""
    size = now.size
    while size > 1:
        size = (size + 1) // 2
        yield replace(now, size=size)
