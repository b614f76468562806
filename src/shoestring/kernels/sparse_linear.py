"""Sparse linear layers in bounded scratch: a block of rows is made dense and multiplied by PyTorch, and so on.

The weight [out, in] is its nonzeros (a flat tensor) and their index (`sparse_index`). Arithmetic is FP32 whatever the
storage (FP64 for FP64), and sums are rounded once.
"""

import torch
from torch import Tensor

from ..errors import ShoestringError
from . import reference_rows
from .define import define
from .reference_rows import widest
from .sparse_index import bitmap_bytes
from .sparse_rows import blocks_of, pieces_of


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward(x, values, index, rows) -> Tensor:
    flat, wide = _tokens(x), widest(x)
    y = x.new_empty(len(flat), rows)
    for block in blocks_of(index, rows, x.shape[-1], values.numel()):
        weight = block.dense(values, wide)
        for piece in pieces_of(flat, len(weight)):
            y[piece, block.rows] = (flat[piece].to(wide) @ weight.t()).to(x.dtype)
    return y.view(*x.shape[:-1], rows)


def _input_gradient(dy, values, index, width) -> Tensor:
    flat, wide = _tokens(dy), widest(dy)
    sums = torch.zeros(len(flat), width, dtype=wide)
    for block in blocks_of(index, dy.shape[-1], width, values.numel()):
        weight = block.dense(values, wide)
        for piece in pieces_of(sums, len(weight)):
            sums[piece].addmm_(flat[piece, block.rows].to(wide), weight)
    return sums.to(dy.dtype).view(*dy.shape[:-1], width)


def _weight_gradient(gradient, x, dy, index, accumulate) -> None:
    flat_x, flat_y, wide = _tokens(x), _tokens(dy), widest(x)
    for block in blocks_of(index, dy.shape[-1], x.shape[-1], gradient.numel()):
        sums = torch.zeros(block.rows.stop - block.rows.start, block.width, dtype=wide)
        for piece in pieces_of(flat_x, len(sums)):
            sums.addmm_(flat_y[piece, block.rows].to(wide).t(), flat_x[piece].to(wide))
        block.gather(sums, gradient, accumulate)


_forward_op = define(
    "sparse_linear(Tensor x, Tensor values, Tensor index, int rows) -> Tensor",
    twin=reference_rows.linear,
    fake=_forward,
    compiled=_forward,
)
_input_gradient_op = define(
    "sparse_linear_input_gradient(Tensor dy, Tensor values, Tensor index, int width) -> Tensor",
    twin=reference_rows.linear_input_gradient,
    fake=_input_gradient,
    compiled=_input_gradient,
)
_weight_gradient_op = define(
    "sparse_linear_weight_gradient(Tensor(a!) gradient, Tensor x, Tensor dy, Tensor index, bool accumulate) -> ()",
    twin=reference_rows.linear_weight_gradient,
    fake=_weight_gradient,
    compiled=_weight_gradient,
)


def sparse_linear_forward(x: Tensor, values: Tensor, index: Tensor, rows: int) -> Tensor:
    """Tokens [..., in], nonzeros and index of a weight [rows, in] -> y [..., rows], without a graph."""
    _check(values, index, rows, x.shape[-1])
    return _forward_op(x, values, index, rows)


def sparse_linear_input_gradient(dy: Tensor, values: Tensor, index: Tensor, width: int) -> Tensor:
    """The gradient of y [..., rows] -> that of x [..., width]."""
    _check(values, index, dy.shape[-1], width)
    return _input_gradient_op(dy, values, index, width)


def sparse_linear_weight_gradient(
    x: Tensor, dy: Tensor, index: Tensor, *, out: Tensor, accumulate: bool = False
) -> Tensor:
    """x and the gradient of y -> the gradient at the nonzeros, written to `out` or added to what it holds."""
    _check(out, index, dy.shape[-1], x.shape[-1])
    _weight_gradient_op(out, x, dy, index, accumulate)
    return out


def _check(values: Tensor, index: Tensor, rows: int, width: int) -> None:
    numel = rows * width
    if index.dtype != torch.uint8 or index.numel() > bitmap_bytes(numel) or values.numel() > numel:
        raise ShoestringError(
            f"{values.numel()} values and an index of {index.numel()} bytes cannot be those of a weight of "
            f"{rows} x {width} = {numel}: check the features"
        )
