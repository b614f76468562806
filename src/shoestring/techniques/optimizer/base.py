"""LeanOptimizer: updates one tensor at a time in FP32 arithmetic, on state of any format; at the end of the step, or
in the backward pass.

In backward, each gradient is applied and freed as soon as the backward pass has made it, and none waits for the others.
That is exact if an update needs nothing else: one microbatch, no clipping, no loss scale. Heavy-ball momentum allows
gradient accumulation as well: gradients are folded into the momentum, which is applied to the weights at the end.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Diverged, ShoestringError
from ...kernels.gradients import all_finite
from ...kernels.moments import Moment, new_moment
from ...kernels.update import Noise
from ...ledger import Phase
from ...phases import phase
from ...task import Task

LOSS_SCALE = "a loss scale must see that all are finite before any weight changes: use bf16 or fp32"
SMALL = 4096  # FP32 tensors below this size (norms, biases) keep FP32 state: it is the most sensitive and costs nothing


class LeanOptimizer(torch.optim.Optimizer):
    """An algorithm is a subclass with `update`, which reads the settings of its `rule` from the groups; one that can
    accumulate gradients in its momentum has `fold_into_momentum` and `apply_momentum` as well.

    `form` is that of the moments: fp32, fp16, bf16 or 8bit. `seed` and `updates` of the groups make the random bits
    of rounding, so they are saved with the run.
    """

    folds_into_momentum = False
    why_not_folded = "an update needs the sum of all microbatches' gradients"

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rule: Any,
        form: str = "fp32",
        in_backward: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, vars(rule) | {"form": form, "seed": seed, "updates": 0})
        self.in_backward = in_backward
        self._taken: dict[Tensor, None] = {}  # whose gradients this step has applied so far

    # -- what a subclass gives ----------------------------------------------------------------------------------
    def update(self, weight: Tensor, group: dict, gradient: Tensor, factor: float, noise: Noise) -> None:
        """One whole update of a tensor by factor * gradient."""
        raise NotImplementedError

    def fold_into_momentum(self, weight: Tensor, group: dict, gradient: Tensor, is_first: bool) -> None:
        """Adds one of several gradients to the momentum."""
        raise NotImplementedError

    def apply_momentum(self, weight: Tensor, group: dict, noise: Noise) -> None:
        """Updates a tensor by its momentum, into which the gradients were folded."""
        raise NotImplementedError

    def moment(self, weight: Tensor, group: dict, name: str, positive: bool = False) -> Moment:
        """A moment by its name, zeros at first."""
        state = self.state[weight]
        if name not in state:
            is_small = weight.numel() < SMALL and weight.dtype == torch.float32
            made = new_moment(weight, "fp32" if is_small else group["form"], positive)
            state |= {name: made.values} | ({} if made.scales is None else {f"{name}_scales": made.scales})
        return Moment(state[name], state.get(f"{name}_scales"))

    # -- the step -----------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch.optim's optimizers step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_by(1.0)
        return loss

    @torch.no_grad()
    def step_by(self, factor: float) -> None:
        """Updates all tensors that have a gradient, by factor * gradient; applies folded momenta."""
        for weight, group, noise in self._numbered():
            if weight.grad is None:
                continue
            if self.in_backward:
                self._take_gradient(weight, group, noise)
            else:
                self.update(weight, group, weight.grad, factor, noise)
        if self.folds_into_momentum:
            for weight, group, noise in self._numbered():
                if weight in self._taken:
                    self.apply_momentum(weight, group, noise)
        self._taken.clear()
        for group in self.param_groups:
            group["updates"] += 1

    def _numbered(self) -> Iterator[tuple[nn.Parameter, dict, Noise]]:
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                yield weight, group, (group["seed"], number, group["updates"])
                number += 1

    # -- in backward --------------------------------------------------------------------------------------------
    @property
    def contexts(self) -> tuple[Callable[[nn.Module], AbstractContextManager], ...]:
        """The contexts that a step enters around each pass."""
        return (self.updating_in_backward,) if self.in_backward else ()

    def begin(self, task: Task, pieces: int) -> None:
        """Called before each step; refuses one that would not be exact."""
        if not self.in_backward:
            return
        if self._taken:
            raise self._broken()
        refuse_in_backward(task)
        if pieces > 1 and not self.folds_into_momentum:
            raise ShoestringError(
                f"no-gradient cannot be used with {pieces} microbatches, because {self.why_not_folded}: leave out "
                "microbatch or no-gradient, or use SGD with heavy-ball momentum"
            )

    @contextmanager
    def updating_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Inside the context, each gradient is applied as soon as the backward pass has made it."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        with ExitStack() as stack:
            for weight, group, noise in self._numbered():
                take = self._hook(group, noise, names.get(weight, "a weight"))
                stack.callback(weight.register_post_accumulate_grad_hook(take).remove)
            yield

    def _hook(self, group: dict, noise: Noise, name: str) -> Callable[[Tensor], None]:
        def take(weight: Tensor) -> None:
            with torch.no_grad(), phase(Phase.UPDATE):
                self._check_finite(weight, name)
                self._take_gradient(weight, group, noise)

        return take

    def _check_finite(self, weight: Tensor, name: str) -> None:
        """Refuses to apply a gradient that is not finite; those before it in this step have been applied."""
        assert weight.grad is not None
        if weight.grad.layout != torch.strided or all_finite(weight.grad):  # the update refuses other layouts
            return
        weight.grad = None
        before = (
            f"{len(self._taken)} others had been applied before it, so that weights and state are between two updates: "
            "go on from the last save, without no-gradient, or"
            if self._taken
            else "the weights are as before: look at the batch, or"
        )
        raise Diverged(f"the gradient of {name} is not finite; {before} lower the learning rate")

    def _take_gradient(self, weight: Tensor, group: dict, noise: Noise) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        is_first = weight not in self._taken
        self._taken[weight] = None
        if self.folds_into_momentum:
            self.fold_into_momentum(weight, group, gradient, is_first)
        elif is_first:
            self.update(weight, group, gradient, 1.0, noise)
        else:
            raise ShoestringError(
                f"a parameter of shape {tuple(weight.shape)} got its gradient in two parts, and the first has been "
                "applied: leave out no-gradient, or do not checkpoint the layers that share it"
            )

    @property
    def in_the_middle(self) -> bool:
        """Whether gradients were applied of a step that is not done."""
        return bool(self._taken)

    def _broken(self) -> ShoestringError:
        return ShoestringError(
            f"a step failed after {len(self._taken)} gradients had been applied: weights and state are between "
            "two updates; go on from the last save"
        )

    # -- saves --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        if self._taken:
            raise self._broken()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that the state keeps its dtypes and is not cast to that of the weight."""
        saved = state_dict["param_groups"]
        theirs, ours = ([group["form"] for group in groups] for groups in (saved, self.param_groups))
        if theirs != ours:
            raise ShoestringError(
                f"the saved state is {'/'.join(theirs)} and the optimizer's is {'/'.join(ours)}: use the same form"
            )
        weights = [weight for weight, _, _ in self._numbered()]
        self.state.clear()
        for index, part in state_dict["state"].items():
            self.state[weights[index]] = dict(part)
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


def refuse_in_backward(task: Task) -> None:
    """Raises, with the reason, if a step must see all its gradients before it may apply one."""
    if reason := why_gradients_stay(task):
        raise ShoestringError(f"no-gradient cannot be used, because {reason}, or leave out no-gradient")


def why_gradients_stay(task: Task) -> str | None:
    """A task -> which of its settings needs all gradients at once, and what to do; None if none does."""
    if task.devices > 1:
        return f"{task.devices} processes add up their gradients before any weight changes: train in one process"
    if task.clip is not None:
        return f"clipping to {task.clip:g} needs the norm of all: leave out clipping"
    if task.scaling is not None:
        return LOSS_SCALE
    if task.on_nonfinite == "skip":
        return "a step that may be skipped must see all before any weight changes: use on_nonfinite='raise'"
    return None
