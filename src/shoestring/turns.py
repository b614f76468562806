"""One thread at a time per model: a step patches its modules and a trace swaps their tensors, for all threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import ShoestringError

_lock = threading.Lock()
_turns: dict[int, tuple[int, str]] = {}  # module -> the thread that has it, and what it does with it


@contextmanager
def turn(model: Any, doing: str) -> Iterator[None]:
    """Gives this thread the model's modules inside the context; another that wants one of them gets an error."""
    thread, modules = threading.get_ident(), [id(module) for module in model.modules()]
    with _lock:
        for module in modules:
            if module in _turns and _turns[module][0] != thread:
                raise ShoestringError(
                    f"{type(model).__name__} cannot be {doing}: it is being {_turns[module][1]} in another "
                    f"thread; use one thread at a time, or give each a copy.deepcopy of the model"
                )
        mine = [module for module in modules if module not in _turns]
        _turns.update(dict.fromkeys(mine, (thread, doing)))
    try:
        yield
    finally:
        with _lock:
            for module in mine:
                del _turns[module]
