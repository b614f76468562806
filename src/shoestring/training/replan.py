"""Replanning in the middle of a run: smaller microbatches of the same batch, for the same model and optimizer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..errors import OverBudget, ShoestringError
from ..profiling import profile
from ..task import Task
from ..techniques.microbatch import SPLITS, ByExamples, ByTokens
from .apply import LeanTask


def smaller_microbatches(lean: LeanTask, batch: Any, used_bytes: int, limit_bytes: int) -> LeanTask:
    """A lean task, a batch of which a step took `used_bytes`, and the budget -> the task with microbatches that fit.

    The sum of gradients is that of the same batch, so the effective batch is the same; batch norm sees fewer examples
    at a time. What a trace does not see of the step (scratch inside operators) is taken to stay as it is.
    """
    task = lean.task.with_(batch=batch)
    unseen = max(0, used_bytes - profile(task, brief=True).peak_bytes)
    for split in _smaller(task):
        try:
            peak = profile(task.with_(split=split), brief=True).peak_bytes + unseen
        except ShoestringError:
            continue  # sentences that are longer, or an optimizer that takes one microbatch only
        if peak <= limit_bytes:
            plan = lean.plan.with_(microbatch=split.size, predicted_peak_bytes=peak, predicted_bytes={})
            settings = lean.task.settings | {"microbatch": split.size}
            return lean.again(lean.task.with_(split=split, settings=settings), plan)
    raise OverBudget("no smaller microbatch fits either: plan the run anew with `shoestring plan`, or raise the budget")


def _smaller(task: Task) -> Iterator[ByExamples | ByTokens]:
    """Splits of half the present size, a quarter, and so on, down to one."""
    now: Any = task.split
    if not isinstance(now, ByExamples | ByTokens):
        now = SPLITS["examples" if task.padding is None else "tokens"](1, task.padding)
        now = replace(now, size=now.measure(task.batch))
    size = now.size
    while size > 1:
        size = (size + 1) // 2
        yield replace(now, size=size)
