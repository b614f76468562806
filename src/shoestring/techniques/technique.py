"""What every technique says of itself: the record that the planner, the command line and the registry read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import ShoestringError
from ..task import Task


class Risk(IntEnum):
    """How a technique affects results, in the order in which the planner spends them."""

    EXACT = 0  # the same numbers
    NEUTRAL = 1  # other numbers, and no loss of quality, or less than half a point, in the papers' evidence
    APPROXIMATE = 2  # quality is traded for memory

    @classmethod
    def named(cls, name: str) -> "Risk":
        if name.upper() not in cls.__members__:
            raise ShoestringError(f"there is no risk {name!r}: use exact, neutral or approximate")
        return cls[name.upper()]


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


def _no_options(task: Task) -> list:
    return []


def _exact(task: Task, value: Any) -> Risk:
    return Risk.EXACT


def _mild(task: Task, value: Any) -> int:
    return 0


def _stands(task: Task, settings: Mapping[str, Any]) -> str:
    return ""


def _lasting(task: Task, value: Any) -> Least:
    return Least()


def _unknown(task: Task, value: Any) -> Price | None:
    return None


def _itself(value: Any) -> Any:
    return value


class Technique(NamedTuple):
    """`name` is the plan's field, `settings(value)` makes the technique's settings from its value.

    What the planner asks:
    `options(task)` are the values that it may try; where there can be none, it raises ShoestringError with the reason.
    `risk(task, value)` is what a value does to the result, `degree` how much within its risk, in steps of about half a
    point of accuracy, and `warning` what a user should know who did not choose it.
    `refuses(task, settings)` is the reason why two settings of a plan cannot stand together, "" if they can.
    `effect(task, value)` scales a trace of the whole batch; without one, a value needs a trace of its own, and
    `alike(value)` is the value whose trace serves as well, `least(task, value)` bounds its memory from below, and
    `price(task, value)` its time, if anything does.
    """

    name: str
    settings: Callable[[Any], Any]
    apply: Callable[[Task, Any], Task]
    options: Callable[[Task], list] = _no_options
    risk: Callable[[Task, Any], Risk] = _exact
    warning: str = ""
    degree: Callable[[Task, Any], int] = _mild
    refuses: Callable[[Task, Mapping[str, Any]], str] = _stands
    effect: Callable[[Task, Any], Effect] | None = None
    alike: Callable[[Any], Any] = _itself
    least: Callable[[Task, Any], Least] = _lasting
    price: Callable[[Task, Any], Price | None] = _unknown
