"""Calibration: runs operator calls once on this machine -> the scratch that each needs.

A prediction knows tensors from their shapes, but not what a library allocates inside an operator: oneDNN copies an
image into blocked order; another CPU or thread count uses another kernel. So each call is run here with tensors of the
same shape, strides and type, and metered. Predictions get the table as data.
"""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_leaves

from ..cache import cache_folder, write_whole
from ..limits import room
from ..records import read_object
from ..signature import Bound, Signature, call_of, output_key
from .allocator import measure_allocator, require_idle_profiler
from .bounds import bounds_of, extent, faked

VERSION = 2  # of the cache's format: what is measured per call
Progress = Callable[[int, int], None]
Table = dict[str, int | None]


class Prediction(Protocol):
    """A prediction that was made from operator calls."""

    @property
    def signatures(self) -> list[Signature]: ...

    def with_scratch(self, table: Table) -> Any:
        """The same prediction with another table; None if it must be made again."""


Predicted = TypeVar("Predicted", bound=Prediction)


def calibrate(signatures: Iterable[Signature], progress: Progress | None = None) -> Table:
    """Operator calls -> {str(signature): bytes of scratch}, from this machine's cache if they are known.

    A call that could not be run here has a `Bound` in place of a measured number, and is tried again next time.
    `progress(done, total)` is called after each call. If a call returns outputs that a fake cannot size, the table also
    has their sizes, under `output_key`.
    """
    wanted = {str(signature): signature for signature in signatures}
    known = load_cache()
    found: Table = {}
    try:
        for done, (key, signature) in enumerate(wanted.items(), 1):
            if key not in known:
                measured = measure_call(signature)
                found |= bounds_of(signature) if measured[key] is None else measured
            if progress:
                progress(done, len(wanted))
    finally:  # an interrupted calibration continues where it was
        save_cache({key: size for key, size in found.items() if size is not None and not isinstance(size, Bound)})
    return {key: size for key, size in (found | known).items() if call_of(key) in wanted}


def calibrated(predict: Callable[[Table], Predicted], progress: Progress | None = None) -> Predicted:
    """A prediction as a function of a table -> the prediction with all of its operator calls in the table.

    It is asked again until then: an output whose size was not known is the argument of another call.
    """
    table: Table = dict(load_cache())
    prediction = predict(table)
    while unknown := [call for call in prediction.signatures if str(call) not in table]:
        table |= calibrate(unknown, progress)
        prediction = prediction.with_scratch(table) or predict(table)
    return prediction


def workspace_bytes(signature: Signature) -> int | None:
    """Runs one operator call -> the most bytes inside it on top of its outputs; None if unknown."""
    return measure_call(signature)[str(signature)]


def measure_call(signature: Signature) -> Table:
    """Runs one operator call -> its scratch, and the sizes of outputs that a fake leaves open.

    Unknown if this torch refuses the call, if its arguments and outputs would fill a quarter of the memory that is left
    to this process, or if an argument is empty: an empty tensor may stand for one of unknown size, and oneDNN would
    crash on it.
    """
    require_idle_profiler()
    try:
        sizes = argument_sizes(signature)
        if 0 in sizes or sum(sizes) + output_bytes(signature) > memory_left_bytes() / 4:
            return {str(signature): None}
        function = signature.function()
        args, kwargs = signature.call_arguments(_zeros)
        returned: list[Any] = []

        def call() -> Any:
            result = function(*args, **kwargs)
            returned[:] = _elements(result)
            return result

        with _as_in_training():
            scratch = _scratch_bytes(call)
            # The first call may also allocate what the library keeps, which is not scratch of the call.
            scratch = scratch and _scratch_bytes(call)
        return {str(signature): scratch} | _hidden_outputs(signature, returned)
    except Exception:  # an operator may raise anything; whatever it is, nothing was measured
        return {str(signature): None}


@contextmanager
def _as_in_training() -> Iterator[None]:
    """With gradients on, because oneDNN's LSTM checks; the random state is restored afterwards."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        yield


def _scratch_bytes(call: Callable[[], Any]) -> int:
    reading = measure_allocator(call)
    return reading.peak_bytes - reading.end_bytes  # what the call returns is alive at the end


def _hidden_outputs(signature: Signature, returned: list[int | None]) -> Table:
    """A call and the elements of its flat outputs -> those that its fake leaves empty."""
    if len(returned) < 2 or not any(returned):
        return {}
    fakes = _elements(faked(signature))
    pairs = enumerate(zip(returned, fakes, strict=True))
    return {output_key(signature, number): real for number, (real, fake) in pairs if real and fake == 0}


def _elements(result: Any) -> list[int | None]:
    """An operator's result -> the elements of each flat tensor in it; None for anything else."""
    parts = result if isinstance(result, tuple | list) else [result]
    return [part.numel() if isinstance(part, Tensor) and part.dim() == 1 else None for part in parts]


def argument_sizes(signature: Signature) -> list[int]:
    """-> the bytes of each of a call's tensor arguments."""
    sizes: list[int] = []

    def count(shape: list[int], stride: list[int], dtype: torch.dtype) -> None:
        sizes.append(extent(shape, stride) * dtype.itemsize)

    signature.call_arguments(count)
    return sizes


def output_bytes(signature: Signature) -> int:
    """What a call returns, as its fake tells; an output that is a view of an argument counts too."""
    try:
        return sum(part.nbytes for part in tree_leaves(faked(signature)) if isinstance(part, Tensor))
    except DataDependentOutputException:  # a number read from a tensor, `.item()`
        return 0


def memory_left_bytes() -> int:
    """What a process may still take: its cgroups' and its own limits, or what the machine has available."""
    return least.left_bytes if (least := room()) is not None else 0


def _zeros(shape: list[int], stride: list[int], dtype: torch.dtype) -> Tensor:
    """Zeros are valid as data and as indices; made flat first, because an expanded tensor cannot be filled."""
    return torch.zeros(extent(shape, stride), dtype=dtype).as_strided(shape, stride)


def machine() -> dict[str, Any]:
    """-> everything that scratch depends on besides the call."""
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
    """-> the path of this machine's table for its present settings."""
    fingerprint = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"workspace-{fingerprint}.json"


def load_cache() -> dict[str, int]:
    """-> the known calls of this machine; empty if the file is missing, damaged or another machine's."""
    try:
        record = read_object(cache_path().read_bytes())
        table = record["workspace"]
        sound = (record["version"], record["machine"]) == (VERSION, machine())
        sound = sound and all(type(size) is int and size >= 0 for size in table.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return table if sound else {}


def save_cache(table: dict[str, int]) -> None:
    """Adds a table to this machine's cache. If it cannot be written, the calls are measured again next time."""
    if not table:
        return
    record = {"version": VERSION, "machine": machine(), "workspace": load_cache() | table}
    with suppress(OSError):
        write_whole(cache_path(), json.dumps(record, indent=0).encode())
