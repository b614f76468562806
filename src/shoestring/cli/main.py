"""The command line: arguments in, one command run, an exit code out.

A command is a module of this package with `add(subparsers)` and `run(args) -> int`, listed in COMMANDS.
None imports torch before it runs, so that `--help` is quick.
"""

import errno
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import ShoestringError
from ..exhaustion import is_exhaustion, out_of_memory
from . import bench, doctor, evaluate, export, fidelity, models, plan, profile, report, study, train, translate
from .options import Parser, WrongUsage, refuse_unknown

COMMANDS = (profile, plan, train, evaluate, translate, export, bench, fidelity, study, report, models, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` names -> its exit code; any error becomes one line on stderr."""
    if sys.stderr is None:  # it was closed before the start, and what is printed to None goes to stdout, among data
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the end)
    try:
        code = _run(argv)
        if sys.stdout is not None:  # it is None if it was closed before the start
            sys.stdout.flush()  # here, where a closed pipe is still caught
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes stdout once more
        return 141
    except KeyboardInterrupt:
        return _complain("stopped", 130)
    except Exception as error:
        if os.environ.get("SHOESTRING_TRACEBACK") == "1":
            raise
        if isinstance(error, ShoestringError):
            return _complain(str(error), error.exit_code)
        if is_exhaustion(error):
            found = out_of_memory(error, "this command", "free some, or give a smaller model, batch or --budget")
            return _complain(str(found), found.exit_code)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            what = error.filename or "the output"
            return _complain(f"{what} cannot be written: {error.strerror}; make room, or write elsewhere", 1)
        kind = type(error).__name__
        return _complain(f"unexpected {kind}: {error}; set SHOESTRING_TRACEBACK=1 to see where it arose", 1)


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="shoestring", description="Train a neural network in the memory you have.")
    parser.add_argument("--version", action="version", version=f"shoestring {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.add(subparsers)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        refuse_unknown(unknown, args.parser if args.command else parser)
    if args.command is None:
        raise WrongUsage(f"name a command: {', '.join(subparsers.choices)}; see `shoestring --help`")
    return args.run(args)


def _complain(message: str, code: int) -> int:
    if "RANK" in os.environ:  # one process of torchrun tells for all
        from ..distributed import speaks

        if not speaks(sys.exception()):
            return code
    print("shoestring:", " ".join(message.split()), file=sys.stderr)
    return code
