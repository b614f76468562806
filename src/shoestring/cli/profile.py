"""`shoestring profile MODEL`: where the memory of a training step goes, before anything runs."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from .model import HELP, load_task, users_code
from .options import command, output_file, print_json, whole_number, write_text

if TYPE_CHECKING:
    from ..ledger import Ledger


def add(subparsers: Any) -> None:
    parser = command(subparsers, "profile", run, "tell where training memory goes, before anything runs")
    parser.add_argument("model", metavar="MODEL", help=HELP)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch", type=whole_number(1, 10**9), metavar="N", help="examples in a batch")
    size.add_argument("--tokens", type=whole_number(1, 10**9), metavar="N", help="tokens in a batch")
    parser.add_argument("--figure", type=output_file(".svg", ".png", ".pdf"), metavar="FILE", help="draw it")
    parser.add_argument("--ledger", type=output_file(".json"), metavar="FILE", help="write all storages down")


def run(args: argparse.Namespace) -> int:
    if args.figure:
        from ..reporting.figures import require_plot

        require_plot()  # before the work, not after it
    data, ledger = _real(args)
    if args.json:
        print_json(data)
    else:
        from ..reporting.terminal import make_console, show_profile

        show_profile(make_console(), data, ledger)
    _write(args, data, ledger)
    return 0


def _real(args: argparse.Namespace) -> tuple[dict[str, Any], "Ledger"]:
    """The arguments -> JSON and ledger of the step as PyTorch would run it."""
    from ..profiling import profile

    sizes = {name: size for name in ("batch", "tokens") if (size := getattr(args, name)) is not None}
    task = load_task(args.model, sizes, device="meta")
    with users_code(args.model):
        result = profile(task)
    data = result.to_json()
    data["settings"] = (sizes or {"items": task.count(task.batch)}) | result.settings
    data["bytes"]["workspace"] = None  # unknown is not nothing
    return data, result.ledger


def _write(args: argparse.Namespace, data: dict[str, Any], ledger: "Ledger") -> None:
    """Writes the files that were asked for, and says so."""
    if args.figure:
        from ..reporting.figures import profile_figure

        profile_figure(args.figure, data, ledger)
    if args.ledger:
        write_text(args.ledger, ledger.to_json())
    for path in filter(None, (args.figure, args.ledger)):
        print(f"shoestring: wrote {path}", file=sys.stderr)
