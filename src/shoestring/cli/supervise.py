"""`shoestring train --supervise`: a parent that starts the run again with less memory where the system had not enough.

The child is the same command without --supervise. If it ends by SIGKILL (which the kernel sends where a cgroup's limit
or the machine's memory is exceeded) or by an allocator's error, the run is resumed from its last save for a smaller
budget: the same batch in smaller microbatches, so that the effective batch stays. The parent holds no tensors.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutOfMemory, ShoestringError
from ..planning.plan import Plan
from ..records import file_bytes
from ..units import format_bytes, parse_bytes, share_of
from .budgets import AUTO
from .options import words_of

KILLED = 128 + signal.SIGKILL  # as a shell tells it
LESS, MOST_STARTS = 0.8, 10  # of the last budget; 0.8**10 is a tenth of the first


def supervise(args: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> int:
    """Runs the command, again with less memory as long as it gets too little -> the exit code of the last."""
    words, budget = words_of(args, supervise=False, folder=folder), args.budget
    for _ in range(MOST_STARTS):
        code = _child(words)
        if code not in (KILLED, OutOfMemory.exit_code):
            return code
        why = "was killed" if code == KILLED else "ran out of memory"
        has_run = (folder / "record.json").exists()
        less = _less(folder, budget)
        if less is None:
            raise ShoestringError(
                f"the run {why} before it had a plan, so nobody knows what would be less: give it --budget SIZE"
            )
        budget = str(less)
        words = (
            _again(args, folder, budget) if has_run else words_of(args, supervise=False, folder=folder, budget=budget)
        )
        how = "goes on from its last save" if has_run and any((folder / "saves").glob("*")) else "starts again"
        say(f"the run {why}: it {how} with a budget of {format_bytes(less)}")
    raise OutOfMemory(f"the run {why} {MOST_STARTS} times, each with less: free some memory, or take a smaller model")


def _again(args: argparse.Namespace, folder: Path, budget: str) -> list[str]:
    """The words that resume a run for another budget: what it was started with is in its record, but for the functions
    of the user's, which must be named again."""
    model = [args.model] if args.model else []
    named = [word for name in ("data", "valid") if (value := getattr(args, name)) for word in (f"--{name}", str(value))]
    more = ["--json"] if args.json else []
    return ["train", *model, *named, "--resume", "--replan", "--run", str(folder), "--budget", budget, *more]


def _less(folder: Path, budget: str | None) -> int | None:
    """A budget below the last one, and below what the plan was predicted to need; None if neither is known."""
    given = None if budget is None or budget == AUTO or share_of(budget) else parse_bytes(budget)
    known = [number for number in (given, _planned(folder / "plan.json")) if number is not None]
    return round(LESS * min(known)) if known else None


def _planned(path: Path) -> int | None:
    """The predicted peak of a run's plan, if it has a plan that can be read."""
    try:
        return Plan.from_json(file_bytes(path).decode()).predicted_peak_bytes
    except (OSError, ValueError, ShoestringError):
        return None


def _child(words: list[str]) -> int:
    """Runs a command of ours -> its exit code, as a shell tells it; signals for this process go to it."""
    process = subprocess.Popen([sys.executable, "-m", "shoestring", *words])
    with _forwarding(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(process: subprocess.Popen) -> Iterator[None]:
    """A terminal sends Ctrl-C to both, and only the child acts on it; what this process alone gets is passed on."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number)),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
