"""`apply(task, plan) -> LeanTask`: the task with a plan's techniques in force, ready to step."""

import copy as copying
import threading
from typing import Any

from torch import Tensor, nn

from ..planning.plan import Plan
from ..step import Stepper
from ..structure import tensors
from ..task import Task
from ..techniques.plain import check_plain, note_plan
from ..techniques.registry import apply_settings

_making = threading.Lock()  # around making a stepper: two steppers would have two optimizers


class LeanTask:
    """A task under a plan. `step(batch)` does one update; `model` is the live module; `task` describes both."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self.task, self.plan = task, plan
        self._stepper: Stepper | None = None

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def stepper(self) -> Stepper:
        """Made at the first step, so that a task that is only profiled allocates no optimizer."""
        with _making:
            if self._stepper is None:
                self._stepper = Stepper(self.task)
            return self._stepper

    def continued_as(self, task: Task, plan: Plan) -> "LeanTask":
        """The same model and optimizer under another task and plan, in the middle of a run."""
        lean = LeanTask(task, plan)
        if self._stepper is not None:
            self._stepper.task = task
            lean._stepper = self._stepper
        return lean

    def step(self, batch: Any) -> Tensor:
        """A batch -> its mean loss, after one whole update."""
        return self.stepper.step(batch)

    def held(self) -> list[Tensor]:
        """The tensors that outlive a step: the model's and the optimizer's."""
        states = list(self.stepper.optimizer.state.values())
        return [*self.model.parameters(), *self.model.buffers(), *tensors(states)]


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
    """
    if copy:
        model, loss = copying.deepcopy((task.model, task.loss))  # together: a loss may hold the model
        task = task.with_(model=model, loss=loss, microbatches=task.microbatches)
    return LeanTask(lean_task(task, plan), plan)
