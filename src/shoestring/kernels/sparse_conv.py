"""Sparse convolution in FP32, FP16 or BF16 storage with FP32 arithmetic: forward, and both gradients.

The weight [out, in, k1, k2] is its nonzeros (a flat tensor) and their index (`sparse_index`); nothing of the
size of the dense weight is ever made. Where `scale` and `shift` are given, the convolution reads
relu(x scale + shift), each channel with its own: a batch norm and ReLU whose result is never stored.
FP64 runs the twin.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import ShoestringError
from . import reference_sparse
from .core import core, threads
from .define import define
from .sparse_index import bitmap_bytes
from .storage import address, code, float32


def _pair(value: int | tuple[int, int] | list[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _output_size(size, kernel, stride, padding, dilation) -> list[int]:
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return [(n + 2 * p - span) // s + 1 for n, p, span, s in zip(size, padding, spans, stride, strict=True)]


def _sizes(input_size, output_size, kernel, stride, padding, dilation) -> list[int]:
    """The sizes in the order of csrc/sparse_geometry.h."""
    return [*input_size, *output_size[1:], *kernel, *stride, *padding, *dilation]


def _room(x: Tensor, name: str, *arguments: Any) -> Tensor | None:
    """The scratch of a compiled kernel; none where the twin runs."""
    if core is None or x.dtype == torch.float64 or x.device.type not in ("cpu", "meta"):
        return None
    return x.new_empty(getattr(core, f"{name}_scratch")(*arguments, threads()), dtype=torch.uint8)


def _forward(x, values, index, out_channels, kernel, stride, padding, dilation, scale, shift) -> Tensor:
    if x.dtype == torch.float64:
        return reference_sparse.conv2d(
            x, values, index, out_channels, kernel, stride, padding, dilation, scale, shift
        )
    x, y, sizes = _prepare_forward(x, out_channels, kernel, stride, padding, dilation)
    scratch = _room(x, "sparse_convolve", sizes, False, values.numel())
    scale, shift = float32(scale), float32(shift)
    core.sparse_convolve(
        sizes, False, address(x), code(x), *_nonzeros(values, index), address(scale), address(shift),
        address(y), address(scratch), threads(),
    )  # fmt: skip
    return y


def _prepare_forward(x, out_channels, kernel, stride, padding, dilation):
    size = [x.shape[0], out_channels, *_output_size(x.shape[2:], kernel, stride, padding, dilation)]
    return x.contiguous(), x.new_empty(size), _sizes(x.shape, size, kernel, stride, padding, dilation)


def _nonzeros(values: Tensor, index: Tensor) -> tuple[int, int, int, int, int]:
    return address(values), code(values), address(index), index.numel(), values.numel()


def _fake_forward(x, values, index, out_channels, kernel, stride, padding, dilation, scale, shift) -> Tensor:
    x, y, sizes = _prepare_forward(x, out_channels, kernel, stride, padding, dilation)
    _room(x, "sparse_convolve", sizes, False, values.numel())
    return y


def _input_gradient(dy, values, index, input_size, kernel, stride, padding, dilation) -> Tensor:
    if dy.dtype == torch.float64:
        return reference_sparse.conv2d_input_gradient(
            dy, values, index, input_size, kernel, stride, padding, dilation
        )
    dy, dx = dy.contiguous(), dy.new_empty(input_size)
    sizes = _sizes(input_size, dy.shape, kernel, stride, padding, dilation)
    scratch = _room(dy, "sparse_convolve", sizes, True, values.numel())
    core.sparse_convolve(
        sizes, True, address(dy), code(dy), *_nonzeros(values, index), 0, 0,
        address(dx), address(scratch), threads(),
    )  # fmt: skip
    return dx


def _fake_input_gradient(dy, values, index, input_size, kernel, stride, padding, dilation) -> Tensor:
    dy, dx = dy.contiguous(), dy.new_empty(input_size)
    sizes = _sizes(input_size, dy.shape, kernel, stride, padding, dilation)
    _room(dy, "sparse_convolve", sizes, True, values.numel())
    return dx


def _weight_gradient(
    gradient, x, dy, index, kernel, stride, padding, dilation, scale, shift, accumulate
) -> None:
    if x.dtype == torch.float64:
        return reference_sparse.conv2d_weight_gradient(
            gradient, x, dy, index, kernel, stride, padding, dilation, scale, shift, accumulate
        )
    x, dy = x.contiguous(), dy.contiguous()
    sizes = _sizes(x.shape, dy.shape, kernel, stride, padding, dilation)
    scratch = _room(x, "sparse_weight_gradient", sizes, gradient.numel())
    scale, shift = float32(scale), float32(shift)
    core.sparse_weight_gradient(
        sizes, address(x), address(dy), code(x), address(index), index.numel(), gradient.numel(),
        address(scale), address(shift), address(gradient), code(gradient), accumulate, address(scratch),
        threads(),
    )  # fmt: skip


def _fake_weight_gradient(
    gradient, x, dy, index, kernel, stride, padding, dilation, scale, shift, accumulate
) -> None:
    x, dy = x.contiguous(), dy.contiguous()
    sizes = _sizes(x.shape, dy.shape, kernel, stride, padding, dilation)
    _room(x, "sparse_weight_gradient", sizes, gradient.numel())


_GEOMETRY = "int[] kernel, int[] stride, int[] padding, int[] dilation"
_forward_op = define(
    f"sparse_conv2d(Tensor x, Tensor values, Tensor index, int out_channels, {_GEOMETRY}, Tensor? scale, "
    "Tensor? shift) -> Tensor",
    twin=reference_sparse.conv2d,
    fake=_fake_forward,
    compiled=_forward,
)
_input_gradient_op = define(
    "sparse_conv2d_input_gradient(Tensor dy, Tensor values, Tensor index, int[] input_size, "
    f"{_GEOMETRY}) -> Tensor",
    twin=reference_sparse.conv2d_input_gradient,
    fake=_fake_input_gradient,
    compiled=_input_gradient,
)
_weight_gradient_op = define(
    f"sparse_conv2d_weight_gradient(Tensor(a!) gradient, Tensor x, Tensor dy, Tensor index, {_GEOMETRY}, "
    "Tensor? scale, Tensor? shift, bool accumulate) -> ()",
    twin=reference_sparse.conv2d_weight_gradient,
    fake=_fake_weight_gradient,
    compiled=_weight_gradient,
)


def sparse_conv2d_forward(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    out_channels: int,
    kernel: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """x [N, in, H, W], nonzeros and index of a weight [out, in, k1, k2] -> y, without a graph."""
    shape = _geometry(kernel, stride, padding, dilation)
    _check(x, values, index, out_channels, shape, scale, shift)
    return _forward_op(x, values, index, out_channels, *shape, scale, shift)


def sparse_conv2d_input_gradient(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    input_size: Any,
    kernel: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> Tensor:
    """The gradient of y -> that of what the convolution read: x, or the activated map."""
    shape = _geometry(kernel, stride, padding, dilation)
    _check_gradient(dy, list(input_size), shape)
    return _input_gradient_op(dy, values, index, list(input_size), *shape)


def sparse_conv2d_weight_gradient(
    x: Tensor,
    dy: Tensor,
    index: Tensor,
    kernel: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    out: Tensor,
    accumulate: bool = False,
) -> Tensor:
    """x and the gradient of y -> the gradient at the nonzeros, written to `out` or added to what it holds.

    Sums are FP32 whatever the storage, and the same on every run with the same number of threads.
    """
    shape = _geometry(kernel, stride, padding, dilation)
    _check(x, out, index, dy.shape[1], shape, scale, shift)
    _check_gradient(dy, list(x.shape), shape)
    if not out.is_contiguous():
        raise ShoestringError("the values' gradient must be contiguous: pass out=torch.empty_like(values)")
    _weight_gradient_op(out, x, dy, index, *shape, scale, shift, accumulate)
    return out


def _geometry(kernel, stride, padding, dilation) -> tuple[list[int], list[int], list[int], list[int]]:
    shape = _pair(kernel), _pair(stride), _pair(padding), _pair(dilation)
    names, least_of = ("kernel", "stride", "padding", "dilation"), (1, 1, 0, 1)
    for name, values, least in zip(names, shape, least_of, strict=True):
        if len(values) != 2 or min(values) < least:
            raise ShoestringError(f"{name}={values} is not two integers of at least {least}")
    return shape


def _check(x, values, index, out_channels, shape, scale, shift) -> None:
    if x.dim() != 4:
        raise ShoestringError(f"a sparse convolution needs a map [N, C, H, W], not {tuple(x.shape)}")
    if min(_output_size(x.shape[2:], *shape)) < 1:
        raise ShoestringError(f"a map {tuple(x.shape)} is smaller than the kernel {shape[0]}: pad it")
    numel = out_channels * x.shape[1] * shape[0][0] * shape[0][1]
    if index.dtype != torch.uint8 or index.numel() > bitmap_bytes(numel) or values.numel() > numel:
        raise ShoestringError(
            f"{values.numel()} values and an index of {index.numel()} bytes cannot be those of a weight of "
            f"{out_channels} x {x.shape[1]} x {shape[0][0]} x {shape[0][1]} = {numel}: check the channels"
        )
    if (scale is None) != (shift is None) or (scale is not None and scale.shape != x.shape[1:2]):
        raise ShoestringError(f"scale and shift come together, an entry for each of {x.shape[1]} channels")


def _check_gradient(dy, input_size, shape) -> None:
    expected = _output_size(input_size[2:], *shape)
    if dy.dim() != 4 or dy.shape[0] != input_size[0] or list(dy.shape[2:]) != expected:
        raise ShoestringError(
            f"the gradient {tuple(dy.shape)} is not of the output {expected} that an input {input_size} gives"
        )


# Two nodes, so that backward makes the weight gradient first, and drops x before the input gradient is
# allocated: autograd frees what a node saved when that node is done, not before.
class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values, index, out_channels, shape):
        ctx.save_for_backward(values, index)
        ctx.input_size, ctx.shape = list(x.shape), shape
        return _forward_op(x, values, index, out_channels, *shape, None, None)

    @staticmethod
    def backward(ctx, dy):
        return _input_gradient_op(dy, *ctx.saved_tensors, ctx.input_size, *ctx.shape), None, None, None, None


class _WithWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, values, x, index, shape, gradient):
        ctx.save_for_backward(x, index)
        ctx.shape, ctx.gradient, ctx.like = shape, gradient, values.detach()
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        x, index = ctx.saved_tensors
        gradient = torch.empty_like(ctx.like) if ctx.gradient is None else ctx.gradient
        _weight_gradient_op(gradient, x, dy, index, *ctx.shape, None, None, ctx.gradient is not None)
        return dy, gradient if ctx.gradient is None else None, None, None, None, None


def sparse_conv2d(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    out_channels: int,
    kernel: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    gradient: Tensor | None = None,
) -> Tensor:
    """x [N, in, H, W], nonzeros and index of a weight [out, in, k1, k2] -> y, with gradients.

    Where `gradient` is given, backward adds the gradient of the values to it, and autograd gets none.
    """
    shape = _geometry(kernel, stride, padding, dilation)
    _check(x, values, index, out_channels, shape, None, None)
    y = _Convolve.apply(x, values.detach(), index, out_channels, shape)
    if not (torch.is_grad_enabled() and values.requires_grad):
        return y
    return _WithWeightGradient.apply(y, values, x, index, shape, gradient)
