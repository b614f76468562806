"""Rewiring: between updates, weak nonzeros are pruned and as many grown elsewhere; their total never changes.

| method | pruned | grown |
|---|---|---|
| `dsr` | magnitudes below one threshold, which adapts to the wanted number | layers in proportion to what survives |
| `set` | the same share of each layer's positions, the smallest magnitudes | as many in the same layer |
| `static` | nothing | nothing |

Dynamic sparse reparameterisation is that of Mostafa and Wang (2019), with the paper's change (section 3.1): the
optimizer's state of all rewired tensors starts anew. SET is that of Mocanu et al. (2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .nonzeros import count_from, generator_from, threshold_of
from .sparse_layers import SparseLayer

METHODS = ("dsr", "set", "static")
TOLERANCE, GAIN = 0.1, 2.0  # how far the pruned number may be off, and what the threshold is changed by then


@dataclass(frozen=True)
class Schedule:
    """When to rewire: every so many updates until a share of the run is over, then off (the paper's table 5).

    The periods stretch with the length of the run; the updates between two rewirings do not, as in the paper. A
    `frequency` of 2 rewires twice as often.
    """

    periods: tuple[tuple[float, int], ...] = ((0.125, 100), (0.4, 200), (0.7, 400), (0.95, 800))
    frequency: float = 1.0

    def is_due(self, update: int, length: int) -> bool:
        """Whether to rewire after the `update`-th of `length` updates, counted from 1."""
        every = next((every for share, every in self.periods if update <= share * length), None)
        return every is not None and update % max(1, round(every / self.frequency)) == 0


class Rewiring:
    """The hook that rewires after an update. `fraction` is the share of all positions that is pruned each time."""

    def __init__(
        self,
        method: str = "dsr",
        fraction: float = 0.01377866,
        schedule: Schedule = Schedule(),  # noqa: B008 (frozen)
        length: int = 100_000,
        threshold: float = 0.001,
        seed: int = 0,
    ) -> None:
        self.method, self.fraction, self.schedule, self.length = method, fraction, schedule, length
        self.threshold, self.update = threshold, 0
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, stepper: Any) -> None:
        self.update += 1
        if self.schedule.is_due(self.update, stepper.length or self.length):
            self.rewire(stepper.task.model, stepper.optimizer)

    def rewire(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Prunes and grows now -> how many."""
        layers = sparse_layers(model)
        for layer in layers:
            optimizer.state.pop(layer.values, None)  # first, so that its memory is there for what follows
        thresholds = self._thresholds(layers)
        survivors = [count_from(x.values.detach(), h) for x, h in zip(layers, thresholds, strict=True)]
        pruned = [layer.values.numel() - left for layer, left in zip(layers, survivors, strict=True)]
        grown = self._grown(layers, survivors, pruned)
        for layer, threshold, count in zip(layers, thresholds, grown, strict=True):
            layer.rewire(threshold, count, generator_from(self.generator))
        self._adapt(sum(pruned), self.fraction * sum(layer.numel for layer in layers))
        return sum(pruned)

    def _thresholds(self, layers: Sequence[SparseLayer]) -> list[float]:
        if self.method == "dsr":
            return [self.threshold] * len(layers)
        return [threshold_of(layer.values.detach(), round(self.fraction * layer.numel)) for layer in layers]

    def _grown(self, layers: Sequence[SparseLayer], survivors: list[int], pruned: list[int]) -> list[int]:
        if self.method != "dsr":
            return pruned
        room = [layer.room - left for layer, left in zip(layers, survivors, strict=True)]
        return shares(sum(pruned), [max(1, left) for left in survivors], room)

    def _adapt(self, pruned: int, wanted: float) -> None:
        if pruned < (1 - TOLERANCE) * wanted:
            self.threshold *= GAIN
        elif pruned > (1 + TOLERANCE) * wanted:
            self.threshold /= GAIN

    # -- what a save keeps --------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        return {"update": self.update, "threshold": self.threshold, "generator": self.generator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.update, self.threshold = state["update"], state["threshold"]
        self.generator.set_state(state["generator"])


def sparse_layers(model: nn.Module) -> list[SparseLayer]:
    """The sparse layers that are trained; of those that share their nonzeros, one."""
    layers = [m for m in model.modules() if isinstance(m, SparseLayer) and m.values.requires_grad]
    return list({id(layer.values): layer for layer in layers}.values())


def shares(count: int, weights: Sequence[int], room: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the weights that add up to `count`, none above its room.

    >>> shares(10, [1, 2, 3], [9, 9, 4])
    [2, 4, 4]
    """
    given = [0] * len(weights)
    while left := count - sum(given):
        unfilled = [i for i in range(len(weights)) if given[i] < room[i]]
        whole = sum(weights[i] for i in unfilled)
        exact = {i: divmod(left * weights[i], whole) for i in unfilled}
        extra = left - sum(quotient for quotient, _ in exact.values())
        by_remainder = sorted(unfilled, key=lambda i: exact[i][1], reverse=True)
        for place, i in enumerate(by_remainder):
            given[i] = min(room[i], given[i] + exact[i][0] + (place < extra))
    return given
