"""Optimizer updates of one tensor in place: FP32 arithmetic, whatever the storage, and no temporaries of its size.

    momentum = new_moment(weight, "fp16")
    sgd_update(weight, gradient, momentum, lr=0.1, mu=0.9)

Weights and gradients are FP32, FP16 or BF16 (FP64 runs the reference); moments are of any form of `moments.py`. The
formulas are those of torch.optim. `factor` multiplies the gradient: 1 / loss scale, say. BF16 weights and narrow
second moments are rounded by chance; `noise` (seed, number of the tensor, number of the update) decides how, so a run
that is done again, or on another number of threads, ends with the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ShoestringError
from .calls import CODES, Launch, forms
from .core import core, threads
from .define import define
from .moments import Moment, blocks_of
from .references import update as reference_update

_CODES = CODES | {torch.int8: 3, torch.uint8: 4}
_SECOND = {torch.int8: torch.uint8}  # a second moment's dtype by the first's, where they differ
_SCALED = (torch.float16, torch.int8, torch.uint8)
Noise = tuple[int, int, int]


def _stored(x: Tensor | None) -> tuple[Tensor | None, int]:
    return x, 0 if x is None else _CODES[x.dtype]


def _sgd(
    launch: Launch, weight: Tensor, gradient: Tensor | None, gradient_scales: Tensor | None, momentum: Tensor | None,
    scales: Tensor | None, lr: float, mu: float, nesterov: bool, weight_decay: float, factor: float, move: bool,
    by_chance: bool, noise: Noise,
) -> None:  # fmt: skip
    tensors = (*_stored(weight), *_stored(gradient), gradient_scales, *_stored(momentum), scales, weight.numel())
    settings = (lr, mu, nesterov, weight_decay, factor, move, gradient is not None, by_chance)
    launch(core.sgd_update, *tensors, *settings, *noise, threads())


def _adam(
    launch: Launch, weight: Tensor, gradient: Tensor | None, gradient_scales: Tensor | None, first: Tensor,
    second: Tensor, first_scales: Tensor | None, second_scales: Tensor | None, *rest: Any,
) -> None:  # fmt: skip
    *settings, noise = rest
    moments = (*_stored(first), first_scales, *_stored(second), second_scales)
    tensors = (*_stored(weight), *_stored(gradient), gradient_scales, *moments, weight.numel())
    launch(core.adam_update, *tensors, *settings, *noise, threads())


_sgd_op = define(
    "sgd_update(Tensor(a!) weight, Tensor? gradient, Tensor? gradient_scales, Tensor(b!)? momentum, "
    "Tensor(c!)? scales, float lr, float mu, bool nesterov, float weight_decay, float factor, bool move, "
    "bool by_chance, int[] noise) -> ()",
    **forms(_sgd, reference_update.sgd_update),
    idle=1,  # noise
)
_adam_op = define(
    "adam_update(Tensor(a!) weight, Tensor gradient, Tensor? gradient_scales, Tensor(b!) first, Tensor(c!) second, "
    "Tensor(d!)? first_scales, Tensor(e!)? second_scales, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, float factor, int step, int[] noise) -> ()",
    **forms(_adam, reference_update.adam_update),
    idle=2,  # step, noise
)


def sgd_update(
    weight: Tensor,
    gradient: Tensor | Moment,
    momentum: Moment | None = None,
    *,
    lr: float,
    mu: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    factor: float = 1.0,
    noise: Noise = (0, 0, 0),
) -> None:
    """g = factor gradient + weight_decay weight; m = mu m + g; weight -= lr m, or lr (g + mu m) with Nesterov's."""
    if momentum is not None:
        _check([momentum])
    values, scales = momentum or (None, None)
    _sgd_op(
        weight, *_read(weight, gradient), values, scales, lr, mu, nesterov, weight_decay, factor, True, False, noise
    )
    torch.autograd.graph.increment_version(weight)


def sgd_accumulate(
    weight: Tensor,
    gradient: Tensor,
    momentum: Moment,
    *,
    mu: float = 1.0,
    weight_decay: float = 0.0,
    factor: float = 1.0,
    noise: Noise | None = None,
) -> None:
    """m = mu m + factor gradient + weight_decay weight; the weight stays as it is. With `noise`, m is rounded by chance
    and nothing that is added to it is lost on average."""
    _check([momentum])
    settings = 0.0, mu, False, weight_decay, factor, False, noise is not None, noise or (0, 0, 0)
    _sgd_op(weight, *_read(weight, gradient), *momentum, *settings)


def sgd_apply_momentum(weight: Tensor, momentum: Moment, *, lr: float, noise: Noise = (0, 0, 0)) -> None:
    """weight -= lr m; the momentum stays as it is."""
    _check([momentum])
    _sgd_op(weight, None, None, *momentum, lr, 1.0, False, 0.0, 1.0, True, False, noise)
    torch.autograd.graph.increment_version(weight)


def adam_update(
    weight: Tensor,
    gradient: Tensor | Moment,
    first: Moment,
    second: Moment,
    *,
    step: int,
    lr: float,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    factor: float = 1.0,
    noise: Noise = (0, 0, 0),
) -> None:
    """Adam, or AdamW if weight decay is `decoupled`; `step` counts from 1."""
    _check([first, second])
    values, scales = zip(first, second, strict=True)
    one, other = (moment.values.dtype for moment in (first, second))
    if other != _SECOND.get(one, one):
        raise ShoestringError(f"Adam's moments are {one} and {other}: make both by new_moment, of one form")
    _adam_op(
        weight,
        *_read(weight, gradient),
        *values,
        *scales,
        lr,
        *betas,
        eps,
        weight_decay,
        decoupled,
        factor,
        step,
        noise,
    )
    torch.autograd.graph.increment_version(weight)


def _check(moments: Sequence[Moment]) -> None:
    """Refuses moments whose scales a kernel would look for where there are none."""
    for values, scales in moments:
        is_scaled, found = values.dtype in _SCALED, 0 if scales is None else scales.numel()
        needed = blocks_of(values.numel()) if is_scaled else 0
        if found < needed or (found and not is_scaled):  # a shard may be empty, and has the scales of the largest
            raise ShoestringError(
                f"a moment of {values.numel()} values in {values.dtype} has {found} scales and needs {needed}: "
                "make it by new_moment"
            )


def _read(weight: Tensor, gradient: Tensor | Moment) -> Moment:
    """A gradient, or the sum of several as it is kept, in the weight's layout, with its scales if it has any."""
    return gradient if isinstance(gradient, Moment) else Moment(laid_out(weight, gradient))


def laid_out(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the weight's layout: itself, or a copy in the rare case that its layout differs."""
    if gradient.layout != torch.strided or gradient.shape != weight.shape:
        raise ShoestringError(
            f"the gradient of a weight {tuple(weight.shape)} is {gradient.layout} {tuple(gradient.shape)}: "
            "lean updates need a dense one (nn.Embedding with sparse=False)"
        )
    if not torch.ops.aten.is_non_overlapping_and_dense(weight):
        raise ShoestringError(
            f"a weight of shape {tuple(weight.shape)} and strides {weight.stride()} has gaps or overlaps: "
            "make the parameter from a tensor of its own, with .clone()"
        )
    steps = zip(weight.shape, weight.stride(), gradient.stride(), strict=True)
    if all(ours == theirs for size, ours, theirs in steps if size > 1):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
