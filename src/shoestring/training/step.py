"""One training step: microbatches forward and backward, then the update. The profiler traces the same."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..errors import ShoestringError
from ..ledger import Phase
from ..phases import phase
from ..task import Task


class Stepper:
    """Runs a task's step; owns the optimizer. `step(batch)` does one update and returns the mean loss.

    `length` is the number of updates of the whole run, where somebody knows it.
    """

    def __init__(self, task: Task, length: int | None = None) -> None:
        self.task, self.length = task, length
        parameters = [p for p in task.model.parameters() if p.requires_grad]
        if not parameters:
            raise ShoestringError(
                "the model has no parameter that requires a gradient: there is nothing to train"
            )
        self.optimizer = task.optimizer(parameters)

    def step(self, batch: Any) -> Tensor:
        pieces = list(self.task.split(batch))
        return self.run(pieces, [self.task.count(piece) for piece in pieces])

    def run(self, pieces: Sequence[Any], counts: Sequence[int]) -> Tensor:
        """One update from microbatches and the number of items in each: each weighs by its share of them."""
        total = sum(counts)
        if total == 0:
            raise ShoestringError("the batch holds no items: pass at least one")
        losses = [self._pass(piece, count / total) for piece, count in zip(pieces, counts, strict=True)]
        with phase(Phase.UPDATE):
            self._update()
        for hook in self.task.after_update:
            hook(self)
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _pass(self, piece: Any, weight: float) -> Tensor:
        with ExitStack() as stack:
            for context in self.task.contexts:
                stack.enter_context(context(self.task.model))
            with phase(Phase.FORWARD):
                loss = self.task.loss(self.task.model, piece)
                check_loss(loss)
                if weight != 1:
                    loss = loss * weight
            with phase(Phase.BACKWARD):
                loss.backward()
            return loss.detach()

    def _update(self) -> None:
        if self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def check_loss(loss: Any) -> None:
    """Refuses a loss that cannot be trained on, with the reason."""
    if not isinstance(loss, Tensor):
        raise ShoestringError(
            f"the loss is {type(loss).__name__}, not a tensor: return the mean loss of the batch"
        )
    if loss.numel() != 1:
        raise ShoestringError(f"the loss has shape {tuple(loss.shape)}, not a single number: return its mean")
    if not loss.requires_grad:
        raise ShoestringError(
            "the loss does not depend on any trainable parameter: check for detach() or a frozen model"
        )
