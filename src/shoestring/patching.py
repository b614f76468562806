"""Patches for the length of a context: a module's `forward` for one thread, or something of the process for all."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def patched(module: nn.Module, call: Callable[[Any, tuple, dict], Any]) -> Iterator[None]:
    """Inside the context, the module's calls go to `call(forward, args, kwargs)`; other threads' calls do not."""
    forward, own, thread = module.forward, "forward" in vars(module), threading.get_ident()

    def answer(*args: Any, **kwargs: Any) -> Any:
        return call(forward, args, kwargs) if threading.get_ident() == thread else forward(*args, **kwargs)

    module.forward = answer
    try:
        yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


class ForAllThreads:
    """A context that replaces something for the whole process, from the first thread that enters it to the last that
    leaves. If each thread put back what it had found, the later one would put back what the earlier had put there."""

    def __init__(self, replaced: Callable[[], AbstractContextManager]) -> None:
        self.replaced, self.open, self.lock, self.threads = replaced, ExitStack(), threading.Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            if not self.threads:
                self.open.enter_context(self.replaced())
            self.threads += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.threads -= 1
            if not self.threads:
                self.open.close()
