"""`shoestring plan MODEL --budget 7MB`: the techniques that fit a budget, and their cost, before anything runs."""

import argparse
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..units import parse_bytes, share_of
from .budgets import AUTO, auto_budget
from .model import add_model, load_task, users_code
from .options import (
    WrongUsage,
    add_devices,
    add_techniques,
    add_threads,
    command,
    given,
    on_device,
    output_file,
    path_name,
    print_json,
    say,
    techniques_of,
    write_text,
)

if TYPE_CHECKING:
    from ..planning.plan import Plan

BUDGET = "memory for a step's tensors and Python objects: 7MB, 1.5GB, 50%% of plain training's, auto (all that is left)"
EXAMPLES = (
    "wrn-28-2 --batch 100",
    "wrn-28-2 --batch 100 --budget 90MB --risk exact",
    "wrn-28-2 --data cifar-10-batches-bin --batch 100 --budget 8MB --risk approximate --output plan.json",
    "resnet18 --batch 100 --budget 200MB --activations adaptive",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "plan", run, "pick the cheapest techniques that fit a budget", EXAMPLES)
    add_model(parser)
    parser.add_argument(
        "--data", type=path_name, metavar="DIR", help="plan for the batches that `train --data DIR` reads"
    )
    add_budget(parser, "; without it, the trade-offs and the least budget that works")
    add_counting(parser)
    add_risk(parser)
    add_techniques(parser)
    parser.add_argument("--output", type=output_file(".json"), metavar="FILE", help="write the plan, for train --plan")
    add_threads(parser)
    add_devices(parser)
    add_bandwidth(parser)
    parser.add_argument("--explain", action="store_true", help="also what was left out, and why")
    parser.add_argument(
        "--rehearse", action="store_true", help="run one microbatch on a copy of the model before a plan is given"
    )


def add_budget(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--budget", type=budget, metavar="SIZE", help=f"{BUDGET}{more}")


def add_counting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--counting", choices=("tensors", "process"), default="tensors",
        help="what the budget is for: tensors and Python objects (default), or the whole process, Python and torch "
        "included, whose base is measured once",
    )  # fmt: skip


_say_once = cache(say)


def for_tensors(args: argparse.Namespace) -> str | int | None:
    """The budget for tensors and objects: of one for the whole process, what is left without its base. `auto` becomes
    what there is room for now."""
    if args.budget == AUTO:
        args.budget = str(auto_budget(_say_once))
    if getattr(args, "counting", "tensors") == "tensors" or args.budget is None:
        return args.budget
    if share_of(args.budget) is not None:
        raise WrongUsage("--counting process takes a size, such as 500MB: a share is one of the tensors' memory")
    from ..errors import NoPlanFits
    from ..measuring.base import process_base_bytes
    from ..units import format_bytes

    whole, base = parse_bytes(args.budget), process_base_bytes()
    if whole <= base:
        raise NoPlanFits(
            f"a process needs {format_bytes(base, 3)} for Python, torch and planning alone, and the budget is "
            f"{format_bytes(whole)}: give more, or count tensors (--counting tensors)"
        )
    _say_once(
        f"of {format_bytes(whole)} for the process, {format_bytes(base, 3)} are for Python and torch (measured), and "
        f"{format_bytes(whole - base)} for tensors and objects"
    )
    return whole - base


def budget(text: str) -> str:
    """An argument type: a size, or a share of what plain training needs; nonsense is refused before any work."""
    if text == AUTO:
        return text
    if share_of(text) is None and parse_bytes(text) < 1000 and text.strip().isdigit():
        raise WrongUsage(f"a budget of {text} is {parse_bytes(text)} bytes: write the unit, as in {text}MB")
    return text


def add_risk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--risk", choices=("exact", "neutral", "approximate"), default="neutral",
        help="exact: the same gradients; neutral: other rounding, no loss known; approximate: quality is traded for "
        "memory (default: neutral)",
    )  # fmt: skip


def add_bandwidth(parser: argparse.ArgumentParser) -> None:
    words = "bytes per second between devices, for predicted times (default: measured under torchrun, or else 1GB)"
    parser.add_argument("--bandwidth", type=parse_bytes, metavar="SIZE", help=words)


def run(args: argparse.Namespace) -> int:
    if args.budget is None and techniques_of(args):
        raise WrongUsage("techniques are held to a budget: give --budget, or see `shoestring profile`")
    with users_code(args.model):
        result = _on_data(args) if args.data else make_plan(_task(args), args, args.rehearse)
    if args.output:
        write_text(args.output, result.to_json())
        say(f"wrote {args.output}")
    if args.json:
        import json

        print_json(json.loads(result.to_json()))
    else:
        from ..reporting.plans import show_plan
        from ..reporting.terminal import make_console

        show_plan(make_console(), result, explain=args.explain)
    return 0


def _task(args: argparse.Namespace) -> Any:
    return on_device(load_task(args.model, given(args, "batch", "tokens"), device="meta"), args)


def _on_data(args: argparse.Namespace) -> "Plan":
    """The plan of a run on data: images are in memory as bytes, and sentences have their own lengths."""
    from .job import RECIPE, load_job

    job = load_job(argparse.Namespace(**RECIPE | vars(args)))
    return job.plan_in_tokens(make_plan(on_device(job.task, args), args, args.rehearse))


def make_plan(task: Any, args: argparse.Namespace, rehearse: bool = False) -> "Plan":
    """A task and the arguments --budget, --risk, --threads and techniques, if any are named -> the plan; operators'
    scratch is calibrated."""
    import torch

    from ..measuring import calibrate
    from ..measuring.calibration import load_cache
    from ..measuring.rates import device_rates
    from ..planning.search import plan
    from ..reporting.progress import progress, steps, waiting

    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)

    def calibrated(signatures: list) -> dict:
        with progress("calibrating operators, once for this machine") as advance:
            return calibrate(signatures, advance)

    known: Any = load_cache()
    link = {"link_bytes_per_second": args.bandwidth} if getattr(args, "bandwidth", None) else {}
    tensors = for_tensors(args)  # what is wrong with it is told before the work
    with waiting("measuring how fast this machine is, once for it"):
        rates = device_rates()
    with steps("planning") as tell:
        return plan(
            task,
            tensors,
            args.risk,
            rates=replace(rates, **link),
            workspace=known,
            calibrate=calibrated,
            progress=tell,
            rehearse=rehearse,
            warn=lambda words: say(f"warning: {words}"),
            **techniques_of(args),
        )
