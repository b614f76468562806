"""A sparse matrix [rows, width], read a block of rows at a time: dense within the block, never as a whole.

The matrix is its nonzeros (a flat tensor) and their index (`sparse_index`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .sparse_index import decode

TRACED = 3  # blocks (and pieces) that a trace goes through: with the second the first's go, and so on
SCRATCH = 262_144  # numbers of a block, unless one row has more: 1 MB in FP32


class Block(NamedTuple):
    """Some rows of the matrix: where their nonzeros lie in the block, and which of the values they are."""

    rows: slice
    width: int
    places: Tensor
    ranks: slice

    def dense(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of all rows -> these rows, zeros included."""
        block = torch.zeros((self.rows.stop - self.rows.start) * self.width, dtype=dtype)
        block[self.places] = values[self.ranks].to(dtype)
        return block.view(-1, self.width)

    def gather(self, block: Tensor, values: Tensor, accumulate: bool) -> None:
        """Numbers at all positions of these rows -> those at the nonzeros, into (or added to) the values."""
        found, mine = block.reshape(-1)[self.places], values[self.ranks]
        mine.copy_(found + mine if accumulate else found)


def blocks_of(index: Tensor, rows: int, width: int, count: int) -> Iterator[Block]:
    """The matrix of `count` nonzeros from its first row to its last; of a fake index, the first few."""
    height, rank = min(rows, max(1, SCRATCH // max(1, width))), 0
    traced = _is_traced(index)
    for start in range(0, min(rows, TRACED * height) if traced else rows, height):
        stop = min(rows, start + height)
        if traced:
            found = index.new_empty(count * stop // rows - count * start // rows, dtype=torch.int32)
        else:
            found = decode(index, rows * width, start * width, stop * width)
        places = found.long().sub_(start * width)
        del found
        yield Block(slice(start, stop), width, places, slice(rank, rank + len(places)))
        rank += len(places)


def pieces_of(x: Tensor, height: int) -> Iterator[slice]:
    """Tokens [n, width] -> some at a time, such that a piece, and its products with a block, are of a block's size."""
    size = max(1, SCRATCH // max(1, height, x.shape[1]))
    length = min(len(x), TRACED * size) if _is_traced(x) else len(x)
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _is_traced(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) or x.is_meta
