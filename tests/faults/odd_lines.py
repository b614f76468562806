"""Command lines made at random: each answers, or is refused in one line, with an exit code that means something."""

import argparse
import contextlib
import io
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shoestring.cli import main as command_line
from shoestring.cli.options import Parser
from shoestring.errors import ShoestringError

MODELS = """
import sys
import torch
from torch import nn
from shoestring import SGD, Task

def loss(model, batch):
    return model(batch).square().mean()

def task(batch=4):
    return Task(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), loss, torch.zeros(batch, 4), SGD(lr=0.1))

def batches(batch=4):
    return [torch.ones(batch, 4)] * 2

def no_parameters():
    return task().with_(model=nn.ReLU())

def leaves():
    sys.exit("enough")

def leaves_in_loss():
    return task().with_(loss=lambda model, batch: sys.exit(3))

def raises():
    raise KeyError("mine")

def wants(more):
    return task()

def nothing():
    pass

number = 3
"""
PLACES = (
    "mine.py:task", "mine.py:task", "mine.py:task", "mine.py:no_parameters", "mine.py:leaves", "mine.py:raises",
    "mine.py:leaves_in_loss", "mine.py:wants", "mine.py:nothing", "mine.py:number", "mine.py:", ":task", ":",
    "mine.py", "mine:task", "other:task", "..:x", "...:x", ".:x", "a..b:x", "mine.py:task:task", "wrn-10-0.1", "wrn-",
    "wrn-0-0", "wrn-10-1e9", "wrn-10-nan", "wrn-4-1", "wrn-5-1", "wrn-99999999999999999999-1", "dynamicconv", "vit",
    "", " ", "-", "--", "x" * 300, "x" * 5000 + ".py:task", "\udcff\udcfe.py:task", "a\0b", "a\0b.py:task",
    "mine.py:a\0b", "mine.py:\udcff", "/dev/null", "/dev/zero:x", "/dev/zero.py:task", "pipe.py:task",
    "folder.py:task", ".", "/", "run", "missing", "é:ü", "wrn-28-\n", "%s%n", "os:system", "builtins:exit",
    "shoestring:train", "mine.py:__name__",
)  # fmt: skip
VALUES = (
    "0", "1", "2", "3", "-1", "10", "1e3", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000, "0x10", "1_0", "１",
    "", " ", "-", "--", "none", "None", "true", "null", "fp16", "bf16", "fp32", "fp8", "8bit", "8bit+no-gradient",
    "sm3", "no-bn", "every-2", "every-0", "every-", "residual-1*", "optimal", "optimal-1MB", "optimal-0", "offload",
    "half", "masks", "pool2", "int4", "pool8+int2", "adaptive", "adaptive-", "int4,*:batch_norm=int2",
    "30,method=set", "30,layers=a+b", "30,seed=nan", "30,method", "30,=", "2,by=tokens", "2,simulated=true", "7MB",
    "1.5GB", "50%", "101%", "0%", "auto", "1QB", "-7MB", "1e999GB", "exact", "approximate", "table3", "table3.toml",
    "study.toml", "plan.json", "run", ".", "/", "/dev/null", "/dev/zero", "/dev/full", "pipe", "/proc/self/mem",
    "missing", "x" * 300, "x" * 5000, "a\0b", "\udcff", "mine.py:batches", "mine.py:nothing", "out.html",
    "out.safetensors", "out.svg", "out.json", "folder/out.svg", "a/b/c.svg", ",", "+", "=", ":", "{}", "[]",
    "{'a': 1}", "é", "\n", "a=b,c=d", "loss", "bleu", "constant", "paper", "memory",
)  # fmt: skip
GOOD = (0, 2, 3, 4, 5, 6)
SECONDS = 90  # until a command counts as hanging, on a busy machine too


def options() -> dict[str, list[argparse.Action]]:
    """The commands, each with its options and positional arguments."""
    parser = Parser(prog="shoestring")
    subparsers = parser.add_subparsers()
    for command in command_line.COMMANDS:
        command.add(subparsers)
    return {name: one._actions for name, one in subparsers.choices.items()}


