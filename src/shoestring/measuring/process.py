"""The process meter: resident memory (RSS) and its peak, as Linux counts them. It is not tensor memory.

RSS holds code, libraries and Python, keeps what malloc has not given back, and leaves out what was allocated
but never touched. It says what the machine loses to this process; no prediction is compared with it.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ShoestringError
from .measurement import Measurement

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")  # writing 5 there lowers the peak to what is resident now


def rss_bytes() -> int:
    """-> bytes of this process that are in memory now."""
    return _kilobytes(_STATUS, "VmRSS")


def peak_rss_bytes() -> int:
    """-> the most bytes of this process that were in memory at once, since its start or `reset_peak()`."""
    return _kilobytes(_STATUS, "VmHWM")


def reset_peak() -> None:
    """Resets the peak to the bytes that are resident now."""
    try:
        _RESET.write_text("5")
    except OSError as error:
        raise ShoestringError(
            f"the peak of resident memory cannot be reset here ({error}): use the allocator or the heap meter"
        ) from None


def measure_process(run: Callable[[], Any]) -> Measurement:
    """Runs `run()` -> resident bytes of the whole process: at the start, at the peak and at the end."""
    reset_peak()
    start = rss_bytes()
    result = run()
    reading = Measurement("process", peak_bytes=max(start, peak_rss_bytes()), end_bytes=rss_bytes(), start_bytes=start)
    del result  # held until here: what a run returns is alive at its end
    return reading


def _kilobytes(file: Path, field: str) -> int:
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        raise ShoestringError(f"{file} has no {field}: the process meter works on Linux only")
    return int(match[1]) * 1024
