"""Several processes of a test: forked from it, so that torch is loaded, and joined by a file: no port is taken."""

import os
import pickle
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

PATIENCE = 1200  # seconds for all of them: for hangs only, as a busy machine takes minutes for what takes seconds


def run_in(size, function, *arguments):
    """Calls function(*arguments) in each of `size` processes of one group -> what each returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_forked(Path(folder), rank, size, function, arguments) for rank in range(size)]
        deadline = time.monotonic() + PATIENCE
        for child in children:
            _wait(child, children, deadline)
        results = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]
    failed = [f"process {rank}:\n{result[1]}" for rank, result in enumerate(results) if result[0] == "failed"]
    assert not failed, "\n".join(failed)
    return [result[1] for result in results]


def raised(act):
    """The name and the words of what `act` raises; empty if it raises nothing."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _forked(folder, rank, size, function, arguments):
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        result = "done", function(*arguments)
    except BaseException:
        result = "failed", traceback.format_exc()
    (folder / str(rank)).write_bytes(pickle.dumps(result))
    os._exit(0)


def _wait(child, children, deadline):
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            for other in children:
                with suppress(ProcessLookupError):  # it ended by itself
                    os.kill(other, 9)
            raise AssertionError(f"the processes were still running after {PATIENCE} s")
        time.sleep(0.01)


def rank():
    return torch.distributed.get_rank()
