"""Recipe: how long to train, at which learning rates, and whatever else determines the result."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

from ..errors import ShoestringError
from .evaluate import Evaluation
from .schedules import Constant, Schedule


@dataclass(frozen=True)
class Recipe:
    """How long and how to train; every field but the two that say when to save determines the result."""

    epochs: int | None = None
    updates: int | None = None
    schedule: Schedule = field(default_factory=Constant)
    evaluation: Evaluation | None = None
    seed: int = 0
    average: int = 0  # the last epochs whose weights are averaged at the end
    save_every: int | None = None  # updates, besides the end of each epoch
    save_seconds: float = 600.0

    def length(self, batches: int) -> int:
        """The number of batches in an epoch -> the number of updates in the run."""
        if (self.epochs is None) == (self.updates is None):
            raise ShoestringError("the length of the run is not clear: give either epochs or updates")
        length = self.updates if self.epochs is None else self.epochs * batches
        assert length is not None
        if length < 1:
            raise ShoestringError(f"a run of {length} updates trains nothing: give at least 1")
        return length


def made_recipe(given: Mapping[str, Any]) -> Recipe:
    """Keywords of `train` -> the recipe; one that does not exist is refused with the nearest that does."""
    known = [f.name for f in fields(Recipe)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            more = "; a learning rate is the task's: SGD(lr=...)" if name in ("lr", "learning_rate") else ""
            raise ShoestringError(f"train() takes no {name!r}: {hint}{more}")
    for name in ("epochs", "updates", "seed", "average", "save_every"):
        if (value := given.get(name)) is not None and not isinstance(value, Integral):
            raise ShoestringError(f"train() takes a whole number as {name}, and got {value!r}")
    if not callable(given.get("schedule", Constant())):
        raise ShoestringError(
            f"train() takes as schedule a function from the number of an update to a factor, and got "
            f"{given['schedule']!r}: shoestring.training.schedules.schedule(NAME, updates) makes the named ones"
        )
    return Recipe(**given)
