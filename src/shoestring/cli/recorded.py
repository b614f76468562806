"""The command that trained a run, kept in its record: later commands need the folder of the run alone."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DamagedSave, ShoestringError
from ..techniques import WORDS
from .model import is_builtin
from .options import say, some_path

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..runs.folder import RunFolder
    from ..task import Task
    from ..training.job import Job, Session

# In the plan, or about one call of the command only.
_ONCE = (
    "help",
    "json",
    "folder",
    "resume",
    "plan",
    "budget",
    "counting",
    "risk",
    "bandwidth",
    "supervise",
    "start_over",
)
_NOT_KEPT = {*_ONCE, *(word.name for word in WORDS)}


def kept(args: argparse.Namespace, job: "Job") -> dict[str, Any]:
    """The arguments of `train` that another command needs, as JSON: what was given, with absolute paths."""
    found: dict[str, Any] = {}
    for action in args.parser._actions:
        value = getattr(args, action.dest, None)
        if action.dest not in _NOT_KEPT and value not in (None, False, action.default):
            found[action.dest] = str(value) if isinstance(value, Path) else value
    for name in ("model", "data", "valid"):
        if name in found:
            found[name] = _absolute(found[name])
    return found | ({"options": dict(job.options)} if is_builtin(args.model) else {})


def _absolute(text: str) -> str:
    """A path, also that of file.py:function, from the root; other names as they are."""
    place, colon, function = text.rpartition(":")
    if colon and place.endswith(".py"):
        return f"{Path(place).resolve()}:{function}"
    return str(Path(text).resolve()) if Path(text).exists() else text


def recall(args: argparse.Namespace, folder: "RunFolder") -> None:
    """Gives the arguments that were left out the values that they had when the run was started.

    A function of the user's is code, and nothing that a run's folder says is run: it must be named again.
    """
    from ..data import kept_languages

    before = _checked(folder)
    defaults = {action.dest: action.default for action in args.parser._actions}
    lengths = {"epochs", "updates"}
    if any(getattr(args, name, None) is not None for name in lengths):
        before = {name: value for name, value in before.items() if name not in lengths}
    _refuse_code({name: before[name] for name in ("model", "data", "valid") if name in before}, args, folder)
    for name, value in before.items():
        if getattr(args, name, None) == defaults.get(name):
            setattr(args, name, value)
    if args.model is None:
        raise ShoestringError(f"the record of {folder.path} does not say which model it trained: name MODEL")
    args.known = kept_languages(folder.languages_path)


def _checked(folder: "RunFolder") -> dict[str, Any]:
    """The recorded arguments of a run, each as the command line would take it."""
    from .train import add

    found = dict(folder.record().command)
    subparsers = argparse.ArgumentParser().add_subparsers()
    add(subparsers)
    actions = {action.dest: action for action in subparsers.choices["train"]._actions}
    for name, value in found.items():
        if name != "options" and not _is_taken(actions.get(name), value):
            raise DamagedSave(
                f"{folder.record_path} is damaged: its command has {name} {value!r}, which train never took"
            )
    return found


def _is_taken(action: argparse.Action | None, value: Any) -> bool:
    if action is None or isinstance(value, list | dict):
        return False
    if action.nargs == 0:
        return value is True
    try:
        parsed = action.type(str(value)) if callable(action.type) else value
    except (argparse.ArgumentTypeError, ValueError, TypeError):
        return False
    if isinstance(parsed, str | Path) and not isinstance(value, str):
        return False
    return action.choices is None or parsed in action.choices


def _refuse_code(before: dict[str, str], args: argparse.Namespace, folder: "RunFolder") -> None:
    """Refuses to run what only a file names, and tells the whole command."""
    code = {name: value for name, value in before.items() if ":" in value}
    missing = [value for name, value in code.items() if getattr(args, name, None) is None]
    if not missing:
        return
    given_or = {name: getattr(args, name, None) or value for name, value in code.items()}
    place = ["--resume", "--run", str(folder.path)] if args.command == "train" else [str(folder.path)]
    model = [given_or.pop("model")] if "model" in given_or else []
    rest = [word for name, value in given_or.items() for word in (f"--{name}", value)]
    raise ShoestringError(
        f"the run was trained with your own code, {' and '.join(missing)}, which is not run because a file names it: "
        f"name it again, as in `{shlex.join([*args.parser.prog.split(), *place, *model, *rest])}`"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN and the choice of its weights, for every command about a trained run."""
    parser.add_argument("run_folder", type=some_path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--weights", choices=("best", "last", "averaged"), default="best", help="which of its weights (default: best)"
    )


def opened(path: Path) -> "RunFolder":
    """The folder of a run; refused if it holds none."""
    from ..runs.folder import RunFolder

    folder = RunFolder(path, warn=say)
    if not folder.record_path.exists():
        what = "holds no run" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
        raise ShoestringError(f"{path} {what}: name the folder that `shoestring train` wrote, such as runs/wrn-28-2")
    return folder


def session_of(args: argparse.Namespace, folder: "RunFolder") -> "Session":
    """The arguments of a command about a run -> its model and data, under its plan."""
    import torch

    from .job import RECIPE, load_job

    recall(args, folder)
    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)
    names = ("model", "data", "valid", "batch", "tokens")
    job = load_job(argparse.Namespace(**RECIPE | dict.fromkeys(names) | vars(args)))
    return job.build(plan_of(folder, job.task).for_one())


def plan_of(folder: "RunFolder", task: "Task") -> "Plan":
    """The plan of a run; if its file is damaged or gone, the techniques that its record names."""
    from ..planning.plan import Plan
    from .job import checked_plan, plan_in

    try:
        plan = plan_in(folder.plan_path)
    except ShoestringError as error:
        record = folder.record()
        say(f"{error}; the techniques are taken from {folder.record_path}")
        return Plan(budget_bytes=record.budget_bytes, **record.settings.get("techniques", {}))
    return checked_plan(plan, folder.plan_path, task)
