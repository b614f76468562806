"""`shoestring fidelity MODEL`: which layers can take compressed activations, by their weight gradients."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .model import add_model, load_task, users_code
from .options import command, given, output_file, path_name, print_json, say, whole_number

if TYPE_CHECKING:
    from ..fidelity import Fidelity
    from ..task import Task

CODECS = "pool2,pool4,int8,int4,int2,pool8+int2"
EXAMPLES = (
    "wrn-28-2 --batch 100 --data cifar-10-batches-bin",
    "resnet18 --batch 32 --codecs pool2,int4 --steps 50 --every 10 --figure fidelity.svg",
    "mine.py:task --json",
)


def add(subparsers: Any) -> None:
    purpose = "train briefly and compare the gradients of compressed activations with exact ones"
    parser = command(subparsers, "fidelity", run, purpose, EXAMPLES)
    add_model(parser)
    parser.add_argument("--codecs", default=CODECS, metavar="C,...", help=f"what to compare (default: {CODECS})")
    parser.add_argument("--steps", type=whole_number(1, 10**6), default=20, metavar="N", help="updates (default: 20)")
    parser.add_argument(
        "--every", type=whole_number(1, 10**6), default=5, metavar="M", help="compare in each M-th step (default: 5)"
    )
    parser.add_argument(
        "--data", type=path_name, metavar="DIR", help="train on this data, not on the model's one example batch"
    )
    parser.add_argument(
        "--figure", type=output_file(".svg", ".png", ".pdf"), metavar="FILE", help="draw it: .svg, .png or .pdf"
    )
    parser.add_argument(
        "--threads", type=whole_number(1, 1024), metavar="N", help="threads to use (default: all cores)"
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from ..fidelity import check_words

    words = [word.strip() for word in args.codecs.split(",")]
    check_words(words)  # before any work
    if args.figure:
        from ..reporting.figures import require_plot

        require_plot()
    if args.threads:
        torch.set_num_threads(args.threads)
    with users_code(args.model):
        found = compare(args, words)
    for word, reason in found.without_effect.items():
        say(f"{word} is left out: {reason}")
    data = found.to_json()
    if args.figure:
        from ..reporting.fidelity import fidelity_figure

        fidelity_figure(args.figure, data)
        say(f"wrote {args.figure}")
    if args.json:
        print_json(data)
    else:
        from ..reporting.fidelity import show_fidelity
        from ..reporting.terminal import make_console

        show_fidelity(make_console(), data)
    return 0


def compare(args: argparse.Namespace, words: list[str]) -> "Fidelity":
    """The arguments and the codecs' words -> what a brief training shows."""
    from .. import profile
    from ..fidelity import probe
    from ..reporting.progress import progress

    task, batches = _on_data(args) if args.data else _on_its_batch(args)
    with progress("training, and comparing gradients") as tell:
        return probe(
            task, batches, args.steps, words, args.every, peak=lambda task: profile(task).peak_bytes, tell=tell
        )


def _on_its_batch(args: argparse.Namespace) -> tuple["Task", Iterator[Any]]:
    from itertools import repeat

    task = load_task(args.model, given(args, "batch", "tokens"))
    return task, repeat(task.batch)


def _on_data(args: argparse.Namespace) -> tuple["Task", Iterator[Any]]:
    from ..fidelity import endless
    from ..planning.plan import Plan
    from .job import RECIPE, load_job

    session = load_job(argparse.Namespace(**RECIPE | vars(args))).build(Plan())
    return session.lean.task, endless(session.data)
