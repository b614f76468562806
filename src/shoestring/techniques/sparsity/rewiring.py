"""Rewiring: between updates, weak nonzeros are pruned and as many grown elsewhere; their total never changes.

| method | pruned | grown |
|---|---|---|
| `dsr` | magnitudes below one threshold, which adapts to the wanted number | layers in proportion to what survives |
| `set` | the same share of each layer's positions, the smallest magnitudes | as many in the same layer |
| `static` | nothing | nothing |

Where few weights are left, a share of all positions may be more than there is: at most `MOST` of the nonzeros are
wanted at a time, and no layer loses more than `MOST_OF_LAYER` of its own, however far off the threshold is.

Dynamic sparse reparameterisation is that of Mostafa and Wang (2019), with the paper's change (section 3.1): the
optimizer's state of all rewired tensors starts anew. SET is that of Mocanu et al. (2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...kernels.sparse_conv import forget_calls
from .bitmap import count_from, generator_from
from .layer import SparseLayer

METHODS = ("dsr", "set", "static")
TOLERANCE, GAIN = 0.1, 2.0  # how far the pruned number may be off, and what the threshold is changed by then
MOST = 0.3  # of the nonzeros, wanted at a time: SET's own share, the largest that was published
MOST_OF_LAYER = 0.5  # of a layer's nonzeros; the paper's settings want 0.28 of all at most


@dataclass(frozen=True)
class Schedule:
    """When to rewire: every so many updates until a share of the run is over, then off (the paper's table 5).

    The periods stretch with the length of the run; the updates between two rewirings do not, as in the paper. A
    `frequency` of 2 rewires twice as often. In a run too short for `least` rewirings the updates between them shrink,
    all alike, but not below `shortest`: a rewiring starts the momentum anew, which must have time to build up.
    """

    periods: tuple[tuple[float, int], ...] = ((0.125, 100), (0.4, 200), (0.7, 400), (0.95, 800))
    frequency: float = 1.0
    least: int = 36
    shortest: int = 10  # the updates over which a momentum of 0.9 averages

    def is_due(self, update: int, length: int) -> bool:
        """Whether to rewire after the `update`-th of `length` updates, counted from 1."""
        every = next((every for share, every in self.periods if update <= share * length), None)
        return every is not None and update % self._updates_between(every, length) == 0

    def _updates_between(self, every: int, length: int) -> int:
        wanted = every / self.frequency
        shrunk = wanted * min(1.0, self._rate() * length / self.least) if self.least else wanted
        return max(1, round(max(shrunk, min(wanted, self.shortest))))

    def _rate(self) -> float:
        """Rewirings per update, over the whole run."""
        starts = (0.0, *(share for share, _ in self.periods))
        shares = ((end - start) / every for start, (end, every) in zip(starts, self.periods, strict=False))
        return self.frequency * sum(shares)

    def times(self, length: int) -> int:
        """The rewirings of a run of that many updates."""
        return sum(self.is_due(update, length) for update in range(1, length + 1))

    def words(self, length: int) -> str:
        """What it comes to in a run of that many updates.

        >>> Schedule().words(1_000)
        'after every 10 updates until 125, 20 until 400, 41 until 700, 82 until 950: 37 times in 1,000 updates'
        """
        ends = (f"{self._updates_between(every, length):,} until {int(end * length):,}" for end, every in self.periods)
        parts = ", ".join(ends).replace(" until", " updates until", 1)
        return f"after every {parts}: {self.times(length):,} times in {length:,} updates"


class Rewiring:
    """The hook that rewires after an update. `fraction` is the share of all positions that is pruned each time.

    `times` counts the rewirings so far.
    """

    stretched = "rewiring"  # its schedule is spread over the length of the run

    def __init__(
        self,
        method: str = "dsr",
        fraction: float = 0.01377866,
        schedule: Schedule = Schedule(),
        length: int = 100_000,
        threshold: float = 0.001,
        seed: int = 0,
    ) -> None:
        self.method, self.fraction, self.schedule, self.length = method, fraction, schedule, length
        self.threshold, self.update, self.times = threshold, 0, 0
        self.generator = torch.Generator().manual_seed(seed)

    def is_due(self, stepper: Any) -> bool:
        """Whether the next update is followed by a rewiring."""
        return self.schedule.is_due(self.update + 1, stepper.length or self.length)

    def __call__(self, stepper: Any) -> dict[str, Any]:
        """After an update -> what the run's log is to say of it: how many weights were rewired, if it was time to; and
        after the first, when it will be."""
        is_due = self.is_due(stepper)
        told: dict[str, Any] = {} if self.update else {"rewiring": self.schedule.words(stepper.length or self.length)}
        self.update += 1
        return told | {"rewired": self.rewire(stepper.task.model, stepper.optimizer)} if is_due else told

    def rewire(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Prunes and grows now -> how many."""
        layers = sparse_layers(model)
        pruned = self._pruned(layers)
        grown = self._grown(layers, pruned)
        changes = [change for change in zip(layers, pruned, grown, strict=True) if any(change[1:])]
        for layer, *_ in changes:
            optimizer.state.pop(layer.values, None)  # first, so that its memory is there for what follows
        for layer, lost, gained in changes:
            layer.rewire(lost, gained, generator_from(self.generator))
        forget_calls()  # of the numbers of nonzeros that were
        self.times += 1
        return sum(pruned)

    def _pruned(self, layers: Sequence[SparseLayer]) -> list[int]:
        """How many nonzeros each layer loses."""
        held = [layer.values.numel() for layer in layers]
        if self.method == "set":
            return [round(wanted(self.fraction, layer.numel, count)) for layer, count in zip(layers, held, strict=True)]
        below = [layer.values.numel() - count_from(layer.values.detach(), self.threshold) for layer in layers]
        self._adapt(sum(below), wanted(self.fraction, sum(layer.numel for layer in layers), sum(held)))
        return [min(found, int(MOST_OF_LAYER * count)) for found, count in zip(below, held, strict=True)]

    def _grown(self, layers: Sequence[SparseLayer], pruned: list[int]) -> list[int]:
        if self.method == "set":
            return pruned
        survivors = [layer.values.numel() - lost for layer, lost in zip(layers, pruned, strict=True)]
        room = [layer.room - left for layer, left in zip(layers, survivors, strict=True)]
        return shares(sum(pruned), [max(1, left) for left in survivors], room)

    def _adapt(self, below: int, wanted: float) -> None:
        if below < (1 - TOLERANCE) * wanted:
            self.threshold *= GAIN
        elif below > (1 + TOLERANCE) * wanted:
            self.threshold /= GAIN

    # -- what a save keeps --------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        names = ("update", "times", "threshold")
        return {name: getattr(self, name) for name in names} | {"generator": self.generator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.update, self.times, self.threshold = state["update"], state["times"], state["threshold"]
        self.generator.set_state(state["generator"])


def wanted(fraction: float, positions: int, held: int) -> float:
    """How many of `held` nonzeros to prune at a time."""
    return min(fraction * positions, MOST * held)


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
