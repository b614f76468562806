"""Evaluation: a model -> one number that says how good it is, streamed over data and without gradients.

Batches go through the model in the same microbatches as in training, and nothing is saved for a backward pass: an
evaluation fits wherever a training step does.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..ambient import Ambient
from ..distributed import reshard
from ..errors import ShoestringError
from ..task import Task


class Data(Protocol):
    """The batches of an epoch: a batch depends only on its epoch and its number, both from 0."""

    def __len__(self) -> int: ...

    def read(self, epoch: int, number: int) -> Any: ...


@dataclass(frozen=True)
class Evaluation:
    """`measure(model)` gives the quality, called `name` in the log; more of it is better where `higher`."""

    name: str
    measure: Callable[[nn.Module], float]
    higher: bool = True

    def __call__(self, model: nn.Module) -> float:
        with evaluating(model):
            return float(self.measure(model))

    def is_better(self, quality: float, best: float | None) -> bool:
        if best is None:
            return quality == quality  # NaN is never the best
        return quality > best if self.higher else quality < best


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode, without gradients; restores each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def within(task: Task, model: nn.Module) -> Iterator[None]:
    """Enters the task's contexts, with which 16-bit models run fast; a nested call for the same model does nothing."""
    entered = Ambient.now().entered
    if any(model is each for each in entered):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(Ambient.during(entered=(*entered, model)))
        for context in task.contexts:
            stack.enter_context(context(model))
        yield


def evaluated(task: Task, evaluation: Evaluation) -> float:
    """A task and an evaluation -> the quality of its model. A 16-bit model runs within the task's contexts, even in a
    user's evaluation: outside, PyTorch's own 16-bit matrix products take many times as long on a CPU."""
    in_16_bits = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in task.model.parameters())
    try:
        with within(task, task.model) if in_16_bits else nullcontext():
            return evaluation(task.model)
    finally:
        if task.sharded:
            reshard(task.model)


@contextmanager
def telling(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Calls `progress(done, total)` after each batch of the evaluations inside."""
    with Ambient.during(evaluated=progress):
        yield


def tell_progress(done: int, total: int) -> None:
    if (progress := Ambient.now().evaluated) is not None:
        progress(done, total)


class _Enough(Exception):
    """Ends an evaluation of which only the first batches are wanted."""


def few_batches(run: Callable[[], float], most: int = 2) -> float | None:
    """Runs an evaluation, but no more than its first batches -> its result, if that was all or it tells no progress."""

    def stop(done: int, total: int) -> None:
        if most <= done < total:
            raise _Enough

    try:
        with telling(stop):
            return run()
    except _Enough:
        return None


Score = Callable[[nn.Module, Any], float]  # the sum of the scores of a piece's items


def mean_score(task: Task, data: Data, score: Score) -> Callable[[nn.Module], float]:
    """A score of pieces -> its mean over all items of the data, as a function of the model."""
    task = task.with_(batch=None)  # or the evaluation would hold it for the whole run

    def measure(model: nn.Module) -> float:
        total, items = 0.0, 0
        for number in range(len(data)):
            for piece in (Ambient.now().split or task.split)(data.read(0, number)):
                with within(task, model):
                    total += score(model, piece)
                items += task.count(piece)
            tell_progress(number + 1, len(data))
        if not items:
            raise ShoestringError("there is nothing to evaluate on: the data holds no items")
        return total / items

    return measure


def mean_loss(task: Task, data: Data) -> Evaluation:
    """The task's own loss over the data; works for any task. Lower is better."""
    task = task.with_(batch=None)

    def score(model: nn.Module, piece: Any) -> float:
        items = task.count(piece)
        loss = float(task.loss_of(model, piece)) if items else 0.0  # the mean over nothing is NaN
        return loss if task.reduction == "sum" else loss * items

    return Evaluation("loss", mean_score(task, data, score), higher=False)


def accuracy(task: Task, data: Data, prepare: Callable[[Tensor, Tensor], Tensor]) -> Evaluation:
    """Percent of images classified correctly; `prepare(images, draws)` makes the model's input."""

    def score(model: nn.Module, piece: tuple[Tensor, Tensor, Tensor]) -> float:
        images, labels, draws = piece
        return 100.0 * float((model(prepare(images, draws)).argmax(1) == labels).sum())

    return Evaluation("accuracy", mean_score(task, data, score))
