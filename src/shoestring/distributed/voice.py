"""One voice of several processes: what stops all of them is one line, of process 0 if it can."""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from traceback import clear_frames
from types import TracebackType
from typing import Any

import torch.distributed as dist

if dist.is_available():
    # Its functions hold the group that there is when they are imported, as an argument's default: so, before one is.
    import torch.distributed.nn.functional  # noqa: F401

from ..errors import ShoestringError
from .world import Lost, attempt, default_store, launched_as, leave_word

TOLD, HEARD = "shoestring/told", "shoestring/heard"


def speak_as_one() -> None:
    """Lets an error of ours that ends a script be one line of one process, as on the command line, and no traceback of
    each; unless the script has a hook of its own, or SHOESTRING_TRACEBACK=1 asks for tracebacks."""
    pythons_own = sys.excepthook is sys.__excepthook__
    torchs_own = sys.excepthook.__module__ == "torch.distributed.distributed_c10d"  # which writes ranks before lines
    if (pythons_own or torchs_own) and os.environ.get("SHOESTRING_TRACEBACK") != "1":
        sys.excepthook = _told_once


def _told_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    ours = isinstance(error, ShoestringError)
    if not ours:
        sys.__excepthook__(kind, error, trace)
    if not isinstance(error, Lost) and dist.is_initialized():
        with suppress(RuntimeError):  # process 0 held the store, and was killed
            leave_word(f"1:{error if ours else f'{kind.__name__}: {error}'} (process {dist.get_rank()})")
    if speaks(error) and ours:
        print("shoestring:", " ".join(str(error).split()), file=sys.stderr)


def speaks(error: BaseException | None, patience: float = 5.0) -> bool:
    """Whether this process is to tell the user why all of them stop: process 0, or another if it does not in time.
    `error` stops this one; what its frames hold is let go."""
    launched = launched_as()
    has_group = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if has_group else launched.rank if launched is not None else 0
    size = dist.get_world_size() if has_group else 0
    try:
        store = default_store() if has_group else _store_of_torchrun()
        if has_group:
            _hang_up(error)
        if store is None:
            return rank == 0
        if rank:
            _until(lambda: store.check([TOLD]), patience)
        first = store.add(TOLD, 1) == 1
    except (RuntimeError, ValueError):  # process 0 held the store, and was killed
        return True
    with suppress(RuntimeError, ValueError):  # process 0 held the store, and was the first to see that all know
        heard = store.add(HEARD, 1)
        _until(lambda: max(heard, store.add(HEARD, 0)) >= size, patience)
    return first


def _hang_up(error: BaseException | None) -> None:
    """Lets the others miss this process now, while it waits for them, and not when it is gone: torchrun ends those that
    are left when the first has ended, and they would have its exit code in place of their own. A process misses those
    that it waits for, not the one that failed: each hangs up in its turn."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from .joining import known_group

    known_group.cache_clear()  # the connections are closed when nobody holds the group, nor a message on its way
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    closing = Thread(target=_close, daemon=True)  # for it waits for messages on their way
    closing.start()
    closing.join(3.0)


def _close() -> None:
    dist.destroy_process_group()
    gc.collect()


def _store_of_torchrun() -> Any:
    """The store that torchrun itself holds, for processes that have not met yet; None if there is none."""
    if not dist.is_available() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    return dist.PrefixStore(f"shoestring before {attempt()}", found)


def _until(happened: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not happened():
        time.sleep(0.02)
