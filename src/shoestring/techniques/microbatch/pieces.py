"""How a batch is cut into pieces: by examples, or by tokens where it holds padded sentences.

What is cut: a tensor or array whose first dimension is the batch, and a list or tuple with an entry for each example.
What goes whole to every piece: what the task names as shared, numbers and texts, tensors without a dimension or with a
first one of 1, which broadcast. Anything else does not match the batch, and is refused by its path.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ShoestringError
from ...items import IGNORED, Shared, counted, is_shared
from ...structure import mapped_by_name, named_leaves, tensors

Rows = slice | list[int]


@dataclass(frozen=True)
class ByExamples:
    """Cuts a batch into pieces of `size` examples; the last may be smaller. Pieces are views: nothing is copied."""

    size: int
    padding: int | None = None
    shared: Shared = ()

    def measure(self, batch: Any) -> int:
        return counted(batch, self.shared)[1]

    def take(self, batch: Any, rows: Rows) -> Any:
        """Some examples of a batch, as a piece has them."""
        return cut(batch, rows, self.shared)

    def __call__(self, batch: Any) -> Iterator[Any]:
        for start in range(0, self.measure(batch), self.size):
            yield self.take(batch, slice(start, start + self.size))


@dataclass(frozen=True)
class ByTokens:
    """Cuts a batch of padded sentences into pieces of at most `size` tokens: rows times the longest sentence in them.

    No sentence is split. Columns that are padding throughout a piece are left out of it, so that it really is smaller.
    """

    size: int
    padding: int | None
    shared: Shared = ()

    def measure(self, batch: Any) -> int:
        lengths = sentence_lengths(batch, self.padding, self.shared)
        return len(lengths) * max(lengths)

    def take(self, batch: Any, rows: Rows) -> Any:
        return trim(cut(batch, rows, self.shared), self.padding, self.shared)

    def __call__(self, batch: Any) -> Iterator[Any]:
        lengths = sentence_lengths(batch, self.padding, self.shared)
        start = 0
        while start < len(lengths):
            count = self._fitting(lengths, start)
            yield self.take(batch, slice(start, start + count))
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


Split = ByExamples | ByTokens
SPLITS: dict[str, type[Split]] = {"examples": ByExamples, "tokens": ByTokens}


# -- cutting --------------------------------------------------------------------------------------------------------
def cut(batch: Any, rows: Rows, shared: Shared = ()) -> Any:
    """A batch -> some of its examples, in the same structure."""
    counting, examples = counted(batch, shared)

    def has_an_entry_each(path: str, node: Any) -> bool:
        around = not path or f"{counting}.".startswith(f"{path}.")  # of what counts the examples
        if type(node) not in (list, tuple) or len(node) != examples or around:
            return False
        parts = tensors(node)
        return not parts or any(_rows(part) != examples for part in parts)  # else they are columns, not examples

    def piece(path: str, leaf: Any) -> Any:
        if is_shared(shared, path, leaf):
            return leaf
        if isinstance(leaf, Tensor | np.ndarray):
            _check_matches(path, leaf, counting, examples)
            return _some(leaf, rows) if _rows(leaf) == examples and leaf.ndim else leaf
        return _entries(leaf, rows) if has_an_entry_each(path, leaf) else leaf

    return mapped_by_name(piece, batch, has_an_entry_each)


def _rows(leaf: Any) -> int:
    return leaf.shape[0] if leaf.ndim else 1


def _some(leaf: Any, rows: Rows) -> Any:
    """Of tensors that nobody differentiates, views without autograd's notes on them: these take more than the views."""
    part = leaf[rows]
    return part.detach() if isinstance(part, Tensor) and not part.requires_grad else part


def _entries(node: list | tuple, rows: Rows) -> list | tuple:
    return node[rows] if isinstance(rows, slice) else type(node)(node[row] for row in rows)


