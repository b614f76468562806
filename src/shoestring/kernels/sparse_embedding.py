"""Rows of a sparse table: ids -> their rows, with zeros, and the gradient at the nonzeros.

The table [rows, width] is its nonzeros (a flat tensor) and their index (`sparse_index`); it is gone through once, a row
at a time. FP64 runs the reference.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ..errors import ShoestringError
from .calls import Launch, code, forms
from .core import core, threads
from .define import define
from .references import sparse_linear as reference_rows
from .sparse_linear import check_weight


def _forward(launch: Launch, ids: Tensor, values: Tensor, index: Tensor, rows: int, width: int) -> Tensor:
    ids = ids.contiguous()
    out = values.new_empty(*ids.shape, width)
    launch(
        core.sparse_gather_rows, ids, ids.numel(), values, code(values), index, index.numel(), rows, width, out,
        _scratch(ids, width), threads(),
    )  # fmt: skip
    return out


def _gradient(
    launch: Launch, gradient: Tensor, ids: Tensor, dy: Tensor, index: Tensor, rows: int, width: int, accumulate: bool
) -> None:
    ids, dy = ids.contiguous(), dy.contiguous()
    launch(
        core.sparse_embedding_gradient, ids, ids.numel(), dy, code(dy), index, index.numel(), rows, width, gradient,
        code(gradient), accumulate, _scratch(ids, width), threads(),
    )  # fmt: skip


def _scratch(ids: Tensor, width: int) -> Tensor:
    return ids.new_empty(core.sparse_embedding_scratch(ids.numel(), width, threads()), dtype=torch.uint8)


_forward_op = define(
    "sparse_embedding(Tensor ids, Tensor values, Tensor index, int rows, int width) -> Tensor",
    **forms(_forward, reference_rows.embedding),
)
_gradient_op = define(
    "sparse_embedding_gradient(Tensor(a!) gradient, Tensor ids, Tensor dy, Tensor index, int rows, int width, "
    "bool accumulate) -> ()",
    **forms(_gradient, reference_rows.embedding_gradient),
)


def sparse_embedding_forward(ids: Tensor, values: Tensor, index: Tensor, rows: int, width: int) -> Tensor:
    """Ids of any shape, nonzeros and index of a table [rows, width] -> their rows, without a graph."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ShoestringError(f"an embedding takes ids, which are integers, not {ids.dtype}")
    if ids.is_cpu and not is_fake(ids) and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise ShoestringError(f"an id is outside of the embedding's {rows} rows: ids are from 0 to {rows - 1}")
    check_weight(values, index, rows, width)
    return _forward_op(ids.long(), values, index, rows, width)


def sparse_embedding_gradient(
    ids: Tensor, dy: Tensor, index: Tensor, rows: int, width: int, *, out: Tensor, accumulate: bool = False
) -> Tensor:
    """Ids and the gradient of their rows -> that of the nonzeros, written to `out` or added to what it holds."""
    check_weight(out, index, rows, width)
    if dy.shape != (*ids.shape, width):
        raise ShoestringError(f"ids {tuple(ids.shape)} of rows of {width} do not have gradients {tuple(dy.shape)}")
    _gradient_op(out, ids.long(), dy, index, rows, width, accumulate)
    return out
