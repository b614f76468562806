"""The CUDA meter: the statistics of torch's caching allocator on a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ShoestringError
from .measurement import Measurement


def measure_cuda(run: Callable[[], Any], device: int | str | None = None) -> Measurement:
    """Runs `run()` -> bytes of a GPU's allocated blocks: at the start, at the peak and at the end.

    cuDNN's and cuBLAS's workspaces come from the same allocator: they are counted, and cannot be separated.
    Blocks that the allocator keeps in reserve are not counted.
    """
    if not torch.cuda.is_available():
        raise ShoestringError("the CUDA meter needs a GPU and torch finds none: use the allocator or the heap meter")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    result = run()
    torch.cuda.synchronize(device)
    reading = Measurement(
        "cuda",
        peak_bytes=torch.cuda.max_memory_allocated(device),
        end_bytes=torch.cuda.memory_allocated(device),
        start_bytes=start,
    )
    del result  # held until here: what a run returns is alive at its end
    return reading
