"""Jobs in a shared folder: each is done once, by whichever worker claims it first, on any machine that sees the folder.

    STORE/waiting/ID.json          what is to be done
    STORE/claimed/ID@WORKER.json   the same file, renamed: only one worker's rename succeeds
    STORE/done/ID.json             the result, with a checksum
    STORE/failed/ID.json           the reason; it does not stop the others
    STORE/work/ID/                 the folder in which the job is done: its run and saves, from which it resumes

A worker touches its claim while it works. A claim that was not touched for LEASE_SECONDS belongs to a dead worker and
is taken over, by rename again. An ID is the hash of all that decides the result, so equal jobs of two studies are one.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from ..records import file_bytes, read_object
from ..runs.folder import replace_file
from ..techniques import WORDS

LEASE_SECONDS = 120.0
VERSION = 1  # of what decides a result besides its job: raised where a change of ours makes results differ


def identify(job: dict[str, Any]) -> str:
    """A job -> 16 hexadecimal digits, equal for jobs of equal results only: settings that ask for nothing are left out,
    so that the dense network of one study is that of another."""
    return hashlib.sha256(_canonical(job | {"settings": _asking(job), "version": VERSION})).hexdigest()[:16]


def _asking(job: dict[str, Any]) -> Any:
    settings = job.get("settings")
    if not isinstance(settings, dict):
        return settings  # of a damaged file
    idle = {word.name for word in WORDS if not word.asks(settings.get(word.name))}
    sizes = job.get("sizes", {})
    if settings.get("microbatch") == sizes.get("batch", sizes.get("tokens")):
        idle.add("microbatch")
    return {key: value for key, value in settings.items() if key not in idle}


def size(job: dict[str, Any]) -> int:
    """The tokens or examples of a job's step."""
    return next(job["sizes"][key] for key in ("tokens", "batch") if key in job["sizes"])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def worker_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


@dataclass(frozen=True)
class Claim:
    """A job that this worker does."""

    store: "Store"
    id: str
    path: Path
    job: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.store.path / "work" / self.id

    def renew(self) -> bool:
        """Tells the others that the job is being done; False if it was taken over."""
        try:
            os.utime(self.path)
        except FileNotFoundError:
            return False
        return True

    def finish(self, result: dict[str, Any]) -> None:
        self.store.write("done", self.id, {"job": self.job, "result": result})
        self.path.unlink(missing_ok=True)

    def fail(self, reason: str) -> None:
        self.store.write("failed", self.id, {"job": self.job, "reason": reason})
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Puts the job back for whoever comes next."""
        with suppress(FileNotFoundError):
            self.path.rename(self.store.path / "waiting" / f"{self.id}.json")


@dataclass(frozen=True)
class Store:
    """The folder of jobs and their results."""

    path: Path

    def __post_init__(self) -> None:
        try:
            for name in ("waiting", "claimed", "done", "failed", "work"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShoestringError(f"{self.path} cannot hold studies: {error.strerror}; name another --store") from error

    def add(self, job: dict[str, Any], again: bool = False) -> str:
        """Queues a job unless it is done, failed (but `again`), being done or waiting -> its id."""
        id = identify(job)
        if self.result(job) is not None:
            return id
        if again:
            (self.path / "failed" / f"{id}.json").unlink(missing_ok=True)
        if (self.path / "failed" / f"{id}.json").exists() or any(self._claims(id)):
            return id
        replace_file(self.path / "waiting" / f"{id}.json", json.dumps(job, indent=2))
        return id

    def adopt(self, job: dict[str, Any], result: dict[str, Any]) -> bool:
        """Takes over a result that was found elsewhere -> whether it was new."""
        if self.result(job) is not None:
            return False
        self.write("done", identify(job), {"job": job, "result": result})
        return True

    def claim(self, ids: list[str], worker: str) -> Claim | None:
        """The first of these jobs that waits, or whose worker is dead; None if there is none."""
        for id in ids:
            source = self.path / "waiting" / f"{id}.json"
            dead = [path for path in self._claims(id) if _age(path) > LEASE_SECONDS]
            for place in [source, *dead]:
                target = self.path / "claimed" / f"{id}@{worker}.json"
                try:
                    place.rename(target)
                    os.utime(target)
                    return Claim(self, id, target, read_object(target.read_bytes()))
                except FileNotFoundError:
                    continue  # another worker was quicker
                except ValueError:
                    target.unlink(missing_ok=True)  # a damaged file of the queue: `add` writes it again
        return None

    def _claims(self, id: str) -> Iterator[Path]:
        return (self.path / "claimed").glob(f"{id}@*.json")

    def result(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """The result of a job that is done; a damaged file counts as none, and is removed."""
        return self.read(identify(job))

    def read(self, id: str) -> dict[str, Any] | None:
        path = self.path / "done" / f"{id}.json"
        try:
            record = read_object(file_bytes(path))
            seal = record.pop("sha256")
            if seal == hashlib.sha256(_canonical(record)).hexdigest() and isinstance(record["result"], dict):
                return record["result"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, AttributeError, TypeError):
            pass
        path.unlink(missing_ok=True)
        return None

    def write(self, folder: str, id: str, record: dict[str, Any]) -> None:
        sealed = record | {"sha256": hashlib.sha256(_canonical(json.loads(json.dumps(record)))).hexdigest()}
        replace_file(self.path / folder / f"{id}.json", json.dumps(sealed, indent=2))

    def reason(self, job: dict[str, Any]) -> str | None:
        """Why a job failed; None if it did not."""
        try:
            return str(read_object((self.path / "failed" / f"{identify(job)}.json").read_bytes())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def state(self, job: dict[str, Any]) -> str:
        """done, failed, running or waiting."""
        id = identify(job)
        if self.result(job) is not None:
            return "done"
        if self.reason(job) is not None:
            return "failed"
        return "running" if any(_age(path) <= LEASE_SECONDS for path in self._claims(id)) else "waiting"


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
