"""A run in progress: what it holds, what it has done, and what it writes and tells of it.

Everything that changes in a run is in `Training.groups()`, and everything that happens next follows from it. So a run
that is killed at any moment and resumed ends with the same bits as one that was not.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from typing import Any

import torch

from ..ambient import Ambient
from ..distributed import ALONE, World
from ..randomness import RandomState
from ..runs.folder import RunFolder
from ..runs.record import RunRecord, describe, environment
from ..runs.state import ModelState, OptimizerState, Parts, Stateful, aliases, find_stateful, fingerprint
from .apply import LeanTask
from .budget import Budget
from .evaluate import Data
from .events import Event, Listener
from .interrupts import Interrupted, Interrupts
from .recipe import Recipe
from .replan import predicted_bytes

Replan = Callable[[LeanTask, int], LeanTask]  # the lean task and the bytes that it took -> one that needs less


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
            settings=self.settings() | settings,
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
        budget.predict = None if lean.task.sharded else self.predicted_bytes  # its model cannot be traced any more
        self.how_to_resume = ""
        self.is_replanned = False
        self.pieces: Callable[[Any], Iterable[Any]] | None = None  # of an evaluation that had no room for whole batches
        self.doing = "the start of the run"
        self.interrupts = Interrupts()
        self.update = self.evaluated = self.log_bytes = self.skipped = 0
        self.late = False  # whether the time for a save has come
        self.quality: float | None = None
        self.best_quality: float | None = None
        self.best_update: int | None = None
        self.saved = (0, 0)  # `update` and `evaluated` at the newest save
        self.seconds_before, self.was_finished = 0.0, False
        self.started = self.saved_at = time.monotonic()

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

    def settings(self) -> dict[str, Any]:
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

    def note_peak(self) -> None:
        """Records the measured peak when it changes; updates that a resumed run repeats are recorded once."""
        peaks, now = [pair for pair in self.record.measured_peaks if pair[0] < self.update], self.budget.peak_bytes
        if now is not None and (not peaks or peaks[-1][1] != now):
            self.record = self.record.with_(measured_peaks=[*peaks, [self.update, now]])

    def reading(self) -> AbstractContextManager[None]:
        """While batches are read: what decoding them takes must fit beside what stays between updates."""
        limit = self.budget.limit
        if limit is None:
            return Ambient.during(room=None)
        return Ambient.during(room=lambda: max(0, limit - sum(tensor.nbytes for tensor in self.lean.held())))

    def predicted_bytes(self, batch: Any) -> int:
        return predicted_bytes(self.lean, batch, getattr(self.budget.measured, "workspace_peak_bytes", None) or 0)

    @property
    def epochs(self) -> int:
        return math.ceil(self.length / len(self.data))

    def ends_epoch(self, update: int) -> bool:
        return update % len(self.data) == 0 or update == self.length

    def write_record(self) -> None:
        measured = self.budget.measured
        now = 0.0 if self.was_finished else time.monotonic() - self.started
        self.record = self.record.with_(
            updates=self.update,
            skipped=self.skipped,
            seconds=self.seconds_before + now,
            quality=self.quality,
            best_quality=self.best_quality,
            best_update=self.best_update,
        )
        self.record = self.record.with_(measured_beside=self.record.measured_beside | self.budget.beside)
        if measured is not None and measured.peak_bytes >= (self.record.measured_peak_bytes or 0):
            self.record = self.record.with_(measured_peak_bytes=measured.peak_bytes, measured=measured.to_json())
        if self.folder is not None and self.leads:
            self.folder.write_record(self.record)

    def log(self, line: dict[str, Any]) -> None:
        if self.folder is not None and self.leads:
            self.folder.log.write(line)

    def measure(self, line: dict[str, Any]) -> None:
        """Writes what an update took: not in the log, so that equal runs have equal logs."""
        if self.folder is not None and self.leads:
            known = {name: value for name, value in line.items() if value is not None}
            self.folder.measures.write({"update": self.update, **known})

    def tell(self, event: Event) -> None:
        for listener in self.listeners if self.leads else ():
            listener(event)

    def interrupted(self) -> Interrupted:
        assert self.interrupts.received is not None
        saved = f"resume with `{self.how_to_resume}`" if self.folder else "without a folder nothing is saved"
        words = f"stopped after update {self.update:,} of {self.length:,}: {saved}"
        return Interrupted(words, self.interrupts.received)

    def safe(self) -> str:
        last = max(self.folder.saves.updates(), default=0) if self.folder else 0
        return f"the save of update {last:,} is good" if last else "there is no save before it"

    def warn(self, words: str) -> None:
        (self.folder.warn if self.folder else warnings.warn)(words)


def _fingerprint_of(data: Data) -> str:
    """The fingerprint of the data's content; "" if it has none."""
    fingerprint = getattr(data, "fingerprint", None)
    return fingerprint() if callable(fingerprint) else ""
