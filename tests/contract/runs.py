"""What a few training steps leave behind: gradients, buffers, random state."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoestring import Task
from shoestring.kernels.moments import read_moment
from shoestring.passes.boundary import release
from shoestring.step import Stepper
from shoestring.structure import mapped
from shoestring.techniques.optimizer.base import LeanOptimizer
from shoestring.techniques.precision import DTYPES, convert
from shoestring.techniques.sparsity.conversion import convert_to_dense
from shoestring.techniques.sparsity.layer import SparseLayer


@dataclass
class Watched:
    """An optimizer that first writes the gradients down: one list per step, of those that it has not used up."""

    make: Any
    gradients: list[list[Tensor]] = field(default_factory=list)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = self.make(parameters)
        in_backward = getattr(optimizer, "in_backward", False) and not optimizer.sums

        def note(factor: float = 1.0) -> None:
            sums = getattr(optimizer, "_summed", {})
            given = [read_moment(sums[p]) if p in sums else p.grad for p in parameters]
            found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, given, strict=True)]
            self.gradients.append([] if in_backward else [gradient.double() * factor for gradient in found])

        if isinstance(optimizer, LeanOptimizer):  # the step hands it the factor of the loss scale
            update = optimizer.step_by
            optimizer.step_by = lambda factor: (note(factor), update(factor))
        else:
            optimizer.register_step_pre_hook(lambda *_: note())
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
    """Copies of a model's parameters; those of sparse layers with all their zeros."""
    sparse = any(isinstance(module, SparseLayer) for module in model.modules())
    dense = convert_to_dense(model) if sparse else model  # which copies it, and not every model can be copied
    return [parameter.detach().clone() for parameter in dense.parameters()]


def doubled(task: Task) -> Task:
    """The same task in FP64."""
    batch = mapped(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, task.batch)
    return task.with_(model=task.model.double(), batch=batch)


def rounded(task: Task, form: str | None) -> Task:
    """The same task from the weights that a plan of this precision starts from, in FP32 again."""
    if form is not None:
        convert(task.model, DTYPES[form])
        task.model.float()
    return task


def held_at_zero(task: Task) -> Task:
    """A task with sparse layers -> the same on PyTorch's dense ones: where no nonzero is, the gradient is made zero."""
    model = convert_to_dense(task.model)
    release(model)  # of 16 bits, whose weights it still has
    for name, module in task.model.named_modules():
        if isinstance(module, SparseLayer):
            weight = model.get_submodule(name).weight
            weight.register_hook(partial(torch.mul, weight.detach() != 0))
    return task.with_(model=model)


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference between gradients, relative to the largest of the wanted ones."""
    largest = max(float(w.abs().max()) for w in wanted)
    return max(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True)) / largest


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors as one vector in FP64."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def apart(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The distance of two vectors, relative to the length of the second."""
    wanted = flat(wanted)
    return float((flat(found) - wanted).norm() / wanted.norm())


def astray(found: Run, wanted: Run) -> float:
    """How far a run's weights are from another's, as a share of the way that those went from their first values."""
    start = flat(wanted.before)
    return apart([flat(found.weights) - start], [flat(wanted.weights) - start])


def went(found: Run, wanted: Run) -> float:
    """The share of another run's way that a run went: 1 is as far, and errors without a bias cancel."""
    start = flat(wanted.before)
    way = flat(wanted.weights) - start
    return float((flat(found.weights) - start) @ way / (way @ way))
