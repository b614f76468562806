"""One training step: microbatches forward and backward, then the update. The profiler traces the same."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from .errors import Diverged, ShoestringError
from .finite import Buffers, Skipping, check_finite, first_not_finite
from .kernels.gradients import squared_norm
from .ledger import Phase
from .optimizers import make
from .phases import phase
from .task import Task
from .turns import turn


class Stepper:
    """Runs a task's step; owns the optimizer. `step(batch)` does one update and returns the mean loss.

    `length` is the number of updates of the whole run, where somebody knows it, and `updates` those that are done. A
    step that breaks off, or meets what is not finite, leaves weights, optimizer state and buffers as they were;
    `skipped` says why the last step was skipped, if it was.
    """

    def __init__(self, task: Task, length: int | None = None) -> None:
        self.task, self.length = task, length
        self.told: dict[str, Any] = {}  # by the hooks after the last update
        self.optimizer = make(task.optimizer, task.model)
        self.scale = task.scaling() if task.scaling else None
        self.updates, self.skipped = 0, ""
        self._skipping = Skipping() if task.on_nonfinite == "skip" else None
        self._changing: set = set()
        self._before: Buffers | None = None

    def step(self, batch: Any) -> Tensor:
        pieces = list(self.task.split(batch))
        return self.run(pieces, self.task.weights(pieces))

    def run(self, pieces: Sequence[Any], weights: Sequence[float]) -> Tensor:
        """One update from microbatches and what the loss of each counts for; one without items is not run."""
        with turn(self.task.model, "trained"):
            return self._run([(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight])

    def _run(self, weighed: Sequence[tuple[Any, float]]) -> Tensor:
        self.begin(len(weighed))
        self.skipped = "it broke off"
        try:
            losses = [self.one_pass(piece, weight) for piece, weight in weighed]
            with phase(Phase.UPDATE):
                self.skipped = self.update()
        except Diverged as error:
            losses = [self._skip(error)]
        finally:
            self._end()
        self.told = {}
        if not self.skipped:
            self.updates += 1
            for hook in self.task.after_update:
                self.told |= hook(self) or {}
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def begin(self, pieces: int) -> None:
        """Tells the optimizer how many microbatches will come: lean ones refuse what they could not do exactly.
        Buffers are copied, for the case that the step is not done."""
        begin = getattr(self.optimizer, "begin", None)
        if begin is not None:
            begin(self.task, pieces)
        self._before = Buffers(self.task.model, self._changing)

    def _end(self) -> None:
        """What is left of a step that broke off must not join the next: gradients go, buffers are as before."""
        self.task.model.zero_grad(set_to_none=True)
        before, self._before = self._before, None
        assert before is not None, "a step that ends has begun"
        before.restore() if self.skipped else before.learn()

    def _skip(self, error: Diverged) -> Tensor:
        """The loss of a step that is skipped, for what is not finite; raises where the task does not skip."""
        if self._skipping is None:
            raise error
        self._skipping.skip(error)
        self.skipped = str(error)
        return torch.full((), torch.nan)

    def stateful(self) -> dict[str, Any]:
        """What the step itself remembers from one update to the next, besides the optimizer."""
        parts = {"scale": self.scale, "skipping": self._skipping}
        return {name: part for name, part in parts.items() if part is not None}

    def one_pass(self, piece: Any, weight: float) -> Tensor:
        """A microbatch and its weight -> its part of the loss; gradients are added to those there."""
        with ExitStack() as stack:
            for context in (*self.task.contexts, *getattr(self.optimizer, "contexts", ())):
                stack.enter_context(context(self.task.model))
            with phase(Phase.FORWARD):
                loss = self.task.loss_of(self.task.model, piece)
                check_loss(loss)
                check_finite(loss, self.updates, narrow=self.scale is not None)
                if weight != 1:
                    loss = loss * weight
                scaled = self._scaled(loss)
            with phase(Phase.BACKWARD):
                scaled.backward()
            return loss.detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss as the backward pass starts from it; in FP32, for the scale alone may be beyond FP16."""
        if self.scale is None:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale.value

    def update(self) -> str:
        """Updates the weights -> ""; or why the step is skipped, if the gradients overflowed at this loss scale."""
        bad, unscale = first_not_finite(self.task.model), 1.0
        if self.scale is not None:
            unscale = 1 / self.scale.value
            if not self.scale.accepts(bad):
                return f"{bad} overflowed at a loss scale of {1 / unscale:g}"
        elif bad is not None:
            raise Diverged(
                f"{bad} is not finite (the weights are as before): look at the batch, lower the learning rate, or clip "
                "the gradients"
            )
        if self._skipping is not None:
            self._skipping.in_a_row = 0
        step_by = getattr(self.optimizer, "step_by", None)  # lean optimizers take a factor of the gradients
        if step_by is not None:
            step_by(self._factor(unscale))
            return ""
        if self.scale is not None:
            factor = self._factor(unscale)
            for parameter in self._with_gradient():
                parameter.grad.mul_(factor)
        elif self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), self.task.clip)
        self.optimizer.step()
        return ""

    def _factor(self, unscale: float) -> float:
        """What the gradients must be multiplied with: the loss scale taken out, their whole norm clipped."""
        if self.task.clip is None:
            return unscale
        norm = unscale * math.sqrt(sum(squared_norm(p.grad) for p in self._with_gradient()))
        return unscale * min(1.0, self.task.clip / (norm + 1e-6))

    def _with_gradient(self) -> list[Any]:
        return [parameter for parameter in self.task.model.parameters() if parameter.grad is not None]


def check_loss(loss: Tensor) -> None:
    """Refuses a loss that cannot be trained on, with the reason."""
    if loss.numel() != 1:
        raise ShoestringError(f"the loss has shape {tuple(loss.shape)}, not a single number: return its mean")
    if not loss.requires_grad:
        raise ShoestringError(
            "the loss does not depend on any trainable parameter: check for detach() or a frozen model"
        )
