"""Batch norm in training, fused with ReLU: statistics, the output (re)computed from them, and the gradients.

A map is [N, C, ...], contiguous or channels_last, in FP32, FP16 or BF16; arithmetic and coefficients are
FP32, sums over the map FP64. FP64 maps run the reference. Of the maps, the backward pass needs the input alone:

    mean, variance = batch_norm_statistics(x)
    invstd = batch_norm_learn(mean, variance, running_mean, running_var, momentum, eps, count)
    y = batch_norm_apply(x, *batch_norm_fold(mean, invstd, gamma, beta), relu=True)
    grad_x, grad_gamma, grad_beta = batch_norm_backward(grad_y, x, mean, invstd, gamma, beta, relu=True)
"""

import math

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import Launch, code, dense, float32, forms, layout, planar, require_in_place, require_same
from .core import core, threads
from .define import define
from .references import norm as reference_norm


class OneValue(ShoestringError, ValueError):
    """Statistics of a single value per channel, which has no variance: PyTorch raises ValueError there."""


_PARTS = 8  # of csrc/norm.cpp: a map is summed in so many parts


def _sizes(x: Tensor) -> tuple[int, int, int, bool]:
    """Batch, channels, pixels, planar: the map as the core reads it."""
    pixels = math.prod(x.shape[2:])
    return x.shape[0], x.shape[1], pixels, pixels > 1 and planar(x)


def _gap(x: Tensor) -> int:
    """Values between two samples of some channels of a larger planar map; 0 if x has no gaps, or others."""
    own = math.prod(x.shape[1:])
    is_slice = x.shape[0] > 1 and x.dim() > 2 and x.stride(0) > own and x[0].is_contiguous()
    return x.stride(0) - own if is_slice else 0


def _floats(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.float32)


def _totals(x: Tensor) -> Tensor:
    return x.new_empty(_PARTS * 2 * x.shape[1], dtype=torch.float64)


def _statistics(launch: Launch, x: Tensor) -> tuple[Tensor, Tensor]:
    x = dense(x)
    mean, variance, totals = _floats(x, x.shape[1]), _floats(x, x.shape[1]), _totals(x)
    launch(core.batch_norm_statistics, x, code(x), *_sizes(x), mean, variance, totals, threads())
    return mean, variance


def _learn(
    launch: Launch, mean: Tensor, variance: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, count: int,
) -> Tensor:  # fmt: skip
    invstd, unbiased = torch.empty_like(variance), count / max(1, count - 1)
    storage = 0 if running_mean is None else code(running_mean)
    read = (mean, variance, mean.numel(), momentum, eps, unbiased)
    launch(core.batch_norm_learn, *read, running_mean, running_var, storage, invstd)
    return invstd


