"""The system's errors at every call of a save, flipped bits in every file of a run, and numbers that are not finite."""

import errno
import io
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small import Noise, right_answers, task

from shoestring import Adam, Plan, ShoestringError, apply
from shoestring.errors import Diverged
from shoestring.reporting.page import write_steps
from shoestring.reporting.page.steps import steps_of
from shoestring.runs.export import export
from shoestring.runs.folder import RunFolder
from shoestring.runs.log import Log
from shoestring.runs.record import read_record
from shoestring.runs.save import NotSaved, Saves, check
from shoestring.runs.start import open_weights
from shoestring.runs.state import ModelState, OptimizerState
from shoestring.training.loop import train

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EINTR, errno.EDQUOT)
CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open", "scandir", "stat")


# -- a save --------------------------------------------------------------------------------------------------------
@contextmanager
def failing(place: int | None, code: int = 0) -> Iterator[list[str]]:
    """Counts the calls of the system that are made inside; the one at `place` fails."""
    seen: list[str] = []

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 == place:
                raise OSError(code, os.strerror(code))
            return call(*args, **kwargs)

        return called

    before = {name: getattr(os, name) for name in CALLS} | {"io.open": io.open}
    opened, write = io.open, io.FileIO.write
    try:
        for name in CALLS:
            setattr(os, name, counting(name, before[name]))
        io.open = counting("io.open", lambda *a, **k: _Writing(opened(*a, **k), counting("write", write)))
        yield seen
    finally:
        for name in CALLS:
            setattr(os, name, before[name])
        io.open = opened


