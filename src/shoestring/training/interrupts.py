"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal), handled between two updates: a half-done update is never saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from ..errors import ShoestringError

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(ShoestringError):
    """A run was stopped by a signal; the message says how to resume it."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Interrupts:
    """`received` is the signal that asked the run to stop, if any; a second one stops it at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._at_once = False

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Notes signals inside the context. Only the main thread can; in others nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [number for number in SIGNALS if number != signal.SIGHUP or not nohup]
        before = {number: signal.signal(number, self._note) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def breaking_off(self, work: Callable[[], T]) -> T | None:
        """Does work that can be repeated, such as an evaluation, and that a signal interrupts at once -> what it gives,
        or None. A signal may come at any moment, between two lines of this function too."""
        try:
            try:
                self._at_once = True
                return work()
            finally:
                self._at_once = False
        except KeyboardInterrupt:
            self._at_once = False
            if self.received is None:
                raise
            return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received is not None, number
        if again or self._at_once:
            raise KeyboardInterrupt
