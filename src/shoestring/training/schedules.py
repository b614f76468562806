"""Learning-rate schedules: the number of an update, from 1 -> the factor on the optimizer's learning rate.

Each is stretched over any number of updates. `schedule(name, updates)` gives the named ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ShoestringError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The factor 1 throughout."""

    def __call__(self, update: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Steps:
    """A constant factor in each part of the run; `until` says where each part ends, as a fraction of the run.

    >>> steps = Steps(updates=100, until=(0.6, 1.0), factors=(1.0, 0.2))
    >>> steps(60), steps(61)
    (1.0, 0.2)
    """

    updates: int
    until: tuple[float, ...]
    factors: tuple[float, ...]

    def __call__(self, update: int) -> float:
        ended = sum(update > round(end * self.updates) for end in self.until)
        return self.factors[min(ended, len(self.factors) - 1)]


@dataclass(frozen=True)
class InverseSqrt:
    """Linear warm-up from `start` to 1 over a fraction `warmup` of the run, then the inverse square root.

    factor(n) = start + (1 - start) n / w for n <= w, sqrt(w / n) after. The defaults are those of the paper's
    Table 5 for the Transformer: with a learning rate of 5e-4 over 50,000 updates, 1e-7 rises to it in 4,000.
    """

    updates: int
    warmup: float = 0.08
    start: float = 2e-4

    def __call__(self, update: int) -> float:
        rise = max(1, round(self.warmup * self.updates))
        return self.start + (1 - self.start) * update / rise if update <= rise else math.sqrt(rise / update)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up to 1 over a fraction `warmup` of the run, then half a cosine down to `floor`."""

    updates: int
    warmup: float = 0.0
    floor: float = 0.0

    def __call__(self, update: int) -> float:
        rise = round(self.warmup * self.updates)
        if update <= rise:
            return update / rise
        progress = min(1.0, (update - 1 - rise) / max(1, self.updates - rise))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2


_WRN_EPOCHS = (0.3, 0.6, 0.8, 1.0)  # epochs 60, 120, 160 and 200 of 200


def paper(updates: int) -> Steps:
    """The paper's Table 5 for WRN-28-2 exactly as printed: 0.100, 0.020, 0.040, 0.008, as factors of 0.1.

    The rise from 0.020 to 0.040 is likely a misprint: the table's source (Mostafa and Wang, 2019) divides by
    five each time, and the text under the paper's Table 6 speaks of step decays. See `mostafa_wang`.
    """
    return Steps(updates, _WRN_EPOCHS, (1.0, 0.2, 0.4, 0.08))


def mostafa_wang(updates: int) -> Steps:
    """The schedule that Table 5 is taken from: 0.1, 0.02, 0.004, 0.0008, as factors of 0.1."""
    return Steps(updates, _WRN_EPOCHS, (1.0, 0.2, 0.04, 0.008))


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "paper": paper,
    "mostafa-wang": mostafa_wang,
    "inverse-sqrt": InverseSqrt,
    "cosine": Cosine,
    "constant": lambda updates: Constant(),
}


def schedule(name: str, updates: int) -> Schedule:
    """A name and the length of the run in updates -> the schedule."""
    if name not in SCHEDULES:
        raise ShoestringError(f"there is no learning-rate schedule {name!r}: use one of {', '.join(SCHEDULES)}")
    if updates < 1:
        raise ShoestringError(f"a run of {updates} updates has no learning-rate schedule: train for at least 1")
    return SCHEDULES[name](updates)
