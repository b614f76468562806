"""Dense convolution whose scratch is bounded: forward, input gradient, and weight gradient added in place.

Maps are [N, C, H, W], contiguous or channels_last, in FP32, FP16 or BF16; arithmetic is FP32, and
FP64 runs the reference. A few rows of a sample at a time are widened to FP32, so no map is ever copied whole and a
16-bit convolution costs what an FP32 one does. On its way into that scratch a map may pass a batch norm and a
ReLU (x scale + shift for each channel), whose output is then never stored:

    y = conv_forward(x, weight, padding=1, scale=scale, shift=shift, relu=True)
    conv_weight_gradient(grad_y, x, weight.shape, padding=1, scale=scale, shift=shift, relu=True, out=grad)
    grad_of_what_was_convolved = conv_input_gradient(grad_y, weight, x.shape, padding=1)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import Launch, code, dense, float32, forms, planar, require_in_place
from .core import core, threads
from .define import define
from .references import conv as reference_conv

Size = int | Sequence[int]
SCRATCH_BYTES = 384 * 1024  # of packed weights and FP32 rows, unless one row of 16 channels needs more
# What forward and input gradient take of it: the input gradient is where a step with checkpointing has its peak. For
# each block of weights the source passes by once more, so weights get up to twice the map that is written: a step's
# largest maps, where the peak is, have few channels. 128 channels on 8 x 8 pixels, 10 samples: 1.05 times as fast as
# with the least in 1 thread, 1.12 and 1.2 in 2 (AMD EPYC (Zen 3), AVX2).
PACKED_BYTES, THREAD_BYTES = 128 * 1024, 32 * 1024


def _sizes(
    x_shape: Sequence[int], weight_shape: Sequence[int], y_shape: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> list[int]:  # fmt: skip
    """The sizes of csrc/conv.h's Geometry, in its order."""
    return [*x_shape, *y_shape[1:], *weight_shape[2:], *stride, *padding, *dilation, groups]


