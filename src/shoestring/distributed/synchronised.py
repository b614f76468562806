"""Batch norm over the examples of all processes, as torch.nn.SyncBatchNorm, which refuses CPUs.

    mean = sum x / n, variance = sum (x - mean)^2 / n, normed = (x - mean) / sqrt(variance + eps)
    dx = weight / sqrt(variance + eps) (dy - sum dy / n - normed sum (dy normed) / n)

Sums and n are over all processes: two messages forward and one backward, each of a few numbers per channel. Gradients
of weight and bias are this process's, and are added up with the others.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ..patching import patched
from .sharding import refuse_others
from .world import World

BESIDE = ("microbatch", "optimizer", "shard")  # the techniques that leave batch norm to PyTorch


def refuse_unsynchronised(settings: dict[str, Any]) -> None:
    """Refuses techniques that compute batch norm in a way of their own."""
    refuse_others(
        settings, BESIDE, "computes batch norm by its own kernels, which are not synchronised over processes: use "
        f"{', '.join(BESIDE)} beside sync_batch_norm, or leave that out",
    )  # fmt: skip


@dataclass(frozen=True)
class SynchronisedNorms:
    """The context of a pass in which every batch norm that is trained takes the statistics of all processes."""

    world: World

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for norm in model.modules():
                if isinstance(norm, _BatchNorm) and norm.training:
                    stack.enter_context(patched(norm, partial(self._call, norm)))
            yield

    def _call(self, norm: _BatchNorm, forward: Any, args: tuple, kwargs: dict) -> Tensor:
        return self._normed(norm, *args, **kwargs)

    def _normed(self, norm: _BatchNorm, input: Tensor) -> Tensor:
        norm._check_input_dim(input)
        y, mean, variance, count = _Norm.apply(input, norm.weight, norm.bias, norm.eps, self.world)
        if norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None:
            with torch.no_grad():
                assert norm.num_batches_tracked is not None
                norm.num_batches_tracked.add_(1)
                momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
                unbiased = variance * count / (count - 1)
                norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), momentum)
        return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, world: World) -> Any:
        wide = torch.promote_types(x.dtype, torch.float32)
        shape, pixels = (1, -1) + (1,) * (x.dim() - 2), [0, *range(2, x.dim())]
        sums = torch.cat([x.sum(pixels, dtype=wide), x.new_full((1,), x.numel() // x.shape[1], dtype=wide)])
        world.add_up(sums)()
        count, mean = sums[-1], sums[:-1] / sums[-1]
        squares = (x - mean.view(shape)).square_().sum(pixels)
        world.add_up(squares)()
        variance = squares / count
        invstd = (variance + eps).rsqrt()
        y = (x - mean.view(shape)).mul_(invstd.view(shape))
        if weight is not None and bias is not None:
            y = y.mul_(weight.view(shape)).add_(bias.view(shape))
        ctx.save_for_backward(x, weight, mean, invstd, count)
        ctx.world = world
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *unused: Any) -> Any:
        x, weight, mean, invstd, count = ctx.saved_tensors
        shape, pixels = (1, -1) + (1,) * (x.dim() - 2), [0, *range(2, x.dim())]
        normed = (x - mean.view(shape)).mul_(invstd.view(shape))
        own = torch.stack([dy.sum(pixels, dtype=mean.dtype), (dy * normed).sum(pixels)])
        everyone = own.clone()
        ctx.world.add_up(everyone)()
        dx = None
        if ctx.needs_input_grad[0]:
            of_dy, of_both = (each.view(shape) for each in everyone / count)
            scale = invstd if weight is None else invstd * weight
            dx = (dy - of_dy - normed.mul_(of_both)).mul_(scale.view(shape)).to(x.dtype)
        weight_grad, bias_grad = (own[1], own[0]) if weight is not None else (None, None)
        return dx, weight_grad, bias_grad, None, None
