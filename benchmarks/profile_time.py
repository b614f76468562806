"""Profiling WRN-28-2 at batch 100 against three of its real training steps, taken in turn: seconds of wall time."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from shoestring import builtin
from shoestring.profiling import profile
from shoestring.step import Stepper

MODEL, BATCH, STEPS = "wrn-28-2", 100, 3


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    """-> 0 if the median profile takes less time than the median of three steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    meta, task = builtin(MODEL, batch=BATCH, device="meta"), builtin(MODEL, batch=BATCH)
    stepper = Stepper(task)

    def steps() -> None:
        for _ in range(STEPS):
            stepper.step(task.batch)

    first = seconds(lambda: profile(meta))
    stepper.step(task.batch)
    times: dict[str, list[float]] = {"profile": [], f"{STEPS} real steps": []}
    for _ in range(args.repeats):
        for name, work in zip(times, (lambda: profile(meta), steps), strict=True):
            times[name].append(seconds(work))
    print(f"{MODEL}, batch {BATCH}, {args.threads} threads, {args.repeats} repeats in turn")
    for name, taken in times.items():
        print(f"{name:<13} median {statistics.median(taken):6.2f} s   {min(taken):6.2f} to {max(taken):.2f} s")
    profiled, stepped = map(statistics.median, times.values())
    print(f"the first profile of the process took {first:.2f} s; later ones {stepped / profiled:.1f}x less than steps")
    return 0 if max(first, profiled) < stepped else 1


if __name__ == "__main__":
    raise SystemExit(main())
