"""Batch norm in training, fused with ReLU: statistics, the map made (again) from them, and the gradients.

A map is [N, C, ...], contiguous or channels_last, in FP32, FP16 or BF16; arithmetic and coefficients are
FP32, sums over the map FP64. FP64 maps run the twin. Of the maps, the backward pass needs the input alone:

    mean, variance = batch_norm_statistics(x)
    invstd = (variance + eps).rsqrt()
    y = batch_norm_apply(x, *batch_norm_fold(mean, invstd, gamma, beta), relu=True)
    grad_x, grad_gamma, grad_beta = batch_norm_backward(grad_y, x, mean, invstd, gamma, beta, relu=True)
"""

import torch
from torch import Tensor

from ..errors import ShoestringError
from . import reference_norm
from .core import core, threads
from .define import define
from .storage import address, code, dense, float32, layout, require_in_place, require_same

_PARTS = 8  # of csrc/norm.cpp: a map is summed in so many parts


def _sizes(x: Tensor) -> tuple[int, int, int, bool]:
    """Batch, channels, pixels, planar: the map as the core reads it."""
    batch, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    return batch, channels, pixels, pixels > 1 and layout(x) == torch.contiguous_format


def _totals(x: Tensor) -> Tensor:
    return torch.empty(_PARTS * 2 * x.shape[1], dtype=torch.float64, device=x.device)


def _vector(x: Tensor) -> Tensor:
    """Room for one number a channel."""
    return x.new_empty(x.shape[1], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _check(x: Tensor, *vectors: Tensor | None) -> None:
    if x.dim() < 2 or x.numel() == 0 or not x.is_floating_point():
        raise ShoestringError(f"batch norm needs values in a map [N, C, ...], not {x.dtype} {tuple(x.shape)}")
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[1:2]:
            raise ShoestringError(
                f"batch norm of {x.shape[1]} channels got coefficients of shape {tuple(vector.shape)}: "
                "pass one entry a channel"
            )


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return reference_norm.statistics(x)
    x = dense(x)
    mean, variance, totals = _vector(x), _vector(x), _totals(x)
    core.batch_norm_statistics(
        address(x), code(x), *_sizes(x), address(mean), address(variance), address(totals), threads()
    )
    return mean, variance


def _fake_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    x = dense(x)
    _totals(x)
    return _vector(x), _vector(x)


def _fold(mean: Tensor, invstd: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    if mean.dtype == torch.float64:
        return reference_norm.fold(mean, invstd, gamma, beta)
    mean, invstd, gamma, beta = (float32(v) for v in (mean, invstd, gamma, beta))
    scale, shift = torch.empty_like(mean), torch.empty_like(mean)
    core.batch_norm_fold(*(address(v) for v in (mean, invstd, gamma, beta, scale, shift)), mean.numel())
    return scale, shift


def _apply(out: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> None:
    if x.dtype == torch.float64:
        return reference_norm.apply(out, x, scale, shift, relu)
    x, scale, shift = dense(x, layout(out)), float32(scale), float32(shift)
    core.batch_norm_apply(
        address(x), code(x), *_sizes(x), address(scale), address(shift), relu, address(out), threads()
    )


def _fake_apply(out: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> None:
    dense(x, layout(out))


def _backward(
    out: Tensor,
    grad_y: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    relu: bool,
    add: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return reference_norm.backward(out, grad_y, x, mean, invstd, gamma, beta, relu, add)
    form = layout(out)
    grad_y, x, add = dense(grad_y, form), dense(x, form), add if add is None else dense(add, form)
    mean, invstd, gamma, beta = (float32(v) for v in (mean, invstd, gamma, beta))
    grad_gamma, grad_beta, totals = _vector(x), _vector(x), _totals(x)
    coefficients = torch.empty(4 * x.shape[1])
    statistics = (address(v) for v in (mean, invstd, gamma, beta))
    rest = (address(v) for v in (add, out, grad_gamma, grad_beta, coefficients, totals))
    core.batch_norm_backward(
        address(grad_y), address(x), code(x), *_sizes(x), *statistics, relu, *rest, threads()
    )
    return grad_gamma, grad_beta


def _fake_backward(out, grad_y, x, mean, invstd, gamma, beta, relu, add):
    form = layout(out)
    held = [dense(v, form) for v in (grad_y, x, add) if v is not None]
    held += [_totals(x), x.new_empty(4 * x.shape[1], dtype=torch.float32)]
    return _vector(x), _vector(x)


_statistics_op = define(
    "batch_norm_statistics(Tensor x) -> (Tensor, Tensor)",
    twin=reference_norm.statistics,
    fake=_fake_statistics,
    compiled=_statistics,
)
_fold_op = define(
    "batch_norm_fold(Tensor mean, Tensor invstd, Tensor? gamma, Tensor? beta) -> (Tensor, Tensor)",
    twin=reference_norm.fold,
    fake=lambda mean, invstd, gamma, beta: (torch.empty_like(mean), torch.empty_like(mean)),
    compiled=_fold,
)
_apply_op = define(
    "batch_norm_apply(Tensor(a!) out, Tensor x, Tensor scale, Tensor shift, bool relu) -> ()",
    twin=reference_norm.apply,
    fake=_fake_apply,
    compiled=_apply,
)
_backward_op = define(
    "batch_norm_backward(Tensor(a!) out, Tensor grad_y, Tensor x, Tensor mean, Tensor invstd, Tensor? gamma, "
    "Tensor? beta, bool relu, Tensor? add) -> (Tensor, Tensor)",
    twin=reference_norm.backward,
    fake=_fake_backward,
    compiled=_backward,
)


def batch_norm_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """A map [N, C, ...] -> (mean, biased variance) of each channel, FP32 (FP64 for an FP64 map)."""
    _check(x)
    return _statistics_op(x)


def batch_norm_fold(
    mean: Tensor, invstd: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics and parameters -> (scale, shift), with batch norm = x scale + shift.

    scale = gamma invstd, shift = beta - mean scale. The backward pass finds its ReLU mask by the same
    arithmetic, so a map made from these agrees with it to the last bit.
    """
    return _fold_op(mean, invstd, gamma, beta)


def batch_norm_apply(
    x: Tensor, scale: Tensor, shift: Tensor, relu: bool = False, out: Tensor | None = None
) -> Tensor:
    """A map, a scale and a shift for each channel -> x scale + shift, rectified if asked; `out` may be x."""
    _check(x, scale, shift)
    require_same("batch_norm_apply", x, out=out)
    out = torch.empty_like(x) if out is None else out
    require_in_place("batch_norm_apply", out, layout(out))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of y, and what the forward pass read -> the gradients of x, gamma and beta.

    grad_x = scale (dz - mean(dz) - n mean(dz n)) + add, with n = (x - mean) invstd and dz = grad_y where the
    ReLU's input (x scale + shift, computed again) was above zero. `add` is another gradient of x, such as the
    skip connection's. `out` may be grad_y or add: the gradient is then written in its place.
    """
    _check(x, mean, invstd, gamma, beta)
    require_same("batch_norm_backward", x, grad_y=grad_y, add=add, out=out)
    out = torch.empty_like(x) if out is None else out
    require_in_place("batch_norm_backward", out, layout(out))
    grad_gamma, grad_beta = _backward_op(out, grad_y, x, mean, invstd, gamma, beta, relu, add)
    return out, grad_gamma, grad_beta