def _fold(
    launch: Launch, mean: Tensor, invstd: Tensor, gamma: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    mean, invstd, gamma, beta = (float32(v) for v in (mean, invstd, gamma, beta))
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    launch(core.batch_norm_fold, mean, invstd, gamma, beta, scale, shift, mean.numel())
    return scale, shift


def _apply(launch: Launch, out: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None, relu: bool) -> None:
    x, scale, shift = dense(x, layout(out)), float32(scale), float32(shift)
    launch(core.batch_norm_apply, x, code(x), *_sizes(x), scale, shift, relu, out, threads())


def _backward(
    launch: Launch, out: Tensor, grad_y: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, gamma: Tensor | None,
    beta: Tensor | None, relu: bool, add: Tensor | None, sums: Tensor | None, count: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    form, gap = layout(out), _gap(out)
    grad_y, x, add = dense(grad_y, form), out if gap else dense(x, form), add if add is None else dense(add, form)
    mean, invstd, gamma, beta = (float32(v) for v in (mean, invstd, gamma, beta))
    channels = x.shape[1]
    grad_gamma, grad_beta, coefficients = _floats(x, channels), _floats(x, channels), _floats(x, 4 * channels)
    read = (grad_y, x, code(x), *_sizes(x), gap, mean, invstd, gamma, beta, relu, add, float32(sums), count)
    written = (out, grad_gamma, grad_beta, coefficients, _totals(x))
    launch(core.batch_norm_backward, *read, *written, threads())
    return grad_gamma, grad_beta


_statistics_op = define(
    "batch_norm_statistics(Tensor x) -> (Tensor, Tensor)", **forms(_statistics, reference_norm.statistics)
)
_learn_op = define(
    "batch_norm_learn(Tensor mean, Tensor variance, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
    "float eps, int count) -> Tensor",
    **forms(_learn, reference_norm.learn),
)
_fold_op = define(
    "batch_norm_fold(Tensor mean, Tensor invstd, Tensor? gamma, Tensor? beta) -> (Tensor, Tensor)",
    **forms(_fold, reference_norm.fold),
)
_apply_op = define(
    "batch_norm_apply(Tensor(a!) out, Tensor x, Tensor scale, Tensor shift, bool relu) -> ()",
    **forms(_apply, reference_norm.apply),
)
_backward_op = define(
    "batch_norm_backward(Tensor(a!) out, Tensor grad_y, Tensor x, Tensor mean, Tensor invstd, Tensor? gamma, "
    "Tensor? beta, bool relu, Tensor? add, Tensor? sums, int count) -> (Tensor, Tensor)",
    **forms(_backward, reference_norm.backward),
)


def _check(x: Tensor, *vectors: Tensor | None) -> None:
    if x.dim() < 2 or x.numel() == 0 or not x.is_floating_point():
        raise ShoestringError(f"batch norm needs values in a map [N, C, ...], not {x.dtype} {tuple(x.shape)}")
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[1:2]:
            raise ShoestringError(
                f"batch norm of {x.shape[1]} channels got coefficients of shape {tuple(vector.shape)}: "
                "pass one entry per channel"
            )


def batch_norm_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """A map [N, C, ...] -> (mean, biased variance) of each channel, FP32 (FP64 for an FP64 map)."""
    _check(x)
    if x.numel() == x.shape[1]:
        raise OneValue(
            f"batch norm in training needs more than 1 value per channel, not {tuple(x.shape)}: "
            "use a larger (micro)batch, or evaluation mode"
        )
    return _statistics_op(x)


def batch_norm_learn(
    mean: Tensor,
    variance: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> Tensor:
    """Statistics of `count` values per channel -> 1 / std; running ones, if given, take in their share of the new."""
    running = [each for each in (running_mean, running_var) if each is not None]
    if len({each.dtype for each in running}) > 1 or not all(each.is_contiguous() for each in running):
        return reference_norm.learn(mean, variance, running_mean, running_var, momentum, eps, count)
    return _learn_op(mean, variance, running_mean, running_var, momentum, eps, count)


def batch_norm_fold(
    mean: Tensor, invstd: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics and parameters -> (scale, shift), with batch norm = x scale + shift.

    scale = gamma invstd, shift = beta - mean scale. The backward pass finds its ReLU mask by the same
    arithmetic, so a map made from these agrees with it to the last bit.
    """
    return _fold_op(mean, invstd, gamma, beta)


def batch_norm_apply(x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False, out: Tensor | None = None) -> Tensor:
    """A map, a scale and a shift for each channel -> x scale + shift, with ReLU if `relu`; `out` may be x."""
    _check(x, scale, shift)
    require_same("batch_norm_apply", x, out=out)
    out = torch.empty_like(x, memory_format=layout(x)) if out is None else out
    require_in_place("batch_norm_apply", out)
    _apply_op(out, x, scale, shift, relu)
    return out


def batch_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    relu: bool = False,
    add: Tensor | None = None,
    out: Tensor | None = None,
    sums: Tensor | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of y, and what the forward pass read -> the gradients of x, gamma and beta.

    grad_x = scale (dz - mean(dz) - n mean(dz n)) + add, with n = (x - mean) invstd and dz = grad_y where the
    ReLU's input (x scale + shift, computed again) was above zero. `add` is another gradient of x, such as the
    skip connection's. `out` may be grad_y, x or add: the gradient is then written in its place, and as x it may be some
    channels of a larger map. Of some samples of
    a batch, `sums` are the gradients of gamma and beta over the whole of it, `count` values of each channel.
    """
    _check(x, mean, invstd, gamma, beta)
    if sums is not None and (sums.shape != (2, x.shape[1]) or count < x.numel() // x.shape[1]):
        raise ShoestringError(
            f"batch norm of {x.shape[1]} channels got sums of shape {tuple(sums.shape)} over {count} values: pass the "
            "gradients of gamma and beta of a batch that these samples are a part of"
        )
    require_same("batch_norm_backward", x, grad_y=grad_y, add=add, out=out)
    out = torch.empty_like(x, memory_format=layout(x)) if out is None else out
    if out is not x or add is not None or not _gap(x):
        require_in_place("batch_norm_backward", out)
    grad_gamma, grad_beta = _backward_op(out, grad_y, x, mean, invstd, gamma, beta, relu, add, sums, count)
    return out, grad_gamma, grad_beta
