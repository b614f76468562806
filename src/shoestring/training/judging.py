"""The evaluations of a run: at the end of each epoch, and of the run."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..ambient import Ambient
from ..distributed import by_first
from ..errors import OverBudget
from ..randomness import RandomState
from .evaluate import Evaluation, evaluated, few_batches, telling
from .events import Evaluated, Evaluating
from .replan import smaller_pieces
from .run import Training


def evaluation_is_due(run: Training) -> bool:
    due = run.recipe.evaluation is not None and run.update > 0 and run.ends_epoch(run.update)
    return due and run.evaluated != run.update


def evaluate(run: Training) -> None:
    evaluation = run.recipe.evaluation
    assert evaluation is not None
    epoch, began = math.ceil(run.update / len(run.data)), time.monotonic()
    quality = by_first(run.world, lambda: _measured(run, evaluation), with_all=run.lean.task.sharded)
    if not quality:
        return  # interrupted: repeated when the run is resumed
    run.quality, run.evaluated = float.fromhex(quality), run.update
    run.measure({"evaluation_seconds": round(time.monotonic() - began, 6)})
    is_best = evaluation.is_better(run.quality, run.best_quality)
    if is_best:
        run.best_quality, run.best_update = run.quality, run.update
    run.log({"update": run.update, "epoch": epoch, evaluation.name: run.quality})
    run.tell(Evaluated(run.update, epoch, evaluation.name, run.quality, is_best))


def _measured(run: Training, evaluation: Evaluation) -> str:
    """The quality now, to the last bit; "" if a signal interrupted its evaluation."""

    def tell(done: int, total: int) -> None:
        run.tell(Evaluating(run.update, epoch, evaluation.name, done, total))

    def judge() -> str:
        with telling(tell):
            tell(0, 0)
            return float(_metered(run, evaluation)).hex()

    epoch = math.ceil(run.update / len(run.data))
    # With shards it takes all processes, so that none may break off, or repeat batches, alone.
    return judge() if run.lean.task.sharded else run.interrupts.breaking_off(judge) or ""


def _judged(run: Training, evaluation: Evaluation) -> float:
    """The quality, in the microbatches that the run is in by now: the evaluation was made before it was replanned."""
    with run.reading(), Ambient.during(split=run.pieces or (run.lean.task.split if run.is_replanned else None)):
        return evaluated(run.lean.task, evaluation)


def _metered(run: Training, evaluation: Evaluation) -> float:
    """The quality; the first time, under the meter for as many batches as show what one needs, and then in full: under
    it too, if that costs little."""
    judge = partial(_judged, run, evaluation)
    if run.lean.task.sharded or not run.budget.wants("evaluation"):
        return judge()
    random = RandomState({}).state()
    looks: list[Callable[[], float | None]] = [partial(few_batches, judge), judge]
    try:
        for act in looks["evaluation" in run.budget.beside :]:
            if run.budget.wants("evaluation"):
                quality = _in_pieces(run, partial(run.budget.around, "evaluation", act, run.lean.held), random)
                if quality is not None:
                    return quality
                RandomState({}).restore(random)
    except OverBudget as error:
        if not run.replan:
            raise
        run.warn(f"{error}; the run goes on")
        RandomState({}).restore(random)
    return judge()


def _in_pieces(run: Training, look: Callable[[], float | None], random: Any) -> float | None:
    """A look at an evaluation, or at its first batches; over the budget once more in smaller pieces, from the same
    random state, as long as that helps: in evaluation mode examples do not meet, so that only their memory is another.
    A plan with activations on disk leaves less room for a batch than an evaluation takes."""
    try:
        return look()
    except OverBudget as error:
        first, present = error, run.pieces
    task = run.lean.task.with_(split=present or run.lean.task.split)
    for pieces in smaller_pieces(task, run.data.read(0, 0)):
        before, run.pieces = run.budget.beside.pop("evaluation"), pieces
        try:
            RandomState({}).restore(random)
            return look()
        except OverBudget:
            if run.budget.beside["evaluation"] > 0.99 * before:
                break  # it is not ours, and takes its batches as it likes
    run.pieces = present
    raise first
