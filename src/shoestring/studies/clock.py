"""The time of a row's step: processor seconds in one thread, which other work on the machine changes least."""

import time
from statistics import median

import torch

from ..models import builtin
from ..planning.plan import Plan
from .memory import built

WARM_UPS, STEPS = 3, 5  # the second of two alike passes is recorded, the third runs from its tape


def step_seconds(model: str, sizes: dict[str, int], plan: Plan) -> float:
    """A built-in model, the sizes of its batch and a plan -> the median over some steps; waiting for a disk is no
    processor time."""
    torch.set_num_threads(1)
    task = builtin(model, device="meta", **sizes)
    lean, taken = built(task, plan), list[float]()
    for _ in range(WARM_UPS + STEPS):
        start = time.process_time()
        lean.step(task.batch)
        taken.append(time.process_time() - start)
    return median(taken[WARM_UPS:])
