"""Sparse convolution and linear layers as `functions.Product`s, and the functions that sparse layers call.

These functions offer themselves to function modes as PyTorch's own do, so that `LeanMode` can fuse batch norm and ReLU
into them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..errors import ShoestringError
from ..kernels.sparse_conv import (
    Geometry,
    sparse_conv2d_forward,
    sparse_conv2d_input_gradient,
    sparse_conv2d_weight_gradient,
)
from ..kernels.sparse_embedding import sparse_embedding_forward, sparse_embedding_gradient
from ..kernels.sparse_linear import sparse_linear_forward, sparse_linear_input_gradient, sparse_linear_weight_gradient
from .functions import Product, lean_product
from .layers import Layer

Pair = tuple[Tensor, Tensor]
# A map whose gradient is made in pieces has so many, of so many bytes: more pieces, of smaller maps, or of a dense
# convolution, cost more time (5 to 16% of a step; Intel Xeon, AVX-512, 2 threads) than they save memory (1 to 2%).
MOST_PIECES, LEAST_BYTES = 2, 128 << 10


def sparse_convolution(x: Tensor, values: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """x [N, in, H, W] and a sparse convolution, whose parameters are passed beside it -> y."""
    if has_torch_function_unary(x):
        return handle_torch_function(sparse_convolution, (x,), x, values, bias, product)
    return lean_product(x, values, bias, product)


def sparse_linear(x: Tensor, values: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """x [..., in] and a sparse linear layer, whose parameters are passed beside it -> y [..., out]."""
    if has_torch_function_unary(x):
        return handle_torch_function(sparse_linear, (x,), x, values, bias, product)
    return lean_product(x, values, bias, product)


def sparse_embedding(ids: Tensor, values: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """Ids [...] and a sparse table of this shape -> their rows [..., width]."""
    return _EmbeddingLookup.apply(ids, values, index, shape)


class _EmbeddingLookup(torch.autograd.Function):
    """Saves the ids, which the batch holds anyway."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, values: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.ids, ctx.like, ctx.index, ctx.shape = ids, values.detach(), index, shape
        return sparse_embedding_forward(ids, values, index, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = torch.empty_like(ctx.like)
        return None, sparse_embedding_gradient(ctx.ids, grad, ctx.index, *ctx.shape, out=out), None, None


@dataclass(frozen=True)
class SparseConvolution(Layer):
    """A sparse 2-d convolution."""

    values: Tensor
    index: Tensor
    bias: Tensor | None
    in_channels: int
    out_channels: int
    geometry: Geometry

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ShoestringError(
                f"a sparse convolution of {self.in_channels} channels got an input of {tuple(x.shape)}: "
                f"pass [N, {self.in_channels}, H, W]"
            )
        scale, shift = prologue or (None, None)
        weight = self.values, self.index, self.out_channels
        return sparse_conv2d_forward(x, *weight, *self.geometry, scale, shift, self.bias)

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        out, (scale, shift) = torch.empty_like(self.values), prologue or (None, None)
        return sparse_conv2d_weight_gradient(x, grad, self.index, *self.geometry, scale, shift, out=out)

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        return sparse_conv2d_input_gradient(grad, self.values, self.index, shape, *self.geometry)

    def channels_gradient(self, grad: Tensor, shape: torch.Size, first: int, last: int) -> Tensor:
        return sparse_conv2d_input_gradient(grad, self.values, self.index, shape, *self.geometry, (first, last))

    def channels_at_a_time(self, x: Tensor) -> int:
        return -(-x.shape[1] // max(1, min(MOST_PIECES, x.nbytes // LEAST_BYTES)))

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum((0, 2, 3))


@dataclass(frozen=True)
class SparseMatrix(Layer):
    """A sparse linear layer; nothing is read before it."""

    values: Tensor
    index: Tensor
    bias: Tensor | None
    out_features: int

    def forward(self, x: Tensor, prologue: Pair | None) -> Tensor:
        return sparse_linear_forward(x, self.values, self.index, self.out_features, self.bias)

    def weight_gradient(self, grad: Tensor, x: Tensor, prologue: Pair | None) -> Tensor:
        return sparse_linear_weight_gradient(x, grad, self.index, out=torch.empty_like(self.values))

    def input_gradient(self, grad: Tensor, shape: torch.Size) -> Tensor:
        return sparse_linear_input_gradient(grad, self.values, self.index, shape[-1])

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum(tuple(range(grad.dim() - 1)))
