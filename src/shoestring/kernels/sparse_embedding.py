"""Rows of a sparse table: ids -> their rows, with zeros, and the gradient at the nonzeros.

The table [rows, width] is its nonzeros (a flat tensor) and their index (`sparse_index`).
"""

import torch
from torch import Tensor

from ..errors import ShoestringError
from . import reference_embedding
from .define import define


def _fake(ids, values, index, rows, width) -> Tensor:
    return values.new_empty((*ids.shape, width))


def _fake_gradient(gradient, ids, dy, index, rows, width, accumulate) -> None:
    pass


_forward_op = define(
    "sparse_embedding(Tensor ids, Tensor values, Tensor index, int rows, int width) -> Tensor",
    twin=reference_embedding.embedding,
    fake=_fake,
    compiled=reference_embedding.embedding,
)
_gradient_op = define(
    "sparse_embedding_gradient(Tensor(a!) gradient, Tensor ids, Tensor dy, Tensor index, int rows, int width, "
    "bool accumulate) -> ()",
    twin=reference_embedding.embedding_gradient,
    fake=_fake_gradient,
    compiled=reference_embedding.embedding_gradient,
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
