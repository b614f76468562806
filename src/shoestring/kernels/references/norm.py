"""Reference implementations of the batch-norm kernels, in PyTorch: any device; FP16 and BF16 are computed in FP32."""

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *[1] * (x.dim() - 2))


def _over(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """A map [N, C, ...] -> mean and (biased) variance of each channel."""
    variance, mean = torch.var_mean(_wide(x), _over(x), correction=0)
    return mean, variance


def learn(
    mean: Tensor,
    variance: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> Tensor:
    """-> 1 / std; running = (1 - momentum) running + momentum new, with the unbiased variance, as PyTorch does."""
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * (count / max(1, count - 1))).to(running_var.dtype), momentum)
    return (variance + eps).rsqrt()


def fold(mean: Tensor, invstd: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Statistics and parameters -> scale, shift such that batch norm is x scale + shift."""
    scale = invstd.clone() if gamma is None else gamma * invstd
    shift = -mean * scale if beta is None else beta - mean * scale
    return scale, shift


def apply(out: Tensor, x: Tensor, scale: Tensor, shift: Tensor, relu: bool) -> None:
    """out = x scale + shift, with ReLU if `relu`."""
    y = _wide(x) * _per_channel(scale, x) + _per_channel(shift, x)
    out.copy_(y.relu_() if relu else y)


def backward(
    out: Tensor,
    grad_y: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    relu: bool,
    add: Tensor | None,
    sums: Tensor | None = None,
    count: int = 0,
) -> tuple[Tensor, Tensor]:
    """out = the gradient of x (plus `add`); returns the gradients of gamma and beta: `sums`, where these are known."""
    value, dz = _wide(x), _wide(grad_y)
    scale, shift = (_per_channel(v, x) for v in fold(mean, invstd, gamma, beta))
    if relu:
        dz = torch.where(value * scale + shift <= 0, 0.0, dz)
    normal = (value - _per_channel(mean, x)) * _per_channel(invstd, x)
    if sums is None:
        sums, count = torch.stack([(dz * normal).sum(_over(x)), dz.sum(_over(x))]), x.numel() // x.shape[1]
    grad_gamma, grad_beta = (each.clone() for each in sums)
    grad_x = scale * (dz - _per_channel(grad_beta / count, x) - normal * _per_channel(grad_gamma / count, x))
    out.copy_(grad_x if add is None else grad_x + _wide(add))
    return grad_gamma, grad_beta
