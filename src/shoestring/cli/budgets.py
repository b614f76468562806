"""`--budget auto`: as many bytes as the cgroup, a limit of the process, or the system leaves."""

from collections.abc import Callable

from ..errors import ShoestringError
from ..limits import room
from ..units import format_bytes

AUTO = "auto"
SHARE = 0.9  # of what is left: Python's own objects, saves and evaluation want some


def auto_budget(say: Callable[[str], None]) -> int:
    """The budget that there is room for now, and says of what."""
    found = room()
    if found is None:
        raise ShoestringError("--budget auto finds no limit of memory on this system: give a size, as in --budget 2GB")
    budget = int(SHARE * found.left_bytes)
    if budget < 1:
        raise ShoestringError(f"nothing is left of {found.of}: free some memory, or raise the limit")
    say(f"--budget auto is {format_bytes(budget)}: 9/10 of what is left of {found.of}")
    return budget
