"""What happens in a run, as data for whoever listens: the progress line, TensorBoard, a user's function."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Updated:
    """An update was done, counted from 1; `peak_bytes` is the highest that was measured so far."""

    update: int
    updates: int
    epoch: int
    epochs: int
    loss: float
    lr: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Evaluated:
    """The model was evaluated; `name` is that of the quality."""

    update: int
    epoch: int
    name: str
    quality: float
    is_best: bool


@dataclass(frozen=True)
class Saved:
    update: int
    path: Path


Event = Updated | Evaluated | Saved
Listener = Callable[[Event], None]
