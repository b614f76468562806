"""The beginning of a run: in a new folder, or from the newest save of one that is resumed."""

from ..distributed import agreed, check_same
from ..errors import DamagedSave, ShoestringError
from ..runs.folder import RunFolder
from ..runs.save import Save
from ..runs.state import run_id
from .processes import newest, restore
from .run import Training
from .saving import forget_old_saves


def begin(run: Training, resume: bool, start_over: bool) -> None:
    for group in run.lean.stepper.optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    if run.folder is None:
        if resume:
            raise ShoestringError("there is nothing to resume: pass the folder of the run")
        return
    folder, new, stretched = run.folder, run.record, _stretched(run)
    check_same(run.world, {"recipe": new.settings})
    if not resume:
        new = new.with_(run_id=run_id(run.lean.model, new.settings, new.data_fingerprint))
    run.record = agreed(run.world, lambda: folder.begin(new, run.lean.plan, resume, stretched) if run.leads else new)
    run.seconds_before = run.record.seconds
    run.folder = folder = folder.of(run.record)
    agreed(run.world, lambda: _require_saves(run, folder, start_over) if run.leads else None)
    save = newest(folder, run.world)
    if save is not None:
        agreed(run.world, lambda: _restore(run, save))
        run.was_finished = run.record.finished and run.update == run.length  # else there is something to train
    if run.leads:
        folder.log.cut(run.log_bytes, folder.warn)
        folder.measures.forget_after(run.update, folder.warn)
        forget_old_saves(run, folder.saves)  # a killed run may have left some
    if run.processes != run.world.size:
        _note_processes(run, folder)


def _require_saves(run: Training, folder: RunFolder, start_over: bool) -> None:
    """A run whose saves were removed does not begin anew unasked."""
    words = folder.lost_saves(run.record)
    if words and folder.saves.updates():
        folder.warn(f"{words}: the run goes on from an earlier one")
    elif words and not start_over:
        raise DamagedSave(
            f"{words}: put them back, or begin again at update 0 with --start-over (in Python, start_over=True)"
        )
    elif words:
        run.record = run.record.anew()
        folder.write_record(run.record)


def _stretched(run: Training) -> str:
    """What, besides the schedule, is spread over the length of the run; "" if nothing is."""
    parts = (getattr(hook, "stretched", "") for hook in run.lean.task.after_update)
    return next(filter(None, parts), "")


def _restore(run: Training, save: Save) -> None:
    save.check_model(run.fingerprint)
    restore(save, run.groups(), run.world.rank, run.recipe.seed)


def _note_processes(run: Training, folder: RunFolder) -> None:
    """The run goes on in another number of processes: sums are in another order, so their last bits may differ."""
    before, run.processes = run.processes, run.world.size
    run.log({"update": run.update, "processes": run.processes, "before": before})
    if run.leads:
        folder.warn(
            f"the run continues in {run.processes} process{'es' * (run.processes > 1)} instead of {before}: sums "
            "are in another order, and what the model draws (dropout) is drawn anew"
        )
