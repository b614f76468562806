"""`shoestring train MODEL`: trains within a budget, saves as it goes, and reports the memory used."""

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import OverBudget, ShoestringError
from ..training.schedules import SCHEDULES, schedule
from ..units import format_bytes, parse_bytes, share_of
from .budgets import AUTO, auto_budget
from .model import add_model, is_builtin, users_code
from .options import (
    WrongUsage,
    add_techniques,
    add_threads,
    command,
    given,
    number,
    print_json,
    techniques_of,
    whole_number,
    write_text,
)
from .plan import add_bandwidth, add_budget, add_counting, add_risk, for_tensors
from .recorded import kept, recall

if TYPE_CHECKING:
    from ..distributed import World
    from ..planning.plan import Plan
    from ..runs.folder import RunFolder
    from ..task import Task
    from ..training.apply import LeanTask
    from ..training.job import Job, Session

EXAMPLES = (
    "wrn-28-2 --data cifar-10-batches-bin --batch 100 --epochs 200 --budget 7MB",
    "wrn-10-1 --epochs 5 --checkpoint 'residual-2*' --microbatch 10 --run runs/small",
    "--resume --run runs/small",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "train", run, "train inside a budget, and save as it goes", EXAMPLES)
    add_model(parser, optional=True)
    data = "a folder of images or sentence pairs (default: embedded ones), or file.py:function that returns batches"
    parser.add_argument("--data", metavar="DIR", help=data)
    parser.add_argument("--valid", metavar="FILE.py:FUNCTION", help="with such a function: batches to evaluate on")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=whole_number(1, 10**6), metavar="N", help="times through the data")
    length.add_argument("--updates", type=whole_number(1, 10**9), metavar="N", help="batches in all")
    add_budget(parser)
    add_counting(parser)
    add_risk(parser)
    add_bandwidth(parser)
    parser.add_argument("--plan", type=Path, metavar="FILE", help="the techniques, from a file of `shoestring plan`")
    parser.add_argument("--replan", action="store_true", help="over the budget, go on with smaller microbatches")
    supervise = "start again with less memory, from the last save, if the run is killed or gets none"
    parser.add_argument("--supervise", action="store_true", help=supervise)
    add_threads(parser)
    add_techniques(parser)
    _add_run(parser)
    _add_recipe(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--run", dest="folder", type=Path, metavar="DIR", help="its folder (default: runs/MODEL)")
    group.add_argument("--resume", action="store_true", help="go on with the run in that folder, as it was started")
    start = "start from these weights: safetensors, a state dict, or a folder of save_pretrained()"
    group.add_argument("--from", dest="start", type=Path, metavar="FILE", help=start)
    group.add_argument("--partial", action="store_true", help="of --from, take the weights that fit, and say which")
    group.add_argument(
        "--save-every", type=whole_number(1, 10**9), metavar="N", help="also save each N updates (default: epochs only)"
    )
    group.add_argument("--tensorboard", action="store_true", help="also log to TensorBoard, in the folder")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the recipe (what is not given is the model's own)")
    group.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="N", help="default: 0")
    lr = "learning rate (default: the one that the paper found for the network and its sparsity, else the task's)"
    group.add_argument("--lr", type=number(0, 1e6), metavar="X", help=lr)
    decay = "weight decay (default: the task's)"
    group.add_argument("--weight-decay", type=number(0, 1e6, zero=True), metavar="X", help=decay)
    usual = "mostafa-wang for images, inverse-sqrt for translation, constant for your own tasks"
    group.add_argument("--schedule", choices=SCHEDULES, help=f"of the learning rate (default: {usual})")
    clip = "largest norm of the gradient (default: the task's, mostly none)"
    group.add_argument("--clip", type=number(0, 1e30), metavar="X", help=clip)
    smooth = "of built-in image models (default: 0)"
    group.add_argument("--label-smoothing", type=number(0, 1, zero=True), metavar="X", help=smooth)
    group.add_argument(
        "--average", type=whole_number(2, 1000), metavar="N", help="average the last N epochs (default: none)"
    )
    group.add_argument("--quality", choices=("loss", "bleu"), help="by which translations are judged (default: loss)")
    group.add_argument(
        "--vocabulary", type=whole_number(10, 10**6), metavar="N",
        help="pieces of the byte-pair encoding of sentence pairs (default: 10000)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.partial and not args.start:
        raise WrongUsage("--partial says what to take of --from FILE: name that too")
    if args.supervise:
        from .supervise import supervise

        return supervise(args, _folder_path(args), _say)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch

    from ..distributed import agreed, by_first, joined, leaving_word
    from ..measuring.process import rss_bytes
    from ..planning.options import risk_of
    from ..training.processes import planned_by_first
    from .job import load_job, shared_out

    world = joined()
    measured = args.bandwidth or world.bytes_per_second()
    if args.budget == AUTO:
        args.budget = by_first(world, lambda: str(auto_budget(_say)))
    with leaving_word(world), users_code(args.model or ""):
        folder = _folder(args, world)
        if args.resume:
            recall(args, folder)
        elif args.model is None or (args.epochs is None and args.updates is None):
            raise WrongUsage("name a MODEL and how long to train it, by --epochs or --updates; or --resume a run")
        _refuse_alone(args)
        if args.threads:
            torch.set_num_threads(args.threads)
        base = rss_bytes()  # Python and torch, before there is a model
        job = agreed(world, lambda: shared_out(load_job(args), world.size))
        planning = argparse.Namespace(**vars(args) | {"bandwidth": measured})
        plan = planned_by_first(world, partial(_plan, planning, job, folder))
        steps = {} if world.rank else _plain_step(job.task, plan)  # before its model is changed
        beside = Beside(kept(args, job), getattr(job, "pairs", None), steps, risk_of(job.task, plan), base)
        session = agreed(world, partial(job.build, plan))
        settings = job.settings | given(args, "label_smoothing") | _started(args, session.lean, folder.warn)
        del job  # and its batch, which only predictions need
        limit = plan.budget_bytes if share_of(args.budget) else args.budget and parse_bytes(for_tensors(args) or 0)
        lean = _predicted(session.lean, limit, steps, world, args.replan)
        answer, lines = _train(args, session._replace(lean=lean), settings, folder, beside, world)
    if world.rank == 0:
        print_json(answer) if args.json else print("\n".join(lines))
    return 0


def _started(args: argparse.Namespace, lean: "LeanTask", say: Callable[[str], None]) -> dict[str, Any]:
    """Gives a new run the weights of --from -> the setting that it is; a resumed one has its own."""
    from ..runs.start import start_from

    if not args.start:
        return {}
    if not args.resume:
        fit = start_from(lean.model, args.start, args.partial)
        rest = "" if fit.is_whole else f"; {fit}"
        say(f"{len(fit.common):,} tensors are those of {args.start}{rest}")
    return {"from": str(args.start)}


class Beside(NamedTuple):
    """What is kept and told beside the training: the command, sentence pairs if the data are some, the steps of the
    page, the plan's risk, and the resident bytes before there was a model."""

    command: dict[str, Any]
    pairs: Any
    steps: dict[str, Any]
    risk: str
    base_bytes: int


def _folder_path(args: argparse.Namespace) -> Path:
    if args.model is None and args.folder is None:
        raise WrongUsage("name a MODEL to train, or the folder of a run to go on with, by --resume --run DIR")
    return args.folder or Path("runs") / _folder_name(args.model)


def _folder(args: argparse.Namespace, world: "World") -> "RunFolder":
    """The run's folder; refused before any work if it holds another run, or none to resume. A run that torchrun has
    started again is resumed."""
    from ..distributed import by_first
    from ..runs.folder import RunFolder

    folder = RunFolder(_folder_path(args), warn=_say if world.rank == 0 else lambda words: None)
    args.resume = bool(by_first(world, lambda: _checked(folder, args)))
    return folder


def _checked(folder: "RunFolder", args: argparse.Namespace) -> str:
    """Whether the run in the folder is resumed: "yes" or ""."""
    from ..distributed import is_restarted

    exists = folder.record_path.exists()
    resume = args.resume or (exists and is_restarted())
    if resume and not exists:
        raise ShoestringError(f"{folder.path} holds no run: name the folder of one with --run")
    if not resume and exists:
        raise ShoestringError(
            f"{folder.path} holds a run already: go on with it by --resume, or name another folder with --run"
        )
    return "yes" if resume else ""


def _refuse_alone(args: argparse.Namespace) -> None:
    """Options that mean something under a budget only are not taken in silence."""
    if args.budget or args.plan or args.resume:
        return
    asked = {"--replan": args.replan, "--risk": args.risk != "neutral", "--counting": args.counting != "tensors"}
    for option, is_given in asked.items():
        if is_given:
            raise WrongUsage(f"{option} is about a budget: give --budget too, or leave it out")


def _folder_name(model: str) -> str:
    """MODEL -> the name of its run: mine.py:task is mine-task."""
    place, _, function = model.rpartition(":")
    return f"{Path(place).stem}-{function}" if place else Path(model).name


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
    if techniques and share_of(args.budget) is not None and not is_open(techniques):
        raise ShoestringError(
            f"a budget of {args.budget} is planned for: leave --{min(techniques)} out, or name a size"
        )
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


def _predicted(
    lean: "LeanTask", budget_bytes: int | None, steps: dict[str, Any], world: "World", replan: bool
) -> "LeanTask":
    """The lean task with its predicted memory in its plan; its step is added to `steps`."""
    from ..training.apply import LeanTask
    from ..training.processes import planned_by_first

    plan = planned_by_first(world, lambda: _prediction(lean, budget_bytes, steps, replan))
    return LeanTask(lean.task.with_(batch=None), plan)


def _prediction(lean: "LeanTask", budget_bytes: int | None, steps: dict[str, Any], replan: bool) -> "Plan":
    """The plan with what it needs; refused if that is over the budget, unless the run may be replanned."""
    from ..measuring import calibrated
    from ..profiling import profile
    from ..reporting.page import step_data
    from ..reporting.progress import progress

    task, limit = lean.task, budget_bytes or lean.plan.budget_bytes
    with progress("calibrating the step's operators, once for this machine") as advance:
        result = calibrated(lambda table: profile(task, table, brief=True), advance)
    if limit is not None and result.peak_bytes > limit and not replan:
        raise OverBudget(
            f"a step would need {format_bytes(result.peak_bytes)}, predicted, and the budget is "
            f"{format_bytes(limit)}: leave the techniques out and let --budget choose them, add some, or raise it"
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
    beside: Beside,
    world: "World",
) -> Answer:
    from ..measuring import measure_allocator
    from ..measuring.process import peak_rss_bytes
    from ..reporting.run_progress import run_progress
    from ..reporting.run_words import plan_words, row, summary
    from ..reporting.tensorboard import tensorboard
    from ..runs.record import read_record
    from ..training.loop import train
    from ..training.recipe import Recipe
    from ..training.resumable import length_of

    before = read_record(folder.record_path) if args.resume else None
    length = given(args, "epochs", "updates")
    batches = length_of(session.data) or 0
    updates = Recipe(**length).length(batches) if batches or args.updates else 0  # without a length, train() refuses
    own = () if is_builtin(args.model) else (args.model,)  # code is not run because a folder names it
    # "--", or torchrun takes --run for one of its own
    start = ["torchrun", "--nproc-per-node", str(world.size), "-m", "--"] if world.size > 1 else []
    resume = shlex.join([*start, "shoestring", "train", *own, "--resume", "--run", str(folder.path)])
    evaluate = shlex.join(["shoestring", "evaluate", str(folder.path), *own])
    export = shlex.join(["shoestring", "export", str(folder.path), "-o", "model.safetensors"])
    plan_row = row("plan", plan_words(session.lean.plan, beside.risk))
    with ExitStack() as stack:
        listeners: list[Any] = []
        if world.rank == 0:
            _keep(folder, beside)
            print(plan_row, *_where(args, settings, world), sep="\n", file=sys.stderr)
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
            command=beside.command,
            schedule=schedule(args.schedule or session.schedule, updates or 1),
            evaluation=session.evaluation,
            seed=args.seed,
            average=args.average or 0,
            save_every=args.save_every,
            **length,
        )
    page = _write_page(folder) if world.rank == 0 else None
    resident = {"peak_bytes": peak_rss_bytes(), "base_bytes": beside.base_bytes}
    answer = record.to_json() | {"run": str(folder.path), "resume": resume, "evaluate": evaluate, "export": export}
    answer |= {"page": str(page) if page else None, "resident": resident}
    later = {"saved": str(folder.path), "evaluate": evaluate, "export": export, "process": _resident(**resident)}
    already = before is not None and before.finished and before.updates == record.updates
    first, *rest = summary(record, already)
    later |= {"page": str(page)} if page else {}
    return answer, [first, plan_row, *rest, *(row(name, words) for name, words in later.items())]


def _keep(folder: "RunFolder", beside: Beside) -> None:
    """What later commands and the page need, before the first update."""
    from ..data import keep_languages

    _keep_steps(folder, beside.steps)
    if beside.pairs is not None:
        keep_languages(folder.languages_path, beside.pairs.known)


def _where(args: argparse.Namespace, settings: dict[str, Any], world: "World") -> list[str]:
    """The data, the device and the threads, in words."""
    import torch

    from ..reporting.run_words import row

    count = torch.get_num_threads()
    processes = f"{world.size} processes of " if world.size > 1 else ""
    threads = f"CPU, {processes}{count} thread{'s' if count > 1 else ''}"
    return [row("data", f"{settings['data']}; {args.data or 'embedded'}"), row("device", threads)]


def _resident(peak_bytes: int, base_bytes: int) -> str:
    """What the machine sees, which no budget counts: Python, torch and its libraries are in it."""
    return (
        f"{format_bytes(peak_bytes, 3)} resident at the peak, {format_bytes(base_bytes, 3)} of it Python and torch "
        "before there was a model (not in the budget)"
    )


def _say(message: str) -> None:
    print(f"shoestring: {message}", file=sys.stderr)
