"""The optimizer of a lean task as loops, schedulers and trainers know optimizers: `lean.optimizer`."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ShoestringError
from ..runs.state import Parts, find_stateful
from ..step import Stepper

LEAN = "lean"  # the entry of a state_dict that plain optimizers do not have


class LoopOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose `step()` is the second half of a lean step: it takes out the loss scale, clips if
    the task does, skips what is not finite, updates the weights, drops the gradients and rewires sparse layers.

    Groups and state are those of the optimizer inside, so that a scheduler's learning rates are used. `state_dict()`
    also has what the step itself carries along: the loss scale, and the state of rewiring.
    """

    stepper: Stepper

    def __init__(self, stepper: Stepper) -> None:
        super().__setstate__({"stepper": stepper})  # hooks and all, but no groups: the optimizer inside has them

    @property
    def inside(self) -> torch.optim.Optimizer:
        return self.stepper.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inside.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inside.param_groups = groups

    @property
    def state(self) -> Any:
        return self.inside.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inside.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inside.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the weights from the gradients of `lean.backward`, which a closure may call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._complete()
        return loss

    def _complete(self) -> None:
        self.stepper.complete()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients that were not applied; after a step there are none."""
        self.stepper.abandon()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ShoestringError(
            "parameters cannot be added to a plan's optimizer, because their memory was not planned: give the Task all "
            "of them, and freeze some with requires_grad_(False)"
        )

    # -- saves ------------------------------------------------------------------------------------------------------
    def _carried(self) -> Parts:
        parts = find_stateful(self.stepper.task) | self.stepper.stateful()
        return Parts({name: part for name, part in parts.items() if not name.startswith(("module ", "extra "))})

    def state_dict(self) -> dict[str, Any]:
        lean = {"updates": self.stepper.updates, "parts": self._carried().state()}
        return self.inside.state_dict() | {LEAN: lean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; one of a plain optimizer has no loss scale to take."""
        self.inside.load_state_dict({key: value for key, value in state_dict.items() if key != LEAN})
        if LEAN in state_dict:
            self.stepper.updates = state_dict[LEAN]["updates"]
            self._carried().restore(state_dict[LEAN]["parts"])

    def __getstate__(self) -> dict[str, Any]:
        raise ShoestringError("lean.optimizer cannot be pickled or copied: save its state_dict() instead")

    def __repr__(self) -> str:
        return f"LoopOptimizer({self.inside!r})"
