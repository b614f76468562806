"""Events of a run, as data for its listeners: the progress line, TensorBoard, a user's function."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Updated:
    """An update was done, counted from 1; `peak_bytes` is the highest peak measured so far."""

    update: int
    updates: int
    epoch: int
    epochs: int
    loss: float
    lr: float
    peak_bytes: int | None
    seconds: float = 0.0  # of this step
    skipped: str = ""  # why no weight was changed, if so
    scale: float | None = None  # the loss scale after it, if there is one


@dataclass(frozen=True)
class Evaluating:
    """An evaluation has begun, or has come to batch `done` of `total`."""

    update: int
    epoch: int
    name: str
    done: int
    total: int


@dataclass(frozen=True)
class Evaluated:
    """The model was evaluated; `name` is the metric's."""

    update: int
    epoch: int
    name: str
    quality: float
    is_best: bool


@dataclass(frozen=True)
class Saved:
    update: int
    path: Path


@dataclass(frozen=True)
class Replanned:
    """A step after `update` needed `used_bytes`, over the budget: the run goes on with these techniques."""

    update: int
    used_bytes: int
    techniques: dict[str, Any]


Event = Updated | Evaluating | Evaluated | Saved | Replanned
Listener = Callable[[Event], None]
