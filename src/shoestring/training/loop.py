"""`train(task, data, epochs=...)`: updates, evaluations and saves, in an order that a resumed run repeats (run.py)."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..distributed import Lost, check_same, joined, leaving_word
from ..errors import Diverged, OverBudget, ShoestringError
from ..exhaustion import telling_of_exhaustion
from ..planning.plan import Plan
from ..randomness import seeded
from ..runs.folder import RunFolder
from ..runs.record import RunRecord
from ..runs.state import Stateful
from ..task import Task
from .apply import LeanTask, apply
from .beginning import begin
from .budget import Budget, Meter, batch_bytes
from .events import Listener, Updated
from .going_on import attempt, fit, replan_run
from .judging import evaluate, evaluation_is_due
from .processes import own_seed, shared
from .recipe import made_recipe
from .resumable import as_data
from .run import Replan, Training
from .saving import finish, save, save_is_due


def train(
    task: Task | LeanTask,
    data: Any,
    *,
    run: str | Path | RunFolder | None = None,
    resume: bool = False,
    start_over: bool = False,
    listeners: Iterable[Listener] = (),
    stateful: Mapping[str, Stateful] | None = None,
    generators: Mapping[str, torch.Generator] | None = None,
    settings: Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    meter: Meter | None = None,
    watch: Callable[[], int] | None = None,
    replan: Replan | bool = False,
    how_to_resume: str = "train(..., resume=True)",
    command: Mapping[str, Any] | None = None,
    **recipe: Any,
) -> RunRecord:
    """Trains a task (lean or not) on data by a recipe (`epochs=` or `updates=`, `schedule=`, `evaluation=`, `seed=`,
    `average=`, `save_every=`, `save_seconds=`) -> the record of the run; the task's model is trained in place.

    `data` has `read(epoch, number)`, or is a list, a DataLoader or any iterable that can be iterated repeatedly; one
    without a length (an IterableDataset, a function that makes a generator) needs `updates`. With a `run` folder the
    run is saved, and `resume` continues it; if all its saves are gone, only with `start_over`, from update 0. Pass
    anything that changes in the run and is not part of the task in `stateful` (objects with state() and restore()) or
    `generators`; `settings` are further ones that must not change when the run is resumed. `meter` measures every
    update, evaluation and save if it costs little, else the first of each, updates with a larger batch than before,
    rewirings and new shapes (training/budget.py says which), and the averaging; `watch` gives the bytes in use at any
    moment. A step over `budget_bytes`, measured or predicted, stops the run, and so does a system that has less
    (`OutOfMemory`); with `replan` it continues from the same update with smaller microbatches of the same batch, or
    with what the function given as `replan`
    returns. `command` is kept in the record, for those that come later. In several processes (torchrun) each is given
    the same data, of whole batches, and trains on its share of each; process 0 writes the folder and calls the
    listeners.
    """
    lean = task if isinstance(task, LeanTask) else apply(task, Plan())
    world = joined()
    folder = RunFolder(Path(run)) if isinstance(run, str | Path) else run
    planned = batch_bytes(lean.task.batch) if lean.task.batch is not None else 0
    budget = Budget(budget_bytes or lean.plan.budget_bytes, meter, watch, planned)
    how = made_recipe(recipe)
    if replan and world.size > 1:
        raise ShoestringError(f"a run of {world.size} processes is not replanned: plan it for less memory, and resume")
    if lean.task.sharded and how.average:
        raise ShoestringError(
            "the averaged weights would be evaluated in one process, which has no room for a model in shards: leave "
            "out averaging, or replicate the model"
        )
    check_same(world, {"seed": how.seed})
    whole = as_data(data, how.seed, how.updates)
    further = dict(settings or {}) | {"remembers": sorted([*(stateful or ()), *(generators or ())])}
    training = Training(lean, shared(whole, lean.task, world), how, folder, budget, further, world)
    training.parts = dict(stateful or {})
    training.generators = dict(generators or {})
    training.listeners = (*listeners,)
    training.replan, training.how_to_resume = replan, how_to_resume
    training.record = training.record.with_(command=dict(command or {}))
    return _go(training, resume, start_over)


def _go(run: Training, resume: bool, start_over: bool = False) -> RunRecord:
    try:
        return _run(run, resume, start_over)
    except Lost as error:
        raise error.with_more(f"{run.safe()}, resume with `{run.how_to_resume}`") from error


def _run(run: Training, resume: bool, start_over: bool) -> RunRecord:
    with ExitStack() as stack:
        stack.enter_context(leaving_word(run.world))
        if run.folder is not None and run.leads:
            stack.enter_context(run.folder.locked())
        stack.enter_context(seeded(own_seed(run.recipe.seed, run.world.rank)))
        stack.enter_context(run.interrupts.heeded())
        begin(run, resume, start_over)
        stack.enter_context(telling_of_exhaustion(lambda: run.doing, lambda: _then(run)))
        gc.collect()  # what tracing and applying left in cycles would be held beside the run
        fit(run)
        while True:
            _agree_on_signals(run)
            judging = f"the evaluation after update {run.update:,}"
            if evaluation_is_due(run) and not attempt(run, judging, lambda: evaluate(run)):
                continue
            if save_is_due(run):
                run.doing = f"the save of update {run.update:,}"
                save(run)
            if run.interrupts.received is not None:
                raise run.interrupted()
            if run.update == run.length:
                return finish(run)
            _advance(run)


def _then(run: Training) -> str:
    return f"{run.safe()}; go on with less by `{run.how_to_resume}` and --budget SIZE --replan"


def _advance(run: Training) -> None:
    """One update. Over the budget, the run stops, or is replanned and tries the same batch again."""
    run.lean.stepper.length, run.lean.stepper.updates = run.length, run.update
    epoch, number = divmod(run.update, len(run.data))
    with run.reading():
        batch = run.data.read(epoch, number)
    lr = _set_lr(run, run.recipe.schedule(run.update + 1))
    began, losses = time.monotonic(), []

    def step() -> None:
        done = run.budget.run(lambda: run.lean.step(batch), batch, run.lean.held, run.lean.stepper.does_more)
        losses.append(float(done))

    try:
        if not attempt(run, f"update {run.update + 1:,}", step):
            return
    except OverBudget as error:
        return replan_run(run, error, batch)
    except Diverged as error:
        raise Diverged(f"{error}; update {run.update + 1:,}, learning rate {lr:g}; {run.safe()}") from error
    (loss,) = losses
    run.update += 1
    run.skipped += bool(run.lean.stepper.skipped)
    seconds, skipped, scale = time.monotonic() - began, run.lean.stepper.skipped, run.lean.stepper.scale
    event = Updated(
        run.update, run.length, epoch + 1, run.epochs, loss, lr, run.budget.peak_bytes, seconds, skipped,
        scale.value if scale is not None else None,
    )  # fmt: skip
    told = {"loss": loss} if math.isfinite(loss) else {"skipped": skipped}
    line = {"update": run.update, "epoch": epoch + 1, **told, "lr": lr}
    run.log(line | run.lean.stepper.told)
    run.note_peak()
    run.measure({"seconds": round(seconds, 6), "bytes": run.budget.last_bytes})
    run.tell(event)
    try:
        run.budget.check()
    except OverBudget as error:
        replan_run(run, error, batch)


def _set_lr(run: Training, factor: float) -> float:
    groups = run.lean.stepper.optimizer.param_groups
    for group in groups:
        group["lr"] = group["initial_lr"] * factor
    return groups[0]["lr"]


def _agree_on_signals(run: Training) -> None:
    """A signal, or the time for a save, in one process is one in all."""
    late = time.monotonic() - run.saved_at > run.recipe.save_seconds
    received, is_late = run.world.max([run.interrupts.received or 0, late])
    run.interrupts.received, run.late = int(received) or None, bool(is_late)
