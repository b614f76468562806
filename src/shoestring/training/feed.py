"""Any iterable of batches as data of which a run can find its place again."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..data.draws import mix
from ..errors import ShoestringError
from ..randomness import RandomState, seeded
from .evaluate import Data


class Stream:
    """A list, a DataLoader or the like, gone through once an epoch; `read` goes on from where it is.

    What the iterable draws at random comes from (seed, epoch), apart from what the model draws. So a run that
    is resumed reads the epoch again up to its place and then meets the same batches. Batches that come from
    elsewhere (a socket, a clock) cannot be had again.
    """

    def __init__(self, batches: Any, seed: int = 0) -> None:
        if not hasattr(batches, "__len__") or not len(batches):
            raise ShoestringError(
                f"the data, a {type(batches).__name__}, has no length or no batch: pass a list or DataLoader"
            )
        self.batches, self.seed = batches, seed
        self._place = (-1, 0)
        self._iterator: Iterator[Any] = iter(())
        self._random: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.batches)

    def read(self, epoch: int, number: int) -> Any:
        if self._place != (epoch, number):
            self._begin(epoch)
            for _ in range(number):
                self._next()
        self._place = epoch, number + 1
        return self._next()

    def _begin(self, epoch: int) -> None:
        key = int(mix(self.seed, epoch)[0] >> np.uint64(1))
        generator = getattr(self.batches, "generator", None)
        if isinstance(
            generator, torch.Generator
        ):  # a DataLoader's own, which would go on from epoch to epoch
            generator.manual_seed(key)
        with seeded(key):
            self._iterator = iter(self.batches)
            self._random = RandomState({}).state()

    def _next(self) -> Any:
        outside = RandomState({}).state()
        RandomState({}).restore(self._random)
        try:
            return next(self._iterator)
        except StopIteration:
            raise ShoestringError(
                f"the data ended early: it says that it has {len(self)} batches, and one of them is missing"
            ) from None
        finally:
            self._random = RandomState({}).state()
            RandomState({}).restore(outside)


def as_data(batches: Any, seed: int) -> Data:
    """Data as it is, and any other iterable as a Stream."""
    return batches if hasattr(batches, "read") else Stream(batches, seed)
