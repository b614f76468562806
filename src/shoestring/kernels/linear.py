"""Linear layers of 16-bit tensors, computed in FP32 within bounded scratch: forward and both gradients.

PyTorch's own 16-bit matrix products are tens of times slower than FP32's on a CPU without 16-bit arithmetic.
Here some rows of the weight and some tokens at a time are widened to FP32 and multiplied by PyTorch's FP32
product; sums are FP32 to their end and are rounded once. Tensors that need no widening (FP32, FP64, other
devices) go to PyTorch whole. The blocks of a product are one operator, so that a trace sees one and its scratch.

    y = linear_forward(x, weight, bias)
    linear_weight_gradient(grad_y, x, out=weight_gradient)     # adds
    grad_x = linear_input_gradient(grad_y, weight)
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import ShoestringError
from .define import define

SCRATCH_BYTES = 2_000_000  # of FP32 blocks, unless one token and one row of the weight need more
_ROWS = 256  # of the weight in a block: more do not make the product faster
_NARROW = (torch.float16, torch.bfloat16)


def _widened(*tensors: Tensor) -> bool:
    """Whether the product is computed in blocks: 16-bit tensors on a CPU."""
    return any(t.dtype in _NARROW and t.device.type == "cpu" for t in tensors)


def _blocks(size: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, size)) for start in range(0, size, most))


def _plan(tokens: int, outputs: int, inputs: int, scratch_bytes: int) -> tuple[int, int]:
    """Tokens and weight rows of a block, whose three FP32 sides (x, weight, y) fit the scratch."""
    floats, rows = scratch_bytes // 4, min(outputs, _ROWS)
    while rows > 16 and rows * inputs > floats // 2:
        rows = (rows + 1) // 2
    return max(1, min(tokens, (floats - rows * inputs) // (inputs + rows))), rows


class _Scratch:
    """One FP32 buffer that blocks of a 16-bit tensor are widened into, one after another."""

    def __init__(self, like: Tensor, rows: int, columns: int) -> None:
        self.floats = torch.empty(rows * columns, dtype=torch.float32, device=like.device)

    def shaped(self, rows: int, columns: int) -> Tensor:
        return self.floats[: rows * columns].view(rows, columns)

    def widen(self, block: Tensor) -> Tensor:
        return self.shaped(*block.shape).copy_(block)


def _scratch(like: Tensor, tokens: int, rows: int, inputs: int) -> list[_Scratch]:
    """The FP32 sides of a block: of x, of the weight, of y."""
    return [_Scratch(like, *shape) for shape in ((tokens, inputs), (rows, inputs), (tokens, rows))]


def _forward(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: int, rows: int) -> None:
    wide_x, wide_w, wide_y = _scratch(x, tokens, rows, weight.shape[1])
    for t in _blocks(len(x), tokens):
        block = wide_x.widen(x[t])
        for r in _blocks(len(weight), rows):
            product = wide_y.shaped(len(block), r.stop - r.start)
            torch.mm(block, wide_w.widen(weight[r]).t(), out=product)
            y[t, r] = product if bias is None else product.add_(bias[r].float())


def _input_gradient(grad_x: Tensor, grad_y: Tensor, weight: Tensor, tokens: int, rows: int) -> None:
    sums, wide_w, wide_y = _scratch(grad_y, tokens, rows, weight.shape[1])
    for t in _blocks(len(grad_y), tokens):
        total = sums.shaped(t.stop - t.start, weight.shape[1]).zero_()
        for r in _blocks(len(weight), rows):
            total.addmm_(wide_y.widen(grad_y[t, r]), wide_w.widen(weight[r]))
        grad_x[t] = total


def _weight_gradient(out: Tensor, grad_y: Tensor, x: Tensor, accumulate: bool, tokens: int, rows: int) -> None:
    wide_x, sums, wide_y = _scratch(x, tokens, rows, x.shape[1])
    once = wide_x.widen(x) if tokens == len(x) else None  # then it serves every block of rows
    for r in _blocks(len(out), rows):
        total = sums.widen(out[r]) if accumulate else sums.shaped(r.stop - r.start, x.shape[1]).zero_()
        for t in _blocks(len(x), tokens):
            block = wide_x.widen(x[t]) if once is None else once
            total.addmm_(wide_y.widen(grad_y[t, r]).t(), block)
        out[r] = total


def _operator(schema: str, body: Callable, inputs: Callable[..., int]) -> Any:
    """`body`, whose last arguments are the tokens and rows of a block, as an operator; its fake makes the scratch."""

    def fake(*args: Any) -> None:
        sides = _scratch(args[1], args[-2], args[-1], inputs(*args))
        if body is _forward and args[3] is not None:
            args[3][: args[-1]].float()
        del sides

    return define(f"{schema}, int tokens, int rows) -> ()", reference=body, fake=fake, compiled=body)


_forward_op = _operator(
    "linear_forward(Tensor(a!) y, Tensor x, Tensor weight, Tensor? bias", _forward, lambda y, x, *_: x.shape[1]
)
_input_gradient_op = _operator(
    "linear_input_gradient(Tensor(a!) grad_x, Tensor grad_y, Tensor weight", _input_gradient, lambda x, *_: x.shape[1]
)
_weight_gradient_op = _operator(
    "linear_weight_gradient(Tensor(a!) out, Tensor grad_y, Tensor x, bool accumulate",
    _weight_gradient,
    lambda out, *_: out.shape[1],
)


def _tokens(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _require(what: str, got: int, wanted: int, shapes: str) -> None:
    if got != wanted:
        raise ShoestringError(f"{what}: {got} where {wanted} was wanted, for {shapes}: check the shapes")


def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scratch_bytes: int = SCRATCH_BYTES
) -> Tensor:
    """Tokens [..., in] and a weight [out, in] -> x weight^T + bias, [..., out], in x's dtype."""
    outputs, inputs = weight.shape
    _require("linear_forward", x.shape[-1], inputs, f"x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    if not _widened(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    flat = _tokens(x)
    y = x.new_empty(len(flat), outputs)
    _forward_op(y, flat, weight, bias, *_plan(len(flat), outputs, inputs, scratch_bytes))
    return y.view(*x.shape[:-1], outputs)


def linear_input_gradient(grad_y: Tensor, weight: Tensor, *, scratch_bytes: int = SCRATCH_BYTES) -> Tensor:
    """The gradient of y, [..., out], and the weight -> the gradient of x, [..., in], in grad_y's dtype."""
    outputs, inputs = weight.shape
    shapes = f"grad_y {tuple(grad_y.shape)} and weight {tuple(weight.shape)}"
    _require("linear_input_gradient", grad_y.shape[-1], outputs, shapes)
    if not _widened(grad_y, weight):
        return grad_y @ weight
    flat = _tokens(grad_y)
    grad_x = grad_y.new_empty(len(flat), inputs)
    _input_gradient_op(grad_x, flat, weight, *_plan(len(flat), outputs, inputs, scratch_bytes))
    return grad_x.view(*grad_y.shape[:-1], inputs)


def linear_weight_gradient(
    grad_y: Tensor, x: Tensor, *, out: Tensor | None = None, scratch_bytes: int = SCRATCH_BYTES
) -> Tensor:
    """The gradient of y, [..., out], and x, [..., in] -> the weight's, [out, in], added to `out` if given.

    Sums over all tokens are FP32 and are rounded once, to out's dtype (x's by default).
    """
    flat_y, flat_x = _tokens(grad_y), _tokens(x)
    outputs, inputs = flat_y.shape[1], flat_x.shape[1]
    shapes = f"grad_y {tuple(grad_y.shape)} and x {tuple(x.shape)}"
    _require("linear_weight_gradient", len(flat_y), len(flat_x), shapes)
    accumulate = out is not None
    if out is None:
        out = x.new_empty(outputs, inputs)
    elif tuple(out.shape) != (outputs, inputs):
        raise ShoestringError(
            f"linear_weight_gradient: out is {tuple(out.shape)}, not {(outputs, inputs)}: pass this weight's gradient"
        )
    if not _widened(grad_y, x, out):
        return out.addmm_(flat_y.t(), flat_x) if accumulate else torch.mm(flat_y.t(), flat_x, out=out)
    _weight_gradient_op(out, flat_y, flat_x, accumulate, *_plan(len(flat_x), outputs, inputs, scratch_bytes))
    return out