class _Writing:
    """An open file whose writes are counted too."""

    def __init__(self, file: Any, write: Callable[..., Any]) -> None:
        self._file, self._write = file, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        return self._write(self._file, data) if isinstance(self._file, io.FileIO) else self._file.write(data)

    def __enter__(self) -> "_Writing":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def save_calls(share: float, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """Each call of a save fails once with each error: the save is whole, or it is told and the one before is whole."""
    draw, found, bad = random.Random(seed), Counter(), []
    small = task()
    groups = {"model": ModelState(small.model), "optimizer": OptimizerState(apply(small, Plan()).stepper.optimizer)}
    total = _attempt(folder / "count", groups, None, 0, Counter(), [])
    for code in ERRORS:
        for place in range(total):
            if draw.random() < share:
                _attempt(folder / f"{code}-{place}", groups, place, code, found, bad)
    return found, bad


def _attempt(folder: Path, groups: dict, place: int | None, code: int, found: Counter, bad: list[str]) -> int:
    told: list[str] = []
    saves = Saves(folder, told.append)
    saves.write(1, "f", groups)
    saves.write(2, "f", groups)
    what = f"error {errno.errorcode.get(code, code)} at call {place}"
    with failing(place, code) as seen:
        try:
            saves.write(3, "f", groups)
            saves.keep({2, 3})
            found["saved"] += 1
        except NotSaved as error:
            found["told"] += 1
            if "\n" in str(error):
                bad.append(f"{what}: two lines")
        except OSError as error:
            bad.append(f"{what} ({seen[-1]}): a bare {type(error).__name__}")
    newest = saves.newest()
    if newest is None or newest.update < 2:
        bad.append(f"{what}: no save is left")
    shutil.rmtree(folder, ignore_errors=True)
    return len(seen)


# -- flipped bits --------------------------------------------------------------------------------------------------
def finished_run(folder: Path) -> Path:
    run = folder / "run"
    lean = apply(task(Adam()), Plan(optimizer="8bit", microbatch=2))
    train(lean, Noise(), run=run, epochs=3, average=2, evaluation=right_answers())
    write_steps(run, {})
    export(run, run / "exported.safetensors")
    return run


def flips(count: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """Bits flipped over every file of a run folder, in proportion to nothing: each file as often."""
    run, draw, found, bad = finished_run(folder), random.Random(seed), Counter(), []
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    for number in range(count):
        path = files[number % len(files)]
        whole = path.read_bytes()
        place, bit = draw.randrange(len(whole)), draw.randrange(8)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            seen = noticed(path)
        except Exception as error:
            bad.append(f"{path.name}, byte {place}, bit {bit}: {type(error).__name__}: {error}")
            continue
        finally:
            path.write_bytes(whole)
        found["noticed" if seen else "missed"] += 1
        if not seen:
            bad.append(f"{path.name}, byte {place}, bit {bit}: not noticed")
    return found, bad


def noticed(path: Path) -> bool:
    """Whether what reads a file of a run folder sees that it has changed."""
    told: list[str] = []
    if path.suffix == ".jsonl":
        return bool(Log(path).damage())
    if path.name == "step.json":
        return bool(steps_of(path.parent, None, None)[1])
    readers = {"record.json": lambda: read_record(path, told.append), "plan.json": lambda: Plan.from_json(_text(path))}
    read = readers.get(path.name, lambda: check(path.parent) if "saves" in path.parts else open_weights(path))
    try:
        read()
    except ShoestringError as error:
        assert "\n" not in str(error)
        return True
    return bool(told)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogateescape")


# -- numbers that are not finite -----------------------------------------------------------------------------------
PLANS = (Plan(), Plan(precision="fp16"), Plan(precision="bf16", checkpoint="residual-1"), Plan(optimizer="8bit"))


def poisoned(count: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """NaN or infinity in an output, input, gradient or weight at one moment: told, or skipped, and never saved."""
    draw, found, bad = random.Random(seed), Counter(), []
    for number in range(count):
        lean, where = apply(task(Adam()), draw.choice(PLANS)), draw.choice(["output", "gradient", "weight", "input"])
        value, moment = draw.choice([float("nan"), float("inf"), -float("inf")]), draw.randrange(1, 12)
        data, run = _Poison(lean.model, where, value, moment, draw), folder / str(number)
        what = f"{value} in {where} {data.name} at update {moment} under {lean.plan.techniques()}"
        try:
            train(lean, data, run=run, epochs=3, save_every=1)
            found["skipped or harmless"] += 1
        except Diverged:
            found["told"] += 1
        except Exception as error:
            bad.append(f"{what}: {type(error).__name__}: {error}")
        save = RunFolder(run).saves.newest() if run.exists() else None
        for group in ("model", "optimizer") if save is not None else ():
            file = save.tensors(group)
            for name in file.entries if file is not None else ():
                kept = file.read(name)
                if kept.is_floating_point() and not torch.isfinite(kept).all():
                    bad.append(f"{what}: {group} {name} was saved so")
        shutil.rmtree(run, ignore_errors=True)
    return found, bad


class _Poison(Noise):
    """Data that puts a number somewhere, once, when a batch is read."""

    def __init__(self, model: torch.nn.Module, where: str, value: float, moment: int, draw: random.Random) -> None:
        super().__init__()
        self.where, self.value, self.left = where, value, moment
        names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters(False))]
        self.name = draw.choice(names)
        self.module = model.get_submodule(self.name)

    def read(self, epoch: int, number: int) -> Any:
        images, labels = super().read(epoch, number)
        self.left -= 1
        if self.left == 0:
            images = self._put(images)
        return images, labels

    def _put(self, images: torch.Tensor) -> torch.Tensor:
        parameter = next(self.module.parameters(False))
        if self.where == "input":
            images.view(-1)[0] = self.value
        elif self.where == "weight":
            with torch.no_grad():
                parameter.view(-1)[0] = self.value
        elif self.where == "gradient":
            handle = parameter.register_hook(lambda g: (handle.remove(), g * self.value)[1])
        else:
            handle = self.module.register_forward_hook(lambda m, a, out: (handle.remove(), out * self.value)[1])
        return images
