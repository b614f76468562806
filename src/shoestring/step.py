"""One training step: gradient accumulation over microbatches, then the update. The profiler traces this very code."""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from . import structure
from .ambient import Ambient
from .distributed import ALONE, World, together
from .errors import Diverged, ShoestringError
from .finite import Buffers, Skipping, check_finite, first_not_finite
from .ledger import Phase
from .optimizers import make
from .phases import phase
from .taping import Tapes
from .taping.recorder import hand_over
from .task import Context, Task
from .turns import turn
from .used_up import USED_UP, UsedUp, clear_used_up, mark_used_up


@runtime_checkable
class Optimizer(Protocol):
    """An optimizer as a step drives it: ours has all of this, and `_TorchOptimizer` gives it to torch.optim's.

    `in_backward`: gradients are applied while the backward pass makes them, by hooks that `contexts` register, and none
    is left for the end of the step.
    """

    in_backward: bool

    @property
    def contexts(self) -> tuple[Context, ...]:
        """Entered around each forward and backward pass, inside the task's."""
        ...

    def begin(self, task: Task, pieces: int) -> None:
        """Called before a step of so many microbatches; refuses a step that would not be exact."""
        ...

    def step_by(self, factor: float) -> None:
        """Updates the weights by factor * gradient."""
        ...


class _TorchOptimizer:
    """One of torch.optim's optimizers, which knows nothing of a step but its end."""

    in_backward, contexts = False, ()

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def begin(self, task: Task, pieces: int) -> None:
        pass

    def step_by(self, factor: float) -> None:
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for gradient in gradients if factor != 1 else ():
            gradient.mul_(factor)
        self.optimizer.step()


