"""The record of a technique: everything that the planner and the registry know about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from ..errors import ShoestringError
from ..task import Task


class Risk(IntEnum):
    """How a technique affects results, in the order in which the planner spends them."""

    EXACT = 0  # the same numbers
    NEUTRAL = 1  # other numbers, and no significant loss of accuracy in runs of ours: evidence.py
    APPROXIMATE = 2  # quality is traded for memory

    @classmethod
    def named(cls, name: str) -> "Risk":
        if name.upper() not in cls.__members__:
            raise ShoestringError(f"there is no risk {name!r}: use exact, neutral or approximate")
        return cls[name.upper()]


MEANING = {
    Risk.EXACT: "the same gradients as plain training",
    Risk.NEUTRAL: "other rounding, no loss of quality known",
    Risk.APPROXIMATE: "quality is traded for memory",
}
# What each risk adds to those below it.
ADDS = {
    Risk.NEUTRAL: "16 bits, 8-bit state",
    Risk.APPROXIMATE: "sparsity, compressed activations, SM3 and Adafactor, microbatches with batch norm",
}


@dataclass(frozen=True)
class Effect:
    """The factors by which a value scales one traced step of the whole batch; 1 changes nothing."""

    weights: float = 1.0  # bytes of weights, an index included
    gradients: float = 1.0  # bytes of gradients; 0: the optimizer runs in backward
    state: float = 1.0  # bytes of optimizer state
    update: float = 1.0  # bytes of an update's temporaries
    flops: float = 1.0
    share: float = 1.0  # the largest microbatch / the batch
    pieces: int = 1  # microbatches per step
    layers: tuple[str, ...] = ()  # whose weights, gradients and state are scaled; (): all
    static: bool = True  # whether passes can still be run from a tape


class Price(NamedTuple):
    """A value takes at least as long as `instead` (None: without the technique).

    Each byte that it saves is recomputed in memory, or goes to disk and back: `medium` is memory or disk, or "" where
    some bytes may be saved for nothing.
    """

    instead: Any
    medium: str


class Bounds(NamedTuple):
    """What is known about a value before it is traced.

    `lasting` is the share of plain training's weights, gradients and optimizer state that surely remains, `moving` the
    share of what grows with the batch. `price` bounds its time, if anything does. `traced_as` is another value whose
    trace serves for this one.
    """

    lasting: float = 1.0
    moving: float = 0.0
    price: Price | None = None
    traced_as: Any = None


def _exact(task: Task, value: Any) -> Risk:
    return Risk.EXACT


def _smooth(task: Task, value: Any) -> int:
    return 0


def _compatible(task: Task, settings: Mapping[str, Any]) -> str:
    return ""


def _lossless(task: Task, value: Any) -> str:
    return ""


def _unknown(task: Task, value: Any) -> Bounds:
    return Bounds()


class Technique(NamedTuple):
    """The record of a technique: `apply(task, settings)` returns the task with it, and the rest is for the planner.

    `settings` is a frozen dataclass, whose first field a plan's scalar stands for; below, `value` is such a scalar.
    `options(task)` are the values that the planner may try; if there is none, it raises ShoestringError (NoEffect if
    the technique would change nothing) with the reason.
    `risk(task, value)` says how a value affects results, `roughness` how much within its risk, in steps of about half a
    point of accuracy; `evidence(task, value)` tells users who did not choose the technique
    themselves what is known about the quality that it costs, "" if nothing can be lost.
    `refuses(task, settings)` is the reason why two settings of a plan are incompatible, "" if they are not.
    `open_values` mean something under a budget only (as `adaptive` does): `sized(task, value, fits)` turns one into a
    value for which `fits(value)` holds; `task` has the techniques before this one.
    `effect(task, value)` scales a trace of the whole batch. Without it a value needs a trace of its own, and
    `bounds(task, value)` says what is known before.
    """

    settings: type
    apply: Callable[[Task, Any], Task]
    options: Callable[[Task], list]
    risk: Callable[[Task, Any], Risk] = _exact
    roughness: Callable[[Task, Any], int] = _smooth
    refuses: Callable[[Task, Mapping[str, Any]], str] = _compatible
    effect: Callable[[Task, Any], Effect] | None = None
    bounds: Callable[[Task, Any], Bounds] = _unknown
    evidence: Callable[[Task, Any], str] = _lossless
    open_values: tuple[str, ...] = ()
    sized: Callable[[Task, Any, Callable[[Any], bool]], Any] | None = None
