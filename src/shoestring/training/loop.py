"""`train(task, data, epochs=...)`: updates, evaluations and saves, in an order that a resumed run repeats.

Everything that changes in a run is in `Training.groups()`, and everything that happens next follows from it. So a run
that is killed at any moment and resumed ends with the same bits as one that was not.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch

from ..distributed import ALONE, Lost, World, agreed, by_first, check_same, is_sharded, joined, leaving_word
from ..errors import Diverged, OutOfMemory, OverBudget, ShoestringError
from ..exhaustion import is_exhaustion, out_of_memory, telling_of_exhaustion
from ..planning.plan import Plan
from ..profiling import profile
from ..randomness import RandomState, seeded
from ..runs.averaging import NoMean, average_saves, averaged
from ..runs.folder import RunFolder
from ..runs.record import RunRecord, describe, environment
from ..runs.save import Save, Saves
from ..runs.state import (
    ModelState,
    OptimizerState,
    Parts,
    Stateful,
    aliases,
    find_stateful,
    fingerprint,
    first_poisoned,
)
from ..task import Task
from .apply import LeanTask, apply
from .budget import Budget, Meter, batch_bytes
from .evaluate import Data, Evaluation, evaluated, telling
from .events import Evaluated, Evaluating, Event, Listener, Replanned, Saved, Updated
from .interrupts import Interrupted, Interrupts
from .processes import gathered, newest, own_seed, restore, shared
from .recipe import Recipe, made_recipe
from .replan import smaller_microbatches
from .resumable import as_data

LESS = 0.8  # of what a step needs, where the system has not that much
Replan = Callable[[LeanTask, int], LeanTask]  # the lean task and the bytes that it took -> one that needs less


def train(
    task: Task | LeanTask,
    data: Any,
    *,
    run: str | Path | RunFolder | None = None,
    resume: bool = False,
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
    run is saved, and `resume` continues it. Pass anything that changes in the run and is not part of the task in
    `stateful` (objects with state() and restore()) or `generators`; `settings` are further ones that must not change
    when the run is resumed. `meter` measures the first two updates and every one with a larger batch than before;
    `watch` gives the bytes in use at any moment. A step over `budget_bytes`, measured or predicted, stops the run, and
    so does a system that has less (`OutOfMemory`); with `replan` it continues from the same update with smaller
    microbatches of the same batch, or with what the function given as `replan` returns. `command` is kept in the
    record, for those that come later. In several processes (torchrun) each is given the same data, of whole
    batches, and trains on its share of each; process 0 writes the folder and calls the listeners.
    """
    lean = task if isinstance(task, LeanTask) else apply(task, Plan())
    world = joined()
    folder = RunFolder(Path(run)) if isinstance(run, str | Path) else run
    planned = batch_bytes(lean.task.batch) if lean.task.batch is not None else 0
    budget = Budget(budget_bytes or lean.plan.budget_bytes, meter, watch, planned)
    how = made_recipe(recipe)
    if replan and world.size > 1:
        raise ShoestringError(f"a run of {world.size} processes is not replanned: plan it for less memory, and resume")
    if any(map(is_sharded, lean.model.parameters())):
        raise ShoestringError(
            "a sharded model is not trained by train(), whose evaluations and saves are those of one process: call "
            "lean.step(batch) in a loop of your own, and save with torch.distributed.checkpoint"
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
    return training.go(resume)


class Training:
    """A run in progress: `update` updates are done, and the model was last evaluated after `evaluated` of them."""

    def __init__(
        self,
        lean: LeanTask,
        data: Data,
        recipe: Recipe,
        folder: RunFolder | None,
        budget: Budget,
        settings: dict[str, Any],
        world: World = ALONE,
    ) -> None:
        self.lean, self.data, self.recipe, self.folder, self.budget = lean, data, recipe, folder, budget
        self.world, self.leads, self.processes = world, world.rank == 0, world.size
        self.length = recipe.length(len(data))
        self.fingerprint = fingerprint(lean.model)
        tied, unsaved = aliases(lean.model)
        self.record = RunRecord(
            task=lean.task.name or type(lean.model).__name__,
            settings=self._settings() | settings,
            environment=environment(),
            budget_bytes=budget.limit,
            predicted_peak_bytes=lean.plan.predicted_peak_bytes,
            predicted_bytes=lean.plan.predicted_bytes,
            quality_name=recipe.evaluation.name if recipe.evaluation else "",
            data_fingerprint=_fingerprint_of(data) if folder is not None else "",
            tied=tied,
            unsaved=unsaved,
        )
        self.parts: dict[str, Stateful] = {}
        self.generators: dict[str, torch.Generator] = {}
        self.listeners: tuple[Listener, ...] = ()
        self.replan: Replan | bool = False
        budget.predict = self._predicted_bytes
        self.how_to_resume = ""
        self.interrupts = Interrupts()
        self.update = self.evaluated = self.log_bytes = self.skipped = 0
        self.late = False  # whether the time for a save has come
        self.quality: float | None = None
        self.best_quality: float | None = None
        self.best_update: int | None = None
        self.saved = (0, 0)  # `update` and `evaluated` at the newest save
        self.seconds_before = 0.0
        self.started = self.saved_at = time.monotonic()

    # -- what a save holds ----------------------------------------------------------------------------------
    def groups(self) -> dict[str, Stateful]:
        """Everything that changes in the run; each group is one file of a save."""
        return {
            "model": ModelState(self.lean.model),
            "optimizer": OptimizerState(self.lean.stepper.optimizer),
            "parts": Parts(find_stateful(self.lean.task) | self.lean.stepper.stateful() | self.parts),
            "run": self,
            "random": RandomState(self.generators),
        }

    def state(self) -> dict[str, Any]:
        names = ("update", "evaluated", "log_bytes", "quality", "best_quality", "best_update", "processes", "skipped")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.saved = self.update, self.evaluated

    def _settings(self) -> dict[str, Any]:
        task, recipe = self.lean.task, self.recipe
        return {
            "task": task.name,
            "model": self.fingerprint[:16],
            "optimizer": describe(task.optimizer if is_dataclass(task.optimizer) else self.lean.stepper.optimizer),
            "clip": task.clip,
            "updates": self.length,
            "batches": len(self.data),
            "schedule": describe(recipe.schedule),
            "seed": recipe.seed,
            "evaluation": recipe.evaluation.name if recipe.evaluation else None,
            "average": recipe.average,
            "techniques": task.settings,
        }

    # -- the run --------------------------------------------------------------------------------------------
    def go(self, resume: bool) -> RunRecord:
        try:
            return self._run(resume)
        except Lost as error:
            raise error.with_more(f"{self._safe()}, resume with `{self.how_to_resume}`") from error

    def _run(self, resume: bool) -> RunRecord:
        with ExitStack() as stack:
            stack.enter_context(leaving_word(self.world))
            if self.folder is not None and self.leads:
                stack.enter_context(self.folder.locked())
            stack.enter_context(seeded(own_seed(self.recipe.seed, self.world.rank)))
            stack.enter_context(self.interrupts.heeded())
            self._begin(resume)
            stack.enter_context(telling_of_exhaustion(lambda: f"update {self.update + 1:,}", self._then))
            self._fit()
            while True:
                self._agree_on_signals()
                if self._evaluation_is_due():
                    self._evaluate()
                if self._save_is_due():
                    self._save()
                if self.interrupts.received is not None:
                    raise self._interrupted()
                if self.update == self.length:
                    return self._finish()
                self._advance()

    def _then(self) -> str:
        return f"{self._safe()}; go on with less by `{self.how_to_resume}` and --budget SIZE --replan"

    def _begin(self, resume: bool) -> None:
        for group in self.lean.stepper.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        if self.folder is None:
            if resume:
                raise ShoestringError("there is nothing to resume: pass the folder of the run")
            return
        folder, new, stretched = self.folder, self.record, self._stretched()
        check_same(self.world, {"recipe": new.settings})
        self.record = agreed(
            self.world, lambda: folder.begin(new, self.lean.plan, resume, stretched) if self.leads else new
        )
        self.seconds_before = self.record.seconds
        save = newest(folder, self.world)
        if save is not None:
            agreed(self.world, lambda: self._restore(save))
        if self.leads:
            folder.log.cut(self.log_bytes, folder.warn)
            folder.measures.forget_after(self.update)
            self._forget_old_saves(folder.saves)  # a killed run may have left some
        if self.processes != self.world.size:
            self._note_processes(folder)

    def _stretched(self) -> str:
        """What, besides the schedule, is spread over the length of the run; "" if nothing is."""
        parts = (getattr(hook, "stretched", "") for hook in self.lean.task.after_update)
        return next(filter(None, parts), "")

    def _restore(self, save: Save) -> None:
        save.check_model(self.fingerprint)
        restore(save, self.groups(), self.world.rank, self.recipe.seed)

    def _note_processes(self, folder: RunFolder) -> None:
        """The run goes on in another number of processes: sums are in another order, so their last bits may differ."""
        before, self.processes = self.processes, self.world.size
        self._log({"update": self.update, "processes": self.processes, "before": before})
        if self.leads:
            folder.warn(
                f"the run continues in {self.processes} process{'es' * (self.processes > 1)} instead of {before}: sums "
                "are in another order, and what the model draws (dropout) is drawn anew"
            )

    def _advance(self) -> None:
        """One update. Over the budget, the run stops, or is replanned and tries the same batch again."""
        self.lean.stepper.length, self.lean.stepper.updates = self.length, self.update
        epoch, number = divmod(self.update, len(self.data))
        batch = self.data.read(epoch, number)
        lr = self._set_lr(self.recipe.schedule(self.update + 1))
        began, found = time.monotonic(), None
        try:
            loss = float(self.budget.run(lambda: self.lean.step(batch), batch, self.lean.held))
        except OverBudget as error:
            return self._replan(error, batch)
        except Diverged as error:
            raise Diverged(f"{error}; update {self.update + 1:,}, learning rate {lr:g}; {self._safe()}") from error
        except Exception as error:
            if not is_exhaustion(error) or not self.replan or self.lean.stepper.is_torn or self.world.size > 1:
                raise
            found = out_of_memory(error, f"update {self.update + 1:,}", self._safe())
        if found is not None:  # outside of the except: its traceback holds the step's tensors
            return self._replan_exhausted(found, batch)
        self.update += 1
        self.skipped += bool(self.lean.stepper.skipped)
        seconds, skipped, scale = time.monotonic() - began, self.lean.stepper.skipped, self.lean.stepper.scale
        event = Updated(
            self.update, self.length, epoch + 1, self.epochs, loss, lr, self.budget.peak_bytes, seconds, skipped,
            scale.value if scale is not None else None,
        )  # fmt: skip
        told = {"loss": loss} if math.isfinite(loss) else {"skipped": skipped}
        line = {"update": self.update, "epoch": epoch + 1, **told, "lr": lr}
        self._log(line | self.lean.stepper.told)
        self._note_peak()
        self._measure({"seconds": round(seconds, 6), "bytes": self.budget.last_bytes})
        self._tell(event)
        try:
            self.budget.check()
        except OverBudget as error:
            self._replan(error, batch)

    def _note_peak(self) -> None:
        """Records the measured peak when it changes; updates that a resumed run repeats are recorded once."""
        peaks, now = [pair for pair in self.record.measured_peaks if pair[0] < self.update], self.budget.peak_bytes
        if now is not None and (not peaks or peaks[-1][1] != now):
            self.record = self.record.with_(measured_peaks=[*peaks, [self.update, now]])

    def _predicted_bytes(self, batch: Any) -> int:
        """The predicted peak of a step on a batch that the plan was not made for; scratch is assumed unchanged."""
        planned = self.lean.plan.predicted_bytes.get("workspace", 0)
        scratch = max(planned, getattr(self.budget.measured, "workspace_peak_bytes", 0))
        return profile(self.lean.task.with_(batch=batch), brief=True).peak_bytes + scratch

    @property
    def epochs(self) -> int:
        return math.ceil(self.length / len(self.data))

    def _set_lr(self, factor: float) -> float:
        groups = self.lean.stepper.optimizer.param_groups
        for group in groups:
            group["lr"] = group["initial_lr"] * factor
        return groups[0]["lr"]

    def _replan(self, error: OverBudget, batch: Any) -> None:
        """Changes the plan under the same model and optimizer state; drops the gradients of the aborted step."""
        if not self.replan:
            raise error
        before, used = self.lean.stepper.optimizer, self.budget.used_bytes
        before.zero_grad(set_to_none=True)
        if self.replan is True:
            self.lean = smaller_microbatches(self.lean, batch, used, self.budget.limit or 0)
        else:
            self.lean = self.replan(self.lean, used)
        if self.lean.stepper.optimizer is not before:
            OptimizerState(self.lean.stepper.optimizer).restore(OptimizerState(before).state())
        self._tell(Replanned(self.update, used, self.lean.plan.techniques()))
        self.budget.reset()
        self.record = self.record.with_(
            settings=self.record.settings | {"techniques": self.lean.task.settings},
            over_budget=[*self.record.over_budget, [self.update, used]],
            measured_peak_bytes=None,
            measured={},
        )
        if self.folder is not None:
            self.folder.write_plan(self.lean.plan)
            self.folder.write_record(self.record)

    def _replan_exhausted(self, error: OutOfMemory, batch: Any) -> None:
        """The system has less than the step needs: the same update again, in microbatches that need a fifth less."""
        (self.folder.warn if self.folder else warnings.warn)(f"{error}; it is tried again in smaller microbatches")
        needed = self._predicted_bytes(batch)
        self.budget.used_bytes, self.budget.limit = needed, min(self.budget.limit or needed, round(LESS * needed))
        try:
            self._replan(OverBudget(str(error)), batch)
        except OverBudget as none:
            raise OutOfMemory(f"{error}; {none}") from none

    def _fit(self) -> None:
        """A plan that needs more than the budget of this run, as of one that is resumed in less, is changed at once."""
        needed, limit = self.lean.plan.predicted_peak_bytes, self.budget.limit
        if self.replan and needed is not None and limit is not None and needed > limit:
            self.budget.used_bytes = needed
            batch = self.data.read(*divmod(self.update, len(self.data)))
            self._replan(OverBudget(f"the plan needs {needed:,} bytes, and the budget is {limit:,}"), batch)

    def _agree_on_signals(self) -> None:
        """A signal, or the time for a save, in one process is one in all."""
        late = time.monotonic() - self.saved_at > self.recipe.save_seconds
        received, is_late = self.world.max([self.interrupts.received or 0, late])
        self.interrupts.received, self.late = int(received) or None, bool(is_late)

    # -- evaluations and saves ------------------------------------------------------------------------------
    def _ends_epoch(self, update: int) -> bool:
        return update % len(self.data) == 0 or update == self.length

    def _evaluation_is_due(self) -> bool:
        due = self.recipe.evaluation is not None and self.update > 0 and self._ends_epoch(self.update)
        return due and self.evaluated != self.update

    def _evaluate(self) -> None:
        evaluation = self.recipe.evaluation
        assert evaluation is not None
        epoch, began = math.ceil(self.update / len(self.data)), time.monotonic()
        quality = by_first(self.world, lambda: self._measured(evaluation))
        if not quality:
            return  # interrupted: repeated when the run is resumed
        self.quality, self.evaluated = float.fromhex(quality), self.update
        self._measure({"evaluation_seconds": round(time.monotonic() - began, 6)})
        is_best = evaluation.is_better(self.quality, self.best_quality)
        if is_best:
            self.best_quality, self.best_update = self.quality, self.update
        self._log({"update": self.update, "epoch": epoch, evaluation.name: self.quality})
        self._tell(Evaluated(self.update, epoch, evaluation.name, self.quality, is_best))

    def _measured(self, evaluation: Evaluation) -> str:
        """The quality now, to the last bit; "" if a signal interrupted its evaluation."""

        def tell(done: int, total: int) -> None:
            self._tell(Evaluating(self.update, epoch, evaluation.name, done, total))

        epoch = math.ceil(self.update / len(self.data))
        with self.interrupts.breakable(), telling(tell):
            tell(0, 0)
            return float(evaluated(self.lean.task, evaluation)).hex()
        return ""

    def _save_is_due(self) -> bool:
        if self.folder is None or self.update == 0 or (self.update, self.evaluated) == self.saved:
            return False
        every = self.recipe.save_every
        wanted = self.late or (every is not None and self.update % every == 0)
        return wanted or self._ends_epoch(self.update) or self.interrupts.received is not None

    def _save(self) -> None:
        assert self.folder is not None
        if bad := first_poisoned(self.lean.model, self.lean.stepper.optimizer):
            lr = self.lean.stepper.optimizer.param_groups[0]["lr"]
            raise Diverged(
                f"{bad} no longer finite at update {self.update:,}, at a learning rate of {lr:g}; {self._safe()}: "
                "lower the learning rate, or clip the gradients"
            )
        check_same(self.world, {"rewired model": self.lean.model})
        folder, groups = self.folder, gathered(self.world, self.groups())
        agreed(self.world, lambda: self._write(folder, groups) if self.leads else None)
        self.saved, self.saved_at = (self.update, self.evaluated), time.monotonic()

    def _write(self, folder: RunFolder, groups: dict[str, Stateful]) -> None:
        self.log_bytes = folder.log.sync()
        path = folder.saves.write(self.update, self.fingerprint, groups)
        self._forget_old_saves(folder.saves)
        self._write_record()
        self._tell(Saved(self.update, path))

    def _forget_old_saves(self, saves: Saves) -> None:
        saves.keep({*saves.updates()[-2:], *self._ends(saves), self.best_update})

    def _ends(self, saves: Saves) -> list[int]:
        """The saves at the ends of epochs whose weights will be averaged."""
        ends = [update for update in saves.updates() if self._ends_epoch(update) and update <= self.update]
        return ends[max(0, len(ends) - self.recipe.average) :]

    def _finish(self) -> RunRecord:
        folder = self.folder
        if self.recipe.average and folder is not None:
            agreed(self.world, lambda: self._average(folder) if self.leads else None)
        self.record = self.record.with_(finished=True)
        self._write_record()
        return self.record

    def _average(self, folder: RunFolder) -> None:
        """Writes averaged.safetensors and evaluates it; the model keeps its last weights."""
        model, evaluation = self.lean.model, self.recipe.evaluation
        saves = [folder.saves.check(update) for update in self._ends(folder.saves)]
        try:
            average_saves(model, saves, folder.averaged_path)
        except NoMean as error:  # the run itself is good, and finished
            self._log({"update": self.update, "averaged": 0})
            return folder.warn(str(error))
        quality = None
        if evaluation:
            with averaged(model, folder.averaged_path, saves[-1]) as mean:
                quality = evaluation(mean)
        self._log({"update": self.update, "averaged": len(saves), "quality": quality})
        self.record = self.record.with_(averaged_quality=quality)

    # -- words ----------------------------------------------------------------------------------------------
    def _write_record(self) -> None:
        measured = self.budget.measured
        self.record = self.record.with_(
            updates=self.update,
            skipped=self.skipped,
            seconds=self.seconds_before + time.monotonic() - self.started,
            quality=self.quality,
            best_quality=self.best_quality,
            best_update=self.best_update,
        )
        if measured is not None and measured.peak_bytes >= (self.record.measured_peak_bytes or 0):
            self.record = self.record.with_(measured_peak_bytes=measured.peak_bytes, measured=measured.to_json())
        if self.folder is not None and self.leads:
            self.folder.write_record(self.record)

    def _log(self, line: dict[str, Any]) -> None:
        if self.folder is not None and self.leads:
            self.folder.log.write(line)

    def _measure(self, line: dict[str, Any]) -> None:
        """Writes what an update took: not in the log, so that equal runs have equal logs."""
        if self.folder is not None and self.leads:
            known = {name: value for name, value in line.items() if value is not None}
            self.folder.measures.write({"update": self.update, **known})

    def _tell(self, event: Event) -> None:
        for listener in self.listeners if self.leads else ():
            listener(event)

    def _interrupted(self) -> Interrupted:
        assert self.interrupts.received is not None
        saved = f"resume with `{self.how_to_resume}`" if self.folder else "without a folder nothing is saved"
        words = f"stopped after update {self.update:,} of {self.length:,}: {saved}"
        return Interrupted(words, self.interrupts.received)

    def _safe(self) -> str:
        last = max(self.folder.saves.updates(), default=0) if self.folder else 0
        return f"the save of update {last:,} is good" if last else "there is no save before it"


def _fingerprint_of(data: Data) -> str:
    """The fingerprint of the data's content; "" if it has none."""
    fingerprint = getattr(data, "fingerprint", None)
    return fingerprint() if callable(fingerprint) else ""