def _gather(
    launch: Launch, backward: bool, out: Tensor, source: Tensor, weight: Tensor, bias: Tensor | None,
    sizes: Sequence[int], scale: Tensor | None, shift: Tensor | None, relu: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    """The kernel of the forward pass and, with the roles of the maps exchanged, of the input gradient."""
    source, weight = dense(source), weight.contiguous()
    scale, shift, bias = float32(scale), float32(shift), float32(bias)
    packed = max(PACKED_BYTES, min(2 * out.nbytes, weight.numel() * 4 * 10 // 6))  # conv_plan's share of it
    budget = min(scratch_bytes, packed + threads() * THREAD_BYTES)
    block, rows, floats = core.conv_plan(sizes, backward, budget, threads())
    scratch = source.new_empty(floats, dtype=torch.float32)
    read = (source, planar(source), scale, shift, relu, weight, code(weight), bias)
    launch(core.conv_gather, sizes, backward, *read, out, planar(out), code(out), block, rows, scratch, threads())


def _forward(
    launch: Launch, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, scale: Tensor | None, shift: Tensor | None,
    relu: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    sizes = _sizes(x.shape, weight.shape, out.shape, stride, padding, dilation, groups)
    _gather(launch, False, out, x, weight, bias, sizes, scale, shift, relu, scratch_bytes)


def _input_gradient(
    launch: Launch, out: Tensor, grad_y: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scratch_bytes: int,
) -> None:  # fmt: skip
    sizes = _sizes(out.shape, weight.shape, grad_y.shape, stride, padding, dilation, groups)
    _gather(launch, True, out, grad_y, weight, None, sizes, None, None, False, scratch_bytes)


def _weight_gradient(
    launch: Launch, out: Tensor, grad_y: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scale: Tensor | None, shift: Tensor | None, relu: bool, accumulate: bool,
    scratch_bytes: int,
) -> None:  # fmt: skip
    grad_y, x, scale, shift = dense(grad_y), dense(x), float32(scale), float32(shift)
    sizes = _sizes(x.shape, out.shape, grad_y.shape, stride, padding, dilation, groups)
    *plan, floats = core.conv_weight_plan(sizes, scratch_bytes, threads())
    scratch = x.new_empty(floats, dtype=torch.float32)
    read = (grad_y, planar(grad_y), x, planar(x), scale, shift, relu, code(x))
    launch(core.conv_weight_gradient, sizes, *read, out, code(out), accumulate, *plan, scratch, threads())


_SETTINGS = "int[] stride, int[] padding, int[] dilation, int groups"
_PROLOGUE = "Tensor? scale, Tensor? shift, bool relu"
_forward_op = define(
    f"conv_forward(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, {_SETTINGS}, {_PROLOGUE}, "
    "int scratch_bytes) -> ()",
    **forms(_forward, reference_conv.forward),
)
_input_gradient_op = define(
    f"conv_input_gradient(Tensor(a!) out, Tensor grad_y, Tensor weight, {_SETTINGS}, int scratch_bytes) -> ()",
    **forms(_input_gradient, reference_conv.input_gradient),
)
_weight_gradient_op = define(
    f"conv_weight_gradient(Tensor(a!) out, Tensor grad_y, Tensor x, {_SETTINGS}, {_PROLOGUE}, "
    "bool accumulate, int scratch_bytes) -> ()",
    **forms(_weight_gradient, reference_conv.weight_gradient),
)


def _settings(stride: Size, padding: Size, dilation: Size, groups: int) -> tuple:
    pairs = [[v, v] if isinstance(v, int) else [int(e) for e in v] for v in (stride, padding, dilation)]
    for name, pair, least in zip(("stride", "padding", "dilation"), pairs, (1, 0, 1), strict=True):
        if len(pair) != 2 or min(pair) < least:
            raise ShoestringError(f"{name}={pair} is not two integers of at least {least}")
    return (*pairs, groups)


def _output_shape(
    x_shape: Sequence[int], weight_shape: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> list[int]:  # fmt: skip
    """The shape of y; refuses what cannot be convolved."""
    if len(x_shape) != 4 or len(weight_shape) != 4:
        raise ShoestringError(
            f"a map {tuple(x_shape)} and a weight {tuple(weight_shape)} need 4 dimensions each: "
            "other convolutions stay PyTorch's"
        )
    if groups < 1 or x_shape[1] != weight_shape[1] * groups or weight_shape[0] % groups:
        raise ShoestringError(
            f"a weight {tuple(weight_shape)} in {groups} groups reads {weight_shape[1] * groups} channels, "
            f"but the map is {tuple(x_shape)}: check weight and groups"
        )
    pixels = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x_shape[2:], weight_shape[2:], stride, padding, dilation, strict=True)
    ]
    if min(*pixels, *x_shape[1:], *weight_shape) < 1:
        raise ShoestringError(
            f"a weight {tuple(weight_shape)} over a map {tuple(x_shape)} gives no output: "
            "check channels, kernel, stride and padding"
        )
    return [x_shape[0], weight_shape[0], *pixels]


def _require(name: str, got: Tensor | None, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    if got is not None and (list(got.shape) != list(shape) or dtype not in (None, got.dtype)):
        raise ShoestringError(
            f"{name} is {got.dtype} {tuple(got.shape)}, not {dtype or got.dtype} {tuple(shape)}: "
            "check the convolution's shapes and settings"
        )


def _empty(like: Tensor, shape: Sequence[int], weight: Tensor | None = None) -> Tensor:
    """A map in the layout of another; PyTorch's convolution has channels_last from its weight, too."""
    last = not planar(like) or (weight is not None and not planar(weight))
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    relu: bool = False,
    out: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """A map and a weight -> conv(r) + bias, stored as PyTorch would; r = x scale + shift, with ReLU if `relu`.

    Zeros of the padding surround r, not x. Results do not depend on threads or scratch_bytes.
    """
    settings = _settings(stride, padding, dilation, groups)
    shape = _output_shape(x.shape, weight.shape, *settings)
    _require("scale", scale, [x.shape[1]])
    _require("shift", shift, [x.shape[1]])
    _require("bias", bias, [shape[1]])
    _require("out", out, shape, x.dtype)
    out = _empty(x, shape, weight) if out is None else out
    require_in_place("conv_forward", out)
    _forward_op(out, x, weight, bias, *settings, scale, shift, relu, scratch_bytes)
    return out


def conv_input_gradient(
    grad_y: Tensor,
    weight: Tensor,
    x_shape: Sequence[int],
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    out: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """The gradient of y, the weight and x's shape -> the gradient of what was convolved, like grad_y."""
    settings = _settings(stride, padding, dilation, groups)
    _require("grad_y", grad_y, _output_shape(x_shape, weight.shape, *settings))
    _require("out", out, x_shape, grad_y.dtype)
    out = _empty(grad_y, x_shape) if out is None else out
    require_in_place("conv_input_gradient", out)
    _input_gradient_op(out, grad_y, weight, *settings, scratch_bytes)
    return out


def conv_weight_gradient(
    grad_y: Tensor,
    x: Tensor,
    weight_shape: Sequence[int],
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    relu: bool = False,
    out: Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> Tensor:
    """The gradient of y and the forward pass's map -> the gradient of the weight, added to `out` if given.

    Sums over the batch are FP32 and are rounded once, to out's dtype (x's by default).
    """
    settings = _settings(stride, padding, dilation, groups)
    _require("grad_y", grad_y, _output_shape(x.shape, weight_shape, *settings), x.dtype)
    _require("scale", scale, [x.shape[1]])
    _require("shift", shift, [x.shape[1]])
    _require("out", out, weight_shape)
    accumulate = out is not None
    out = x.new_empty(weight_shape) if out is None else out
    if not out.is_contiguous():
        raise ShoestringError(f"a weight's gradient has strides {tuple(out.stride())}: make it contiguous")
    _weight_gradient_op(out, grad_y, x, *settings, scale, shift, relu, accumulate, scratch_bytes)
    return out
