"""Which part of a training step is running, told to whoever listens: profiler, meters, progress line."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .ledger import Phase

Listener = Callable[[Phase], None]
_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
_phase: ContextVar[Phase] = ContextVar("phase", default=Phase.BUILD)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """`listener(phase)` is called at each change of phase inside the context."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """The step is in this phase inside the context, and in the one before it again afterwards."""
    before = _phase.get()
    try:
        _enter(name)  # a listener may end the step here
        yield
    finally:
        _enter(before)


def current_phase() -> Phase:
    return _phase.get()


def _enter(name: Phase) -> None:
    _phase.set(name)
    for listener in _listeners.get():
        listener(name)
