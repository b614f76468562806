"""Microbatching: the batch goes through the model in pieces whose gradients add up. Exact without batch norm.

Each piece weighs by its share of the items, so that a tail of another size counts rightly. A batch is cut along its
first dimension, by examples, or by tokens where the task says which id is padding. With batch norm the statistics are
those of a piece (neutral, not exact: the paper's section 3.3); `simulated` gives these in one pass over the batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ..errors import NoEffect, ShoestringError
from ..task import Task, first_tensor
from .blocks import patched
from .lean import LeanPass
from .risk import Risk


@dataclass(frozen=True)
class Settings:
    """`size`: examples in a piece, or tokens, padding counted; `by` says which ("" is what the task goes by).

    `simulated` runs the whole batch at once and only takes batch norm's statistics by pieces: it saves nothing, and
    is for studies of what microbatches do to accuracy.
    """

    size: int
    by: str = ""
    simulated: bool = False


def options(task: Task) -> list[int]:
    """Sizes that the planner tries: the batch in 2, 4, 10, 25 and 100 pieces."""
    whole = units(task)
    return sorted({-(-whole // pieces) for pieces in (2, 4, 10, 25, 100)} - {whole}, reverse=True)


def units(task: Task) -> int:
    """How many of what a microbatch counts are in the task's batch."""
    return SPLITS[_usual(task)](1, task.padding).measure(task.batch)


def risk(task: Task, size: int) -> Risk:
    """Exact without batch norm; with it neutral down to 10 examples (the paper's Figure 4), approximate below."""
    if not any(isinstance(module, _BatchNorm) for module in task.model.modules()):
        return Risk.EXACT
    return Risk.NEUTRAL if size >= 10 else Risk.APPROXIMATE