class Stepper:
    """Runs a task's step; owns the optimizer. `step(batch)` does one update and returns the mean loss.

    `length` is the number of updates of the whole run, if known, and `updates` counts those done. A step that raises,
    or whose loss or gradients are not finite, leaves weights, optimizer state and buffers as they were; `skipped` says
    why the last step was skipped, if it was. In a `world` of several processes `step` is called in each with its share
    of the batch, whatever its size; the loss and the update are those of the whole batch. `backward(batch)` and
    `complete()` are the two halves of a step.
    """

    def __init__(self, task: Task, length: int | None = None, world: World = ALONE) -> None:
        self.task, self.length, self.world = task, length, world
        self._together = together(world, task)
        self.told: dict[str, Any] = {}  # by the hooks after the last update
        self.microbatch: Any = None  # the step's first, if it has any, while the hooks after the update run
        self.optimizer = make(task.optimizer, task.model)
        self._driven: Optimizer = (
            self.optimizer if isinstance(self.optimizer, Optimizer) else _TorchOptimizer(self.optimizer)
        )
        self.scale = task.scaling() if task.scaling else None
        self.updates, self.skipped = 0, ""
        self._skipping = Skipping() if task.on_nonfinite == "skip" else None
        self._changing: set = set()
        self._before: Buffers | None = None
        self._clip = math.inf  # of the update in progress alone, besides the task's
        self._updating = False  # also after an error in the middle of it
        self._made: list[tuple[int, int]] = []  # the gradients as the last backward pass left them
        self.tapes = Tapes(task.model) if task.static_graph else None

    def step(self, batch: Any) -> Tensor:
        (pieces, counts), total = self._together.counted(lambda: self._cut(batch))
        return self.run(pieces, self.task.shares(counts, total), sum(counts) / total if total else 0)

    def _cut(self, batch: Any) -> tuple[tuple[list[Any], list[int]], int]:
        """A batch -> its microbatches and the items of each, and of all."""
        pieces = list(self.task.split(batch))
        counts = [self.task.count(piece) for piece in pieces]
        return (pieces, counts), sum(counts)

    def run(self, pieces: Sequence[Any], weights: Sequence[float], share: float = 1.0) -> Tensor:
        """One update from microbatches and the weight of each one's loss; those of weight 0 are skipped. `share` is
        that of this process in the items of the whole batch."""
        with self._at_work():
            loss = self._accumulate(_weighed(pieces, weights), share)
            lost = self._update_or_skip()
        return loss if lost is None else lost

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with turn(self.task.model, "trained"), Ambient.during(rank=self.world.rank):
            yield

    # -- the same in two halves, for loops that do something between them -------------------------------------------
    def backward(self, batch: Any, weight: float = 1.0) -> Tensor:
        """Adds the gradients of weight * (a batch's loss) to those of the update in progress -> that weighted loss."""
        (pieces, counts), total = self._together.counted(lambda: self._cut(batch))
        weights = [weight * share for share in self.task.shares(counts, total)]
        with self._at_work():
            loss = self._accumulate(_weighed(pieces, weights), sum(counts) / total if total else 0)
        if self.in_backward and not self.skipped:
            mark_used_up(self.task.model)
        self._made = self._versions()
        return loss

    def complete(self) -> None:
        """The update from the gradients of all `backward`s since the last one."""
        if not self.is_open:
            raise ShoestringError("there are no gradients to update from: call lean.backward(batch) before step()")
        with self._at_work():
            with self._whole():
                self._check_unchanged()
            clear_used_up(self.task.model)
            self._update_or_skip()

    def _check_unchanged(self) -> None:
        """Refuses gradients that were written to while the loss scale was in them."""
        if self.scale is not None and self._made != self._versions():
            raise ShoestringError(
                f"the gradients were changed before the update, and they are {self.scale.value:,g} times too large "
                "(the loss scale of fp16): clip with lean.clip_grad_norm_(...) instead, or use bf16 or fp32"
            )

    def abandon(self) -> None:
        """Drops the gradients of an update that was begun and is not to be done."""
        if self.is_open:
            if self.in_backward and not self.skipped:
                raise ShoestringError(
                    "the gradients of this update cannot be dropped: no-gradient applied them in the backward pass; "
                    "call step() first, or leave out no-gradient"
                )
            self._end()

    def clip(self, largest: float) -> float:
        """Clips the gradient of the update in progress to a norm -> its norm before, without the loss scale."""
        if self.in_backward:
            raise ShoestringError(f"the gradients cannot be clipped: {USED_UP}")
        if not self.is_open:
            raise ShoestringError("there are no gradients to clip: call lean.backward(batch) first")
        if self._driven is not self.optimizer and self.scale is None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), largest))
        else:
            norm = self._norm(1.0 if self.scale is None else 1 / self.scale.value)
            self._clip = min(largest, self._clip)
        return norm

    @property
    def does_more(self) -> bool:
        """Whether a hook does more after the next update than after others, such as rewiring."""
        hooks = (getattr(hook, "is_due", None) for hook in self.task.after_update)
        return any(is_due(self) for is_due in hooks if is_due is not None)

    @property
    def is_open(self) -> bool:
        """Whether gradients of an update were made that is not done yet."""
        return self._before is not None

    def _versions(self) -> list[tuple[int, int]]:
        """Which tensors the gradients are, and how often each was written to."""
        return [(id(p.grad), p.grad._version) for p in self._with_gradient() if not isinstance(p.grad, UsedUp)]

    def _accumulate(self, weighed: Sequence[tuple[Any, float]], share: float) -> Tensor:
        """Runs the passes of microbatches -> the sum of their weighted losses; NaN where the update is skipped."""
        self._together.check_passes(len(weighed))
        if not self.is_open:
            self.begin(len(weighed), share)
            self.skipped, self.microbatch = "", weighed[0][0] if weighed else None
        elif self.world.size > 1:
            raise ShoestringError(
                f"a second backward() in one update is not possible in {self.world.size} processes, which added up "
                "the gradients of the first: pass the batches as one"
            )
        elif self.in_backward:
            raise ShoestringError(
                "a second backward() in one update is not possible with no-gradient, which has applied the gradients "
                "of the first: call step() after each, pass the batches as one, or leave out no-gradient"
            )
        if self.skipped:
            return torch.full((), torch.nan)
        with self._whole():
            try:
                losses = self._passes(weighed)
            except Diverged as error:
                losses = [self._skip(error)]
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _update_or_skip(self) -> Tensor | None:
        """Updates the weights, or leaves all as it was -> NaN, where something was not finite and that is skipped."""
        lost = None
        with self._whole():
            if not self.skipped:
                try:
                    with phase(Phase.UPDATE):
                        self.skipped = self.update()
                except Diverged as error:
                    lost = self._skip(error)
        self._end()
        self.told = {}
        if not self.skipped:
            if self.tapes is not None and self.does_more:
                self.tapes.clear()  # first, so that its memory is there for what follows
            self.updates += 1
            for hook in self.task.after_update:
                self.told |= hook(self) or {}
            if self.task.after_update:
                self._together.check_same(bool(self.told))
        self.microbatch = None
        return lost

    def _passes(self, weighed: Sequence[tuple[Any, float]]) -> list[Tensor]:
        """Runs all microbatches -> their losses; or that of the whole batch, if other processes have parts of it."""
        assert self._before is not None, "the step has begun"
        try:
            last = len(weighed) - 1
            losses = [self.one_pass(*one, is_last=number == last) for number, one in enumerate(weighed)]
        except Exception as error:
            self._together.fail(self._before, error)
            raise
        return self.finish(losses)

    def finish(self, losses: list[Tensor]) -> list[Tensor]:
        """After the last microbatch: adds up the gradients of all processes -> the losses of the whole batch."""
        assert self._before is not None, "the step has begun"
        return self._together.finish(losses, self._before)

    def begin(self, pieces: int, share: float = 1.0) -> None:
        """Tells the optimizer how many microbatches there will be: a lean one refuses a step that would not be exact.
        Copies the buffers, in case the step is not completed."""
        self._driven.begin(self.task, pieces)
        self._together.begin(share)
        self._before = Buffers(self.task.model, self._changing)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Whatever is raised inside ends the update, and leaves nothing of it behind."""
        try:
            yield
        except BaseException:
            self.skipped = "it broke off"
            self._end()
            raise

    def _end(self) -> None:
        """Clears the gradients; restores the buffers if the step was not completed: nothing leaks into the next."""
        self.task.model.zero_grad(set_to_none=True)
        before, self._before, self._clip = self._before, None, math.inf
        assert before is not None, "a step that ends has begun"
        before.restore() if self.skipped else before.learn()

    def _skip(self, error: Diverged) -> Tensor:
        """The loss (NaN) of a step that is skipped for what is not finite; raises if the task does not skip."""
        if self._skipping is None:
            raise error
        self._skipping.skip(error)
        self.skipped = str(error)
        return torch.full((), torch.nan)

    def stateful(self) -> dict[str, Any]:
        """The state that the step itself carries from one update to the next, besides the optimizer's."""
        parts = {"scale": self.scale, "skipping": self._skipping}
        return {name: part for name, part in parts.items() if part is not None}

    def one_pass(self, piece: Any, weight: float, is_last: bool = False) -> Tensor:
        """Runs forward and backward on one microbatch, accumulating gradients -> its weighted loss."""
        if self.tapes is None or self._together.sends(is_last):
            return self._run_pass(piece, weight, is_last)
        decided = weight, self.scale and self.scale.value
        run = partial(self._run_pass, piece, weight, is_last)
        return self.tapes.one_pass(decided, list(structure.leaves(piece)), run)

    def _run_pass(self, piece: Any, weight: float, is_last: bool) -> Tensor:
        """The same by the model's own code. During the last pass of a step gradients are on their way to other
        processes, if there are any."""
        with ExitStack() as stack:
            stack.enter_context(Ambient.during(outside_call=None))  # an interrupted pass left its own
            for context in (*self.task.contexts, *self._driven.contexts, *self._together.contexts):
                stack.enter_context(context(self.task.model))
            with phase(Phase.FORWARD):
                loss = self.task.loss_of(self.task.model, piece)
                check_loss(loss)
                this = weakref.proxy(self)  # whose tapes keep the call
                hand_over(loss, lambda loss: this._check_finite(loss))
                if weight != 1:
                    loss = loss * weight
                scaled = self._scaled(loss)
            with phase(Phase.BACKWARD), self._together.last_pass() if is_last else nullcontext():
                scaled.backward()
            return loss.detach()

    def _check_finite(self, loss: Tensor) -> None:
        check_finite(loss, self.updates, narrow=self.scale is not None)

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale; in FP32, because the scale alone may exceed FP16."""
        if self.scale is None:
            return loss
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale.value

    def update(self) -> str:
        """Updates the weights -> ""; or why the step is skipped, if the gradients overflowed at this loss scale."""
        found = getattr(self.optimizer, "not_finite", "") or first_not_finite(self.task.model)
        bad, unscale = self._together.overflow(found), 1.0
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
        factor = self._factor(unscale)
        self._updating = True
        self._driven.step_by(factor)
        self._updating = False
        return ""

    @property
    def is_torn(self) -> bool:
        """Whether a step broke off when some weights had been updated and others not."""
        return self._updating or bool(getattr(self.optimizer, "in_the_middle", False))

    @property
    def in_backward(self) -> bool:
        """Whether the optimizer steps in the backward pass, so that no gradient waits for the end of the step."""
        return self._driven.in_backward

    def _factor(self, unscale: float) -> float:
        """The factor that the gradients are still to be multiplied by: it takes out the loss scale and clips."""
        clip = min(self._clip, math.inf if self.task.clip is None else self.task.clip)
        if clip == math.inf:
            return unscale
        if self._driven is not self.optimizer and self.scale is None:  # plain training: PyTorch's own clipping
            torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), clip)
            return 1.0
        return unscale * min(1.0, clip / (self._norm(unscale) + 1e-6))

    def _norm(self, unscale: float) -> float:
        """The norm of the whole gradient, without the loss scale."""
        return unscale * math.sqrt(self._together.squared_norm([p.grad for p in self._with_gradient()]))

    def _with_gradient(self) -> list[Any]:
        return [parameter for parameter in self.task.model.parameters() if parameter.grad is not None]


def _weighed(pieces: Sequence[Any], weights: Sequence[float]) -> list[tuple[Any, float]]:
    """Microbatches with the weights of their losses, without those of weight 0."""
    return [(piece, weight) for piece, weight in zip(pieces, weights, strict=True) if weight]


def check_loss(loss: Tensor) -> None:
    """Refuses a loss that cannot be trained on, with the reason."""
    if loss.numel() != 1:
        raise ShoestringError(f"the loss has shape {tuple(loss.shape)}, not a single number: return its mean")
    if not loss.requires_grad:
        raise ShoestringError(
            "the loss does not depend on any trainable parameter: check for detach() or a frozen model"
        )
