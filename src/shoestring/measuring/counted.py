"""The counter: the peak of what torch's CPU allocator handed out, from the compiled core (csrc/allocations.cpp).

It reads what the allocator meter reads, to the byte, but knows no operators. In return no event is kept, where
torch.profiler takes 2 to 36 MB of the heap for a step and 1.2 to 1.6 times as long: it can always be on, and a small
budget is not broken by being measured. It also sees the blocks of other threads.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..kernels.core import core
from .allocator import measure_allocator, storage_bytes
from .measurement import Measurement


def is_available() -> bool:
    """Whether torch's allocator can be counted here: by a compiled core, on Linux."""
    return hasattr(core, "allocations_available") and core.allocations_available()


def measure_counted(run: Callable[[], Any], held: Iterable[Tensor] = ()) -> Measurement:
    """Runs `run()` -> the peak of torch's CPU allocator meanwhile, beside the tensors in `held`, which stay alive.

    Inside another count, or where there is none, the allocator meter reads instead.
    """
    if not is_available() or not core.allocations_begin():
        return measure_allocator(run, held)
    peak = end = 0
    try:
        start = storage_bytes(held)
        result = run()
    finally:
        peak, end = core.allocations_end()
    del result  # held until here: what a run returns is alive at its end
    return Measurement("counted", peak_bytes=start + peak, end_bytes=start + end, start_bytes=start)


measure_counted.costs_little = is_available()  # type: ignore[attr-defined]  # a budget then measures every step
