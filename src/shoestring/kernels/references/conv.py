"""Reference implementations of the dense convolution kernels, in PyTorch. The CPU computes 16-bit maps in FP32."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16) else x


def prepare(x: Tensor, scale: Tensor | None, shift: Tensor | None, relu: bool) -> Tensor:
    """The map that the convolution reads: x scale + shift per channel, with ReLU if `relu`."""
    x = _wide(x)
    if scale is not None:
        x = x * scale.view(1, -1, 1, 1).to(x.dtype)
    if shift is not None:
        x = x + shift.view(1, -1, 1, 1).to(x.dtype)
    return x.relu() if relu else x


def forward(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scale: Tensor | None, shift: Tensor | None, relu: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    """out = conv2d(prepared x, weight) + bias."""
    x = prepare(x, scale, shift, relu)
    bias = bias if bias is None else bias.to(x.dtype)
    out.copy_(F.conv2d(x, weight.to(x.dtype), bias, stride, padding, dilation, groups))


def input_gradient(
    out: Tensor, grad_y: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int, scratch_bytes: int,
) -> None:  # fmt: skip
    """out = the gradient of the (prepared) input."""
    grad_y = _wide(grad_y)
    weight = weight.to(grad_y.dtype)
    out.copy_(conv2d_input(out.shape, weight, grad_y, stride, padding, dilation, groups))


def weight_gradient(
    out: Tensor, grad_y: Tensor, x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int, scale: Tensor | None, shift: Tensor | None, relu: bool, accumulate: bool, scratch_bytes: int,
) -> None:  # fmt: skip
    """out = (out +) the gradient of the weight."""
    x = prepare(x, scale, shift, relu)
    gradient = conv2d_weight(x, out.shape, _wide(grad_y), stride, padding, dilation, groups)
    out.copy_(_wide(out) + gradient if accumulate else gradient)
