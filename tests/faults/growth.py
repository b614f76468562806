"""Whether steps leave anything behind: what malloc and Python have handed out, before and after many of them."""

import ctypes
import gc
import sys

from small import Noise, task

from shoestring import Plan, apply
from shoestring.techniques import sparsity

MOST_BYTES, MOST_OBJECTS = 8192, 1000  # however many steps; small objects, of about 60 bytes, of PyTorch's calls


class _Mallinfo(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def malloc_bytes() -> int | None:
    """What malloc has handed out and not got back; None without glibc's mallinfo2."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo.restype = _Mallinfo
    gc.collect()
    found = mallinfo()
    return found.uordblks + found.hblkhd


def grown(steps: int, warm: int, rewires: bool) -> tuple[int, int, int]:
    """Trains so many steps after some to warm up -> by how many bytes malloc has grown, by how many objects Python, and
    the rewirings."""
    small = sparsity.apply(task(), sparsity.Settings(50, frequency_multiplier=20 if rewires else 1e-6))
    lean = apply(small, Plan())
    lean.stepper.length = 4 * (steps + warm)
    batches = [Noise().read(0, number) for number in range(5)]
    for number in range(warm):
        lean.step(batches[number % 5])
    before = [malloc_bytes() for _ in range(3)][-1]  # asking takes a little itself, the first time
    rewired, objects = small.after_update[0].times, sys.getallocatedblocks()
    for number in range(steps):
        lean.step(batches[number % 5])
    after = malloc_bytes()
    assert before is not None and after is not None
    return after - before, sys.getallocatedblocks() - objects, small.after_update[0].times - rewired
