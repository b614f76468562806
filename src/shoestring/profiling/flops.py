"""FLOPs of one operator call: PyTorch's own table, and what it lacks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """An operator call -> its floating-point operations (a multiply-add counts 2); 0 for operators not counted.

    Counted are matrix products, convolutions, attention and our own kernels: what remains is linear in the data.
    """
    formula: Callable | None = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _attention(query: tuple, key: tuple, value: tuple) -> int:
    batch, heads, queries, width = query
    keys = key[-2]
    return 2 * batch * heads * queries * keys * (width + value[-1])


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return _attention(query, key, value)


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _(grad, query, key, value, *args, out_shape=None, **kwargs) -> int:
    # The scores are made again, then one product for each of four gradients: 5 products against the forward's 2.
    return _attention(query, key, value) * 5 // 2
