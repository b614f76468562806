"""Shared by the commands: the parser, the types of arguments, and output."""

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import NotWritten, ShoestringError
from ..techniques import WORDS
from ..techniques.words import Word, in_words

if TYPE_CHECKING:
    from ..task import Task


class WrongUsage(ShoestringError):
    """Arguments that no command understands."""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is a one-line error of ours, and `--bat` is not taken for `--batch`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self._negative_number_matcher = re.compile(r"^-\d")  # -5MB is a wrong value of its option, not another option

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            commands = [name.strip(" '") for name in wrong[2].split(",")]
            close = difflib.get_close_matches(wrong[1].lower(), [*commands, "--help", "--version"], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}? There are" if close else "there are"
            message = f"there is no command {wrong[1]!r}: {hint} {', '.join(commands)}"
        raise WrongUsage(f"{message}; see `{self.prog} --help`")


Run = Callable[[argparse.Namespace], int]


def command(subparsers: Any, name: str, run: Run, help: str, examples: Sequence[str] = ()) -> Parser:
    """A command's name, function, purpose and examples -> its parser, with --json."""
    lines = [f"shoestring {name} {words}".rstrip() for words in examples]
    parser = subparsers.add_parser(
        name,
        help=help,
        description=help[:1].upper() + help[1:] + ".",
        epilog="\n  ".join(["examples:", *lines]) if lines else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="data on stdout, words on stderr")
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_techniques(parser: argparse.ArgumentParser) -> None:
    """The techniques in a plan's words, for every command that takes them."""
    about = (
        "a value, and after it further settings of the technique as VALUE,KEY=VALUE,...; lists are joined by + "
        "(default: none, or what a --budget chooses)"
    )
    group = parser.add_argument_group("techniques", about)
    for word in WORDS:
        further = f" (KEY: {', '.join(word.further)})" if word.further else ""
        group.add_argument(
            f"--{word.name}", type=_value_of(word), metavar=word.metavar, help=(word.help + further).replace("%", "%%")
        )


def _value_of(word: Word) -> Callable[[str], Any]:
    """A technique's word -> an argument type: a plan's value for it."""

    def convert(text: str) -> Any:
        try:
            return word.parse(text)
        except ShoestringError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_devices(parser: argparse.ArgumentParser) -> None:
    """--devices, for every command that predicts: the batch is shared by them, and the memory is that of each."""
    most = "processes that share the batch, as under torchrun --nproc-per-node N (default: the WORLD_SIZE, or 1)"
    parser.add_argument("--devices", type=whole_number(1, 10**6), metavar="N", help=most)


def on_device(task: "Task", args: argparse.Namespace) -> "Task":
    """A task as one of --devices N has it: its batch is the largest share."""
    from ..distributed import launched_as
    from ..training.processes import example_share

    launched = launched_as()
    return example_share(task, args.devices or (launched.size if launched else 1))


def techniques_of(args: argparse.Namespace) -> dict[str, Any]:
    """The techniques that were named, in a plan's words."""
    return given(args, *(word.name for word in WORDS))


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Names of options -> those that were given, with their values."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def words_of(args: argparse.Namespace, **changes: Any) -> list[str]:
    """A command's arguments -> its words again, with some of their values changed."""
    words, values = [args.command, *([args.model] if args.model else [])], vars(args) | changes
    for action in args.parser._actions:
        value, name = values.get(action.dest), (action.option_strings or [""])[-1]
        if name and value not in (None, False, action.default):
            words += [name] if value is True else [name, in_words(value)]
    return words


def refuse_unknown(unknown: Sequence[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Refuses arguments that `parser` does not know; suggests the closest option, or lists all."""
    known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    word = unknown[0].split("=")[0]
    close = difflib.get_close_matches(word, known, n=1)
    if not word.startswith("-"):
        raise WrongUsage(f"`{parser.prog}` takes no further argument {word!r}; see `{parser.prog} --help`")
    raise WrongUsage(f"`{parser.prog}` takes no {word!r}; did you mean {close[0] if close else ', '.join(known)}?")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Bounds -> an argument type: a whole number between them."""

    def convert(text: str) -> int:
        try:
            number = int(text.replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is out of range: it must be from {low} to {high:,}")
        return number

    return convert


def number(low: float, high: float, zero: bool = False) -> Callable[[str], float]:
    """Bounds -> an argument type: a number above `low` (or, with `zero`, from it) and up to `high`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (low < value <= high or (zero and value == low)):
            words = "at least" if zero else "above"
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {words} {low:g} and at most {high:g}")
        return value

    return convert


def path_name(text: str) -> str:
    """An argument type: a name that the system could have for a file, or of a function in one."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r:.60} has a NUL in it, which no name of a file has")
    names = [*text.split("/"), text]
    for name, most in zip(names, [*[255] * (len(names) - 1), 4095], strict=True):
        if len(size := os.fsencode(name)) > most:
            raise argparse.ArgumentTypeError(f"{name[:20]!r}... is no name of a file: it has {len(size):,} bytes")
    return text


def some_path(text: str) -> Path:
    """An argument type: the path of a file or folder."""
    if not text:  # which would be the current folder
        raise argparse.ArgumentTypeError("the name is empty: name a file or folder")
    return Path(path_name(text))


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """Suffixes -> an argument type: a file that can be written, checked before any work is done."""

    def convert(text: str) -> Path:
        path = some_path(text)
        if path.suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(suffixes)}")
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
        if path.is_dir() or not path.parent.is_dir() or not writable:
            missing = f"there is no folder {str(path.parent)!r}"
            reason = "it is a folder" if path.is_dir() else missing if not path.parent.is_dir() else "no permission"
            raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {reason}")
        return path

    return convert


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=whole_number(1, 1024), metavar="N", help="threads to use (default: all cores)"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a file whose name the user gave; an OS error becomes one line, and leaves no empty file."""
    is_new = not path.exists()
    try:
        path.write_text(text, "utf-8")  # a page says so of itself, whatever the locale
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise NotWritten.because(path, error) from error


def say(words: str) -> None:
    """Tells the user something that is no output of the command."""
    print(f"shoestring: {words}", file=sys.stderr)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2))
