"""What a technique's value does to memory and time, as the planner must know it before it traces."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Effect:
    """How a value scales one traced step of the whole batch: each is times what it was, 1 changes nothing."""

    weights: float = 1.0  # their bytes, an index included
    gradients: float = 1.0  # 0: used up as they are made
    state: float = 1.0  # of the optimizer
    update: float = 1.0  # what an update makes and drops
    flops: float = 1.0
    share: float = 1.0  # of the batch that is in the largest microbatch
    pieces: int = 1
    layers: tuple[str, ...] = ()  # whose weights, gradients and state are scaled; (): all


class Least(NamedTuple):
    """The share of plain training's bytes that a value surely leaves.

    `lasting`: of weights, gradients and optimizer state; `moving`: of what grows with the batch.
    """

    lasting: float = 1.0
    moving: float = 0.0


class Price(NamedTuple):
    """A value takes at least as long as `instead` (None: without the technique).

    Each byte that it keeps less is made again in memory, or goes to disk and back: `medium` is memory or disk.
    """

    instead: Any
    medium: str
