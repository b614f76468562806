"""Which part of a training step is running, told to whoever listens: profiler, meters, progress line."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from .ambient import Ambient
from .ledger import Phase

Listener = Callable[[Phase], None]


def listen(listener: Listener) -> AbstractContextManager[None]:
    """`listener(phase)` is called at each change of phase inside the context."""
    return Ambient.during(listeners=(*Ambient.now().listeners, listener))


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """The step is in this phase inside the context, and afterwards in the one before it."""
    before = current_phase()
    try:
        _enter(name)  # a listener may end the step here
        yield
    finally:
        _enter(before)


def current_phase() -> Phase:
    return Ambient.now().phase


def _enter(name: Phase) -> None:
    Ambient.change(phase=name)
    for listener in Ambient.now().listeners:
        listener(name)
