"""The memory that this process may still take: limits of its cgroups and of the process itself, or what is free.

Linux: cgroup v2 (`memory.max`) and v1 (`memory.limit_in_bytes`) of this process and of all groups around it, and the
soft limits RLIMIT_AS and RLIMIT_DATA. Elsewhere, and where none is set, what the system calls available.
"""

import ctypes
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
M_MMAP_THRESHOLD, MAPPED = -3, 128 * 1024  # glibc's malloc.h, and its default before it raises that by itself
NO_LIMIT = 2**62  # cgroup v1 writes a number near 2**63 where there is none


class Room(NamedTuple):
    """Bytes that are left, and of what."""

    left_bytes: int
    of: str


def room() -> Room | None:
    """The least of what every limit leaves, or else what the system has available; None where nothing is known."""
    return min((*limits(), *_available()), default=None)


def give_back(from_now_on: bool = False) -> None:
    """Gives what malloc has free back to the system, where it can: glibc keeps it otherwise. `from_now_on`: blocks of
    MAPPED bytes and more are mapped one by one, so that each goes back when it is freed, which takes time."""
    library = ctypes.CDLL(None)
    if from_now_on and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, MAPPED)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def limits() -> list[Room]:
    """What each limit that is set for this process leaves."""
    return [*_cgroups(), *_process()]


def _cgroups() -> Iterator[Room]:
    """/proc/self/cgroup has a line per hierarchy: number, controllers, path; v2 has no controllers."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from _tree(CGROUPS, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _tree(CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _tree(root: Path, path: str, limit_name: str, usage_name: str) -> Iterator[Room]:
    """A group and those around it, each with a limit of its own; in a container its own group is the root."""
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        if group == root.parent:
            return
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and limit < NO_LIMIT:
            yield Room(max(0, limit - (usage or 0)), f"the cgroup limit of {limit:,} bytes ({group / limit_name})")


def _process() -> Iterator[Room]:
    used = dict(line.split(":", 1) for line in _lines(PROC / "self" / "status") if ":" in line)
    for name, kind, field in (("AS", resource.RLIMIT_AS, "VmSize"), ("DATA", resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            taken = int(used.get(field, "0 kB").split()[0]) * 1024
            yield Room(max(0, soft - taken), f"the limit RLIMIT_{name} of {soft:,} bytes")


def _available() -> Iterator[Room]:
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield Room(int(line.split()[1]) * 1024, "the memory that is available")


def _lines(path: Path) -> list[str]:
    return _read(path, lambda text: text.splitlines()) or []


def _number(path: Path) -> int | None:
    return _read(path, int)  # "max" is no number


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(path.read_text())
    except (OSError, ValueError):
        return None
