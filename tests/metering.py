"""A task's real step under the allocator meter, for tests that hold a prediction to it."""

from torch import Tensor
from torch.utils import _pytree as pytree

from shoestring import Profile, Task
from shoestring.measuring import Measurement, calibrated, measure_allocator
from shoestring.profiling import profile
from shoestring.step import Stepper


def measured(task: Task, steps: int = 2) -> Measurement:
    """A task with real weights -> the meter's reading of whole steps, what they start with included."""

    def run(count: int = steps) -> None:
        stepper = Stepper(task)
        for _ in range(count):
            stepper.step(task.batch)

    run(1)  # what a library makes once and keeps is no part of a step
    batch = [leaf for leaf in pytree.tree_leaves(task.batch) if isinstance(leaf, Tensor)]
    return measure_allocator(run, held=[*task.model.parameters(), *task.model.buffers(), *batch])


def predicted(task: Task, brief: bool = False) -> Profile:
    """A task -> its profile with the scratch of this machine's operators."""
    return calibrated(lambda table: profile(task, table, brief=brief))
