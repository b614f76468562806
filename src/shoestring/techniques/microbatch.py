"""Microbatching: the batch goes through the model in pieces whose gradients add up. Exact without batch norm.

Each piece weighs by its share of the items, so that a tail of another size counts rightly. A batch is cut along its
first dimension. With batch norm the statistics are those of a piece (neutral, not exact: the paper's section 3.3).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import NoEffect, ShoestringError
from ..task import Task, first_tensor
from .risk import Risk


@dataclass(frozen=True)
class Settings:
    """`size`: examples in a piece, or items (such as tokens) in it where `by` is "items"."""

    size: int
    by: str = "examples"


def options(task: Task) -> list[int]:
    """Sizes that the planner tries: the batch in 2, 4, 10, 25 and 100 pieces."""
    whole = units(task)
    return sorted({-(-whole // pieces) for pieces in (2, 4, 10, 25, 100)} - {whole}, reverse=True)


def units(task: Task) -> int:
    """How many of what a microbatch counts are in the task's batch."""
    return first_tensor(task.batch).shape[0]


def risk(task: Task, size: int) -> Risk:
    """Exact without batch norm; with it neutral down to 10 examples (the paper's Figure 4), approximate below."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.model.modules()):
        return Risk.EXACT
    return Risk.NEUTRAL if size >= 10 else Risk.APPROXIMATE


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task whose batch is run in pieces of `size`."""
    whole = first_tensor(task.batch).shape[0] if settings.by == "examples" else task.count(task.batch)
    if settings.by not in ("examples", "items"):
        raise ShoestringError(f"microbatches go by examples or by items, not by {settings.by!r}")
    if settings.size < 1 or settings.size > whole:
        raise ShoestringError(
            f"a microbatch of {settings.size} does not go into a batch of {whole} {settings.by}: use 1 to {whole}"
        )
    if settings.size == whole:
        raise NoEffect(f"a microbatch of {settings.size} is the whole batch: leave it out of the plan")
    split = ByExamples(settings.size) if settings.by == "examples" else ByItems(settings.size, task.count)
    list(split(task.batch))  # refuses now what it would refuse in the step
    return task.with_(split=split, settings=task.settings | {"microbatch": settings.size})


@dataclass(frozen=True)
class ByExamples:
    """Cuts a batch into pieces of `size` examples; the last may be smaller. Pieces are views: nothing is copied."""

    size: int

    def __call__(self, batch: Any) -> Iterator[Any]:
        examples = first_tensor(batch).shape[0]
        for start in range(0, examples, self.size):
            yield cut(batch, start, min(self.size, examples - start), examples)


@dataclass(frozen=True)
class ByItems:
    """Cuts a batch into pieces of at most `size` items, padding counted; no example is split."""

    size: int
    count: Callable[[Any], int]

    def __call__(self, batch: Any) -> Iterator[Any]:
        examples = first_tensor(batch).shape[0]
        start = 0
        while start < examples:
            length = self._fitting(batch, start, examples)
            yield cut(batch, start, length, examples)
            start += length

    def _fitting(self, batch: Any, start: int, examples: int) -> int:
        """How many examples from `start` on fit into a piece: at least one, or the piece is too small."""
        length = 0
        while start + length < examples and self._items(batch, start, length + 1, examples) <= self.size:
            length += 1
        if not length:
            items = self._items(batch, start, 1, examples)
            raise ShoestringError(
                f"a microbatch of {self.size} items is smaller than example {start}, which has {items}: "
                f"use at least {items}"
            )
        return length

    def _items(self, batch: Any, start: int, length: int, examples: int) -> int:
        return self.count(cut(batch, start, length, examples))


def cut(batch: Any, start: int, length: int, examples: int) -> Any:
    """The examples from `start` on; tensors with another first dimension, and what is no tensor, go to each piece."""

    def piece(leaf: Any) -> Any:
        shared = not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != examples
        return leaf if shared else leaf.narrow(0, start, length)

    return pytree.tree_map(piece, batch)
