"""Memory that could not be had, whoever says so: PyTorch's allocators, Python, oneDNN, our own kernels, the system."""

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread
from weakref import WeakSet

from .errors import OutOfMemory
from .limits import room
from .units import format_bytes

_WORDS = re.compile(r"can't allocate memory|out of memory|bad_alloc|cannot allocate memory", re.IGNORECASE)
_SILENT = re.compile(r"could not (create a primitive|create a memory|execute a primitive)\b(?! descriptor)")
_LITTLE = 32 * 2**20  # bytes; oneDNN and Python's own code give no reason, and what they ask for is smaller
_spoilt = WeakSet[Thread]()  # where oneDNN had no memory once: it is seen to make no new operator there (torch 2.13)
_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|[KMGT]?i?B)?", re.IGNORECASE)
_FACTORS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError) and _WORDS.search(str(error)):
        return True
    if not is_primitives(error):
        return isinstance(error, SystemError) and _little_is_left()
    if _little_is_left():
        _spoilt.add(current_thread())
    return primitives_fail()


def is_primitives(error: BaseException) -> bool:
    """Whether it is oneDNN that could not make or run an operator, for a reason that it does not tell."""
    return isinstance(error, RuntimeError) and bool(_SILENT.search(str(error)))


def primitives_fail() -> bool:
    """Whether oneDNN has run out of memory in this thread: it makes no new operator there, whatever is free later."""
    return current_thread() in _spoilt


def _little_is_left() -> bool:
    left = room()
    return left is not None and left.left_bytes < _LITTLE


def asked_bytes(error: BaseException) -> int | None:
    """The bytes that were asked for, if the error tells."""
    found = _ASKED.search(str(error))
    return round(float(found[1]) * _FACTORS.get((found[2] or "bytes").lower(), 1)) if found else None


@contextmanager
def telling_of_exhaustion(doing: Callable[[], str], then: Callable[[], str]) -> Iterator[None]:
    """Turns an allocator's error into ours, in the words of the two functions."""
    try:
        yield
    except Exception as error:
        if not is_exhaustion(error):
            raise
        raise out_of_memory(error, doing(), then()) from None


def out_of_memory(error: BaseException, doing: str, then: str) -> OutOfMemory:
    """An exhaustion, what was being done and what to do next -> the error with what was asked for and what is free."""
    asked, left = asked_bytes(error), room()
    wanted = f", which asked for {format_bytes(asked)}" if asked is not None else ""
    free = f"; {format_bytes(left.left_bytes)} are left of {left.of} now" if left is not None else ""
    return OutOfMemory(f"out of memory in {doing}{wanted}{free}: {then}")
