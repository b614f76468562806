"""The clock of the benchmarks: steps of several models that take turns, each model in a process of its own."""

import os
import statistics
import time
from collections.abc import Callable
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
    context, seconds = get_context("spawn"), [[] for _ in cases]
    ends, workers = [], []
    for case in cases:
        end, other = context.Pipe()
        workers.append(context.Process(target=_steps, args=(make, case, torch.get_num_threads(), clock, other)))
        workers[-1].start()
        other.close()  # so that the end of a process that failed is heard
        end.recv()  # it is warm
        ends.append(end)
    for goes_on in [True] * repeats + [False]:
        for end, taken in zip(ends, seconds, strict=True):
            end.send(goes_on)
            if goes_on:
                taken.append(end.recv())
    for worker in workers:
        worker.join()
    return [statistics.median(taken) for taken in seconds]


def _steps(make: Callable, case: tuple, threads: int, clock: Callable[[], float], turns: Connection) -> None:
    """A process: warms up, then takes two steps and tells the seconds of the second whenever it is its turn."""
    torch.set_num_threads(threads)
    lean, batch = make(*case)
    for _ in range(WARM_UPS):
        lean.step(batch)
    turns.send(0.0)
    while turns.recv():
        os.sync()  # what another has offloaded is not written while this one is timed
        lean.step(batch)
        start = clock()
        lean.step(batch)
        turns.send(clock() - start)
