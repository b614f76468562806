"""The saves of a run, and the average of its last ones at its end."""

import time
from functools import partial

from ..distributed import Lending, agreed, check_same
from ..errors import Diverged, OverBudget
from ..runs.averaging import NoMean, average_saves, averaged
from ..runs.folder import RunFolder
from ..runs.record import RunRecord
from ..runs.save import Saves, lent
from ..runs.state import Stateful, first_poisoned
from ..units import format_bytes
from .events import Saved
from .processes import gathered
from .run import Training


def save_is_due(run: Training) -> bool:
    if run.folder is None or run.update == 0 or (run.update, run.evaluated) == run.saved:
        return False
    every = run.recipe.save_every
    wanted = run.late or (every is not None and run.update % every == 0)
    return wanted or run.ends_epoch(run.update) or run.interrupts.received is not None


def save(run: Training) -> None:
    assert run.folder is not None
    agreed(run.world, lambda: _check_finite(run))
    check_same(run.world, {"rewired model": run.lean.model})
    folder, groups = run.folder, gathered(run.world, run.groups())
    agreed(run.world, lambda: _write(run, folder, groups))
    run.saved, run.saved_at = (run.update, run.evaluated), time.monotonic()


def _check_finite(run: Training) -> None:
    if bad := first_poisoned(run.lean.model, run.lean.stepper.optimizer):
        lr = run.lean.stepper.optimizer.param_groups[0]["lr"]
        raise Diverged(
            f"{bad} no longer finite at update {run.update:,}, at a learning rate of {lr:g}; {run.safe()}: "
            "lower the learning rate, or clip the gradients"
        )


def _write(run: Training, folder: RunFolder, groups: dict[str, Stateful]) -> None:
    """Process 0 writes a save; the others lend it what it has no part of."""
    lending = lent(groups)
    try:
        if run.leads:
            _write_save(run, folder, groups, lending)
    finally:
        lending.finish()


def _write_save(run: Training, folder: RunFolder, groups: dict[str, Stateful], lending: Lending) -> None:
    run.log_bytes = folder.log.sync()
    write = partial(folder.saves.write, run.update, run.fingerprint, groups, lending.whole)
    path = run.budget.around("save", write, run.lean.held)
    forget_old_saves(run, folder.saves)
    run.write_record()
    run.tell(Saved(run.update, path))


def forget_old_saves(run: Training, saves: Saves) -> None:
    saves.keep({*saves.updates()[-2:], *_ends(run, saves), run.best_update})


def _ends(run: Training, saves: Saves) -> list[int]:
    """The saves at the ends of epochs whose weights will be averaged."""
    ends = [update for update in saves.updates() if run.ends_epoch(update) and update <= run.update]
    return ends[max(0, len(ends) - run.recipe.average) :]


def finish(run: Training) -> RunRecord:
    folder = run.folder
    run.doing = "the averaging of the weights"
    if run.recipe.average and folder is not None:
        agreed(run.world, lambda: _average_within(run, folder) if run.leads else None)
    run.record = run.record.with_(finished=True)
    run.write_record()
    return run.record


def _average_within(run: Training, folder: RunFolder) -> None:
    """Averages; over the budget, that is told, for the run is good and over."""
    try:
        run.budget.around("averaging", lambda: _average(run, folder), run.lean.held)
    except OverBudget as error:
        folder.warn(f"{error}; the run is finished, and its weights are good")


def _average(run: Training, folder: RunFolder) -> None:
    """Writes averaged.safetensors and evaluates it; the model keeps its last weights."""
    model, evaluation = run.lean.model, run.recipe.evaluation
    saves = [folder.saves.check(update) for update in _ends(run, folder.saves)]
    try:
        average_saves(model, saves, folder.averaged_path)
    except NoMean as error:  # the run itself is good, and finished
        run.log({"update": run.update, "averaged": 0})
        return folder.warn(str(error))
    quality, dense = None, folder.averaged_path.stat().st_size
    needed = sum(tensor.nbytes for tensor in run.lean.held()) + dense
    if evaluation and run.budget.limit is not None and needed > run.budget.limit:
        folder.warn(
            f"the averaged weights are not evaluated: they would be {format_bytes(dense)} beside the model, which "
            "the budget has no room for; `shoestring evaluate RUN --weights averaged` does it where there is some"
        )
    elif evaluation:
        with averaged(model, folder.averaged_path, saves[-1]) as mean:
            quality = evaluation(mean)
    run.log({"update": run.update, "averaged": len(saves), "quality": quality})
    run.record = run.record.with_(averaged_quality=quality)
