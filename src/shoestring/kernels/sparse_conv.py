"""Sparse convolution in FP32, FP16 or BF16 storage with FP32 arithmetic: forward, and both gradients.

The weight [out, in, k1, k2] is its nonzeros (a flat tensor) and their index (`sparse_index`); the dense weight is never
made. If `scale` and `shift` are given, the convolution reads relu(x scale + shift), with one of
each per channel: a batch norm and ReLU whose result is never stored. FP64 runs the reference.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import Launch, code, float32, forms, require_contiguous, require_dtype
from .core import core, threads
from .define import define
from .references import sparse_conv as reference
from .sparse_index import bitmap_bytes, require_countable

Sizes = tuple[int, ...]
Geometry = tuple[Sizes, Sizes, Sizes, Sizes]  # kernel, stride, padding, dilation: pairs


class _Call(NamedTuple):
    """All that follows from the sizes of a call: the output's size, the sizes in the order of csrc/sparse_geometry.h,
    and the bytes of scratch of the convolution, of the input gradient of some channels and of the weight gradient."""

    output_size: Sizes
    sizes: Sizes
    scratch: tuple[int, int, int]


@lru_cache(maxsize=256)  # a step makes the same calls many times
def _call(input_size: Sizes, out_channels: int, geometry: Geometry, count: int, channels: int, threads: int) -> _Call:
    """The call of a weight of `count` nonzeros, or of so many `channels` of its input gradient."""
    output_size = input_size[0], out_channels, *_output_size(input_size[2:], *geometry)
    sizes = *input_size, *output_size[1:], *(number for pair in geometry for number in pair)
    scratch = (
        core.sparse_convolve_scratch(sizes, False, out_channels, count, threads),
        core.sparse_convolve_scratch(sizes, True, channels, count, threads),
        core.sparse_weight_gradient_scratch(sizes, count, threads),
    )
    require_countable("convolution", scratch, (out_channels, input_size[1], *geometry[0]), input_size)
    return _Call(output_size, sizes, scratch)


def _output_size(size: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Sizes:
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    out = tuple((n + 2 * p - span) // s + 1 for n, p, span, s in zip(size, padding, spans, stride, strict=True))
    if min(out) < 1:
        raise ShoestringError(f"a map of {tuple(size)} pixels is smaller than the kernel {list(kernel)}: pad it")
    return out


# -- the ops --------------------------------------------------------------------------------------------------
def _forward(
    launch: Launch, x: Tensor, values: Tensor, index: Tensor, out_channels: int, kernel: Any, stride: Any, padding: Any,
    dilation: Any, scale: Tensor | None, shift: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    call = _call_of(x.shape, out_channels, (kernel, stride, padding, dilation), values)
    x, y, scratch = x.contiguous(), x.new_empty(call.output_size), _scratch(x, call.scratch[0])
    launch(
        core.sparse_convolve, call.sizes, False, 0, out_channels, x, code(x), *_nonzeros(values, index), float32(scale),
        float32(shift), float32(bias), y, scratch, threads(),
    )  # fmt: skip
    return y


def _input_gradient(
    launch: Launch, dy: Tensor, values: Tensor, index: Tensor, input_size: Any, kernel: Any, stride: Any, padding: Any,
    dilation: Any, first: int, last: int,
) -> Tensor:  # fmt: skip
    call = _call_of(input_size, dy.shape[1], (kernel, stride, padding, dilation), values, last - first)
    samples, _, *pixels = input_size
    dy, dx, scratch = dy.contiguous(), dy.new_empty([samples, last - first, *pixels]), _scratch(dy, call.scratch[1])
    launch(
        core.sparse_convolve, call.sizes, True, first, last - first, dy, code(dy), *_nonzeros(values, index),
        None, None, None, dx, scratch, threads(),
    )  # fmt: skip
    return dx


def _weight_gradient(
    launch: Launch, gradient: Tensor, x: Tensor, dy: Tensor, index: Tensor, kernel: Any, stride: Any, padding: Any,
    dilation: Any, scale: Tensor | None, shift: Tensor | None, accumulate: bool,
) -> None:  # fmt: skip
    call = _call_of(x.shape, dy.shape[1], (kernel, stride, padding, dilation), gradient)
    x, dy, scratch = x.contiguous(), dy.contiguous(), _scratch(x, call.scratch[2])
    launch(
        core.sparse_weight_gradient, call.sizes, x, dy, code(x), index, index.numel(), gradient.numel(),
        float32(scale), float32(shift), gradient, code(gradient), accumulate, scratch, threads(),
    )  # fmt: skip


def _call_of(
    input_size: Any, out_channels: int, geometry: tuple[Any, ...], values: Tensor, channels: int | None = None
) -> _Call:
    kernel, stride, padding, dilation = map(tuple, geometry)
    shape, count = (kernel, stride, padding, dilation), values.numel()
    return _call(tuple(input_size), out_channels, shape, count, channels or input_size[1], threads())


def _nonzeros(values: Tensor, index: Tensor) -> tuple[Any, ...]:
    return values, code(values), index, index.numel(), values.numel()


def _scratch(x: Tensor, size: int) -> Tensor:
    return x.new_empty(size, dtype=torch.uint8)


_GEOMETRY = "int[] kernel, int[] stride, int[] padding, int[] dilation"
_forward_op = define(
    f"sparse_conv2d(Tensor x, Tensor values, Tensor index, int out_channels, {_GEOMETRY}, Tensor? scale, "
    "Tensor? shift, Tensor? bias) -> Tensor",
    **forms(_forward, reference.conv2d),
)
_input_gradient_op = define(
    f"sparse_conv2d_input_gradient(Tensor dy, Tensor values, Tensor index, int[] input_size, {_GEOMETRY}, "
    "int first, int last) -> Tensor",
    **forms(_input_gradient, reference.conv2d_input_gradient),
)
_weight_gradient_op = define(
    f"sparse_conv2d_weight_gradient(Tensor(a!) gradient, Tensor x, Tensor dy, Tensor index, {_GEOMETRY}, "
    "Tensor? scale, Tensor? shift, bool accumulate) -> ()",
    **forms(_weight_gradient, reference.conv2d_weight_gradient),
)


# -- what layers call -----------------------------------------------------------------------------------------
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
    geometry = _geometry(kernel, stride, padding, dilation)
    _check(x.shape, values, index, out_channels, geometry, scale, shift)
    return _forward_op(x, values, index, out_channels, *geometry, scale, shift, bias)


def sparse_conv2d_input_gradient(
    dy: Tensor,
    values: Tensor,
    index: Tensor,
    input_size: Any,
    kernel: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    channels: tuple[int, int] | None = None,
) -> Tensor:
    """The gradient of y -> that of what the convolution read: x, or relu(x scale + shift); or of the `channels` from a
    first to before a last, which have the same bits."""
    geometry = _geometry(kernel, stride, padding, dilation)
    _check(input_size, values, index, dy.shape[1], geometry, None, None)
    _check_gradient(dy.shape, tuple(input_size), geometry)
    first, last = channels or (0, input_size[1])
    if not 0 <= first < last <= input_size[1]:
        raise ShoestringError(f"there are no channels {first} to {last} of {input_size[1]}")
    return _input_gradient_op(dy, values, index, input_size, *geometry, first, last)


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
    geometry = _geometry(kernel, stride, padding, dilation)
    _check(x.shape, out, index, dy.shape[1], geometry, scale, shift)
    _check_gradient(dy.shape, tuple(x.shape), geometry)
    require_dtype("a sparse convolution", x=x, dy=dy)
    _weight_gradient_op(out, x, dy, index, *geometry, scale, shift, accumulate)
    return out


# -- checks: a step makes the same calls many times, so those of sizes are remembered -------------------------
def _geometry(*settings: Any) -> Geometry:
    """Kernel, stride, padding and dilation, each a number or two -> the same as pairs that were checked."""
    return _checked_geometry(*((value, value) if isinstance(value, int) else tuple(value) for value in settings))


@lru_cache(maxsize=64)
def _checked_geometry(kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Geometry:
    for name, pair, least in (("kernel", kernel, 1), ("stride", stride, 1), ("padding", padding, 0),
                              ("dilation", dilation, 1)):  # fmt: skip
        if len(pair) != 2 or min(pair) < least:
            raise ShoestringError(f"{name}={list(pair)} is not two integers of at least {least}")
    return kernel, stride, padding, dilation


def _check(
    size: Any, values: Tensor, index: Tensor, out_channels: int, geometry: Geometry, scale: Any, shift: Any
) -> None:
    _check_sizes(tuple(size), values.numel(), index.numel(), index.dtype, out_channels, geometry)
    require_contiguous("a sparse convolution", values=values, index=index)
    if (scale is None) != (shift is None) or (scale is not None and scale.shape != size[1:2]):
        raise ShoestringError(f"scale and shift come together, one entry for each of {size[1]} channels: pass both")


@lru_cache(maxsize=256)
def _check_sizes(
    size: Sizes, count: int, index_bytes: int, dtype: torch.dtype, out_channels: int, geometry: Geometry
) -> None:
    if len(size) != 4:
        raise ShoestringError(f"a sparse convolution needs a map [N, C, H, W], not {tuple(size)}")
    _output_size(size[2:], *geometry)
    numel = out_channels * size[1] * geometry[0][0] * geometry[0][1]
    if dtype != torch.uint8 or index_bytes > bitmap_bytes(numel) or count > numel:
        raise ShoestringError(
            f"{count} values and an index of {index_bytes} bytes cannot be those of a weight of "
            f"{out_channels} x {size[1]} x {geometry[0][0]} x {geometry[0][1]} = {numel}: check the channels"
        )


@lru_cache(maxsize=256)
def _check_gradient(size: Sizes, input_size: Sizes, geometry: Geometry) -> None:
    expected = list(_output_size(input_size[2:], *geometry))
    if len(size) != 4 or size[0] != input_size[0] or list(size[2:]) != expected:
        raise ShoestringError(
            f"the gradient {tuple(size)} is not of the output {expected} that an input {list(input_size)} gives: "
            "check stride and padding"
        )


def forget_calls() -> None:
    """Drops what is remembered by the number of nonzeros: after a rewiring, those numbers do not come back."""
    _call.cache_clear()
    _check_sizes.cache_clear()
