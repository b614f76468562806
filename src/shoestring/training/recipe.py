"""Recipe: how long to train, at which learning rates, and whatever else determines the result."""

from dataclasses import dataclass, field

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
