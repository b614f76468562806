"""Batch norm by PyTorch's own kernel, whose input is stored as a codec likes: its backward reads it in parts."""

from typing import Any

import torch
from torch import Tensor

from ..kernels.norm import batch_norm_backward
from .functions import take_stored, wanted
from .owned import told_if_owned
from .saved_tensors import StoredInput, store


class PlainNorm(torch.autograd.Function):
    """batch_norm(x) in training, with PyTorch's bits; updates the running statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Any, beta: Any, call: dict[str, Any], kept: Any) -> Tensor:
        running = call["running_mean"], call["running_var"]
        y, mean, invstd = torch.native_batch_norm(x, gamma, beta, *running, True, call["momentum"], call["eps"])
        ctx.kept, ctx.statistics, ctx.gamma = kept, (mean, invstd), gamma
        return y

    @staticmethod
    @told_if_owned
    def backward(ctx: Any, grad: Tensor, owned: bool) -> Any:
        kept, (mean, invstd) = take_stored(ctx), ctx.statistics
        if isinstance(kept, StoredInput):
            return *wanted(ctx, in_parts(grad, kept, mean, invstd, ctx.gamma, owned)), None, None
        # Our own kernel: PyTorch's takes a map of scratch, which in the stem of a ResNet would be the peak.
        x = kept.take()
        out = grad if owned and grad.stride() == x.stride() else None
        return *wanted(ctx, batch_norm_backward(grad, x, mean, invstd, ctx.gamma, out=out)), None, None


def in_parts(
    grad: Tensor, x: StoredInput, mean: Tensor, invstd: Tensor, gamma: Tensor | None, owned: bool
) -> tuple[Tensor, ...]:
    """dx = gamma invstd (dy - mean(dy) - n mean(dy n)), n = (x - mean) invstd; x is expanded twice, in parts. If dy is
    owned, dx takes its place."""
    shape = (1, grad.shape[1]) + (1,) * (grad.dim() - 2)
    pixels, (mean, invstd) = [0, *range(2, grad.dim())], (each.view(shape) for each in (mean, invstd))
    sum_dy, sum_dyn = grad.new_zeros(shape, dtype=mean.dtype), grad.new_zeros(shape, dtype=mean.dtype)
    for part, values in x.parts():
        normed = values.sub(mean).mul_(invstd)
        sum_dy += grad[part].sum(pixels, keepdim=True)
        sum_dyn += normed.mul_(grad[part]).sum(pixels, keepdim=True)
    count = grad.numel() // grad.shape[1]
    scale = invstd if gamma is None else invstd * gamma.view(shape)
    dx = grad if owned else torch.empty_like(grad)
    for part, values in x.parts():
        normed = values.sub(mean).mul_(invstd * (sum_dyn / count))
        dx[part] = normed.add_(sum_dy / count).sub_(grad[part]).mul_(-scale)
    return dx, sum_dyn.flatten(), sum_dy.flatten()


def plain_norm(x: Tensor, call: dict[str, Any]) -> Tensor:
    """A call of batch norm in training, its arguments by name -> its output."""
    return PlainNorm.apply(x, call["weight"], call["bias"], call, store(x))
