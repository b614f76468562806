"""A run folder: plan.json, record.json, log.jsonl, measures.jsonl and saves/; one process trains in it at a time."""

import errno
import fcntl
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from ..planning.plan import Plan
from .record import RunRecord, differences, read_record, why_not_resumed
from .save import NotSaved, Saves


@dataclass(frozen=True)
class RunFolder:
    """The files that a run writes; in several processes, the first of them does."""

    path: Path
    warn: Callable[[str], None] = warnings.warn

    @property
    def saves(self) -> Saves:
        return Saves(self._named("saves", ""), self.warn)

    @property
    def log(self) -> "Log":
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
    def measures(self) -> "Log":
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
        with _refusing(self.path):
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
            if plan.budget_bytes != before.budget_bytes:
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
        before = read_record(self.record_path)
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
        )

    def write_plan(self, plan: Plan) -> None:
        with _refusing(self.path):
            replace_file(self.plan_path, plan.to_json())

    def write_record(self, record: RunRecord) -> None:
        with _refusing(self.path):
            replace_file(self.record_path, json.dumps(record.to_json(), indent=2))


OURS = ("plan", "record", "log", "measures", "saves", "averaged", "step", "page", "vocabulary")


def _is_ours(name: str) -> bool:
    """Whether another process of this run, or one killed at its start, may have left this file."""
    return name.startswith(".") or name.split(".")[0] in OURS


@dataclass(frozen=True)
class Log:
    """log.jsonl: a line per update and per evaluation; no times, so that equal runs have equal logs."""

    path: Path

    def write(self, line: dict[str, Any]) -> None:
        with _refusing(self.path), self.path.open("ab") as file:
            file.write((json.dumps(line) + "\n").encode())

    def sync(self) -> int:
        """Syncs all lines to disk -> their size in bytes."""
        with _refusing(self.path), self.path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def forget_after(self, update: int) -> None:
        """Drops the lines of later updates, which a resumed run repeats, and one that was cut off."""
        if not self.path.exists():
            return
        with _refusing(self.path):
            lines = self.path.read_bytes().splitlines(keepends=True)
            kept = b"".join(line for line in lines if _update_of(line) <= update)
            self.path.write_bytes(kept)

    def cut(self, size: int, warn: Callable[[str], None]) -> None:
        """Truncates the lines written after a save: the resumed run writes them again."""
        with _refusing(self.path), self.path.open("ab") as file:
            if file.tell() < size:
                warn(f"{self.path} has {file.tell():,} bytes where {size:,} were written: a part of it is lost")
            file.truncate(min(size, file.tell()))


def _update_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    hidden = path.with_name(f".writing-{path.name}")
    with hidden.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    hidden.replace(path)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turns the system's errors into one line: a full disk, a folder without write permission, a file in the way."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        help = "make room, or choose another folder" if full else "choose another folder, or mend this one"
        raise NotSaved(f"{path} cannot be written: {error.strerror}; {help}") from error
