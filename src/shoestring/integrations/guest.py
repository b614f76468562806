"""A lean task as a guest in another library's loop, which has the data, the schedule and the order of things.

The host's loop calls `backward` for each of its batches, and then `optimizer.step()`, as it always does. Where the host
accumulates gradients over several batches, they are in memory while the next batch runs, and so are the batches that it
has fetched ahead: the plan is made for that.
"""

import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .. import plan as make_plan
from ..errors import OverBudget, ShoestringError
from ..measuring.calibration import load_cache
from ..measuring.counted import is_available, measure_counted
from ..planning.plan import Plan
from ..profiling import profile
from ..task import Task, whole
from ..techniques.words import described
from ..training.apply import LeanTask, apply
from ..training.budget import Budget, batch_bytes
from ..training.loop_optimizer import LoopOptimizer
from ..training.replan import predicted_bytes, smaller_microbatches
from ..units import format_bytes, parse_bytes
from ..used_up import UsedUp

METER_BYTES = 16_000_000  # that torch.profiler may take per microbatch, or a twentieth of the budget where that is more


class Guest:
    """A task under a plan, made for `budget` bytes unless it is given, inside a loop of `accumulation` batches,
    which holds `fetched` others beside the one that runs.

    `backward` measures and keeps the budget as `train` does: a batch for which too much is predicted, or that took too
    much, goes on in smaller microbatches, and `warn` is told. Steps are measured where the counter works, or where the
    budget has room for torch.profiler, and go by their prediction elsewhere.
    """

    def __init__(
        self,
        task: Task,
        budget: str | int | None,
        *,
        risk: str = "neutral",
        plan: Plan | None = None,
        accumulation: int = 1,
        fetched: int = 0,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        fetched_bytes = fetched * batch_bytes(task.batch)
        self.budget_bytes = parse_bytes(budget) if budget is not None else None
        self.warn = warn
        limit = None if self.budget_bytes is None else self.budget_bytes - fetched_bytes
        if accumulation > 1 and task.clip is None:
            task = task.with_(clip=math.inf)  # gradients are needed at the end of the update
        if plan is None and limit is None:
            raise ShoestringError('there is nothing to plan for: pass budget="4GB", or a plan')
        if accumulation > 1:
            task = task.with_(split=twice)
        if plan is None:
            plan = make_plan(task, max(1, limit or 0), risk, warn=warn)
        self.fetched_bytes = fetched_bytes
        lean = apply(task, plan)
        pieces = len(list(lean.task.split(task.batch)))
        self.lean = _ready(lean)
        meter = measure_counted if is_available() or self._has_room_for_meter(limit, pieces) else None
        self._budget = Budget(limit, meter, None, batch_bytes(task.batch), self._predicted)
        self._updates = Budget(limit, meter, None)
        self._batch: Any = None

    def _has_room_for_meter(self, limit: int | None, pieces: int) -> bool:
        """Where torch.profiler is the meter, its own memory is no tensor's, and must not break the budget either."""
        predicted = self.lean.plan.predicted_peak_bytes
        return limit is None or predicted is None or predicted + pieces * meter_room(limit) <= limit

    def backward(self, batch: Any, weight: float = 1.0) -> Tensor:
        """A batch of the host -> its loss times `weight`; its gradients are added to the model's."""
        try:
            loss = self._budget.run(lambda: self.lean.backward(batch, weight), batch, self._held)
        except OverBudget:
            self._shrink(batch, self._budget)
            loss = self._budget.run(lambda: self.lean.backward(batch, weight), batch, self._held)
        self._batch = batch
        return loss

    def update(self) -> None:
        """The update from the gradients of all batches since the last, under the meter; the budget is checked then."""
        batch, self._batch = self._batch, None
        if batch is None:  # nothing to update from, which the stepper says best
            return self.lean.stepper.complete()
        self._updates.run(lambda: self.lean.stepper.complete(), batch, self._held)
        for budget in (self._budget, self._updates):
            try:
                budget.check()
            except OverBudget:
                self._shrink(batch, budget)

    def metrics(self) -> dict[str, int]:
        """The memory of a step in bytes: measured, allowed and predicted, as far as each is known."""
        known = {
            "peak_bytes": max(filter(None, (self._budget.peak_bytes, self._updates.peak_bytes)), default=None),
            "predicted_bytes": self.lean.plan.predicted_peak_bytes,
        }
        found = {f"mem/{name}": number + self.fetched_bytes for name, number in known.items() if number is not None}
        return found | ({} if self.budget_bytes is None else {"mem/budget_bytes": self.budget_bytes})

    def describe(self) -> str:
        """The plan in one line."""
        settings = described(self.lean.plan.techniques().items())
        peak = self.lean.plan.predicted_peak_bytes
        told = f", predicted peak {format_bytes(peak + self.fetched_bytes)}" if peak is not None else ""
        limit = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes is not None else ""
        return f"Shoestring: {settings or 'plain training fits'}{told}{limit}"

    def _held(self) -> list[Tensor]:
        gradients = (parameter.grad for parameter in self.lean.model.parameters())
        made = (gradient for gradient in gradients if gradient is not None and not isinstance(gradient, UsedUp))
        return [*self.lean.held(), *made]

    def _predicted(self, batch: Any) -> int:
        return predicted_bytes(self.lean, batch)

    def _shrink(self, batch: Any, over: Budget) -> None:
        used = over.used_bytes
        self.lean = smaller_microbatches(self.lean, batch, used, over.limit or 0)
        pieces = len(list(self.lean.task.split(batch)))
        for budget in (self._budget, self._updates):
            budget.reset()
            budget.meter = budget.meter if self._has_room_for_meter(over.limit, pieces) else None
        size = self.lean.plan.techniques()["microbatch"]
        self.warn(f"a step of {format_bytes(used)} was over the budget: it goes on in microbatches of {size}")


def meter_room(limit: int) -> int:
    """A budget -> the bytes of it that the meter may need per microbatch of a step."""
    return max(METER_BYTES, limit // 20)


def _ready(lean: LeanTask) -> LeanTask:
    """A lean task without the batch that it was planned for, which only predictions need; its plan says the peak."""
    task, plan = lean.task, lean.plan
    if plan.predicted_peak_bytes is None:
        traced = profile(task, load_cache(), brief=True)
        plan = plan.with_(predicted_peak_bytes=traced.peak_bytes, predicted_bytes=traced.bytes_by_category)
    return LeanTask(task.with_(batch=None, split=whole if task.split is twice else task.split), plan)


def twice(batch: Any) -> Iterator[Any]:
    """A batch that comes after another one of the same update, whose gradients are there: what the second one needs is
    what the third does."""
    yield batch
    yield batch


class GuestOptimizer(LoopOptimizer):
    """`lean.optimizer` whose updates are measured and kept within the budget, for a host that calls `step()`."""

    def __init__(self, guest: Guest) -> None:
        super().__init__(guest.lean.stepper)
        self.guest = guest

    def _complete(self) -> None:
        self.guest.update()


def move_scheduler(scheduler: Any, theirs: Any, ours: LoopOptimizer) -> None:
    """Lets a scheduler that was made for one optimizer drive another with the same groups."""
    if len(theirs.param_groups) != len(ours.param_groups):
        raise ShoestringError(
            f"the scheduler was made for {len(theirs.param_groups)} groups of parameters, and the plan's optimizer has "
            f"{len(ours.param_groups)}: make the scheduler for an optimizer with these"
        )
    for old, new in zip(theirs.param_groups, ours.param_groups, strict=True):
        new |= {key: old[key] for key in ("lr", "initial_lr") if key in old}
    scheduler.optimizer = ours
    ours.step = types.MethodType(_tracked, ours)  # type: ignore[method-assign]


def _tracked(optimizer: LoopOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    """A step that a scheduler sees, as torch.optim.lr_scheduler patches the one that it is made for."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return type(optimizer).step(optimizer, closure)


_tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