def _check_matches(path: str, leaf: Any, counting: str, examples: int) -> None:
    if _rows(leaf) not in (1, examples):
        raise ShoestringError(
            f"the batch has {examples} examples, by the first dimension of {_called(counting)}, and {_called(path)} "
            f"has {_rows(leaf)}, so it cannot be cut with them: name what every piece needs whole in "
            f"Task(shared=[{path.split('.')[-1]!r}])"
        )


def _called(path: str) -> str:
    return f"batch {path!r}" if path else "the batch"


def check_names(batch: Any, shared: Shared) -> None:
    """Refuses a name in `shared` that nothing in the batch has."""
    paths = [path for path, _ in named_leaves(batch)]
    for name in () if callable(shared) else shared:
        if not any(is_shared((name,), path, None) for path in paths):
            raise ShoestringError(f"Task(shared=...) names {name!r}, and the batch has only {', '.join(paths)}")


# -- sentences ------------------------------------------------------------------------------------------------------
def sentence_lengths(batch: Any, padding: int | None, shared: Shared = ()) -> list[int]:
    """A batch -> the tokens of each example: of its longest sentence, such as source or target, padding left out."""
    return torch.stack([*_lengths(batch, padding, shared).values()]).amax(0).tolist()


def trim(batch: Any, padding: int | None, shared: Shared = ()) -> Any:
    """A batch without the last columns of its sentences, where they are nothing but padding."""
    lengths = _lengths(batch, padding, shared)
    longest = {width: max(1, int(found.max())) for width, found in lengths.items()}
    examples = counted(batch, shared)[1]

    def trimmed(path: str, leaf: Any) -> Any:
        if is_shared(shared, path, leaf) or not _is_sentences(leaf, examples):
            return leaf
        width = leaf.shape[1]
        # Contiguous: a loss may well call view(-1) on what was contiguous before.
        return leaf[:, : longest[width]].contiguous() if longest[width] < width else leaf

    return mapped_by_name(trimmed, batch)


def _lengths(batch: Any, padding: int | None, shared: Shared) -> dict[int, Tensor]:
    """Each width of sentences in the batch -> the tokens of each example up to the last that is no padding.

    Tensors of one width are cut alike (ids, a mask, labels), so what any of them holds counts. A width that is found in
    any other tensor too (features, a mask of width x width, positions) is left as it is: it may mean something else
    there, or have to agree with the sentences.
    """
    examples = counted(batch, shared)[1]
    found: dict[int, Tensor] = {}
    others: set[int] = set()
    for path, leaf in named_leaves(batch):
        if not is_shared(shared, path, leaf) and _is_sentences(leaf, examples):
            width = leaf.shape[1]
            places = torch.arange(1, width + 1, device=leaf.device)
            lengths = (_is_real(path, leaf, padding) * places).amax(1)
            found[width] = torch.maximum(found[width], lengths) if width in found else lengths
        elif isinstance(leaf, Tensor):
            others.update(leaf.shape if is_shared(shared, path, leaf) or _rows(leaf) != examples else leaf.shape[1:])
    if not found:
        raise ShoestringError(
            "the batch holds no whole numbers of shape (examples, tokens), so it cannot be cut by tokens: "
            "use microbatches by examples"
        )
    return {w: torch.full_like(lengths, w) if w in others else lengths for w, lengths in found.items()}


def _is_sentences(leaf: Any, examples: int) -> bool:
    """Whether a leaf holds a row of ids, or of a mask, for each example."""
    if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dim() != 2:
        return False
    return leaf.shape[0] == examples and leaf.shape[1] > 0


def _is_real(path: str, leaf: Tensor, padding: int | None) -> Tensor:
    """Where a row holds something: no padding, no label that is ignored, no hole of a mask."""
    if leaf.dtype == torch.bool or path.endswith("mask"):
        return leaf != 0
    real = leaf != IGNORED
    return real if padding is None else real & (leaf != padding)
