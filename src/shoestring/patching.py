"""Patches a module's `forward` for the length of a context."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
