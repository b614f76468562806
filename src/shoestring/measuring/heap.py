"""The heap meter: every block that malloc and its relatives handed out to the process, whoever asked for it.

It sees what the allocator meter cannot: other threads, NumPy, MKL's and oneDNN's own buffers, Python's large
objects. It needs a small library in the process from its start (LD_PRELOAD), which is compiled on first use
from heapmeter.c. Memory that does not come from malloc is not counted: Python's small objects (up to 512 bytes, in
arenas that CPython maps itself), thread stacks, and mapped files.
"""

import ctypes
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..cache import cache_folder, write_whole
from ..errors import ShoestringError
from .measurement import Measurement

_SOURCE = Path(__file__).with_name("heapmeter.c")
_process = ctypes.CDLL(None)


def is_preloaded() -> bool:
    """Whether this process runs under a heap meter: ours, or another that exports the same three readers."""
    return hasattr(_process, "heapmeter_live")


def live() -> int:
    """-> bytes of all blocks that are allocated now."""
    return _reader("heapmeter_live")()


def peak() -> int:
    """-> the most bytes that were live at once since the start or the last `reset()`."""
    return _reader("heapmeter_peak")()


def reset() -> None:
    """Resets the peak to the bytes that are live now."""
    _reader("heapmeter_reset_peak", None)()


def _reader(name: str, result: Any = ctypes.c_long) -> Any:
    if not is_preloaded():
        raise ShoestringError(
            "the heap meter is not loaded in this process: it must be there from the start; "
            'use measure_heap("module:function"), which starts a process with it'
        )
    function = getattr(_process, name)
    function.restype = result
    return function


def measure_preloaded(run: Callable[[], Any]) -> Measurement:
    """Runs `run()` in this process, which has the meter -> the heap's peak and end above its start.

    What a library allocates once (oneDNN's primitives, MKL's buffers) counts if it happens in the run: warm up first
    to leave it out.
    """
    gc.collect()
    base = live()
    reset()
    result = run()
    reading = Measurement("heap", peak_bytes=peak() - base, end_bytes=live() - base)
    del result  # held until here: what a run returns is alive at its end
    return reading


def measure_heap(
    target: str, args: Sequence[Any] = (), warmups: int = 1, timeout_seconds: float | None = None
) -> Measurement:
    """A function or script, run in a fresh process -> the peak of its heap above what libraries hold.

    `target` is "module:function" or "file.py:function", called with `args` (JSON-able), or "script.py", run
    with `args` as its command line. It is run `warmups` times unmetered, so that one-time allocations of libraries are
    done, and then measured: build and train inside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "reading.json"
        request = {"target": target, "args": list(args), "warmups": warmups, "answer": str(answer)}
        command = [sys.executable, "-m", "shoestring.measuring.heap_process", json.dumps(request)]
        try:
            done = subprocess.run(command, env=preload_environment(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            raise ShoestringError(
                f"measuring {target} took longer than {timeout_seconds} s: give it more time or less work"
            ) from None
        if not answer.exists():
            raise ShoestringError(
                f"measuring {target} ended with exit code {done.returncode} and no reading: see what it printed above"
            )
        outcome = json.loads(answer.read_text())
    if "error" in outcome:
        raise ShoestringError(f"measuring {target} failed: {outcome['error']}")
    return Measurement("heap", **outcome)


def preload_environment() -> dict[str, str]:
    """-> this process's environment, with the meter preloaded and the same modules importable."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path)}
    if not is_preloaded():  # otherwise LD_PRELOAD already names the meter that we run under
        earlier = os.environ.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = " ".join(filter(None, [str(library()), earlier]))
    return environment


def library() -> Path:
    """-> the compiled meter, built on first use and whenever its source changes."""
    if sys.platform != "linux":
        raise ShoestringError(f"the heap meter works on Linux only and this is {sys.platform}: use the allocator meter")
    source = _SOURCE.read_bytes()
    path = cache_folder() / f"heapmeter-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not path.exists():
        write_whole(path, _compile(find_compiler()))
    return path


def find_compiler() -> str:
    """-> the C compiler: what CC names, or the first of cc, gcc and clang on the PATH."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if found := shutil.which(name):
            return found
    raise ShoestringError(
        "the heap meter needs a C compiler and there is none (cc, gcc, clang): "
        "install one (Debian: apt install gcc), or use the allocator meter"
    )


def _compile(compiler: str) -> bytes:
    """The meter's source through `compiler` -> the shared library's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "heapmeter.so"
        # -fno-builtin: otherwise malloc followed by memset may become a call of the calloc that it is in.
        flags = ["-O2", "-fPIC", "-shared", "-fno-builtin", "-o", str(output), str(_SOURCE), "-ldl"]
        done = subprocess.run([compiler, *flags], capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
            raise ShoestringError(
                f"the heap meter could not be compiled with {compiler}: {reason}; "
                "set CC to another compiler, or use the allocator meter"
            )
        return output.read_bytes()
