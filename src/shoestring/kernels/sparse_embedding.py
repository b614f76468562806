"""Rows of a sparse table: ids -> their rows, with zeros, and the gradient at the nonzeros.

The table [rows, width] is its nonzeros (a flat tensor) and their index (`sparse_index`); it is gone through once, a
block of rows at a time.
"""

import torch
from torch import Tensor

from ..errors import ShoestringError
from . import reference_rows
from .define import define
from .reference_rows import widest
from .sparse_rows import Block, blocks_of


def _forward(ids, values, index, rows, width) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise ShoestringError(f"an id is outside of the embedding's {rows} rows: ids are from 0 to {rows - 1}")
    flat = ids.reshape(-1)
    out = values.new_empty(len(flat), width)
    for block in blocks_of(index, rows, width, values.numel()):
        here = _inside(flat, block)
        out[here] = block.dense(values, values.dtype)[flat[here] - block.rows.start]
    return out.view(*ids.shape, width)


def _gradient(gradient, ids, dy, index, rows, width, accumulate) -> None:
    flat, rows_of, wide = ids.reshape(-1), dy.reshape(-1, width), widest(dy)
    for block in blocks_of(index, rows, width, gradient.numel()):
        here = _inside(flat, block)
        sums = torch.zeros(block.rows.stop - block.rows.start, width, dtype=wide)
        sums.index_add_(0, flat[here] - block.rows.start, rows_of[here].to(wide))
        block.gather(sums, gradient, accumulate)


def _inside(ids: Tensor, block: Block) -> Tensor:
    return ((ids >= block.rows.start) & (ids < block.rows.stop)).nonzero().flatten()


def _fake(ids, values, index, rows, width) -> Tensor:
    out = values.new_empty((*ids.shape, width))
    for block in blocks_of(index, rows, width, values.numel()):
        block.dense(values, values.dtype)
    return out


def _fake_gradient(gradient, ids, dy, index, rows, width, accumulate) -> None:
    for block in blocks_of(index, rows, width, gradient.numel()):
        sums = torch.empty(block.rows.stop - block.rows.start, width, dtype=widest(dy))
        block.gather(sums, gradient, accumulate)


_forward_op = define(
    "sparse_embedding(Tensor ids, Tensor values, Tensor index, int rows, int width) -> Tensor",
    twin=reference_rows.embedding,
    fake=_fake,
    compiled=_forward,
)
_gradient_op = define(
    "sparse_embedding_gradient(Tensor(a!) gradient, Tensor ids, Tensor dy, Tensor index, int rows, int width, "
    "bool accumulate) -> ()",
    twin=reference_rows.embedding_gradient,
    fake=_fake_gradient,
    compiled=_gradient,
)


def sparse_embedding_forward(ids: Tensor, values: Tensor, index: Tensor, rows: int, width: int) -> Tensor:
    """Ids of any shape, nonzeros and index of a table [rows, width] -> their rows, without a graph."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ShoestringError(f"an embedding takes ids, which are integers, not {ids.dtype}")
    return _forward_op(ids, values, index, rows, width)


def sparse_embedding_gradient(
    ids: Tensor, dy: Tensor, index: Tensor, rows: int, width: int, *, out: Tensor, accumulate: bool = False
) -> Tensor:
    """Ids and the gradient of their rows -> that of the nonzeros, written to `out` or added to what it holds."""
    _gradient_op(out, ids, dy, index, rows, width, accumulate)
    return out
