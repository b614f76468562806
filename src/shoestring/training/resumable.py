"""Makes any iterable of batches resumable: a run finds its place in it after a restart."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from ..data.draws import mix
from ..data.splits import WHOLE
from ..errors import ShoestringError
from ..randomness import RandomState, seeded
from ..structure import tensors
from .evaluate import Data

ENDED = object()


class Stream:
    """A list, a DataLoader or another iterable, iterated once per epoch; `read` continues from where it is.

    The iterable's random numbers depend on (seed, epoch) only, not on what the model draws. So a resumed run reads
    the epoch from its start up to its place, and then gets the same batches. Batches that come from elsewhere (a
    socket, a clock) cannot be reproduced.

    Batches without a length (an IterableDataset, a function that makes a generator) are iterated as often as
    `updates` need, as a single epoch: there is no other end of one at which to evaluate and save.
    """

    def __init__(self, batches: Any, seed: int = 0, updates: int | None = None) -> None:
        check_can_be_read_again(batches)
        length = length_of(batches)
        if length is None and updates is None:
            raise ShoestringError(
                f"the data, a {type(batches).__name__}, has no length, so the end of an epoch is unknown: "
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

    def fingerprint(self) -> str:
        """What all batches of a list or a tuple are; "" if they cannot be looked at without being drawn."""
        if not isinstance(self.batches, list | tuple):
            return ""
        digest = hashlib.sha256()
        for tensor in tensors(list(self.batches)):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return WHOLE + digest.hexdigest()[:16]

    def read(self, epoch: int, number: int) -> Any:
        if self._place != (epoch, number):
            self._begin(epoch)
            for _ in range(number):
                self._next()
        self._place = epoch, number + 1
        return self._next()

    def _begin(self, number: int) -> None:
        """Starts an iteration over the batches."""
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
        """The next batch, with the iterable's own random state; ENDED after the last."""
        outside = RandomState({}).state()
        RandomState({}).restore(self._random)
        try:
            return next(self._iterator, ENDED)
        finally:
            self._random = RandomState({}).state()
            RandomState({}).restore(outside)


def check_can_be_read_again(batches: Any) -> None:
    """Refuses what cannot be iterated, or only once."""
    if isinstance(batches, Iterator):
        raise ShoestringError(
            f"the data, a {type(batches).__name__}, can be iterated only once, and epochs and resumed runs iterate "
            "it again: pass the function that makes it, a list, or a DataLoader"
        )
    if not isinstance(batches, Iterable) and not callable(batches) and not hasattr(batches, "__getitem__"):
        raise ShoestringError(
            f"the data, a {type(batches).__name__}, cannot be iterated: pass a list, a DataLoader, or a function "
            "that makes a generator of batches"
        )


def length_of(batches: Any) -> int | None:
    """The number of batches, if known: a DataLoader of an IterableDataset has one only if the data set does."""
    try:
        return len(batches)
    except TypeError:
        return None


def as_data(batches: Any, seed: int, updates: int | None = None) -> Data:
    """Data unchanged, and any other iterable as a Stream."""
    return batches if hasattr(batches, "read") else Stream(batches, seed, updates)
