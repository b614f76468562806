"""`shoestring train MODEL`: trains within a budget, saves as it goes, and reports the memory used."""

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OverBudget, ShoestringError
from ..techniques.words import in_words
from ..training.schedules import SCHEDULES, schedule
from ..units import format_bytes, parse_bytes
from .model import add_model, users_code
from .options import add_techniques, command, given, number, print_json, techniques_of, whole_number, write_text
from .plan import add_risk

if TYPE_CHECKING:
    from ..distributed import World
    from ..planning.plan import Plan
    from ..runs.folder import RunFolder
    from ..runs.record import RunRecord
    from ..task import Task
    from ..training.apply import LeanTask
    from ..training.job import Job, Session

EXAMPLES = (
    "wrn-28-2 --data cifar-10-batches-bin --batch 100 --epochs 200 --budget 7MB",
    "wrn-10-1 --epochs 5 --checkpoint 'residual-2*' --microbatch 10 --run runs/small",
    "wrn-10-1 --epochs 5 --checkpoint 'residual-2*' --microbatch 10 --run runs/small --resume",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "train", run, "train inside a budget, and save as it goes", EXAMPLES)
    add_model(parser)
    parser.add_argument("--data", metavar="DIR", help="images or sentence pairs; without it, the embedded ones")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=whole_number(1, 10**6), metavar="N", help="times through the data")
    length.add_argument("--updates", type=whole_number(1, 10**9), metavar="N", help="batches in all")
    parser.add_argument("--budget", type=parse_bytes, metavar="SIZE", help="memory to stay within, as in 7MB")
    add_risk(parser)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="the techniques, from a file of `shoestring plan`")
    parser.add_argument("--replan", action="store_true", help="over the budget, go on with smaller microbatches")
    parser.add_argument("--threads", type=whole_number(1, 1024), metavar="N", help="threads that train")
    add_techniques(parser)
    _add_run(parser)
    _add_recipe(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--run", dest="folder", type=Path, metavar="DIR", help="its folder (default: runs/MODEL)")
    group.add_argument("--resume", action="store_true", help="go on with the run in that folder")
    group.add_argument("--save-every", type=whole_number(1, 10**9), metavar="N", help="also save each N updates")
    group.add_argument("--evaluate", choices=("best", "last", "averaged"), help="its weights, and train no more")
    group.add_argument("--tensorboard", action="store_true", help="also log to TensorBoard, in the folder")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the recipe (what is not given is the model's own)")
    group.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="N", help="default: 0")
    lr = "learning rate (default: the one that the paper found for the network and its sparsity, else the task's)"
    group.add_argument("--lr", type=number(0, 1e6), metavar="X", help=lr)
    group.add_argument("--weight-decay", type=number(0, 1e6, zero=True), metavar="X")
    group.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate")
    group.add_argument("--clip", type=number(0, 1e30), metavar="X", help="largest norm of the gradient")
    group.add_argument("--label-smoothing", type=number(0, 1, zero=True), metavar="X")
    group.add_argument("--average", type=whole_number(2, 1000), metavar="N", help="average the last N epochs")
    group.add_argument("--quality", choices=("loss", "bleu"), help="by which translations are judged")


def run(args: argparse.Namespace) -> int:
    import torch

    from ..distributed import agreed, joined, leaving_word
    from .job import load_job, shared_out

    if args.threads:
        torch.set_num_threads(args.threads)
    world = joined()
    with leaving_word(world), users_code(args.model):
        folder = _folder(args, world)
        job = agreed(world, lambda: shared_out(load_job(args), world.size))
        plan = planned_by_first(world, lambda: _plan(args, job, folder))
        steps = {} if args.evaluate or world.rank else _plain_step(job.task, plan)  # before its model is changed
        session = agreed(world, lambda: job.build(plan))
        if args.evaluate:
            answer, lines = _evaluate(args.evaluate, session, folder)
        else:
            settings = job.settings | given(args, "label_smoothing")
            del job  # and its batch, which only predictions need
            lean = _predicted(session.lean, args.budget, steps, world)
            answer, lines = _train(args, session._replace(lean=lean), settings, folder, steps, world)
    if world.rank == 0:
        print_json(answer) if args.json else print("\n".join(lines))
    return 0


def _folder(args: argparse.Namespace, world: "World") -> "RunFolder":
    """The run's folder; refused before any work if it holds another run, or none to resume. A run that torchrun has
    started again is resumed."""
    from ..distributed import by_first
    from ..runs.folder import RunFolder

    if args.evaluate and world.size > 1:
        raise ShoestringError(f"--evaluate takes one process, not {world.size}: start it without torchrun")
    path = args.folder or Path("runs") / Path(args.model.split(":")[0]).name
    folder = RunFolder(path, warn=_say if world.rank == 0 else lambda words: None)
    args.resume = bool(by_first(world, lambda: _checked(folder, args)))
    return folder


def _checked(folder: "RunFolder", args: argparse.Namespace) -> str:
    """Whether the run in the folder is resumed: "yes" or ""."""
    from ..distributed import is_restarted

    exists = folder.record_path.exists()
    resume = args.resume or (exists and is_restarted())
    if (resume or args.evaluate) and not exists:
        raise ShoestringError(f"{folder.path} holds no run: name the folder of one with --run")
    if not (resume or args.evaluate) and exists:
        raise ShoestringError(
            f"{folder.path} holds a run already: go on with it by --resume, or name another folder with --run"
        )
    return "yes" if resume else ""


def planned_by_first(world: "World", make: Callable[[], "Plan"]) -> "Plan":
    """The plan of process 0, in all: what it measures is never the same twice."""
    from ..distributed import by_first
    from ..planning.plan import Plan

    return make() if world.size == 1 else Plan.from_json(by_first(world, lambda: make().to_json()))


def _plan(args: argparse.Namespace, job: "Job", folder: "RunFolder") -> "Plan":
    """The plan: from a file, from the techniques named, from the resumed run, or made for the budget."""
    from ..planning.plan import Plan
    from ..techniques.registry import is_open
    from .job import read_plan
    from .plan import make_plan

    techniques = techniques_of(args)
    if args.plan and techniques:
        raise ShoestringError(f"--plan and --{min(techniques)} both say what to do: give one of them")
    if args.plan:
        return read_plan(args.plan, job.task)
    if args.resume and folder.plan_path.exists() and not techniques:
        return read_plan(folder.plan_path, job.task)
    if args.budget and (not techniques or is_open(techniques)):
        return job.plan_in_tokens(make_plan(job.task, args, rehearse=True))
    return Plan(**techniques)


def _plain_step(task: "Task", plan: "Plan") -> dict[str, Any]:
    """The step without techniques, for the page, with the scratch known of this machine; none without a plan."""
    from ..measuring.calibration import load_cache
    from ..profiling import profile
    from ..reporting.page import step_data

    if not plan.techniques():
        return {}
    try:
        return {"plain": step_data(profile(task, load_cache(), brief=True))}
    except ShoestringError:
        return {}  # the lean step may still be traceable


def _keep_steps(folder: "RunFolder", steps: dict[str, Any]) -> None:
    from ..reporting.page import write_steps

    try:
        write_steps(folder.path, steps)
    except OSError as error:  # training will report what is wrong with the folder
        _say(f"the page of {folder.path} will not show the step: {error.strerror}")


def _write_page(folder: "RunFolder") -> Path | None:
    """Writes the run's page into its folder; if that fails, the finished run is still good."""
    from ..reporting.page import page_data, page_html, run_data

    path = folder.path / "page.html"
    try:
        write_text(path, page_html(page_data(str(folder.path), [run_data(folder.path)])))
    except ShoestringError as error:
        _say(f"the page was not written: {error}")
        return None
    return path


def _predicted(lean: "LeanTask", budget_bytes: int | None, steps: dict[str, Any], world: "World") -> "LeanTask":
    """The lean task with its predicted memory in its plan; its step is added to `steps`."""
    from ..training.apply import LeanTask

    plan = planned_by_first(world, lambda: _prediction(lean, budget_bytes, steps))
    return LeanTask(lean.task.with_(batch=None), plan)


def _prediction(lean: "LeanTask", budget_bytes: int | None, steps: dict[str, Any]) -> "Plan":
    """The plan with what it needs; refused if that is over the budget."""
    from ..measuring import calibrated
    from ..profiling import profile
    from ..reporting.page import step_data
    from ..reporting.progress import progress

    task, limit = lean.task, budget_bytes or lean.plan.budget_bytes
    with progress("calibrating the step's operators, once for this machine") as advance:
        result = calibrated(lambda table: profile(task, table, brief=True), advance)
    if limit is not None and result.peak_bytes > limit:
        raise OverBudget(
            f"a step would need {format_bytes(result.peak_bytes)}, predicted, and the budget is "
            f"{format_bytes(limit)}: add techniques (see `shoestring train --help`) or raise it"
        )
    steps["lean" if lean.plan.techniques() else "plain"] = step_data(result, len(list(task.split(task.batch))))
    return lean.plan.with_(
        task=task.name,
        budget_bytes=limit,
        predicted_peak_bytes=result.peak_bytes,
        predicted_bytes=result.bytes_by_category,
    )


Answer = tuple[dict[str, Any], list[str]]  # as JSON, and in words


def _train(
    args: argparse.Namespace,
    session: "Session",
    settings: dict[str, Any],
    folder: "RunFolder",
    steps: dict[str, Any],
    world: "World",
) -> Answer:
    from ..measuring import measure_allocator
    from ..reporting.run_progress import run_progress
    from ..reporting.tensorboard import tensorboard
    from ..training.loop import train
    from ..training.recipe import Recipe

    length = given(args, "epochs", "updates")
    updates = Recipe(**length).length(len(session.data))
    resume = _command(args, folder.path, world.size, resume=True)
    evaluate = _command(args, folder.path, evaluate="best")
    with ExitStack() as stack:
        listeners: list[Any] = []
        if world.rank == 0:
            _keep_steps(folder, steps)
            listeners.append(stack.enter_context(run_progress(sys.stderr, session.lean.plan.budget_bytes)))
            if args.tensorboard:
                listeners.append(stack.enter_context(tensorboard(folder.path / "tensorboard")))
        record = train(
            session.lean,
            session.data,
            run=folder,
            resume=args.resume,
            listeners=listeners,
            settings=settings,
            meter=measure_allocator,
            replan=args.replan,
            how_to_resume=resume,
            schedule=schedule(args.schedule or session.schedule, updates),
            evaluation=session.evaluation,
            seed=args.seed,
            average=args.average or 0,
            save_every=args.save_every,
            **length,
        )
    page = _write_page(folder) if world.rank == 0 else None
    answer = record.to_json() | {"run": str(folder.path), "resume": resume, "evaluate": evaluate}
    answer["page"] = str(page) if page else None
    lines = [*_summary(record), f"{'saved':<10}{folder.path}", f"{'evaluate':<10}{evaluate}"]
    return answer, lines + ([f"{'page':<10}{page}"] if page else [])


def _evaluate(which: str, session: "Session", folder: "RunFolder") -> Answer:
    """The quality of a run's saved weights."""
    from ..runs.averaging import averaged
    from ..runs.record import read_record
    from ..runs.save import restore_task

    record, newest = read_record(folder.record_path), folder.saves.newest()
    if newest is None:
        raise ShoestringError(f"{folder.path} holds no save yet: train with --resume first")
    if which == "averaged" and not folder.averaged_path.exists():
        raise ShoestringError(f"{folder.path} holds no averaged weights: train with --average N")
    best = record.best_update if which == "best" else None
    save = newest if best is None else folder.saves.check(best)
    restore_task(session.lean.task, save)
    model, name = session.lean.model, session.evaluation.name
    with averaged(model, folder.averaged_path, save) if which == "averaged" else nullcontext(model) as chosen:
        quality = session.evaluation(chosen)
    answer = {"run": str(folder.path), "weights": which, "update": save.update, name: quality}
    return answer, [f"{name} {quality:.4g} with the {which} weights, of update {save.update:,}"]


def _command(args: argparse.Namespace, folder: Path, processes: int = 1, **changes: Any) -> str:
    """This command with changes, for the same run."""
    # "--", or torchrun takes --run for one of its own
    start = ["torchrun", "--nproc-per-node", str(processes), "-m", "--"] if processes > 1 else []
    words = [*start, "shoestring", "train", args.model]
    values = vars(args) | {"folder": folder, "resume": False, "evaluate": None, "json": False} | changes
    for action in args.parser._actions:
        value = values.get(action.dest)
        if action.option_strings and value not in (None, False, action.default):
            words += [action.option_strings[-1]] if value is True else [action.option_strings[-1], in_words(value)]
    return shlex.join(words)


def _summary(record: "RunRecord") -> list[str]:
    lines = [f"{record.task}: {record.updates:,} updates in {record.seconds:,.1f} s"]
    if record.quality is not None and record.best_quality is not None:
        best = f"best {record.best_quality:.4g} after update {record.best_update:,}"
        averaged = record.averaged_quality
        more = f", averaged {averaged:.4g}" if averaged is not None else ""
        lines.append(f"{record.quality_name:<10}{record.quality:.4g} at the end, {best}{more}")
    if record.measured_peak_bytes is not None and record.predicted_peak_bytes is not None:
        predicted, measured = format_bytes(record.predicted_peak_bytes), format_bytes(record.measured_peak_bytes)
        within = f", within the budget of {format_bytes(record.budget_bytes)}" if record.budget_bytes else ""
        lines.append(f"{'memory':<10}predicted {predicted}, measured {measured}{within}")
    return lines


def _say(message: str) -> None:
    print(f"shoestring: {message}", file=sys.stderr)
