"""`apply(task, plan) -> LeanTask`: the task with a plan's techniques in force, ready to step."""

import copy as copying
import math
import threading
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn

from ..distributed import check_same, joined, local, shard
from ..errors import ShoestringError
from ..planning.plan import Plan
from ..runs.record import describe
from ..step import Stepper
from ..structure import tensors
from ..task import Task, need_task
from ..techniques.plain import check_plain, note_plan
from ..techniques.registry import apply_settings
from ..techniques.words import described
from .evaluate import Evaluation, Score, evaluated, mean_loss, mean_score
from .loop_optimizer import LoopOptimizer
from .resumable import as_data

_making = threading.Lock()  # around making a stepper: two steppers would have two optimizers


class LeanTask:
    """A task under a plan. `step(batch)` does one update; `model` is the live module; `task` describes both.

    In a loop of your own, `backward(batch)` and then `optimizer.step()` are the same update in two halves.
    """

    def __init__(self, task: Task, plan: Plan) -> None:
        self.task, self.plan = task, plan
        self._stepper: Stepper | None = None
        self._loop: LoopOptimizer | None = None

    def __repr__(self) -> str:
        words = described(self.plan.techniques().items()) or "no technique"
        done = f", {self._stepper.updates:,} updates done" if self._stepper else ""
        return f"LeanTask({self.task.name or type(self.model).__name__}: {words}{done})"

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def stepper(self) -> Stepper:
        """Made at the first step, so that a task that is only profiled allocates no optimizer."""
        with _making:
            if self._stepper is None:
                self._stepper = self._made()
            return self._stepper

    def _made(self) -> Stepper:
        """A stepper of all processes, once each is seen to have the same plan, model and weights."""
        world, task = joined(), self.task
        if world.size != task.devices:
            raise ShoestringError(
                f"{world.size} processes train, and the plan was applied for {task.devices}: initialise the process "
                "group before apply()"
            )
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in task.model.named_parameters()}
        items = str(task.items) if is_dataclass(task.items) else describe(task.items)
        plan = {"settings": task.settings, "optimizer": describe(task.optimizer), "items": items}
        check_same(world, {"plan": plan, "model": shapes, "weights": task.model})
        if task.sharded:
            shard(task.model, task.settings, world)
        return Stepper(task, world=world)

    def shard(self) -> None:
        """Shards parameters, gradients and optimizer state over all processes by FSDP2, as `Plan(shard="fsdp")` does:
        each block of the model's ModuleLists and Sequentials, then the rest. Beside every dense technique."""
        if self._stepper is not None:
            raise ShoestringError("the model cannot be sharded, because it has been stepped already: shard it before")
        self.task = apply_settings(self.task, {"shard": "fsdp"})
        self.plan = self.plan.with_(shard="fsdp")

    def continued_as(self, task: Task, plan: Plan) -> "LeanTask":
        """The same model and optimizer under another task and plan, in the middle of a run."""
        lean = LeanTask(task, plan)
        if self._stepper is not None:
            self._stepper.task = task
            lean._stepper, lean._loop = self._stepper, self._loop
        return lean

    def step(self, batch: Any) -> Tensor:
        """A batch -> its mean loss, after one whole update."""
        return self.stepper.step(batch)

    # -- the same in two halves: backward(batch), then optimizer.step() ----------------------------------------------
    def backward(self, batch: Any, weight: float = 1.0) -> Tensor:
        """A batch -> its loss times `weight`, whose gradients are added to the model's, for `optimizer.step()`.

        As with PyTorch's own, several calls before a step add up: to accumulate over 4 batches, give each a weight of
        1/4. Microbatches inside a batch are the plan's affair and weigh as their items do.
        """
        if not 0 < weight < math.inf:
            raise ShoestringError(f"a batch's loss cannot be weighted by {weight:g}: use a number above 0")
        return self.stepper.backward(batch, weight)

    @property
    def optimizer(self) -> LoopOptimizer:
        """The optimizer for a loop of your own: learning rate schedulers of torch.optim take it."""
        stepper = self.stepper
        if self._loop is None or self._loop.stepper is not stepper:
            self._loop = LoopOptimizer(stepper)
        return self._loop

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clips the gradients between `backward` and `optimizer.step()` -> their norm before, without a loss scale.

        Without a loss scale `torch.nn.utils.clip_grad_norm_(lean.model.parameters(), max_norm)` does the same.
        """
        return self.stepper.clip(max_norm)

    @property
    def skipped(self) -> str:
        """Why the last step left the weights as they were; "" if it did not."""
        return self.stepper.skipped

    def evaluate(self, batches: Any, score: Score | None = None) -> float:
        """Batches (a list, a DataLoader, anything that `train` takes) -> the mean loss per item of the model as it is
        now, without gradients, in evaluation mode, and in the microbatches of training.

        With `score(model, batch)`, the sum of some score over a batch's items, its mean instead: for an accuracy
        `lambda model, batch: float((model(batch[0]).argmax(1) == batch[1]).sum())`.
        """
        data, task = as_data(batches, seed=0), self.task.with_(batch=None)
        evaluation = mean_loss(task, data) if score is None else Evaluation("score", mean_score(task, data, score))
        return evaluated(self.task, evaluation)

    def held(self) -> list[Tensor]:
        """The tensors that outlive a step: the model's and the optimizer's, as this process has them."""
        states = list(self.stepper.optimizer.state.values())
        return [*map(local, self.model.parameters()), *self.model.buffers(), *map(local, tensors(states))]


def lean_task(task: Task, plan: Plan) -> Task:
    """A task and a plan -> the task with the plan's techniques applied, still a description."""
    techniques = plan.techniques()
    if not techniques:
        return task
    check_plain(task, techniques)
    lean = apply_settings(task, techniques)
    note_plan(lean.model)
    return lean


def apply(task: Task, plan: Plan, copy: bool = False) -> LeanTask:
    """A task and a plan -> a task that trains within the plan's memory.

    The model is changed in place, so that it is never in memory twice: in 16 bits its weights are rounded, and of a
    model that has values sparse layers keep the largest. With `copy` a copy of the model (and of a loss that is an
    object) is changed instead; `shoestring.plain(model)` leads back to PyTorch's own layers in FP32.

    In a process of torchrun, or of an initialised process group, `step(batch)` takes this process's share of the batch,
    of any size, and updates by the mean over the items of all processes.
    """
    need_task(task)
    if not isinstance(plan, Plan):
        raise ShoestringError(f"apply() takes a Plan, as in Plan(precision='fp16'), not a {type(plan).__name__}")
    if copy:
        model, loss = copying.deepcopy((task.model, task.loss))  # together: a loss may hold the model
        task = task.with_(model=model, loss=loss, microbatches=task.microbatches)
    return LeanTask(lean_task(task.with_(devices=joined().size), plan), plan)