def line(draw: random.Random, commands: dict[str, list[argparse.Action]]) -> list[str]:
    """A command line: mostly well formed, with odd values."""
    command = draw.choice(sorted(commands))
    words = [command if draw.random() < 0.98 else draw.choice(VALUES)]
    for action in commands[command]:
        named = action.option_strings
        if named and draw.random() < (0.9 if action.required else 0.15) and action.dest not in ("help", "tensorboard"):
            words.append(draw.choice(named) if draw.random() < 0.97 else draw.choice(named)[:-1])
            if action.nargs != 0 and draw.random() < 0.97:
                words.append(_value(draw, action))
        elif not named and draw.random() < 0.95:
            words += [_value(draw, action) for _ in range(draw.choice([1, 1, 1, 2]))]
    if command == "train" and draw.random() < 0.9:
        words += ["--updates", "1", "--run", draw.choice(["run", "new", "run/inside", "missing/new"])]
    if draw.random() < 0.05:
        words.insert(draw.randrange(len(words) + 1), draw.choice(VALUES))
    return words


def _value(draw: random.Random, action: argparse.Action) -> str:
    """A value for an argument: mostly one that its type takes, so that what comes after it is reached."""
    if action.choices and draw.random() < 0.8:
        return draw.choice(sorted(map(str, action.choices)))
    places = action.dest in ("model", "run_folder", "subjects", "data", "valid", "start", "name")
    values = PLACES if places and draw.random() < 0.8 else VALUES
    return draw.choice(_taken(action, values) if draw.random() < 0.8 else values)


def _taken(action: argparse.Action, values: tuple[str, ...]) -> list[str]:
    def is_taken(value: str) -> bool:
        try:
            return action.type is None or action.type(value) is not None
        except (argparse.ArgumentTypeError, ShoestringError, ValueError):
            return False

    return list(filter(is_taken, values)) or list(values)


@contextlib.contextmanager
def desk(folder: Path) -> Iterator[None]:
    """A folder with what the lines name; the process is in it, and its cache too."""
    (folder / "mine.py").write_text(MODELS)
    (folder / "folder.py").mkdir()
    (folder / "folder").mkdir()
    (folder / "plan.json").write_text('{"version": 1, "microbatch": 2}')
    (folder / "study.toml").write_text('title = "x"\npaper = "sohoni"\n')
    for name in ("pipe", "pipe.py"):
        os.mkfifo(folder / name)
    before, cache = os.getcwd(), os.environ.get("XDG_CACHE_HOME")
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("XDG_CACHE_HOME") if cache is None else os.environ.update(XDG_CACHE_HOME=cache)


def answer(words: list[str]) -> tuple[int | str, str]:
    """A command line -> its exit code, or what it ended with, and what it said."""

    def late(*_):
        raise TimeoutError("too slow")

    out, err, told = io.StringIO(), io.StringIO(), list[str]()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), by_children(told):
            code: int | str = command_line.main(words)
    except SystemExit as error:
        code = f"SystemExit({error.code})"
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return code, err.getvalue() + "".join(told)


@contextlib.contextmanager
def by_children(told: list[str]) -> Iterator[None]:
    """Adds what processes that this one starts say, as --supervise does, to `told`."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            told.append(file.read().decode(errors="replace"))


def wrong(code: int | str, said: str) -> str:
    """What is wrong with an answer; "" if nothing is."""
    if "unexpected" in said:
        return said[said.index("unexpected") :].strip()
    if "Traceback" in said:
        return "a traceback"
    if code not in GOOD:
        return f"exit code {code}"
    if code and len([text for text in said.splitlines() if text.startswith("shoestring: ")]) < 1:
        return "no word of the reason"
    return ""


def check(count: int, seed: int, folder: Path) -> tuple[Counter, list[tuple[list[str], str]]]:
    """So many command lines -> how many ended with which exit code, and those that ended badly."""
    draw, commands, codes, bad = random.Random(seed), options(), Counter(), []
    with desk(folder):
        for _ in range(count):
            words = line(draw, commands)
            if words[0] in ("doctor", "bench") or words[:2] == ["study", "run"]:
                words.append("--no-such-option")  # what these do on a good line takes long, and is tested elsewhere
            code, said = answer(words)
            codes[code] += 1
            if what := wrong(code, said):
                bad.append((words, what))
    return codes, bad
