"""Counting a batch: its examples, and the items that its loss is the mean of. Gradient accumulation weighs by items.

A batch's examples are the first dimension of its first tensor that is not shared. Items may be fewer or more: a
language model's loss is the mean over the labels that are not ignored. Which of the `candidates` a loss counts can
only be found by calling it: techniques/microbatch/adding_up.py does.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ShoestringError
from .structure import named_leaves

IGNORED = -100  # the label that PyTorch's losses and most collators ignore
OTHERS_IGNORED = (255, -1, 0)  # ignored in segmentation, by other libraries, as padding
LABELS = ("labels", "label", "targets", "target")
# Names (or paths) of tensors that belong to all examples at once, or a predicate of path and value.
Shared = Collection[str] | Callable[[str, Any], bool]


def is_shared(shared: Shared, path: str, value: Any) -> bool:
    """Whether the task says that a leaf goes whole to every microbatch."""
    if callable(shared):
        return bool(shared(path, value))
    return any(name == path or name in path.split(".") for name in shared)


def counted(batch: Any, shared: Shared = ()) -> tuple[str, int]:
    """A batch -> the path of the tensor whose first dimension is its examples, and their number."""
    for path, leaf in named_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and not is_shared(shared, path, leaf):
            return path, leaf.shape[0]
    raise ShoestringError(
        "the batch holds no tensor with a first dimension (lists, tuples, Mappings and dataclasses are searched): "
        "give Task an `items(batch)` function"
    )


@dataclass(frozen=True)
class Examples:
    """Counts examples."""

    shared: Shared = ()

    def __call__(self, batch: Any) -> int:
        return counted(batch, self.shared)[1]

    def __str__(self) -> str:
        return "examples"


@dataclass(frozen=True)
class Entries:
    """Counts the entries of a tensor that are not in `ignored`; if `shifted`, as for next-token prediction, without the
    first of each row."""

    name: str
    ignored: tuple[int, ...] = (IGNORED,)
    shifted: bool = False

    def __call__(self, batch: Any) -> int:
        leaf = dict(named_leaves(batch)).get(self.name)
        if not isinstance(leaf, Tensor):
            raise ShoestringError(
                f"items are counted in {self.name!r}, which this batch does not have: pass Task(items=...)"
            )
        entries = leaf[:, 1:] if self.shifted else leaf
        return int(torch.stack([entries != number for number in self.ignored]).all(0).sum())

    def __str__(self) -> str:
        words = f"entries of {self.name!r} that are not {' or '.join(map(str, self.ignored))}"
        return f"{words}, without the first of each row" if self.shifted else words


Count = Callable[[Any], int]


def usual(batch: Any, padding: int | None = None, shared: Shared = ()) -> Count:
    """A batch's items before the loss has been called: labels that are not ignored, or else examples."""
    examples = counted(batch, shared)[1]
    for path, leaf in named_leaves(batch):
        if _is_labels(path) and _holds_rows(leaf, examples) and not is_shared(shared, path, leaf):
            return Entries(path, _left_out(padding))
    return Examples(shared)


def candidates(batch: Any, padding: int | None = None, shared: Shared = ()) -> list[Count]:
    """Everything that a loss may be the mean of, likeliest first."""
    examples = counted(batch, shared)[1]
    likely: list[Count] = []
    others: list[Count] = []
    for path, leaf in named_leaves(batch):
        if not _holds_rows(leaf, examples) or is_shared(shared, path, leaf):
            continue
        if _is_labels(path) or bool((leaf == IGNORED).any()):
            likely += _with_shift(path, _left_out(padding))
            for label in OTHERS_IGNORED:
                others += _with_shift(path, (*_left_out(padding), label)) if bool((leaf == label).any()) else ()
        elif padding is not None:
            others += _with_shift(path, (padding,))
        if bool(((leaf == 0) | (leaf == 1)).all()):  # a mask
            others += _with_shift(path, (0,))
    return list(dict.fromkeys([usual(batch, padding, shared), *likely, Examples(shared), *others]))


def _with_shift(path: str, ignored: tuple[int, ...]) -> Iterator[Count]:
    return (Entries(path, ignored, shifted) for shifted in (False, True))


def _left_out(padding: int | None) -> tuple[int, ...]:
    return (IGNORED,) if padding in (None, IGNORED) else (IGNORED, padding)


def _is_labels(path: str) -> bool:
    return path.split(".")[-1] in LABELS


def _holds_rows(leaf: Any, examples: int) -> bool:
    """Whether a leaf holds several integers per example, and has values."""
    if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.is_floating_point() or leaf.is_complex():
        return False
    return leaf.dim() > 1 and leaf.shape[0] == examples
