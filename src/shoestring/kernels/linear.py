"""Linear layers of 16-bit tensors, computed in FP32 within bounded scratch: forward and both gradients.

PyTorch's own 16-bit matrix products are tens of times slower than FP32's on a CPU without 16-bit arithmetic.
Here some rows of the weight and some tokens at a time are widened to FP32 and multiplied by PyTorch's FP32
product; sums are FP32 to their end and are rounded once. Tensors that need no widening (FP32, FP64, other
devices) go to PyTorch whole. The steps are PyTorch's own operations, so a trace sees their scratch as it is.

    y = linear_forward(x, weight, bias)
    linear_weight_gradient(grad_y, x, out=weight_gradient)     # adds
    grad_x = linear_input_gradient(grad_y, weight)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ShoestringError

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
    tokens, rows = _plan(len(flat), outputs, inputs, scratch_bytes)
    y = x.new_empty(len(flat), outputs)
    wide_x, wide_w, wide_y = (_Scratch(x, *s) for s in ((tokens, inputs), (rows, inputs), (tokens, rows)))
    for t in _blocks(len(flat), tokens):
        block = wide_x.widen(flat[t])
        for r in _blocks(outputs, rows):
            product = wide_y.shaped(len(block), r.stop - r.start)
            torch.mm(block, wide_w.widen(weight[r]).t(), out=product)
            y[t, r] = product if bias is None else product.add_(bias[r])
    return y.view(*x.shape[:-1], outputs)


def linear_input_gradient(grad_y: Tensor, weight: Tensor, *, scratch_bytes: int = SCRATCH_BYTES) -> Tensor:
    """The gradient of y, [..., out], and the weight -> the gradient of x, [..., in], in grad_y's dtype."""
    outputs, inputs = weight.shape
    shapes = f"grad_y {tuple(grad_y.shape)} and weight {tuple(weight.shape)}"
    _require("linear_input_gradient", grad_y.shape[-1], outputs, shapes)
    if not _widened(grad_y, weight):
        return grad_y @ weight
    flat = _tokens(grad_y)
    tokens, rows = _plan(len(flat), outputs, inputs, scratch_bytes)
    grad_x = grad_y.new_empty(len(flat), inputs)
    sums, wide_w, wide_y = (_Scratch(flat, *s) for s in ((tokens, inputs), (rows, inputs), (tokens, rows)))
    for t in _blocks(len(flat), tokens):
        total = sums.shaped(t.stop - t.start, inputs).zero_()
        for r in _blocks(outputs, rows):
            total.addmm_(wide_y.widen(flat[t, r]), wide_w.widen(weight[r]))
        grad_x[t] = total
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
    tokens, rows = _plan(len(flat_x), outputs, inputs, scratch_bytes)
    wide_x, sums, wide_y = (_Scratch(x, *s) for s in ((tokens, inputs), (rows, inputs), (tokens, rows)))
    once = wide_x.widen(flat_x) if tokens == len(flat_x) else None  # then it serves every block of rows
    for r in _blocks(outputs, rows):
        total = sums.widen(out[r]) if accumulate else sums.shaped(r.stop - r.start, inputs).zero_()
        for t in _blocks(len(flat_x), tokens):
            block = wide_x.widen(flat_x[t]) if once is None else once
            total.addmm_(wide_y.widen(flat_y[t, r]).t(), block)
        out[r] = total
    return out
