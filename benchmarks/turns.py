"""The clock of the benchmarks: steps of several models that take turns, each model in a process of its own."""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

import shoestring.training.apply

WARM_UPS = 3  # the second of two alike passes is recorded, the third runs from its tape


def medians(
    make: Callable[..., tuple[shoestring.training.apply.LeanTask, Any]],
    cases: list[tuple],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Median seconds of a step of make(*case) -> (what is trained, its batch), for each case. Users have a process for
    each; in one for all, each would find the memory that it freed given back to the system for the others. And users'
    steps follow one another: the first of a turn finds cold caches, and is not counted."""
    context, ends = get_context("spawn"), []
    with ExitStack() as open_ends:  # a closed end ends its process, also if another failed
        for case in cases:
            end, other = context.Pipe()
            worker = context.Process(target=_steps, args=(make, case, torch.get_num_threads(), clock, other))
            with other:  # closed here, so that the end of a process that failed is heard
                worker.start()
            open_ends.callback(worker.join)
            ends.append(open_ends.enter_context(end))
            end.recv()  # it is warm
        rounds = [[_turn(end) for end in ends] for _ in range(repeats)]
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]


def _turn(end: Connection) -> float:
    end.send(None)
    return end.recv()


def _steps(make: Callable, case: tuple, threads: int, clock: Callable[[], float], turns: Connection) -> None:
    """A process: warms up, then takes two steps and tells the seconds of the second whenever it is its turn."""
    torch.set_num_threads(threads)
    lean, batch = make(*case)
    for _ in range(WARM_UPS):
        lean.step(batch)
    turns.send(0.0)
    with suppress(EOFError):  # no more turns
        while True:
            turns.recv()
            os.sync()  # what another has offloaded is not written while this one is timed
            lean.step(batch)
            start = clock()
            lean.step(batch)
            turns.send(clock() - start)
