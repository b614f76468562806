"""Calibration: operator calls, run once for real on this machine -> the scratch that each needs.

A prediction knows tensors from their shapes, but not what a library allocates inside an operator: oneDNN
copies an image into blocked order; another CPU or thread count takes another kernel. So each call is made
here with tensors of the same shape, strides and type, and metered. A prediction is given the table as data.
"""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..signature import Signature
from .allocator import measure_allocator, require_idle_profiler
from .cache import cache_folder, write_whole
from .process import memory_available_bytes

Progress = Callable[[int, int], None]


def calibrate(signatures: Iterable[Signature], progress: Progress | None = None) -> dict[str, int | None]:
    """Operator calls -> {str(signature): bytes of scratch}, from the machine's cache where they are known.

    None is "unknown": the call could not be made here. `progress(done, total)` is told of each call.
    """
    wanted = {str(signature): signature for signature in signatures}
    known = load_cache()
    found: dict[str, int | None] = {}
    try:
        for done, (key, signature) in enumerate(wanted.items(), 1):
            if key not in known:
                found[key] = workspace_bytes(signature)
            if progress:
                progress(done, len(wanted))
    finally:  # an interrupted calibration goes on where it was
        save_cache({key: size for key, size in found.items() if size is not None})
    return {key: known[key] if key in known else found[key] for key in wanted}


def workspace_bytes(signature: Signature) -> int | None:
    """One operator call, made for real -> the most bytes inside it on top of its outputs; None if unknown.

    Unknown is a call that this torch refuses, or whose arguments would fill a quarter of the free memory.
    """
    require_idle_profiler()
    try:
        if argument_bytes(signature) > memory_available_bytes() / 4:
            return None
        function = signature.function()
        args, kwargs = signature.call_arguments(_zeros)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            scratch = _scratch_bytes(lambda: function(*args, **kwargs))
            # The first call may also make what the library keeps, which is no scratch of the call.
            return scratch and _scratch_bytes(lambda: function(*args, **kwargs))
    except Exception:  # an operator may raise anything; whatever it is, nothing was measured
        return None


def _scratch_bytes(call: Callable[[], Any]) -> int:
    reading = measure_allocator(call)
    return reading.peak_bytes - reading.end_bytes  # what the call returns is alive at the end


def argument_bytes(signature: Signature) -> int:
    """-> the bytes of a call's tensor arguments."""
    total = 0

    def count(shape: list[int], stride: list[int], dtype: torch.dtype) -> None:
        nonlocal total
        total += _extent(shape, stride) * dtype.itemsize

    signature.call_arguments(count)
    return total


def _extent(shape: list[int], stride: list[int]) -> int:
    """How many elements a tensor's storage needs: 1 + sum((size - 1) * stride), or none if it is empty."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _zeros(shape: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """Zeros are valid as data and as indices; made flat first, for an expanded tensor cannot be filled."""
    return torch.zeros(_extent(shape, stride), dtype=dtype).as_strided(shape, stride)


def machine() -> dict[str, Any]:
    """-> what scratch depends on, besides the call."""
    return {
        "torch": torch.__version__,
        "cpu": _cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "onednn": torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled,
    }


def _cpu_model() -> str:
    with suppress(OSError):
        if match := re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.processor() or platform.machine()


def cache_path() -> Path:
    """-> the table of this machine with its present settings."""
    fingerprint = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"workspace-{fingerprint}.json"


def load_cache() -> dict[str, int]:
    """-> what is known of this machine; nothing where the file is missing, damaged or another machine's."""
    try:
        record = json.loads(cache_path().read_bytes())
        table = record["workspace"]
        sound = record["machine"] == machine() and all(type(b) is int and b >= 0 for b in table.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return table if sound else {}


def save_cache(table: dict[str, int]) -> None:
    """Adds a table to what is known of this machine. Where nothing can be written, it is measured again."""
    if not table:
        return
    record = {"version": 1, "machine": machine(), "workspace": load_cache() | table}
    with suppress(OSError):
        write_whole(cache_path(), json.dumps(record, indent=0).encode())
