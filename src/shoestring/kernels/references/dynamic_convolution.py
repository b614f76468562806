"""Reference implementation of the dynamic convolution, tap by tap. The CPU computes 16-bit tensors in FP32."""

from collections.abc import Iterator

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16) else x


def _meetings(length: int, size: int, left: int) -> Iterator[tuple[int, slice, slice]]:
    """For each tap that reaches any position: the readers t, and the positions t + k - left that they read."""
    for k in range(size):
        distance = k - left
        if abs(distance) < length:
            readers = slice(max(0, -distance), min(length, length - distance))
            yield k, readers, slice(readers.start + distance, readers.stop + distance)


def forward(x: Tensor, kernels: Tensor, left: int) -> Tensor:
    """out[t] = sum over k of kernels[t, k] x[t + k - left]."""
    wide, weights, out = _wide(x), _wide(kernels), torch.zeros_like(_wide(x))
    for k, readers, read in _meetings(x.shape[1], kernels.shape[3], left):
        out[:, readers] += weights[:, readers, :, k, None] * wide[:, read]
    return out.to(x.dtype)


def input_gradient(grad_y: Tensor, kernels: Tensor, left: int) -> Tensor:
    """grad_x[t + k - left] += kernels[t, k] grad_y[t]."""
    wide, weights, out = _wide(grad_y), _wide(kernels), torch.zeros_like(_wide(grad_y))
    for k, readers, read in _meetings(grad_y.shape[1], kernels.shape[3], left):
        out[:, read] += weights[:, readers, :, k, None] * wide[:, readers]
    return out.to(grad_y.dtype)


def kernel_gradient(grad_y: Tensor, x: Tensor, size: int, left: int) -> Tensor:
    """grad_kernels[t, k] = grad_y[t] . x[t + k - left]."""
    wide, wide_x = _wide(grad_y), _wide(x)
    out = wide.new_zeros(*x.shape[:3], size)
    for k, readers, read in _meetings(x.shape[1], size, left):
        out[:, readers, :, k] = (wide[:, readers] * wide_x[:, read]).sum(3)
    return out.to(x.dtype)
