"""Dynamic convolution without unfolding: each position and head has a kernel of its own over its neighbours.

    out[n, t, h] = sum over k of kernels[n, t, h, k] x[n, t + k - left, h],    x = 0 outside its sequence

Maps are [batch, length, heads, channels] and kernels [batch, length, heads, size], of one dtype: FP32, FP16 or BF16
with FP32 sums; FP64 runs the reference. There is no scratch, where a band matrix would hold length x (length + size)
elements a head, and unfolding `size` copies of x. `left` is size - 1 for causal kernels, size // 2 for centred ones.

    y = windowed(x, kernels, left)      # with autograd; the three passes are functions of their own
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ShoestringError
from .calls import Launch, code, forms
from .core import core, threads
from .define import define
from .references import dynamic_convolution as reference_dynamic


def _forward(launch: Launch, x: Tensor, kernels: Tensor, left: int) -> Tensor:
    return _sum(launch, x, kernels, left, 1)


def _input_gradient(launch: Launch, grad_y: Tensor, kernels: Tensor, left: int) -> Tensor:
    return _sum(launch, grad_y, kernels, left, -1)


def _sum(launch: Launch, source: Tensor, kernels: Tensor, left: int, direction: int) -> Tensor:
    source, kernels = source.contiguous(), kernels.contiguous()
    out = torch.empty_like(source)
    sizes = (*source.shape, kernels.shape[3], left)
    launch(core.dynamic_convolution, source, kernels, out, code(source), *sizes, direction, threads())
    return out


def _kernel_gradient(launch: Launch, grad_y: Tensor, x: Tensor, size: int, left: int) -> Tensor:
    grad_y, x = grad_y.contiguous(), x.contiguous()
    out = x.new_empty(*x.shape[:3], size)
    launch(core.dynamic_convolution_kernel_gradient, grad_y, x, out, code(x), *x.shape, size, left, threads())
    return out


_forward_op = define(
    "dynamic_convolution_forward(Tensor x, Tensor kernels, int left) -> Tensor",
    **forms(_forward, reference_dynamic.forward),
)
_input_gradient_op = define(
    "dynamic_convolution_input_gradient(Tensor grad_y, Tensor kernels, int left) -> Tensor",
    **forms(_input_gradient, reference_dynamic.input_gradient),
)
_kernel_gradient_op = define(
    "dynamic_convolution_kernel_gradient(Tensor grad_y, Tensor x, int size, int left) -> Tensor",
    **forms(_kernel_gradient, reference_dynamic.kernel_gradient),
)


def _check(first: Tensor, other: Tensor, dimensions: int, size: int, left: int) -> None:
    """Refuses tensors that do not share dtype and leading dimensions, and windows that miss their position."""
    if first.dim() != 4 or first.shape[:dimensions] != other.shape[:dimensions] or first.dtype != other.dtype:
        raise ShoestringError(
            f"dynamic convolution of {first.dtype} {tuple(first.shape)} with {other.dtype} {tuple(other.shape)}: "
            "pass [batch, length, heads, ...] tensors of one dtype"
        )
    if not 0 <= left < size:
        raise ShoestringError(f"a kernel of size {size} cannot begin {left} positions to the left: use 0 to {size - 1}")


def dynamic_convolution_forward(x: Tensor, kernels: Tensor, left: int) -> Tensor:
    """Values [N, T, H, C] and kernels [N, T, H, K] -> out[t] = sum over k of kernels[t, k] x[t + k - left]."""
    _check(x, kernels, 3, kernels.shape[-1], left)
    return _forward_op(x, kernels, left)


def dynamic_convolution_input_gradient(grad_y: Tensor, kernels: Tensor, left: int) -> Tensor:
    """The gradient of out and the kernels -> the gradient of x."""
    _check(grad_y, kernels, 3, kernels.shape[-1], left)
    return _input_gradient_op(grad_y, kernels, left)


def dynamic_convolution_kernel_gradient(grad_y: Tensor, x: Tensor, size: int, left: int) -> Tensor:
    """The gradient of out, x and the kernels' size -> the gradient of the kernels, [N, T, H, size]."""
    _check(grad_y, x, 4, size, left)
    return _kernel_gradient_op(grad_y, x, size, left)


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(x, kernels)
        ctx.left = left
        return dynamic_convolution_forward(x, kernels, left)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        x, kernels = ctx.saved_tensors
        grad_x = dynamic_convolution_input_gradient(grad_y, kernels, ctx.left)
        return grad_x, dynamic_convolution_kernel_gradient(grad_y, x, kernels.shape[3], ctx.left), None


def windowed(x: Tensor, kernels: Tensor, left: int) -> Tensor:
    """Dynamic convolution with gradients: saves x and the kernels, and makes no band matrix."""
    return _Windowed.apply(x, kernels, left)
