"""The heap meter's fresh process: `python -m shoestring.measuring.heap_process REQUEST` writes a reading."""

import importlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from .heap import measure_preloaded


def find_run(target: str, args: list[Any]) -> Callable[[], Any]:
    """A target as `measure_heap` takes it, and its arguments -> a function that runs it once."""
    home, _, name = target.partition(":")
    if not name:
        return lambda: _run_script(home, args)
    function = getattr(_module(home), name, None)
    if not callable(function):
        raise ShoestringError(f"{home} has no function called {name!r}: name one that it defines")
    return lambda: function(*args)


def _module(home: str) -> Any:
    if not home.endswith(".py"):
        return importlib.import_module(home)
    spec = importlib.util.spec_from_file_location(Path(home).stem, _existing(home))
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run_script(path: str, args: list[Any]) -> None:
    sys.argv = [_existing(path), *map(str, args)]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise ShoestringError(f"{path} ended with {end.code!r}: make it run to its end") from None


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise ShoestringError(f"there is no file {path}: give the path of a Python file")
    return path


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Target, arguments and number of warm-ups -> peak and end in bytes, or the error in one line."""
    try:
        run = find_run(request["target"], request["args"])
        for _ in range(request["warmups"]):
            run()
        reading = measure_preloaded(run)
    except ShoestringError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"peak_bytes": reading.peak_bytes, "end_bytes": reading.end_bytes}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    Path(request["answer"]).write_text(json.dumps(measure(request)))
