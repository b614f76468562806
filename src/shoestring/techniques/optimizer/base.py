"""LeanOptimizer: updates one tensor at a time in FP32 arithmetic, on state of any format; at the end of the step, or
in the backward pass.

In backward, each gradient is applied and freed as soon as the backward pass has made it, and none waits for the others.
That is exact if an update needs nothing else: one microbatch, no clipping, no loss scale. Heavy-ball momentum allows
gradient accumulation as well: gradients are folded into the momentum, which is applied to the weights at the end.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...distributed import is_sharded, largest_part, local, part_like, part_number, parts_of
from ...errors import Diverged, ShoestringError
from ...kernels.gradients import all_finite
from ...kernels.moments import Moment, blocks_of, new_moment
from ...kernels.update import Noise, sgd_accumulate
from ...ledger import Phase
from ...phases import phase
from ...taping.recorder import hand_over
from ...task import Task

LOSS_SCALE = "a loss scale must see that all are finite before any weight changes: use bf16 or fp32"
SMALL = 4096  # FP32 tensors below this size (norms, biases) keep FP32 state: it is the most sensitive and costs nothing


class LeanOptimizer(torch.optim.Optimizer):
    """An algorithm is a subclass with `update`, which reads the settings of its `rule` from the groups; one that can
    accumulate gradients in its momentum has `fold_into_momentum` and `apply_momentum` as well.

    `form` is that of the moments: fp32, fp16, bf16 or 8bit. `seed` and `updates` of the groups make the random bits
    of rounding, so they are saved with the run.

    Of a weight in shards (FSDP2) each process updates its part, and has its part of the state; scales are those of a
    part, or of blocks of a part.
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
        sums: str = "",
    ) -> None:
        super().__init__(parameters, vars(rule) | {"form": form, "seed": seed, "updates": 0})
        self.in_backward = in_backward or bool(sums)
        self.sums = sums  # the form in which the gradients of microbatches add up; "": in .grad
        self._summed: dict[Tensor, Moment] = {}  # of this step
        self._folds = 0  # into the sums, of this step
        self.not_finite = ""  # the first gradient of this step that was not
        self._taken: dict[Tensor, None] = {}  # whose gradients this step has applied so far

    # -- what a subclass gives ----------------------------------------------------------------------------------
    def update(self, weight: Tensor, group: dict, gradient: Any, factor: float, noise: Noise) -> None:
        """One whole update of a tensor by factor * gradient; of this process's part of both, if it is in shards."""
        raise NotImplementedError

    def fold_into_momentum(self, weight: Tensor, group: dict, gradient: Tensor, is_first: bool) -> None:
        """Adds one of several gradients to the momentum."""
        raise NotImplementedError

    def apply_momentum(self, weight: Tensor, group: dict, noise: Noise) -> None:
        """Updates a tensor by its momentum, into which the gradients were folded."""
        raise NotImplementedError

    def moment(self, weight: Tensor, group: dict, name: str, positive: bool = False) -> Moment:
        """A moment by its name, zeros at first; this process's part of it."""
        state = self.state[weight]
        if name not in state:
            is_small = weight.numel() < SMALL and weight.dtype == torch.float32
            blocks = blocks_of(largest_part(weight))  # as many everywhere, or one could not tell whose a scale is
            made = new_moment(local(weight), "fp32" if is_small else group["form"], positive, blocks)
            state[name] = part_like(weight, made.values, tuple(weight.shape))
            if made.scales is not None:
                state[f"{name}_scales"] = _each_its_row(weight, made.scales)
        scales = state.get(f"{name}_scales")
        return Moment(local(state[name]), None if scales is None else local(scales).view(-1))

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
            if weight in self._summed:
                self.update(weight, group, self._summed.pop(weight), factor, noise)
            if weight.grad is None:
                continue
            if self.in_backward:
                gradient, weight.grad = weight.grad, None
                self._take_gradient(weight, gradient, group, noise)
            else:
                self.update(weight, group, local(weight.grad), factor, noise)
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
                # The parts of a weight are rounded by other random bits each.
                yield weight, group, (group["seed"], number + (part_number(weight) << 20), group["updates"])
                number += 1

    # -- in backward --------------------------------------------------------------------------------------------
    @property
    def contexts(self) -> tuple[Callable[[nn.Module], AbstractContextManager], ...]:
        """The contexts that a step enters around each pass."""
        return (self.updating_in_backward,) if self.in_backward else ()

    def begin(self, task: Task, pieces: int) -> None:
        """Called before each step; refuses one that would not be exact."""
        self._summed.clear()  # of a step that broke off, or was skipped
        self._folds, self.not_finite = 0, ""
        if self.sums:
            refuse_sums(task)
        if not self.in_backward or self.sums:
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
        with ExitStack() as stack:
            for weight, take in self.takers(model):
                stack.callback(weight.register_post_accumulate_grad_hook(take).remove)
            yield

    def takers(self, model: nn.Module) -> Iterator[tuple[nn.Parameter, Callable[[Tensor], None]]]:
        """Each weight, and what takes its gradient once the backward pass has made it."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for weight, group, noise in self._numbered():
            yield weight, self._hook(group, noise, names.get(weight, "a weight"))

    def _hook(self, group: dict, noise: Noise, name: str) -> Callable[[Tensor], None]:
        seed, number, _ = noise

        def take(weight: Tensor) -> None:
            if weight.grad is not None:  # else a function had no gradient for it
                gradient, weight.grad = weight.grad, None
                hand_over(gradient, partial(took, weight))

        def took(weight: Tensor, gradient: Tensor) -> None:
            now = seed, number, group["updates"]  # of the step that runs, which a tape outlives
            with torch.no_grad(), phase(Phase.UPDATE):
                if self.sums:
                    self._add_up(weight, gradient, group, now, name)
                else:
                    self._check_finite(gradient, name)
                    self._take_gradient(weight, gradient, group, now)

        return take

    def _add_up(self, weight: Tensor, gradient: Tensor, group: dict, noise: Noise, name: str) -> None:
        """Adds a gradient to the sum of the step's, rounded by chance: to nearest, what is small beside the sum would
        be lost again and again."""
        if not all_finite(gradient):
            self.not_finite = self.not_finite or f"the gradient of {name}"
            return
        is_first = weight not in self._summed
        if is_first:
            is_small = weight.numel() < SMALL and weight.dtype == torch.float32
            self._summed[weight] = new_moment(weight, "fp32" if is_small else self.sums)
        self._folds += 1
        seed, number, updates = noise
        chance = None if is_first else (seed, number + (self._folds << 20), updates)
        sgd_accumulate(weight, gradient, self._summed[weight], noise=chance)

    def _check_finite(self, gradient: Tensor, name: str) -> None:
        """Refuses to apply a gradient that is not finite; those before it in this step have been applied."""
        if gradient.layout != torch.strided or all_finite(gradient):  # the update refuses other layouts
            return
        before = (
            f"{len(self._taken)} others had been applied before it, so that weights and state are between two updates: "
            "go on from the last save, without no-gradient, or"
            if self._taken
            else "the weights are as before: look at the batch, or"
        )
        raise Diverged(f"the gradient of {name} is not finite; {before} lower the learning rate")

    def _take_gradient(self, weight: Tensor, gradient: Tensor, group: dict, noise: Noise) -> None:
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
            _check_parts(weights[index], part)
            self.state[weights[index]] = {name: _one_per_block(name, part) for name in part}
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


def _each_its_row(weight: Tensor, scales: Tensor) -> Tensor:
    """The scales of this process's part of a weight -> a matrix with a row for each process; the scales themselves if
    the weight is whole."""
    return part_like(weight, scales[None], (parts_of(weight), len(scales))) if is_sharded(weight) else scales


def _check_parts(weight: Tensor, state: dict[str, Any]) -> None:
    """Refuses scales of a weight's parts in another number of processes."""
    rows = {len(value) for name, value in state.items() if name.endswith("_scales")} if is_sharded(weight) else set()
    if rows - {parts_of(weight)}:
        raise ShoestringError(
            f"the saved optimizer state has scales for the shards of {rows.pop()} processes, and there are "
            f"{parts_of(weight)} now: resume in as many as before"
        )


def _one_per_block(name: str, state: dict[str, Any]) -> Any:
    """A part of a saved state; version 0.1 kept one scale for a whole moment in FP16."""
    value = state[name]
    if not name.endswith("_scales") or value.numel() > 1:
        return value
    return value.repeat(blocks_of(state[name.removesuffix("_scales")].numel()))


def refuse_in_backward(task: Task) -> None:
    """Raises, with the reason, if a step must see all its gradients before it may apply one."""
    if reason := why_gradients_stay(task):
        raise ShoestringError(f"no-gradient cannot be used, because {reason}, or leave out no-gradient")


def refuse_sums(task: Task) -> None:
    """Raises if a step needs the gradients themselves."""
    if reason := why_not_summed(task):
        raise ShoestringError(
            f"gradients cannot be kept in 8 bits, because {reason} at the end: leave out 8bit-gradient"
        )


def why_not_summed(task: Task) -> str:
    """A task -> what needs the gradients themselves; "" if they may add up in 8 bits."""
    if task.devices > 1:
        return f"{task.devices} processes add them up"
    return "" if task.clip is None else f"clipping to {task.clip:g} needs them"


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
