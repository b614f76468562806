"""Any iterable of batches as data of which a run can find its place again."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..data.draws import mix
from ..errors import ShoestringError
from ..randomness import RandomState, seeded
from .evaluate import Data

ENDED = object()


class Stream:
    """A list, a DataLoader or the like, gone through once an epoch; `read` goes on from where it is.

    What the iterable draws at random comes from (seed, epoch), apart from what the model draws. So a run that
    is resumed reads the epoch again up to its place and then meets the same batches. Batches that come from
    elsewhere (a socket, a clock) cannot be had again.

    Batches without a length (an IterableDataset, a function that makes a generator) are gone through as often as
    `updates` take, as one epoch: there is no other end of one at which to evaluate and save.
    """

    def __init__(self, batches: Any, seed: int = 0, updates: int | None = None) -> None:
        check_can_be_read_again(batches)
        length = length_of(batches)
        if length is None and updates is None:
            raise ShoestringError(
                f"the data, a {type(batches).__name__}, has no length, so that nobody knows where an epoch ends: "
                "train for updates=N"
            )
        if length == 0:
            raise ShoestringError(f"the data, a {type(batches).__name__}, holds no batch: pass at least one")
        self.batches, self.seed = batches, seed
        self.endless, self.length = length is None, length or updates
        self._place = (-1, 0)
        self._pass = self._drawn = 0
        self._iterator: Iterator[Any] = iter(())
        self._random: dict[str, Any] = {}

    def __len__(self) -> int:
        assert self.length is not None
        return self.length

    def read(self, epoch: int, number: int) -> Any:
        if self._place != (epoch, number):
            self._begin(epoch)
            for _ in range(number):
                self._next()
        self._place = epoch, number + 1
        return self._next()

    def _begin(self, number: int) -> None:
        """Starts a pass through the batches."""
        self._pass, self._drawn = number, 0
        key = int(mix(self.seed, number)[0] >> np.uint64(1))
        generator = getattr(self.batches, "generator", None)
        if isinstance(generator, torch.Generator):  # a DataLoader's own, which would go on from epoch to epoch
            generator.manual_seed(key)
        with seeded(key):
            self._iterator = iter(self._made() if callable(self.batches) else self.batches)
            self._random = RandomState({}).state()

    def _made(self) -> Iterable[Any]:
        made = self.batches()
        if not isinstance(made, Iterable):
            raise ShoestringError(
                f"the data is a function that made a {type(made).__name__}: return an iterable of batches"
            )
        return made

    def _next(self) -> Any:
        batch = self._draw()
        if batch is ENDED and self.endless and self._drawn:
            self._begin(self._pass + 1)
            batch = self._draw()
        if batch is ENDED:
            expected = "at least one batch" if self.endless else f"{len(self)} batches"
            raise ShoestringError(f"the data ended early: it should have {expected}, and gave {self._drawn}")
        self._drawn += 1
        return batch

    def _draw(self) -> Any:
        """The next batch of a pass, drawn with random numbers of its own; ENDED after the last."""
        outside = RandomState({}).state()
        RandomState({}).restore(self._random)
        try:
            return next(self._iterator, ENDED)
        finally:
            self._random = RandomState({}).state()
            RandomState({}).restore(outside)


def check_can_be_read_again(batches: Any) -> None:
    """Refuses what is no data, and what can be gone through once only."""
    if isinstance(batches, Iterator):
        raise ShoestringError(
            f"the data, a {type(batches).__name__}, can be gone through once only, and epochs and resumed runs go "
            "through it again: pass the function that makes it, a list, or a DataLoader"
        )
    if not isinstance(batches, Iterable) and not callable(batches) and not hasattr(batches, "__getitem__"):
        raise ShoestringError(
            f"the data, a {type(batches).__name__}, cannot be gone through: pass a list, a DataLoader, or a function "
            "that makes a generator of batches"
        )


def length_of(batches: Any) -> int | None:
    """The number of batches, where it is known: a DataLoader of an IterableDataset has one only if that has."""
    try:
        return len(batches)
    except TypeError:
        return None


def as_data(batches: Any, seed: int, updates: int | None = None) -> Data:
    """Data as it is, and any other iterable as a Stream."""
    return batches if hasattr(batches, "read") else Stream(batches, seed, updates)
