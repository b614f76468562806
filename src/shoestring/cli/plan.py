"""`shoestring plan MODEL --budget 7MB`: the techniques that fit a budget, and their cost, before anything runs."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .model import add_model, load_task, users_code
from .options import add_techniques, command, given, output_file, print_json, techniques_of, whole_number, write_text

if TYPE_CHECKING:
    from ..planning.plan import Plan

EXAMPLES = (
    "wrn-28-2 --batch 100 --budget 90MB --risk exact",
    "wrn-28-2 --data cifar-10-batches-bin --batch 100 --budget 7MB --output plan.json",
    "resnet18 --batch 100 --budget 200MB --activations adaptive",
)


def add(subparsers: Any) -> None:
    parser = command(subparsers, "plan", run, "pick the cheapest techniques that fit a budget", EXAMPLES)
    add_model(parser)
    parser.add_argument("--data", metavar="DIR", help="plan for the batches that `train --data DIR` reads")
    parser.add_argument("--budget", required=True, metavar="SIZE", help="such as 7MB or 1.5GB")
    add_risk(parser)
    add_techniques(parser)
    parser.add_argument("--output", type=output_file(".json"), metavar="FILE", help="write the plan, for train --plan")
    parser.add_argument("--threads", type=whole_number(1, 1024), metavar="N", help="threads that will train")
    parser.add_argument("--explain", action="store_true", help="also what was left out, and why")
    parser.add_argument(
        "--rehearse", action="store_true", help="run one microbatch on a copy of the model before a plan is given"
    )


def add_risk(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--risk", choices=("exact", "neutral", "approximate"), default="neutral", help="what may change the result"
    )


def run(args: argparse.Namespace) -> int:
    from ..units import parse_bytes

    parse_bytes(args.budget)  # refuses nonsense before any work
    with users_code(args.model):
        result = _on_data(args) if args.data else make_plan(_task(args), args, args.rehearse)
    if args.output:
        write_text(args.output, result.to_json())
        print(f"shoestring: wrote {args.output}", file=sys.stderr)
    if args.json:
        import json

        print_json(json.loads(result.to_json()))
    else:
        from ..reporting.plans import show_plan
        from ..reporting.terminal import make_console

        show_plan(make_console(), result, explain=args.explain)
    return 0


def _task(args: argparse.Namespace) -> Any:
    return load_task(args.model, given(args, "batch", "tokens"), device="meta")


def _on_data(args: argparse.Namespace) -> "Plan":
    """The plan of a run on data: images are in memory as bytes, and sentences have their own lengths."""
    from .job import RECIPE, load_job

    job = load_job(argparse.Namespace(**RECIPE | vars(args)))
    return job.plan_in_tokens(make_plan(job.task, args, args.rehearse))


def make_plan(task: Any, args: argparse.Namespace, rehearse: bool = False) -> "Plan":
    """A task and the arguments --budget, --risk, --threads and techniques, if any are named -> the plan; operators'
    scratch is calibrated."""
    import torch

    from ..measuring import calibrate
    from ..measuring.calibration import load_cache
    from ..measuring.rates import device_rates
    from ..planning.search import plan
    from ..reporting.progress import progress, steps

    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)

    def warn(words: str) -> None:
        print(f"shoestring: warning: {words}", file=sys.stderr)

    def calibrated(signatures: list) -> dict:
        with progress("calibrating operators, once for this machine") as advance:
            return calibrate(signatures, advance)

    known: Any = load_cache()
    with steps("planning") as tell:
        return plan(
            task,
            args.budget,
            args.risk,
            rates=device_rates(),
            workspace=known,
            calibrate=calibrated,
            progress=tell,
            rehearse=rehearse,
            warn=warn,
            **techniques_of(args),
        )
