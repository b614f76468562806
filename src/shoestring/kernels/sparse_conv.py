"""Sparse convolution in FP32, FP16 or BF16 storage with FP32 arithmetic: forward, and both gradients.

The weight [out, in, k1, k2] is its nonzeros (a flat tensor) and their index (`sparse_index`); nothing of the
size of the dense weight is ever made. Where `scale` and `shift` are given, the convolution reads
relu(x scale + shift), each channel with its own: a batch norm and ReLU whose result is never stored.
FP64 runs the twin.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import address, code, float32, require_contiguous, require_dtype
from .core import core, threads
from .define import define
from .references import sparse_conv as reference_sparse
from .sparse_index import bitmap_bytes, require_countable

Sizes = tuple[int, ...]


class _Plan(NamedTuple):
    """What follows from the sizes of a call alone: the output's size, the sizes in the order of csrc/sparse_geometry.h,
    and the bytes of scratch of a convolution, of the gradient of its input and of that of its weight."""

    output_size: Sizes
    sizes: Sizes
    scratch: tuple[int, int, int]


def _output_size(size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Sizes:
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    out = tuple((n + 2 * p - span) // s + 1 for n, p, span, s in zip(size, padding, spans, stride, strict=True))
    if min(out) < 1:
        raise ShoestringError(f"a map of {tuple(size)} pixels is smaller than the kernel {list(kernel)}: pad it")
    return out


@lru_cache(maxsize=256)
def _plan(input_size: Sizes, out_channels: int, geometry: tuple[Sizes, ...], count: int, threads: int) -> _Plan:
    """The plan of a weight of `count` nonzeros; remembered, for a step asks for the same ones again and again."""
    output_size = input_size[0], out_channels, *_output_size(input_size[2:], *geometry)
    sizes = *input_size, *output_size[1:], *(number for pair in geometry for number in pair)
    scratch = 0, 0, 0
    if core is not None:
        scratch = (
            core.sparse_convolve_scratch(sizes, False, count, threads),
            core.sparse_convolve_scratch(sizes, True, count, threads),
            core.sparse_weight_gradient_scratch(sizes, count, threads),
        )
        require_countable("convolution", scratch, (out_channels, input_size[1], *geometry[0]), input_size)
    return _Plan(output_size, sizes, scratch)


def _planned(input_size: Any, out_channels: int, geometry: tuple[Any, ...], count: int) -> _Plan:
    return _plan(tuple(input_size), out_channels, tuple(map(tuple, geometry)), count, threads())


def _room(x: Tensor, size: int) -> Tensor | None:
    """The scratch of a compiled kernel; none where the twin runs."""
    if core is None or x.dtype == torch.float64 or x.device.type not in ("cpu", "meta"):
        return None
    return x.new_empty(size, dtype=torch.uint8)


def _forward(x, values, index, out_channels, kernel, stride, padding, dilation, scale, shift, bias) -> Tensor:
    if x.dtype == torch.float64:
        return reference_sparse.conv2d(
            x, values, index, out_channels, kernel, stride, padding, dilation, scale, shift, bias
        )
    plan = _planned(x.shape, out_channels, (kernel, stride, padding, dilation), values.numel())
    x, y, scratch = _prepare_forward(x, plan)
    scale, shift, bias = float32(scale), float32(shift), float32(bias)
    core.sparse_convolve(
        plan.sizes, False, address(x), code(x), *_nonzeros(values, index), address(scale), address(shift),
        address(bias), address(y), address(scratch), threads(),
    )  # fmt: skip
    return y


def _prepare_forward(x: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    return x.contiguous(), x.new_empty(plan.output_size), _room(x, plan.scratch[0])


def _nonzeros(values: Tensor, index: Tensor) -> tuple[int, int, int, int, int]:
    return address(values), code(values), address(index), index.numel(), values.numel()


def _fake_forward(x, values, index, out_channels, kernel, stride, padding, dilation, scale, shift, bias) -> Tensor:
    plan = _planned(x.shape, out_channels, (kernel, stride, padding, dilation), values.numel())
    return _prepare_forward(x, plan)[1]


def _input_gradient(dy, values, index, input_size, kernel, stride, padding, dilation) -> Tensor:
    if dy.dtype == torch.float64:
        return reference_sparse.conv2d_input_gradient(dy, values, index, input_size, kernel, stride, padding, dilation)
    plan = _planned(input_size, dy.shape[1], (kernel, stride, padding, dilation), values.numel())
    dy, dx, scratch = _prepare_input_gradient(dy, input_size, plan)
    core.sparse_convolve(
        plan.sizes, True, address(dy), code(dy), *_nonzeros(values, index), 0, 0, 0,
        address(dx), address(scratch), threads(),
    )  # fmt: skip
    return dx


def _prepare_input_gradient(dy: Tensor, input_size: Any, plan: _Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    return dy.contiguous(), dy.new_empty(input_size), _room(dy, plan.scratch[1])


def _fake_input_gradient(dy, values, index, input_size, kernel, stride, padding, dilation) -> Tensor:
    plan = _planned(input_size, dy.shape[1], (kernel, stride, padding, dilation), values.numel())
    return _prepare_input_gradient(dy, input_size, plan)[1]


def _weight_gradient(gradient, x, dy, index, kernel, stride, padding, dilation, scale, shift, accumulate) -> None:
    if x.dtype == torch.float64:
        return reference_sparse.conv2d_weight_gradient(
            gradient, x, dy, index, kernel, stride, padding, dilation, scale, shift, accumulate
        )
    plan = _planned(x.shape, dy.shape[1], (kernel, stride, padding, dilation), gradient.numel())
    x, dy, scratch = x.contiguous(), dy.contiguous(), _room(x, plan.scratch[2])
    scale, shift = float32(scale), float32(shift)
    core.sparse_weight_gradient(
        plan.sizes, address(x), address(dy), code(x), address(index), index.numel(), gradient.numel(),
        address(scale), address(shift), address(gradient), code(gradient), accumulate, address(scratch),
        threads(),
    )  # fmt: skip


def _fake_weight_gradient(gradient, x, dy, index, kernel, stride, padding, dilation, scale, shift, accumulate) -> None:
    plan = _planned(x.shape, dy.shape[1], (kernel, stride, padding, dilation), gradient.numel())
    _ = x.contiguous(), dy.contiguous(), _room(x, plan.scratch[2])


# The ops themselves check nothing: for layers, whose settings were checked when they were made.
_GEOMETRY = "int[] kernel, int[] stride, int[] padding, int[] dilation"
forward_op = define(
    f"sparse_conv2d(Tensor x, Tensor values, Tensor index, int out_channels, {_GEOMETRY}, Tensor? scale, "
    "Tensor? shift, Tensor? bias) -> Tensor",
    twin=reference_sparse.conv2d,
    fake=_fake_forward,
    compiled=_forward,
)
input_gradient_op = define(
    f"sparse_conv2d_input_gradient(Tensor dy, Tensor values, Tensor index, int[] input_size, {_GEOMETRY}) -> Tensor",
    twin=reference_sparse.conv2d_input_gradient,
    fake=_fake_input_gradient,
    compiled=_input_gradient,
)
weight_gradient_op = define(
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
    bias: Tensor | None = None,
) -> Tensor:
    """x [N, in, H, W], nonzeros and index of a weight [out, in, k1, k2], and a bias -> y, without a graph."""
    shape = _geometry(kernel, stride, padding, dilation)
    _check(x, values, index, out_channels, shape, scale, shift)
    return forward_op(x, values, index, out_channels, *shape, scale, shift, bias)


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
    _check_gradient(dy, input_size, shape)
    _check_sizes(tuple(input_size), values.numel(), index.numel(), index.dtype, dy.shape[1], shape)
    require_contiguous("a sparse convolution", values=values, index=index)
    return input_gradient_op(dy, values, index, input_size, *shape)


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
    _check_gradient(dy, x.shape, shape)
    require_dtype("a sparse convolution", x=x, dy=dy)
    weight_gradient_op(out, x, dy, index, *shape, scale, shift, accumulate)
    return out


def _geometry(*settings: Any) -> tuple[Sizes, ...]:
    """Kernel, stride, padding and dilation, each a number or two -> the same as pairs that were checked."""
    return _checked_geometry(*((value, value) if isinstance(value, int) else tuple(value) for value in settings))


@lru_cache(maxsize=64)
def _checked_geometry(*pairs: Sizes) -> tuple[Sizes, ...]:
    names, least_of = ("kernel", "stride", "padding", "dilation"), (1, 1, 0, 1)
    for name, values, least in zip(names, pairs, least_of, strict=True):
        if len(values) != 2 or min(values) < least:
            raise ShoestringError(f"{name}={list(values)} is not two integers of at least {least}")
    return pairs


def _check(x, values, index, out_channels, shape, scale, shift) -> None:
    _check_sizes(x.shape, values.numel(), index.numel(), index.dtype, out_channels, shape)
    require_contiguous("a sparse convolution", values=values, index=index)
    if (scale is None) != (shift is None) or (scale is not None and scale.shape != x.shape[1:2]):
        raise ShoestringError(f"scale and shift come together, an entry for each of {x.shape[1]} channels")


@lru_cache(maxsize=256)
def _check_sizes(
    size: Sizes, count: int, index_bytes: int, dtype: torch.dtype, out_channels: int, shape: tuple[Sizes, ...]
) -> None:
    if len(size) != 4:
        raise ShoestringError(f"a sparse convolution needs a map [N, C, H, W], not {tuple(size)}")
    _output_size(size[2:], *shape)
    numel = out_channels * size[1] * shape[0][0] * shape[0][1]
    if dtype != torch.uint8 or index_bytes > bitmap_bytes(numel) or count > numel:
        raise ShoestringError(
            f"{count} values and an index of {index_bytes} bytes cannot be those of a weight of "
            f"{out_channels} x {size[1]} x {shape[0][0]} x {shape[0][1]} = {numel}: check the channels"
        )


def _check_gradient(dy: Tensor, input_size: Any, shape: tuple[Sizes, ...]) -> None:
    _check_gradient_sizes(dy.shape, tuple(input_size), shape)


@lru_cache(maxsize=256)
def _check_gradient_sizes(size: Sizes, input_size: Sizes, shape: tuple[Sizes, ...]) -> None:
    expected = list(_output_size(input_size[2:], *shape))
    if len(size) != 4 or size[0] != input_size[0] or list(size[2:]) != expected:
        raise ShoestringError(
            f"the gradient {tuple(size)} is not of the output {expected} that an input {list(input_size)} gives"
        )


# Two nodes, so that backward makes the weight gradient first, and drops x before the input gradient is
# allocated: autograd frees what a node saved when that node is done, not before.
class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values, index, out_channels, shape):
        ctx.save_for_backward(values, index)
        ctx.input_size, ctx.shape = list(x.shape), shape
        return forward_op(x, values, index, out_channels, *shape, None, None, None)

    @staticmethod
    def backward(ctx, dy):
        return input_gradient_op(dy, *ctx.saved_tensors, ctx.input_size, *ctx.shape), None, None, None, None


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
        weight_gradient_op(gradient, x, dy, index, *ctx.shape, None, None, ctx.gradient is not None)
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
