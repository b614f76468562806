"""What a few training steps leave behind: gradients, buffers, random state."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoestring import Task
from shoestring.training.step import Stepper


@dataclass
class Watched:
    """An optimizer that first writes the gradients down: one list a step. A lean one is not asked."""

    make: Any
    gradients: list[list[Tensor]] = field(default_factory=list)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = self.make(parameters)
        optimizer.register_step_pre_hook(lambda *_: self.gradients.append([p.grad.clone() for p in parameters]))
        return optimizer


@dataclass(frozen=True)
class Run:
    """A few steps' gradients and losses, and the state before and after them."""

    gradients: list[list[Tensor]]
    losses: list[Tensor]
    before: list[Tensor]
    weights: list[Tensor]
    buffers: dict[str, Tensor]
    random: Tensor


def run(task: Task, steps: int = 2, seed: int = 1) -> Run:
    """Trains for a few steps on the task's own batch."""
    torch.manual_seed(seed)
    before = weights(task.model)
    watched = Watched(task.optimizer)
    stepper = Stepper(task.with_(optimizer=watched))
    losses = [stepper.step(task.batch) for _ in range(steps)]
    buffers = {name: buffer.clone() for name, buffer in task.model.named_buffers()}
    return Run(watched.gradients, losses, before, weights(task.model), buffers, torch.get_rng_state())


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def doubled(task: Task) -> Task:
    """The same task in FP64."""
    batch = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, task.batch)
    return task.with_(model=task.model.double(), batch=batch)


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference between gradients, relative to the largest of the wanted ones."""
    largest = max(float(w.abs().max()) for w in wanted)
    return max(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True)) / largest


def astray(found: Run, wanted: Run) -> float:
    """How far a run's weights are from another's, as a share of the way that those went from their first values."""
    flat = [
        torch.cat([part.double().flatten() for part in run]) for run in (found.weights, wanted.weights, wanted.before)
    ]
    return float((flat[0] - flat[1]).norm() / (flat[1] - flat[2]).norm())
