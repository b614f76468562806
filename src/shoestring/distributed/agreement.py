"""What several processes do together, or the first of them for all: an error of one is an error of all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import DamagedSave, Diverged, NoPlanFits, OutOfMemory, OverBudget, ShoestringError
from ..exhaustion import is_exhaustion
from .world import Lost, World, leave_word

# Errors that a run reacts to, or that have an exit code of their own.
KINDS = {kind.__name__: kind for kind in (DamagedSave, Diverged, NoPlanFits, OutOfMemory, OverBudget)}
T = TypeVar("T")


def agreed(world: World, act: Callable[[], T]) -> T:
    """Each process's result of `act`; raises in all of them if it raises in one."""
    if world.size == 1:
        return act()
    try:
        result = act()
    except Exception as error:
        raise_together(world, world.sum([True])[0], error)
        raise
    raise_together(world, world.sum([False])[0], None)
    return result


def by_first(world: World, act: Callable[[], str], with_all: bool = False) -> str:
    """The text that `act` gives in process 0, in all of them; `with_all`: it takes all of them to find it."""
    mine = agreed(world, act if world.rank == 0 or with_all else str)
    return world.gather(mine.encode())[0].decode()


def raise_together(world: World, failed: float, error: Exception | None) -> None:
    """If any process failed, raises the error of the first that did in all others; its own is left to the caller."""
    if not failed:
        return
    told = world.gather(_told(error).encode() if error is not None else b"")
    first = next(rank for rank, words in enumerate(told) if words)
    if first == world.rank:
        return
    kind, _, words = told[first].decode().partition(":")
    raise KINDS.get(kind, ShoestringError)(f"{words} (process {first})")


def _told(error: Exception) -> str:
    if isinstance(error, ShoestringError):
        return f"{type(error).__name__}:{error}"
    kind = OutOfMemory.__name__ if is_exhaustion(error) else ""
    return f"{kind}:{type(error).__name__}: {error}"


@contextmanager
def leaving_word(world: World) -> Iterator[None]:
    """Around what a process does alone: if it raises, the others will know why this one is gone."""
    try:
        yield
    except Exception as error:
        if world.size > 1 and not isinstance(error, Lost):
            leave_word(f"{getattr(error, 'exit_code', 1)}:{error} (process {world.rank})")
        raise
