"""Reference implementations of the optimizer updates: any device, FP32 arithmetic, one chunk of a tensor at a time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .moments import flat, key_of, narrow, parts, random_bits, widen

Stored = tuple[Tensor | None, Tensor | None]  # values and scales
Rule = Callable[..., tuple[Tensor, ...]]  # weight, gradient, moments -> weight, moments


def sgd_update(
    weight: Tensor,
    gradient: Tensor | None,
    gradient_scales: Tensor | None,
    momentum: Tensor | None,
    scales: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    weight_decay: float,
    factor: float,
    move: bool,
    by_chance: bool,
    noise: Sequence[int],
) -> None:
    """weight -= lr (momentum = mu momentum + gradient), in place; see kernels/update.py."""

    def rule(w: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        g = factor * g + weight_decay * w
        m = mu * m + g
        return w - lr * (g + mu * m if nesterov else m), m

    moments = [(momentum if gradient is not None else None, scales)]
    read = (gradient, gradient_scales)
    _update(weight if move else None, weight, read, [(momentum, scales)], moments, rule, noise, by_chance)


def adam_update(
    weight: Tensor,
    gradient: Tensor,
    gradient_scales: Tensor | None,
    first: Tensor,
    second: Tensor,
    first_scales: Tensor | None,
    second_scales: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    factor: float,
    step: int,
    noise: Sequence[int],
) -> None:
    """weight -= lr first / (sqrt(second) + eps), both with their bias taken out, in place."""
    correction = 1 / (1 - beta2**step) ** 0.5
    rooted = second_scales is not None

    def rule(w: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        g = factor * g + (0 if decoupled else weight_decay) * w
        m = m + (1 - beta1) * (g - m)
        v = beta2 * (v * v if rooted else v) + (1 - beta2) * (g * g)
        root = v.sqrt()
        w = (1 - lr * weight_decay if decoupled else 1) * w
        return w - lr / (1 - beta1**step) * m / (root * correction + eps), m, root if rooted else v

    moments = [(first, first_scales), (second, second_scales)]
    _update(weight, weight, (gradient, gradient_scales), moments, moments, rule, noise)


def _update(
    to_weight: Tensor | None,
    weight: Tensor,
    gradient: Stored,
    moments: Sequence[Stored],
    to_moments: Sequence[Stored],
    rule: Rule,
    noise: Sequence[int],
    by_chance: bool = False,
) -> None:
    wide = torch.promote_types(weight.dtype, torch.float32)
    key, device = key_of(noise), weight.device
    stored = [(weight, None), gradient, *moments]
    targets = [(to_weight, None), *to_moments]

    for part in parts(weight.numel()):
        new = rule(*(_widened(values, scales, part, wide, device) for values, scales in stored))
        for stream, (numbers, (values, scales)) in enumerate(zip(new, targets, strict=True)):
            if values is not None:
                noisy = _is_noisy(stream, values) or (stream == 1 and by_chance)
                bits = random_bits(key, (0, 2, 1)[stream], part, device) if noisy else None
                narrow(flat(values), scales, part, numbers, bits)


def _widened(
    values: Tensor | None, scales: Tensor | None, part: slice, wide: torch.dtype, device: torch.device
) -> Tensor:
    if values is None:
        return torch.zeros((), dtype=wide, device=device)
    return widen(flat(values), scales, part, wide)


def _is_noisy(stream: int, values: Tensor) -> bool:
    """Stochastic rounding is for BF16 weights and narrow second moments: both change by less than their spacing."""
    return values.dtype == torch.bfloat16 if stream == 0 else stream == 2 and values.dtype != torch.float32
