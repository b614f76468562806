"""PyTorch's dense convolution and linear layer as `functions.Product`s: forward, and each gradient on its own."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.calls import dense, planar
from ..kernels.conv import conv_forward, conv_input_gradient, conv_weight_gradient
from ..kernels.linear import linear_forward, linear_input_gradient, linear_weight_gradient
from .saved_tensors import samples_at_a_time
from .widened import is_narrow

Pair = tuple[Tensor, Tensor]
WEIGHT_BYTES = 16 << 20  # PyTorch's weight gradient takes scratch of the output's gradient, in another layout
PIECE_BYTES = 4 << 20  # PyTorch's input gradient of a strided convolution takes scratch of three maps of its samples


class Layer:
    """A layer whose weight's gradient reads all of its input, and whose input's gradient is made at once."""

    def channels_at_a_time(self, x: Tensor) -> int:
        return x.shape[1]

    def channels_gradient(self, grad: Tensor, shape: torch.Size, first: int, last: int) -> Tensor:
        raise AssertionError("all channels are made at once")

    def read(self, x: Tensor) -> Tensor:
        return x

    def reading(self) -> Any:
        return self


@dataclass(frozen=True)
class Convolution(Layer):
    """A dense 2-d convolution."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        return conv_forward(x, self.weight, self.bias, *self._geometry(), **_reading(prologue))

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        return conv_weight_gradient(grad, x, self.weight.shape, *self._geometry(), **_reading(prologue))

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor) -> None:
        """Adds the gradient that some of a batch's samples give to `total`, whatever made the forward pass."""
        conv_weight_gradient(grad, x, self.weight.shape, *self._geometry(), out=total)

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        return conv_input_gradient(grad, self.weight, shape, *self._geometry())

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum((0, 2, 3))

    def _geometry(self) -> tuple:
        return self.stride, self.padding, self.dilation, self.groups


@dataclass(frozen=True)
class PlainConvolution(Convolution):
    """A dense 2-d convolution by PyTorch's own operators, with their bits in the forward pass."""

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        assert prologue is None, "PyTorch's convolution reads its input as it is"
        return torch.conv2d(x, self.weight, self.bias, *self._geometry())

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        count = samples_at_a_time(grad.shape, grad.dtype, WEIGHT_BYTES)
        first, *rest = zip(grad.split(count), x.split(count), strict=True)
        total = self._backward(*first, [False, True, False])[1]
        for part in rest:
            total += self._backward(*part, [False, True, False])[1]
        return total

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        if self._skips():  # PyTorch's takes scratch of three such maps
            rows, columns = self.stride
            full = self._empty(grad, shape).zero_()
            read = full[:, :, ::rows, ::columns]
            read.copy_(self.reading().input_gradient(grad, read.shape))
            return full
        count = samples_at_a_time(shape, grad.dtype, PIECE_BYTES) if max(self.stride) > 1 else len(grad)
        if count >= len(grad):
            return self._input_gradient(grad, shape)
        full = self._empty(grad, shape)
        for part, out in zip(grad.split(count), full.split(count), strict=True):
            out.copy_(self._input_gradient(part, out.shape))
        return full

    def _input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        # Of x its shape and layout are read. What does not lie in the layout that PyTorch takes is copied: the gradient
        # once, and in the place of x it is itself, if it has the shape.
        grad = dense(grad, self._form(grad))
        x = grad if grad.shape == shape else self._empty(grad, shape)
        return self._backward(grad, x, [True, False, False])[0]

    def _empty(self, grad: Tensor, shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=self._form(grad))

    def _form(self, grad: Tensor) -> torch.memory_format:
        """The layout in which PyTorch makes the gradient of the input."""
        return torch.contiguous_format if planar(grad) and planar(self.weight) else torch.channels_last

    def _backward(self, grad: Tensor, x: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
        geometry = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        return torch.ops.aten.convolution_backward(grad, x, self.weight, None, *geometry, wanted)

    def read(self, x: Tensor) -> Tensor:
        """A 1 x 1 convolution of stride s reads one pixel of s x s."""
        rows, columns = self.stride
        return dense(x[:, :, ::rows, ::columns]) if self._skips() else x

    def reading(self) -> Convolution:
        return replace(self, stride=(1, 1)) if self._skips() else self

    def _skips(self) -> bool:
        return self.weight.shape[2:] == (1, 1) and not any(self.padding) and max(self.stride) > 1


@dataclass(frozen=True)
class Linear(Layer):
    """A dense linear layer."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        return linear_forward(x, self.weight, self.bias)

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        if is_narrow(x):
            return linear_weight_gradient(grad, x)
        return _rows(grad).t() @ _rows(x)

    # Flattened before it is multiplied and summed, as in PyTorch: with other strides the result has other bits.
    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        if is_narrow(grad):
            return linear_input_gradient(grad, self.weight)
        return (_rows(grad) @ self.weight).view(shape)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return _rows(grad).sum(0)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _reading(prologue: Pair | None) -> dict:
    return {} if prologue is None else {"scale": prologue[0], "shift": prologue[1], "relu": True}
