"""The meters: what a run really occupied, by torch's allocator, the whole heap, CUDA or the process."""

from .allocator import measure_allocator
from .measurement import Measurement

__all__ = ["Measurement", "measure_allocator"]
