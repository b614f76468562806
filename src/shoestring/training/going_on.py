"""A run that meets its limit goes on with less: the same update again, under a plan that needs less memory."""

import gc
from collections.abc import Callable
from typing import Any

from ..errors import OutOfMemory, OverBudget
from ..exhaustion import is_exhaustion, is_primitives, out_of_memory, primitives_fail
from ..limits import give_back
from ..runs.state import OptimizerState
from .events import Replanned
from .replan import smaller_microbatches
from .run import Training

LESS = 0.8  # of what a step needs, where the system has not that much


def attempt(run: Training, doing: str, act: Callable[[], Any]) -> bool:
    """Does something of a run -> whether the system had the memory for it; if not, the run is replanned for less, or
    the error goes on to where it is told."""
    run.doing, fail = doing, primitives_fail()
    try:
        act()
        return True
    except Exception as error:
        if not is_exhaustion(error) or not run.replan or run.lean.stepper.is_torn or run.world.size > 1:
            raise
        if fail and is_primitives(error):
            raise  # no plan helps, and a new process does
        found = out_of_memory(error, doing, run.safe())
    _replan_exhausted(run, found)  # outside of the except: its traceback holds the step's tensors
    return False


def replan_run(run: Training, error: OverBudget, batch: Any, **told: Any) -> None:
    """Changes the plan under the same model and optimizer state; drops the gradients of the aborted step."""
    if not run.replan:
        raise error
    before, used = run.lean.stepper.optimizer, run.budget.used_bytes
    before.zero_grad(set_to_none=True)
    if run.replan is True:
        run.lean = smaller_microbatches(run.lean, batch, used, run.budget.limit or 0)
    else:
        run.lean = run.replan(run.lean, used)
    if run.lean.stepper.optimizer is not before:
        OptimizerState(run.lean.stepper.optimizer).restore(OptimizerState(before).state())
    run.is_replanned = True
    run.tell(Replanned(run.update, used, run.lean.plan.techniques()))
    run.budget.reset()
    run.record = run.record.with_(
        settings=run.record.settings | {"techniques": run.lean.task.settings},
        predicted_peak_bytes=run.lean.plan.predicted_peak_bytes,
        predicted_bytes=run.lean.plan.predicted_bytes,
        measured_peak_bytes=None,
        measured={},
        **(told or _over(run, used)),
    )
    if run.folder is not None:
        run.folder.write_plan(run.lean.plan)
        run.folder.write_record(run.record)


def _over(run: Training, used: int) -> dict[str, Any]:
    """What a record says of a step that took more than the budget, and not only would have."""
    limit = run.record.budget_bytes
    is_over = run.budget.was_used and limit is not None and used > limit
    return {"over_budget": [*run.record.over_budget, [run.update, used]]} if is_over else {}


def _replan_exhausted(run: Training, error: OutOfMemory) -> None:
    """The system has less than the run needs: microbatches that need a fifth less."""
    gc.collect()
    give_back(from_now_on=True)  # or freed blocks of the old sizes take the room of what must be mapped anew
    run.warn(f"{error}; it is tried again in smaller microbatches")
    batch = _batch(run)
    needed = run.predicted_bytes(batch)
    run.budget.used_bytes, run.budget.limit = needed, min(run.budget.limit or needed, round(LESS * needed))
    short = [*run.record.out_of_memory, [run.update, needed]]
    try:
        replan_run(run, OverBudget(str(error)), batch, out_of_memory=short)
    except OverBudget as none:
        raise OutOfMemory(f"{error}; {none}") from none


def _batch(run: Training) -> Any:
    """The batch of the next update, or of the last one."""
    return run.data.read(*divmod(min(run.update, run.length - 1), len(run.data)))


def fit(run: Training) -> None:
    """A plan that needs more than the budget of this run, as of one that is resumed in less, is changed at once."""
    needed, limit = run.lean.plan.predicted_peak_bytes, run.budget.limit
    if run.replan and needed is not None and limit is not None and needed > limit:
        run.budget.used_bytes, run.budget.was_used = needed, False
        replan_run(run, OverBudget(f"the plan needs {needed:,} bytes, and the budget is {limit:,}"), _batch(run))
