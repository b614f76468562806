"""The dense layers of PyTorch as products: what `functions.LeanProduct` needs of a convolution or a linear layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.norm import batch_norm_apply

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Convolution:
    """A dense 2-d convolution."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        x = _read(x, prologue)
        return torch.ops.aten.convolution(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, False, (0, 0), self.groups
        )

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        return self._backward(grad, _read(x, prologue), self.weight, (False, True, False))[1]

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        return self._backward(grad, grad.new_empty(1).expand(shape), self.weight, (True, False, False))[0]

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum((0, 2, 3))

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]) -> tuple:
        return torch.ops.aten.convolution_backward(
            grad, x, weight, None, self.stride, self.padding, self.dilation, False, (0, 0), self.groups, mask
        )


@dataclass(frozen=True)
class Linear:
    """A dense linear layer."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        return grad @ self.weight

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum(tuple(range(grad.dim() - 1)))


def _read(x: Tensor, prologue: Pair | None) -> Tensor:
    return x if prologue is None else batch_norm_apply(x, *prologue, relu=True)
