"""Sparse linear layers in FP32, FP16 or BF16 storage with FP32 arithmetic: the product, and both gradients.

The weight [out, in] is its nonzeros (a flat tensor) and their index (`sparse_index`); nothing of the size of the dense
weight is ever made. FP64 runs the reference.
"""

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import Launch, code, float32, forms, require_contiguous, require_dtype
from .core import core, threads
from .define import define
from .references import sparse_linear as reference_rows
from .sparse_index import bitmap_bytes, require_countable


def _forward(launch: Launch, x: Tensor, values: Tensor, index: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    return _multiply(launch, x, values, index, (rows, x.shape[-1]), False, float32(bias))


def _input_gradient(launch: Launch, dy: Tensor, values: Tensor, index: Tensor, width: int) -> Tensor:
    return _multiply(launch, dy, values, index, (dy.shape[-1], width), True, None)


def _multiply(
    launch: Launch, x: Tensor, values: Tensor, index: Tensor, shape: tuple[int, int], transposed: bool,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    x, tokens = x.contiguous(), _tokens(x)
    y = x.new_empty(*x.shape[:-1], shape[transposed])
    scratch = _scratch(x, tokens, shape, values.numel(), transposed, False)
    launch(
        core.sparse_multiply, tokens, *shape, transposed, x, code(x), values, code(values), index, index.numel(),
        values.numel(), bias, y, scratch, threads(),
    )  # fmt: skip
    return y


def _weight_gradient(launch: Launch, gradient: Tensor, x: Tensor, dy: Tensor, index: Tensor, accumulate: bool) -> None:
    x, dy, tokens, shape = x.contiguous(), dy.contiguous(), _tokens(x), (dy.shape[-1], x.shape[-1])
    scratch = _scratch(x, tokens, shape, gradient.numel(), False, True)
    launch(
        core.sparse_linear_weight_gradient, tokens, *shape, x, dy, code(x), index, index.numel(), gradient.numel(),
        gradient, code(gradient), accumulate, scratch, threads(),
    )  # fmt: skip


def _tokens(x: Tensor) -> int:
    return x.shape[:-1].numel()


def _scratch(x: Tensor, tokens: int, shape: tuple[int, int], count: int, transposed: bool, ranked: bool) -> Tensor:
    size = core.sparse_multiply_scratch(tokens, *shape, count, transposed, ranked, threads())
    require_countable("linear layer", [size], shape, (tokens, shape[not transposed]))
    return x.new_empty(size, dtype=torch.uint8)


_forward_op = define(
    "sparse_linear(Tensor x, Tensor values, Tensor index, int rows, Tensor? bias) -> Tensor",
    **forms(_forward, reference_rows.linear),
)
_input_gradient_op = define(
    "sparse_linear_input_gradient(Tensor dy, Tensor values, Tensor index, int width) -> Tensor",
    **forms(_input_gradient, reference_rows.linear_input_gradient),
)
_weight_gradient_op = define(
    "sparse_linear_weight_gradient(Tensor(a!) gradient, Tensor x, Tensor dy, Tensor index, bool accumulate) -> ()",
    **forms(_weight_gradient, reference_rows.linear_weight_gradient),
)


def sparse_linear_forward(x: Tensor, values: Tensor, index: Tensor, rows: int, bias: Tensor | None = None) -> Tensor:
    """Tokens [..., in], nonzeros and index of a weight [rows, in], and a bias -> y [..., rows], without a graph."""
    check_weight(values, index, rows, x.shape[-1])
    return _forward_op(x, values, index, rows, bias)


def sparse_linear_input_gradient(dy: Tensor, values: Tensor, index: Tensor, width: int) -> Tensor:
    """The gradient of y [..., rows] -> that of x [..., width]."""
    check_weight(values, index, dy.shape[-1], width)
    return _input_gradient_op(dy, values, index, width)


def sparse_linear_weight_gradient(
    x: Tensor, dy: Tensor, index: Tensor, *, out: Tensor, accumulate: bool = False
) -> Tensor:
    """x and the gradient of y -> the gradient at the nonzeros, written to `out` or added to what it holds."""
    check_weight(out, index, dy.shape[-1], x.shape[-1])
    require_dtype("a sparse linear layer", x=x, dy=dy)
    if dy.shape[:-1] != x.shape[:-1]:
        raise ShoestringError(f"x {tuple(x.shape)} and the gradient {tuple(dy.shape)} are not of the same tokens")
    _weight_gradient_op(out, x, dy, index, accumulate)
    return out


def check_weight(values: Tensor, index: Tensor, rows: int, width: int) -> None:
    """Refuses nonzeros and an index that cannot be those of a weight [rows, width]."""
    numel = rows * width
    require_contiguous("a sparse weight", values=values, index=index)
    if index.dtype != torch.uint8 or index.numel() > bitmap_bytes(numel) or values.numel() > numel:
        raise ShoestringError(
            f"{values.numel()} values and an index of {index.numel()} bytes cannot be those of a weight of "
            f"{rows} x {width} = {numel}: check the sizes"
        )
