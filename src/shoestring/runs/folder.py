"""A run folder: plan.json, record.json, log.jsonl, measures.jsonl and saves/; one process trains in it at a time."""

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ShoestringError
from ..planning.plan import Plan
from ..records import file_bytes, seal
from .log import Log
from .record import RunRecord, differences, read_record, why_not_resumed
from .save import Saves
from .writing import refusing


@dataclass(frozen=True)
class RunFolder:
    """The files that a run writes; in several processes, the first of them does."""

    path: Path
    warn: Callable[[str], None] = warnings.warn
    run_id: str = ""  # of the run, once its record was read: saves of another are refused

    def of(self, record: RunRecord) -> "RunFolder":
        return replace(self, run_id=record.run_id)

    @property
    def saves(self) -> Saves:
        return Saves(self._named("saves", ""), self.warn, self.run_id)

    @property
    def log(self) -> Log:
        return Log(self._named("log", ".jsonl"))

    @property
    def record_path(self) -> Path:
        return self._named("record", ".json")

    @property
    def plan_path(self) -> Path:
        return self._named("plan", ".json")

    @property
    def averaged_path(self) -> Path:
        return self._named("averaged", ".safetensors")

    @property
    def measures(self) -> Log:
        """Seconds and bytes of each update, which differ from run to run: log.jsonl has none."""
        return Log(self._named("measures", ".jsonl"))

    @property
    def languages_path(self) -> Path:
        return self.path / "vocabulary"

    def _named(self, stem: str, suffix: str) -> Path:
        return self.path / (stem + suffix)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuses a folder in which a process is training already; the lock ends with the process."""
        with refusing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = self._named(".lock", "").open("a")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ShoestringError(
                    f"another process is training in {self.path}: wait for it, or choose another folder"
                ) from None
            yield

    def is_locked(self) -> bool:
        """Whether a process is training in the folder now."""
        try:
            with self._named(".lock", "").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # no lock file: nobody trained here
        return False

    def begin(self, record: RunRecord, plan: Plan, resume: bool, stretched: str = "") -> RunRecord:
        """Claims the folder for a run -> its record: the new one, or that of the run being resumed.

        `stretched` names what is spread over the length of the run, which then cannot change, if anything is.
        """
        if self.record_path.exists():
            before = self._resumed(record, resume, stretched)
            known = self._plan()
            if known is None or known.budget_bytes != plan.budget_bytes:
                self.write_plan(plan)
            return before
        if resume:
            raise ShoestringError(f"{self.path} holds no run to resume: leave --resume out, or name its folder")
        if others := {entry.name for entry in self.path.iterdir() if not _is_ours(entry.name)}:
            raise ShoestringError(
                f"{self.path} holds {min(others)!r}, which no run wrote: choose an empty or a new folder"
            )
        self.write_plan(plan)
        self.write_record(record)
        return record

    def _resumed(self, record: RunRecord, resume: bool, stretched: str) -> RunRecord:
        before = self.record()
        why_not = why_not_resumed(before, record, stretched)
        if not resume:
            why = f" ({why_not})" if why_not else ""
            raise ShoestringError(
                f"{self.path} holds a run already{why}: resume it with --resume, or choose another folder"
            )
        if why_not:
            raise ShoestringError(
                f"the run in {self.path} cannot go on, for {why_not}; resume it as it was started "
                f"(`shoestring train --resume --run {self.path}`), or choose another folder"
            )
        if other := differences(before.environment, record.environment):
            self.warn(f"the run continues elsewhere, so its numbers may differ in their last bits: {other}")
        return before.with_(
            environment=record.environment,
            settings=record.settings,
            budget_bytes=record.budget_bytes,
            command=record.command or before.command,
            data_fingerprint=record.data_fingerprint or before.data_fingerprint,
            finished=before.finished and before.updates == record.settings["updates"],  # not if it goes on for longer
        )

    def record(self) -> RunRecord:
        """The record of the run; refused if a byte of it has changed."""
        return read_record(self.record_path, self.warn)

    def lost_saves(self, record: RunRecord) -> str:
        """What is missing of the saves that the record tells of, in words; "" if nothing is."""
        there = self.saves.updates()
        if not record.updates or (there and there[-1] >= record.updates):
            return ""
        which = f"the save of update {record.updates:,} is gone" if there else "all its saves are gone"
        return f"the run in {self.path} has done {record.updates:,} updates, and {which}"

    def _plan(self) -> Plan | None:
        """The plan that the folder holds; None if it cannot be read."""
        try:
            return Plan.from_json(file_bytes(self.plan_path).decode())
        except (OSError, ValueError, ShoestringError):
            return None

    def write_plan(self, plan: Plan) -> None:
        with refusing(self.path):
            replace_file(self.plan_path, seal(json.loads(plan.to_json())))

    def write_record(self, record: RunRecord) -> None:
        with refusing(self.path):
            replace_file(self.record_path, seal(record.to_json()))


OURS = ("plan", "record", "log", "measures", "saves", "averaged", "step", "page", "vocabulary")


def _is_ours(name: str) -> bool:
    """Whether another process of this run, or one killed at its start, may have left this file."""
    return name.startswith(".") or name.split(".")[0] in OURS


def replace_file(path: Path, text: str | bytes) -> None:
    """Replaces a file atomically."""
    hidden = path.with_name(f".writing-{path.name}")
    with hidden.open("wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)
