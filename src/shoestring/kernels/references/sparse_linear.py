"""Reference implementations of the kernels on rows of a sparse matrix, in PyTorch: any device; densified per call."""

import torch
from torch import Tensor
from torch.nn import functional

from .sparse_conv import densify, positions


def widest(x: Tensor) -> torch.dtype:
    """The precision of the arithmetic: FP32, or FP64 if the tensor is that."""
    return torch.promote_types(x.dtype, torch.float32)


def linear(x: Tensor, values: Tensor, index: Tensor, rows: int, bias: Tensor | None = None) -> Tensor:
    wide = widest(x)
    y = x.to(wide) @ densify(values.to(wide), index, [rows, x.shape[-1]]).t()
    return (y if bias is None else y.add_(bias)).to(x.dtype)


def linear_input_gradient(dy: Tensor, values: Tensor, index: Tensor, width: int) -> Tensor:
    wide = widest(dy)
    return (dy.to(wide) @ densify(values.to(wide), index, [dy.shape[-1], width])).to(dy.dtype)


def linear_weight_gradient(gradient: Tensor, x: Tensor, dy: Tensor, index: Tensor, accumulate: bool) -> None:
    wide = widest(x)
    dense = dy.reshape(-1, dy.shape[-1]).to(wide).t() @ x.reshape(-1, x.shape[-1]).to(wide)
    at_nonzeros = dense.reshape(-1)[positions(index, dense.numel(), gradient.numel())]
    gradient.copy_(gradient.to(wide) + at_nonzeros if accumulate else at_nonzeros)


def embedding(ids: Tensor, values: Tensor, index: Tensor, rows: int, width: int) -> Tensor:
    return functional.embedding(ids, densify(values, index, [rows, width]))


def embedding_gradient(
    gradient: Tensor, ids: Tensor, dy: Tensor, index: Tensor, rows: int, width: int, accumulate: bool
) -> None:
    wide = widest(dy)
    dense = torch.zeros(rows, width, dtype=wide, device=dy.device)
    dense.index_add_(0, ids.reshape(-1), dy.reshape(-1, width).to(wide))
    at_nonzeros = dense.view(-1)[positions(index, dense.numel(), gradient.numel())]
    gradient.copy_(gradient.to(wide) + at_nonzeros if accumulate else at_nonzeros)
