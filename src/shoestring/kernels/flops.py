"""FLOPs of one operator call: PyTorch's own table, and what it lacks."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from . import conv, linear, sparse_conv, sparse_linear  # noqa: F401 - their operators get formulas here


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """An operator call -> its floating-point operations (a multiply-add counts 2); 0 if it is not counted.

    Counted are matrix products, convolutions, attention and our own kernels: the rest is linear in the data.
    """
    formula: Callable | None = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _formula(targets: Any) -> Callable[[Callable], Callable]:
    """Registers a formula for operators of which this PyTorch has none: newer ones know more of them."""
    listed = targets if isinstance(targets, list) else [targets]
    return register_flop_formula([target for target in listed if target not in flop_registry])


def _attention(query: tuple, key: tuple, value: tuple) -> int:
    batch, heads, queries, width = query
    keys = key[-2]
    return 2 * batch * heads * queries * keys * (width + value[-1])


@_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _(query: tuple, key: tuple, value: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _attention(query, key, value)


@_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _(grad: tuple, query: tuple, key: tuple, value: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    # The scores are recomputed, then one product for each of four gradients: 5 products to the forward's 2.
    return _attention(query, key, value) * 5 // 2


# A convolution does 2 FLOPs for each element of its output and each weight (or nonzero) of that element's channel;
# its two gradients do the same.
def _convolution(y: tuple, weights: int) -> int:
    return 2 * prod(y) // y[1] * weights


ours = torch.ops.shoestring


@_formula(ours.conv_forward)
def _(y: tuple, x: tuple, weight: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _convolution(y, prod(weight))


@_formula(ours.conv_input_gradient)
def _(x: tuple, y: tuple, weight: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _convolution(y, prod(weight))


@_formula(ours.conv_weight_gradient)
def _(weight: tuple, y: tuple, x: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _convolution(y, prod(weight))


@_formula(ours.sparse_conv2d)
def _(x: tuple, values: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _convolution(out_shape, prod(values))


@_formula(ours.sparse_conv2d_input_gradient)
def _(y: tuple, values: tuple, index: Any, size: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _convolution(y, prod(values)) * out_shape[1] // size[1]  # of some channels


@_formula(ours.sparse_conv2d_weight_gradient)
def _(values: tuple, x: tuple, y: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _convolution(y, prod(values))


# A linear layer does 2 FLOPs for each token and each weight, and so do its gradients.
@_formula([ours.linear_forward, ours.linear_input_gradient])
def _(out: tuple, given: tuple, weight: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * given[0] * prod(weight)


@_formula(ours.linear_weight_gradient)
def _(out: tuple, y: tuple, x: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * x[0] * prod(out)


# A sparse linear layer does 2 FLOPs for each token and each nonzero, and so do its gradients.
def _sparse_linear(tokens: tuple, values: tuple) -> int:
    return 2 * prod(tokens[:-1]) * prod(values)


@_formula([ours.sparse_linear, ours.sparse_linear_input_gradient])
def _(x: tuple, values: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _sparse_linear(x, values)


@_formula(ours.sparse_linear_weight_gradient)
def _(values: tuple, x: tuple, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return _sparse_linear(x, values)
