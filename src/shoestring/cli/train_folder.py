"""The folder of a run that `train` starts or resumes: refused before any work if it is the wrong one."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ShoestringError
from .options import WrongUsage, say

if TYPE_CHECKING:
    from ..distributed import World
    from ..runs.folder import RunFolder


def folder_path(args: argparse.Namespace) -> Path:
    if args.model is None and args.folder is None:
        raise WrongUsage("name a MODEL to train, or the folder of a run to go on with, by --resume --run DIR")
    return args.folder or Path("runs") / _folder_name(args.model)


def run_folder(args: argparse.Namespace, world: "World") -> "RunFolder":
    """The run's folder; refused before any work if it holds another run, or none to resume. A run that torchrun has
    started again is resumed."""
    from ..distributed import by_first
    from ..runs.folder import RunFolder

    folder = RunFolder(folder_path(args), warn=say if world.rank == 0 else lambda words: None)
    args.resume = bool(by_first(world, lambda: _checked(folder, args)))
    return folder


def _checked(folder: "RunFolder", args: argparse.Namespace) -> str:
    """Whether the run in the folder is resumed: "yes" or ""."""
    from ..distributed import is_restarted

    _check_writable(folder.path)
    exists = folder.record_path.exists()
    resume = args.resume or (exists and is_restarted())
    if resume and not exists:
        raise ShoestringError(f"{folder.path} holds no run: name the folder of one with --run")
    if not resume and exists:
        raise ShoestringError(
            f"{folder.path} holds a run already: go on with it by --resume, or name another folder with --run"
        )
    if resume:
        _ask_to_start_over(folder, args)
    return "yes" if resume else ""


def _check_writable(path: Path) -> None:
    """Refuses a folder that could not be written, before anything is planned for it."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ShoestringError(f"{there} is a file, and a run is a folder: name another with --run")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ShoestringError(f"{path} cannot be written: no permission in {there}; name another folder with --run")


def _ask_to_start_over(folder: "RunFolder", args: argparse.Namespace) -> None:
    """On a terminal, asks before a run whose saves are gone begins again; elsewhere training refuses it."""
    lost = "" if args.start_over or folder.saves.updates() else folder.lost_saves(folder.record())
    if lost and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"shoestring: {lost}: begin again at update 0? [y/N] ", end="", file=sys.stderr, flush=True)
        args.start_over = sys.stdin.readline().strip().lower() in ("y", "yes")


def _folder_name(model: str) -> str:
    """MODEL -> the name of its run: mine.py:task is mine-task."""
    place, _, function = model.rpartition(":")
    return f"{Path(place).stem}-{function}" if place else Path(model).name
