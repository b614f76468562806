"""`shoestring profile MODEL`: where the memory of a training step goes, before anything runs."""

import argparse
from inspect import signature
from typing import TYPE_CHECKING, Any

from ..errors import ShoestringError
from ..techniques.words import in_words
from .job import read_plan
from .model import add_model, is_builtin, load_task, users_code
from .options import (
    add_devices,
    add_techniques,
    add_threads,
    command,
    given,
    on_device,
    output_file,
    print_json,
    say,
    some_path,
    techniques_of,
    write_text,
)
from .plan import add_budget, add_risk, make_plan

if TYPE_CHECKING:
    from ..ledger import Ledger

EXAMPLES = (
    "wrn-28-2 --batch 100",
    "mine.py:task --figure memory.svg",
    "wrn-28-2 --batch 100 --checkpoint 'residual-2*' --microbatch 10",
    "wrn-28-2 --batch 100 --rules paper --nonzero 30 --precision fp16",
    "wrn-28-2 --batch 100 --compare plan.json",
)


def add(subparsers: Any) -> None:
    purpose = "tell where training memory goes, before anything runs"
    parser = command(subparsers, "profile", run, purpose, EXAMPLES)
    add_model(parser)
    rules = "count as allocated (default), or as in the paper"
    parser.add_argument("--rules", choices=("real", "paper"), default="real", help=rules)
    drawn = "draw it: .svg, .png or .pdf"
    parser.add_argument("--figure", type=output_file(".svg", ".png", ".pdf"), metavar="FILE", help=drawn)
    parser.add_argument("--ledger", type=output_file(".json"), metavar="FILE", help="write all storages down, as .json")
    beside = "the same model under a plan beside it, from a file of `shoestring plan`"
    parser.add_argument("--compare", type=some_path, metavar="PLAN", help=beside)
    parser.add_argument("--no-calibrate", action="store_true", help="leave PyTorch's own scratch unknown")
    add_threads(parser)
    add_devices(parser)
    add_techniques(parser)
    add_budget(parser, "; alone it is planned for, and named techniques are held to it")
    add_risk(parser)


def run(args: argparse.Namespace) -> int:
    if args.figure:
        from ..reporting.figures import require_plot

        require_plot()  # before the work, not after it
    sizes = given(args, "batch", "tokens")
    techniques = techniques_of(args)
    if args.compare and args.rules == "paper":
        raise ShoestringError("--compare compares steps as they are allocated: leave out --rules paper")
    with users_code(args.model):
        data, ledger = (_paper if args.rules == "paper" else _real)(args, sizes, techniques)
    _write(args, data, ledger)  # before printing, which a closed pipe may end
    if args.json:
        print_json(data)
    else:
        from ..reporting.terminal import make_console, show_comparison, show_profile

        if "compared" in data:
            show_comparison(make_console(), data, data["compared"], args.compare.name)
        else:
            show_profile(make_console(), data, ledger)
    return 0


def _paper(args: argparse.Namespace, sizes: dict, techniques: dict) -> tuple[dict[str, Any], "Ledger"]:
    """The arguments -> JSON and ledger of the step by the paper's counting rules."""
    from ..paper import paper_profile

    known = signature(paper_profile).parameters
    techniques = techniques | given(args, "budget", "devices")
    for name, value in techniques.items():
        if name not in known or isinstance(value, dict):
            what = f"--{name} {in_words(value)}"
            raise ShoestringError(f"the paper's rules know no {what}: leave it out, or use --rules real")
    model = args.model if is_builtin(args.model) else load_task(args.model, sizes)
    result = paper_profile(model, **sizes, **techniques)
    return result.to_json(), result.ledger


def _real(args: argparse.Namespace, sizes: dict, techniques: dict) -> tuple[dict[str, Any], "Ledger"]:
    """The arguments -> JSON and ledger of the step as PyTorch would run it."""
    import torch

    from .. import profile
    from ..planning.plan import Plan
    from ..reporting.progress import progress
    from ..training.apply import lean_task

    if args.threads:
        torch.set_num_threads(args.threads)
    plain = on_device(load_task(args.model, sizes, device="meta"), args)

    def profiled(plan: Plan) -> tuple[dict[str, Any], "Ledger"]:
        task = lean_task(plain, plan)
        before = f"tracing the step of {task.name}"
        with progress("calibrating the step's operators, once for this machine", before) as advance:
            result = profile(task, calibrate=not args.no_calibrate, progress=advance)
        data = result.to_json()
        if plan.budget_bytes:
            data["budget_bytes"] = plan.budget_bytes
        data["settings"] = (sizes or {"items": task.count(task.batch)}) | result.settings
        if task.devices > 1:
            data["settings"]["devices"] = task.devices  # the memory is that of each
        return data, result.ledger

    other = read_plan(args.compare, plain) if args.compare else None  # a bad file is told before the work
    data, ledger = profiled(make_plan(plain, args) if args.budget else Plan(**techniques))
    if other is not None:
        data["compared"], _ = profiled(other)
    return data, ledger


def _write(args: argparse.Namespace, data: dict[str, Any], ledger: "Ledger") -> None:
    """Writes the requested files, and says so."""
    if args.figure:
        from ..reporting.figures import profile_figure

        profile_figure(args.figure, data, ledger)
    if args.ledger:
        write_text(args.ledger, ledger.to_json())
    for path in filter(None, (args.figure, args.ledger)):
        say(f"wrote {path}")
