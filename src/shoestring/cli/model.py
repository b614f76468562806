"""MODEL on the command line -> a Task: a built-in name, `file.py:function` or `package.module:function`."""

import argparse
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ShoestringError
from .options import path_name, whole_number

if TYPE_CHECKING:
    from ..task import Task

HELP = "a built-in model such as wrn-28-2, or file.py:function or package.module:function that returns a Task"


def add_model(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """MODEL and its size, for every command that takes them."""
    parser.add_argument("model", type=path_name, metavar="MODEL", help=HELP, nargs="?" if optional else None)
    size = parser.add_mutually_exclusive_group()
    batch, tokens = "examples in a batch (default: the model's, mostly 100)", "tokens in a batch (default: 4000)"
    size.add_argument("--batch", type=whole_number(1, 10**9), metavar="N", help=batch)
    size.add_argument("--tokens", type=whole_number(1, 10**9), metavar="N", help=tokens)


def is_function(text: str | None) -> bool:
    """Whether an argument names a function, as in file.py:function, and not a folder."""
    return text is not None and ":" in text and not Path(text).exists()


def load_batches(text: str, sizes: dict[str, int]) -> Any:
    """file.py:function that returns batches -> what it returns; it is given the sizes that it takes."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ShoestringError(f"{text!r} names no function of yours: write it as file.py:function")
    with users_code(text), _named_if_long(text):
        function = _function(_load_file(Path(place)) if place.endswith(".py") else _load_module(place), name, place)
        taken = inspect.signature(function).parameters
        return function(**{size: value for size, value in sizes.items() if size in taken})


def is_builtin(text: str) -> bool:
    return ":" not in text and not text.endswith(".py")


def short_name(text: str) -> str:
    """file.py:function without the folders in front: its name, wherever a command is started."""
    place, colon, function = text.rpartition(":")
    return f"{Path(place).name}:{function}" if colon and place.endswith(".py") else text


def load_task(text: str, sizes: dict[str, int], device: str = "cpu") -> "Task":
    """MODEL, the sizes asked for (batch or tokens) and the device of a built-in model -> the Task."""
    if is_builtin(text):
        from ..models import builtin

        return builtin(text, device=device, **sizes)
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise ShoestringError(f"{text!r} names no function: write it as file.py:function")
    with users_code(text), _named_if_long(text):
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
        task = _call(_function(module, name, place), text, sizes)
    return task if task.name else task.with_(name=short_name(text))  # one name, whatever command it is given to


def _named_if_long(text: str) -> AbstractContextManager[None]:
    """Around what may take for ever, as code of the user's may: it is named after a while."""
    from ..reporting.progress import waiting

    return waiting(f"running {text}")


@contextmanager
def users_code(text: str) -> Iterator[None]:
    """Around the user's code: its prints go to stderr, and its exceptions are reported with their line."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except ShoestringError:
        raise
    except SyntaxError as error:
        line = f"line {error.lineno} of " if error.lineno else ""  # bytes that are no text are in no line
        where = f"{line}{Path(error.filename or text.rpartition(':')[0]).name}"
        raise ShoestringError(f"{text!r} is not valid Python: {error.msg} in {where}") from error
    except (Exception, SystemExit) as error:
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        if not theirs and not isinstance(error, SystemExit):
            raise
        told = " ".join([f"{type(error).__name__}:", *map(str.strip, str(error).strip().splitlines())])
        where = f"line {theirs[-1].lineno} of {Path(theirs[-1].filename).name}" if theirs else "to end the program"
        raise ShoestringError(f"{text!r} raised {told} ({where})") from error


def _is_users(filename: str) -> bool:
    """Whether a file of a traceback is the user's: not ours, not Python's, not an installed library's."""
    path = Path(filename)
    ours, python = Path(__file__).parents[1], Path(traceback.__file__).parent
    return path.exists() and "site-packages" not in path.parts and not {ours, python} & set(path.parents)


def _load_file(path: Path) -> ModuleType:
    """A Python file -> the module, with the file's folder on the path as if it were run itself."""
    if not path.exists():
        raise ShoestringError(f"there is no file {str(path)!r}: check the path before the colon")
    if not path.is_file() and not path.is_dir():  # opening a pipe would wait for ever
        raise ShoestringError(f"{str(path)!r} is not a regular file: name one that holds Python")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ShoestringError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    sys.path.insert(0, str(path.resolve().parent))
    name = f"shoestring_user_{path.stem}"  # must not shadow an installed module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    """A dotted name -> the module, with the current folder on the path as `python -m` has it."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ShoestringError(f"{name!r} is no module: write MODEL as file.py:function or package.module:function")
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise ShoestringError(f"there is no module {error.name!r}: check the name and the folder") from error


def _function(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise ShoestringError(f"{name!r} in {place!r} is of type {type(function).__name__}, and no function: name one")
    own = [f.__name__ for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    raise ShoestringError(f"{place!r} has no function {name!r}: it has {', '.join(own) or 'none'}")


def _call(function: Callable[..., Any], text: str, sizes: dict[str, int]) -> "Task":
    """Calls the user's function with the sizes asked for -> its Task."""
    from ..task import Task

    signature = inspect.signature(function)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    if (unknown := sorted(sizes.keys() - signature.parameters.keys())) and not takes_any:
        raise ShoestringError(
            f"{text!r} takes no argument {unknown[0]!r}: leave --{unknown[0]} out, or let the function take it"
        )
    try:
        signature.bind(**sizes)
    except TypeError as error:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "no arguments"
        raise ShoestringError(f"{text!r} cannot be called with {given}: {error}") from error
    task = function(**sizes)
    if not isinstance(task, Task):
        raise ShoestringError(f"{text!r} returned {type(task).__name__}, not a shoestring.Task: return one")
    return task
