"""Gradients of one batch under several tasks, and how near they are to each other."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...finite import Buffers
from ...randomness import unmoved
from ...step import Stepper
from ...task import SGD, Task

TINY = 1e-300  # a norm that is zero counts as this, so that two gradients that are zero are equal
Gradients = dict[str, Tensor]


class Overlap(NamedTuple):
    """The inner product of two gradients and their squared norms; those of several tensors add up."""

    product: float
    exact: float
    lossy: float

    @classmethod
    def of(cls, exact: Tensor, lossy: Tensor) -> "Overlap":
        a, b = (gradient.to_dense().double().flatten() for gradient in (exact, lossy))
        return cls((a @ b).item(), (a @ a).item(), (b @ b).item())

    @property
    def cosine(self) -> float:
        """1 where both gradients are zero, 0 where one is."""
        if self.exact == self.lossy == 0:
            return 1.0
        return self.product / math.sqrt(max(self.exact * self.lossy, TINY))

    @property
    def norm_ratio(self) -> float:
        return math.sqrt(max(self.lossy, TINY) / max(self.exact, TINY))

    @property
    def error(self) -> float:
        """The squared distance of the exact gradient from the other's direction: (1 - cosine^2) |exact|^2."""
        return max(0.0, 1 - self.cosine**2) * self.exact


def total(overlaps: Iterable[Overlap]) -> Overlap:
    """The overlap of several tensors' gradients together."""
    return Overlap(*(sum(part) for part in zip(*overlaps, strict=True)))


def gradients(task: Task, batch: Any, scale: Any = None) -> Gradients:
    """The gradients of a batch's loss by the names of parameters, without an update; times the loss scale, if any."""
    stepper = Stepper(task.with_(optimizer=SGD(lr=0), after_update=()))  # an optimizer in backward would step
    stepper.scale = scale or stepper.scale
    pieces = list(task.split(batch))
    try:
        for piece, weight in zip(pieces, task.weights(pieces), strict=True):
            if weight:
                stepper.one_pass(piece, weight)
        return {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}
    finally:
        task.model.zero_grad(set_to_none=True)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Afterwards the model's buffers and all random generators are as before."""
    everything = {(module, name) for module in model.modules() for name in module._buffers}
    buffers = Buffers(model, everything)
    with unmoved():
        try:
            yield
        finally:
            buffers.restore()


def weights_of(module: str, given: Iterable[str], names: Iterable[str]) -> set[str]:
    """The parameters that a module's operations were given or, where their weight is computed first, all of its own."""
    return {name for name in given if name} or {name for name in names if module and name.startswith(f"{module}.")}