def _usual(task: Task) -> str:
    return "examples" if task.padding is None else "tokens"


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task whose batch is run in pieces of `size`."""
    by = settings.by or _usual(task)
    if by not in SPLITS:
        raise ShoestringError(f"microbatches go by {' or by '.join(SPLITS)}, not by {by!r}")
    split = SPLITS[by](settings.size, task.padding)
    whole = split.measure(task.batch)
    if not 1 <= settings.size <= whole:
        raise ShoestringError(
            f"a microbatch of {settings.size} does not go into a batch of {whole} {by}: use 1 to {whole}"
        )
    if settings.size == whole:
        raise NoEffect(f"a microbatch of {settings.size} {by} is the whole batch: leave it out of the plan")
    changed = _simulated(task, settings, by) if settings.simulated else {"split": split}
    list(split(task.batch))  # refuses now what it would refuse in the step
    return task.with_(**changed, settings=task.settings | {"microbatch": settings.size})


@dataclass(frozen=True)
class ByExamples:
    """Cuts a batch into pieces of `size` examples; the last may be smaller. Pieces are views: nothing is copied."""

    size: int
    padding: int | None = None

    def measure(self, batch: Any) -> int:
        return first_tensor(batch).shape[0]

    def __call__(self, batch: Any) -> Iterator[Any]:
        examples = self.measure(batch)
        for start in range(0, examples, self.size):
            yield cut(batch, start, min(self.size, examples - start), examples)


@dataclass(frozen=True)
class ByTokens:
    """Cuts a batch of padded sentences into pieces of at most `size` tokens: rows times the longest sentence in them.

    No sentence is split. Columns that are padding throughout a piece are left out of it, so that it really is smaller.
    """

    size: int
    padding: int | None

    def measure(self, batch: Any) -> int:
        lengths = sentence_lengths(batch, self.padding)
        return len(lengths) * max(lengths)

    def __call__(self, batch: Any) -> Iterator[Any]:
        lengths = sentence_lengths(batch, self.padding)
        start = 0
        while start < len(lengths):
            count = self._fitting(lengths, start)
            yield trim(cut(batch, start, count, len(lengths)), self.padding)
            start += count

    def _fitting(self, lengths: list[int], start: int) -> int:
        """How many sentences from `start` on fit into a piece: at least one, or the piece is too small."""
        count, longest = 0, lengths[start]
        while start + count < len(lengths):
            longest = max(longest, lengths[start + count])
            if (count + 1) * longest > self.size:
                break
            count += 1
        if not count:
            raise ShoestringError(
                f"a microbatch of {self.size} tokens is smaller than sentence {start} of the batch, which has "
                f"{lengths[start]}, and sentences are not split: use at least {max(lengths)}, the longest"
            )
        return count


SPLITS: dict[str, Any] = {"examples": ByExamples, "tokens": ByTokens}


def cut(batch: Any, start: int, length: int, examples: int) -> Any:
    """The examples from `start` on; tensors with another first dimension, and what is no tensor, go to each piece."""

    def piece(leaf: Any) -> Any:
        shared = not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != examples
        return leaf if shared else leaf.narrow(0, start, length)

    return pytree.tree_map(piece, batch)


def sentence_lengths(batch: Any, padding: int | None) -> list[int]:
    """A batch -> the tokens of each example: of its longest sentence, such as source or target, padding left out."""
    return torch.stack([*_lengths(batch, padding).values()]).amax(0).tolist()


def trim(batch: Any, padding: int | None) -> Any:
    """A batch without the last columns of its sentences, where they are nothing but padding."""
    longest = {width: max(1, int(lengths.max())) for width, lengths in _lengths(batch, padding).items()}
    examples = first_tensor(batch).shape[0]

    def trimmed(leaf: Any) -> Any:
        width = _width(leaf, examples)
        # Contiguous: a loss may well call view(-1) on what was contiguous before.
        return leaf.narrow(1, 0, longest[width]).contiguous() if longest.get(width, width) < width else leaf

    return pytree.tree_map(trimmed, batch)


def _lengths(batch: Any, padding: int | None) -> dict[int, Tensor]:
    """Each width of sentences in the batch -> the tokens of each example up to the last that is no padding.

    Tensors of one width are cut alike (ids, a mask, labels), so what any of them holds counts.
    """
    examples = first_tensor(batch).shape[0]
    found: dict[int, Tensor] = {}
    for leaf in pytree.tree_leaves(batch):
        width = _width(leaf, examples)
        if width and leaf.dim() == 2 and not leaf.is_floating_point():
            real = torch.ones_like(leaf) if padding is None else leaf != padding
            lengths = (real * torch.arange(1, width + 1, device=leaf.device)).amax(1)
            found[width] = torch.maximum(found[width], lengths) if width in found else lengths
    if not found:
        raise ShoestringError(
            "the batch holds no whole numbers of shape (examples, tokens), so it cannot be cut by tokens: "
            "use microbatches by examples"
        )
    return found


def _width(leaf: Any, examples: int) -> int:
    """The tokens of a row, padding included; 0 where the leaf is no batch of sentences."""
    return leaf.shape[1] if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] == examples else 0


# -- simulated ----------------------------------------------------------------------------------------------------
def _simulated(task: Task, settings: Settings, by: str) -> dict[str, Any]:
    if by != "examples":
        raise ShoestringError("simulated microbatches go by examples: batch norm knows no tokens")
    if any(isinstance(context, LeanPass) for context in task.contexts):
        raise ShoestringError(
            "simulated microbatches save no memory and do not go with checkpointing: use true microbatches"
        )
    if not any(isinstance(module, _BatchNorm) for module in task.model.modules()):
        raise NoEffect(f"{type(task.model).__name__} has no batch norm: simulated microbatches change nothing in it")
    return {"contexts": (*task.contexts, GroupedNorms(settings.size))}


@dataclass(frozen=True)
class GroupedNorms:
    """The context of a pass in which each batch norm treats groups of `size` examples one after the other.

    Running statistics and counters are updated group by group, as in true microbatches. What a norm sees must have the
    batch as its first dimension.
    """

    size: int

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, _BatchNorm) and module.training:
                    stack.enter_context(patched(module, self._by_groups))
            yield

    def _by_groups(self, forward: Any, args: tuple, kwargs: dict) -> Tensor:
        (x,) = (*args, *kwargs.values())
        return torch.cat([forward(group) for group in x.split(self.size)])
