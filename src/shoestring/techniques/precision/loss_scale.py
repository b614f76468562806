"""Dynamic loss scaling: the loss is multiplied so that small gradients survive in FP16, and the factor divided out.

A step whose gradients overflow is skipped and the scale halved; after enough good steps it doubles. At its floor,
where a smaller scale can no longer be the cure, the run stops and names the layer. (Micikevicius et al. 2018.) The
step looks at the gradients, here as without a scale: nothing that is not finite reaches a weight or a momentum.

    task = task.with_(scaling=Scaling())
"""

import math
from dataclasses import dataclass
from typing import Any

from ...errors import Diverged, ShoestringError


@dataclass(frozen=True)
class Scaling:
    """Settings of the loss scale; called, it makes the scale of a run. Powers of two keep every digit."""

    initial: float = 2.0**16
    growth_steps: int = 2000  # good steps in a row after which it doubles
    floor: float = 2.0**-13
    ceiling: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.initial <= self.ceiling < math.inf or self.growth_steps < 1:
            raise ShoestringError(
                f"a loss scale from {self.initial:g} between {self.floor:g} and {self.ceiling:g}, doubled after "
                f"{self.growth_steps} steps, cannot be: use 0 < floor <= initial <= ceiling and 1 step or more"
            )

    def __call__(self) -> "DynamicLossScale":
        return DynamicLossScale(self)


class DynamicLossScale:
    """The loss scale of a run, `value`, as its steps went so far."""

    def __init__(self, settings: Scaling) -> None:
        self.settings = settings
        self.value = settings.initial
        self.updates = 0  # that were done
        self.good_steps = 0  # in a row, since the scale last changed
        self.skipped = 0  # steps in a row

    def accepts(self, overflow: str | None) -> bool:
        """What the step found not to be finite, or None -> whether the update may be done; adapts the scale."""
        if overflow is None:
            self._grow()
        else:
            self._shrink(overflow)
        return overflow is None

    def _grow(self) -> None:
        self.updates, self.good_steps, self.skipped = self.updates + 1, self.good_steps + 1, 0
        if self.good_steps == self.settings.growth_steps:
            self.value, self.good_steps = min(2 * self.value, self.settings.ceiling), 0

    def _shrink(self, overflow: str) -> None:
        self.good_steps, self.skipped = 0, self.skipped + 1
        if self.value / 2 < self.settings.floor:
            raise Diverged(
                f"{overflow} is not finite even at a loss scale of {self.value:g}, the floor, after "
                f"{self.skipped} skipped updates in a row (the weights are as before them): lower the learning "
                "rate, clip the gradients, or use bf16"
            )
        self.value /= 2

    def state(self) -> dict[str, Any]:
        names = ("value", "updates", "good_steps", "skipped")
        return {name: getattr(self, name) for name in names}

    def restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
