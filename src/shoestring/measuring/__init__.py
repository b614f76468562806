"""The meters: how much memory a run really occupied, by torch's allocator, the whole heap, CUDA or the process.

    measure(train).peak_bytes                              # blocks of torch's allocator, to the byte
    measure("train.py:main", meter="heap").peak_bytes      # all of malloc, in a fresh process

A meter is imported on first use, so that the heap meter's fresh process does not load torch needlessly.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ShoestringError
from .measurement import Measurement

_HOMES = {
    "calibrate": "calibration",
    "calibrated": "calibration",
    "measure_allocator": "allocator",
    "measure_cuda": "cuda",
    "measure_heap": "heap",
    "measure_process": "process",
}
__all__ = [
    "Measurement",
    "available",
    "calibrate",
    "calibrated",
    "measure",
    "measure_allocator",
    "measure_cuda",
    "measure_heap",
    "measure_process",
]

if TYPE_CHECKING:
    from .allocator import measure_allocator
    from .calibration import calibrate, calibrated
    from .cuda import measure_cuda
    from .heap import measure_heap
    from .process import measure_process

METERS = ("allocator", "heap", "cuda", "process")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoestring.measuring' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def measure(run: Callable[[], Any] | str, meter: str = "allocator") -> Measurement:
    """Runs a function under a meter -> its reading.

    The meters are allocator, heap, cuda and process. The heap meter runs a target such as "module:function" in a fresh
    process; it can run a function only in a process that was started with the meter. The others run it here.
    """
    if meter not in METERS:
        raise ShoestringError(f"there is no meter called {meter!r}: choose one of {', '.join(METERS)}")
    if meter == "heap":
        from .heap import measure_heap, measure_preloaded

        return measure_heap(run) if isinstance(run, str) else measure_preloaded(run)
    if not callable(run):
        raise ShoestringError(f"the {meter} meter runs a function, not {run!r:.60}: pass the function itself")
    return getattr(import_module(f".{meter}", __name__), f"measure_{meter}")(run)


def available() -> dict[str, tuple[bool, str]]:
    """-> for each meter, whether it works here, and how or why not."""
    import torch

    gpu = torch.cuda.is_available()
    linux = Path("/proc/self/clear_refs").exists()
    return {
        "allocator": (True, f"events of torch {torch.__version__}, CPU"),
        "heap": _heap_available(),
        "cuda": (gpu, torch.cuda.get_device_name() if gpu else "torch finds no GPU"),
        "process": (linux, "resident memory of /proc" if linux else "this system has no /proc"),
    }


def _heap_available() -> tuple[bool, str]:
    from .heap import is_preloaded, library

    if is_preloaded():
        return True, "preloaded in this process"
    try:
        return True, f"preloads {library()} into a fresh process"
    except ShoestringError as error:
        return False, str(error)
