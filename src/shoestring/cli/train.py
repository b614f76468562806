"""`shoestring train MODEL`: trains within a budget, saves as it goes, and reports the memory used."""

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ..training.schedules import SCHEDULES, schedule
from ..units import parse_bytes, share_of
from .budgets import AUTO, auto_budget
from .model import add_model, users_code
from .options import (
    WrongUsage,
    add_techniques,
    add_threads,
    command,
    given,
    number,
    path_name,
    print_json,
    say,
    some_path,
    techniques_of,
    whole_number,
)
from .plan import add_bandwidth, add_budget, add_counting, add_risk, for_tensors
from .recorded import kept, recall
from .train_beside import Beside, keep, own_code, process_watch, resident_words, where, write_page
from .train_folder import folder_path, run_folder
from .train_plan import plain_step, plan_for, plan_in_use, predicted

if TYPE_CHECKING:
    from ..distributed import World
    from ..runs.folder import RunFolder
    from ..training.apply import LeanTask
    from ..training.job import Session

EXAMPLES = (
    "wrn-28-2 --data cifar-10-batches-bin --batch 100 --epochs 200 --budget 8MB --risk approximate",
    "wrn-10-1 --epochs 5 --checkpoint 'residual-2*' --microbatch 10 --run runs/small",
    "--resume --run runs/small",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "train", run, "train inside a budget, and save as it goes", EXAMPLES)
    add_model(parser, optional=True)
    data = "a folder of images or sentence pairs (default: embedded ones), or file.py:function that returns batches"
    parser.add_argument("--data", type=path_name, metavar="DIR", help=data)
    parser.add_argument(
        "--valid", type=path_name, metavar="FILE.py:FUNCTION", help="with such a function: batches to evaluate on"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=whole_number(1, 10**6), metavar="N", help="times through the data")
    length.add_argument("--updates", type=whole_number(1, 10**9), metavar="N", help="batches in all")
    add_budget(parser)
    add_counting(parser)
    add_risk(parser)
    add_bandwidth(parser)
    words = "in several processes, batch norm takes the statistics of all of them"
    parser.add_argument("--sync-batch-norm", action="store_true", help=words)
    parser.add_argument(
        "--plan", type=some_path, metavar="FILE", help="the techniques, from a file of `shoestring plan`"
    )
    parser.add_argument("--replan", action="store_true", help="over the budget, go on with smaller microbatches")
    supervise = "start again with less memory, from the last save, if the run is killed or gets none"
    parser.add_argument("--supervise", action="store_true", help=supervise)
    add_threads(parser)
    add_techniques(parser)
    _add_run(parser)
    _add_recipe(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--run", dest="folder", type=some_path, metavar="DIR", help="its folder (default: runs/MODEL)")
    group.add_argument("--resume", action="store_true", help="go on with the run in that folder, as it was started")
    over = "with --resume, if all saves of the run are gone: begin again at update 0"
    group.add_argument("--start-over", action="store_true", help=over)
    start = "start from these weights: safetensors, a state dict, or a folder of save_pretrained()"
    group.add_argument("--from", dest="start", type=some_path, metavar="FILE", help=start)
    group.add_argument("--partial", action="store_true", help="of --from, take the weights that fit, and say which")
    group.add_argument(
        "--save-every", type=whole_number(1, 10**9), metavar="N", help="also save each N updates (default: epochs only)"
    )
    group.add_argument("--tensorboard", action="store_true", help="also log to TensorBoard, in the folder")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the recipe (what is not given is the model's own)")
    seed = "of the weights and of the order of the data (default: 0)"
    group.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, metavar="N", help=seed)
    lr = "learning rate (default: the one that the paper found for the network and its sparsity, else the task's)"
    group.add_argument("--lr", type=number(0, 1e6), metavar="X", help=lr)
    decay = "weight decay (default: the task's)"
    group.add_argument("--weight-decay", type=number(0, 1e6, zero=True), metavar="X", help=decay)
    usual = "mostafa-wang for images, inverse-sqrt for translation, constant for your own tasks"
    group.add_argument("--schedule", choices=SCHEDULES, help=f"of the learning rate (default: {usual})")
    clip = "largest norm of the gradient (default: the task's, mostly none)"
    group.add_argument("--clip", type=number(0, 1e30), metavar="X", help=clip)
    image = (
        "side of the images of built-in models: folders of pictures are resized to it, smaller images get a border "
        "(default: that of the data, and of folders the model's own)"
    )
    group.add_argument("--image", type=whole_number(8, 4096), metavar="N", help=image)
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

        return supervise(args, folder_path(args), say)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    import torch

    from ..distributed import agreed, by_first, check_same, joined, leaving_word
    from ..measuring.process import rss_bytes
    from ..planning.options import risk_of
    from ..training.processes import planned_by_first
    from .job import load_job, shared_out

    world = joined()
    measured = args.bandwidth or world.bytes_per_second()
    if args.budget == AUTO:
        args.budget = by_first(world, lambda: str(auto_budget(say)))
    with leaving_word(world), users_code(args.model or ""):
        folder = run_folder(args, world)
        if args.resume:
            recall(args, folder)
        elif args.model is None or (args.epochs is None and args.updates is None):
            raise WrongUsage("name a MODEL and how long to train it, by --epochs or --updates; or --resume a run")
        _refuse_alone(args)
        if args.average and args.epochs and args.average > args.epochs:
            raise WrongUsage(f"--average {args.average} is of the last epochs, and there are {args.epochs}: take fewer")
        if args.threads:
            torch.set_num_threads(args.threads)
        base = rss_bytes()  # Python and torch, before there is a model
        job = agreed(world, lambda: shared_out(load_job(args), world.size))
        planning = argparse.Namespace(**vars(args) | {"bandwidth": measured})
        check_same(world, {"plan": techniques_of(args)})
        plan = planned_by_first(world, partial(plan_for, planning, job, folder))
        steps = {} if world.rank else plain_step(job.task, plan)  # before its model is changed
        beside = Beside(kept(args, job), getattr(job, "pairs", None), steps, risk_of(job.task, plan), base)
        session = agreed(world, partial(job.build, plan))
        settings = job.settings | given(args, "label_smoothing") | _started(args, session.lean, folder.warn)
        del job  # and its batch, which only predictions need
        limit = plan.budget_bytes if share_of(args.budget) else args.budget and parse_bytes(for_tensors(args) or 0)
        lean = predicted(session.lean, limit, steps, world, args.replan)
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


def _refuse_alone(args: argparse.Namespace) -> None:
    """Options that mean something under a budget only are not taken in silence."""
    if args.budget or args.plan or args.resume:
        return
    asked = {"--replan": args.replan, "--risk": args.risk != "neutral", "--counting": args.counting != "tensors"}
    for option, is_given in asked.items():
        if is_given:
            raise WrongUsage(f"{option} is about a budget: give --budget too, or leave it out")


Answer = tuple[dict[str, Any], list[str]]  # as JSON, and in words


def _train(
    args: argparse.Namespace,
    session: "Session",
    settings: dict[str, Any],
    folder: "RunFolder",
    beside: Beside,
    world: "World",
) -> Answer:
    from ..measuring.counted import measure_counted
    from ..measuring.process import peak_rss_bytes
    from ..reporting.run_progress import run_progress
    from ..reporting.run_words import plan_words, row, summary
    from ..reporting.tensorboard import tensorboard
    from ..training.loop import train
    from ..training.recipe import Recipe
    from ..training.resumable import length_of

    before = folder.record() if args.resume else None
    length = given(args, "epochs", "updates")
    batches = length_of(session.data) or 0
    updates = Recipe(**length).length(batches) if batches or args.updates else 0  # without a length, train() refuses
    own = own_code(args)
    # "--", or torchrun takes --run for one of its own
    start = ["torchrun", "--nproc-per-node", str(world.size), "-m", "--"] if world.size > 1 else []
    resume = shlex.join([*start, "shoestring", "train", *own, "--resume", "--run", str(folder.path)])
    evaluate = shlex.join(["shoestring", "evaluate", str(folder.path), *own])
    export = shlex.join(["shoestring", "export", str(folder.path), "-o", "model.safetensors"])
    watch = process_watch() if args.counting == "process" else None
    plan_row = row("plan", plan_words(session.lean.plan, beside.risk))
    with ExitStack() as stack:
        listeners: list[Any] = []
        if world.rank == 0:
            keep(folder, beside)
            print(plan_row, *where(args, settings, world), sep="\n", file=sys.stderr)
            listeners.append(stack.enter_context(run_progress(sys.stderr, session.lean.plan.budget_bytes)))
            if args.tensorboard:
                listeners.append(stack.enter_context(tensorboard(folder.path / "tensorboard")))
        record = train(
            session.lean,
            session.data,
            run=folder,
            resume=args.resume,
            start_over=args.start_over,
            listeners=listeners,
            settings=settings,
            meter=measure_counted,
            watch=watch,
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
    page = write_page(folder, session, beside.steps) if world.rank == 0 else None
    resident = {"peak_bytes": peak_rss_bytes(), "base_bytes": beside.base_bytes}
    answer = record.to_json() | {"run": str(folder.path), "resume": resume, "evaluate": evaluate, "export": export}
    answer |= {"page": str(page) if page else None, "resident": resident}
    whole = parse_bytes(args.budget) if watch else None
    judged = {"evaluate": evaluate} if session.evaluation else {}  # else there is nothing to evaluate on
    later = {"saved": str(folder.path), **judged, "export": export}
    later |= {"process": resident_words(**resident, budget_bytes=whole)}
    already = before is not None and before.finished and before.seconds == record.seconds
    first, *rest = summary(record, already)
    later |= {"page": str(page)} if page else {}
    if world.rank == 0:
        plan_row = row("plan", plan_in_use(folder, session.lean.plan, beside.risk))
    return answer, [first, plan_row, *rest, *(row(name, words) for name, words in later.items())]
