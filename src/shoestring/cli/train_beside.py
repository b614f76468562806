"""What `train` keeps and tells beside the training: the steps and the page of the run, and where it runs."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ShoestringError
from ..units import format_bytes
from .model import is_builtin, is_function
from .options import say, write_text

if TYPE_CHECKING:
    from ..distributed import World
    from ..runs.folder import RunFolder
    from ..training.job import Session


class Beside(NamedTuple):
    """What is kept and told beside the training: the command, sentence pairs if the data are some, the steps of the
    page, the plan's risk, and the resident bytes before there was a model."""

    command: dict[str, Any]
    pairs: Any
    steps: dict[str, Any]
    risk: str
    base_bytes: int


def _keep_steps(folder: "RunFolder", steps: dict[str, Any]) -> None:
    from ..reporting.page import write_steps

    try:
        write_steps(folder.path, steps)
    except OSError as error:  # training will report what is wrong with the folder
        say(f"the page of {folder.path} will not show the step: {error.strerror}")


def keep(folder: "RunFolder", beside: Beside) -> None:
    """What later commands and the page need, before the first update."""
    from ..data import keep_languages

    _keep_steps(folder, beside.steps)
    if beside.pairs is not None:
        keep_languages(folder.languages_path, beside.pairs.known)


def write_page(folder: "RunFolder", session: "Session", steps: dict[str, Any]) -> Path | None:
    """Writes the run's page into its folder; if that fails, the finished run is still good."""
    from ..reporting.page import page_data, page_html, run_data, stored_data

    path = folder.path / "page.html"
    try:
        # Codecs may have been chosen anew while it was trained, but not of shards, which one process cannot trace.
        if steps.get("lean", {}).get("stored") and not session.lean.task.sharded:
            steps["lean"]["stored"] = stored_data(session.lean.task.with_(batch=session.data.read(0, 0)))
            _keep_steps(folder, steps)
        write_text(path, page_html(page_data(str(folder.path), [run_data(folder.path)])))
    except ShoestringError as error:
        say(f"the page was not written: {error}")
        return None
    return path


def where(args: argparse.Namespace, settings: dict[str, Any], world: "World") -> list[str]:
    """The data, the device and the threads, in words."""
    import torch

    from ..reporting.run_words import row

    count = torch.get_num_threads()
    processes = f"{world.size} processes of " if world.size > 1 else ""
    threads = f"CPU, {processes}{count} thread{'s' if count > 1 else ''}"
    place = "" if is_function(args.data) else f"; {args.data or 'embedded'}"  # the words for a function name it
    return [row("data", f"{settings['data']}{place}"), row("device", threads)]


def own_code(args: argparse.Namespace) -> list[str]:
    """The arguments that name code of the user's: later commands must be given them again, for nothing that a folder
    names is run."""
    model = [] if is_builtin(args.model) else [args.model]
    named = {name: getattr(args, name) for name in ("data", "valid")}
    return model + [word for name, value in named.items() if is_function(value) for word in (f"--{name}", value)]


def process_watch() -> Callable[[], int]:
    """For a budget of the whole process: what it has in memory now, beyond the base that the plan left room for. What
    planning has freed is given back first."""
    from ..limits import give_back
    from ..measuring.base import process_base_bytes
    from ..measuring.process import reset_peak, rss_bytes

    base = process_base_bytes()
    give_back(from_now_on=True)  # what is freed in a step must not count as taken
    with suppress(ShoestringError):  # then the peak of planning is told too
        reset_peak()
    return lambda: max(0, rss_bytes() - base)


def resident_words(peak_bytes: int, base_bytes: int, budget_bytes: int | None = None) -> str:
    """What the machine sees: Python, torch and its libraries are in it. Only a budget of the process counts those."""
    if budget_bytes is None:
        budget = "not in the budget"
    else:
        kept = "within" if peak_bytes <= budget_bytes else "over"
        budget = f"{kept} the budget of {format_bytes(budget_bytes)} for the process"
    return (
        f"{format_bytes(peak_bytes, 3)} resident at the peak, {format_bytes(base_bytes, 3)} of it Python and torch "
        f"before there was a model ({budget})"
    )
