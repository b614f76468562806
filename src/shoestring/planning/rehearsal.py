"""A rehearsal: one real microbatch runs forward and backward under a plan, on a copy of the model.

A trace knows shapes, but neither numbers nor what a kernel refuses. Afterwards everything is as before, even if the
rehearsal fails: the model, its buffers and gradients, and the random generators.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ..randomness import RandomState
from ..step import Stepper
from ..structure import tensors
from ..task import Task
from ..techniques.registry import apply_settings
from ..units import format_bytes
from .options import Settings


def why_not_rehearsed(task: Task) -> str:
    """The reason why a task cannot be rehearsed; "" if it can."""
    held = [*task.model.parameters(), *task.model.buffers()]
    if any(tensor.is_meta for tensor in (*held, *tensors(task.batch))):
        return "the model or the batch is on the meta device"
    needed, free = sum(tensor.nbytes for tensor in held), free_bytes()
    if free is not None and needed > free:
        return f"a copy of the model takes {format_bytes(needed)}, and {format_bytes(free)} are free"
    return ""


def rehearse(task: Task, settings: Settings) -> None:
    """Runs one microbatch under the settings, without an update; raises if that fails, or if the loss is NaN."""
    with _unharmed(task):
        model, loss = copy.deepcopy((task.model, task.loss))
        lean = apply_settings(task.with_(model=model, loss=loss), dict(settings))
        pieces = list(lean.split(lean.batch))
        stepper = Stepper(lean.with_(after_update=()))
        stepper.begin(len(pieces))
        stepper.one_pass(pieces[0], lean.weights(pieces)[0])  # refuses a loss that is not finite


@contextmanager
def _unharmed(task: Task) -> Iterator[None]:
    """Restores the random generators, and what a loss that holds the original model could change in it."""
    model = task.model
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    generators = RandomState({})
    drawn = generators.state()
    for parameter, _ in gradients:
        parameter.grad = None  # the rehearsal must not accumulate into it
    try:
        yield
    finally:
        generators.restore(drawn)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def free_bytes() -> int | None:
    """Bytes that this process may still allocate, by the system and its control group; None if neither says."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(int(limit) - int(used))
    return min(found, default=None)
