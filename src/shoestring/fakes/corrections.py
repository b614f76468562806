"""Fakes in place of PyTorch's own: sparse ones keep the number of nonzeros, grouped products take FP32 on the CPU, the
statistics of 16-bit maps have their weight's precision, and batch norm's outputs lie as the CPU lays them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator call on fake tensors -> its result."""
    if func._overloadpacket is _GROUPED:
        return _grouped_product(*args, **kwargs)
    if func in _NORMS:
        return _normalised(func(*args, **kwargs), args)
    if func in _BATCH_NORMS:
        return _laid_out(func(*args, **kwargs), args[_BATCH_NORMS[func]])
    if func in _FAKES and args[-1].layout == torch.sparse_coo:
        return _FAKES[func](*args)
    return func(*args, **kwargs)


def coo(indices: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Indices and values -> a sparse tensor of the size of `like`."""
    return torch.sparse_coo_tensor(
        indices, values, like.shape, check_invariants=False, is_coalesced=like.is_coalesced()
    )


def _copy(sparse: Tensor) -> Tensor:
    return coo(torch.empty_like(sparse._indices()), torch.empty_like(sparse._values()), sparse)


def _mask(dense: Tensor, mask: Tensor) -> Tensor:
    return coo(torch.empty_like(mask._indices()), torch.empty_like(mask._values(), dtype=dense.dtype), mask)


_NORMS = {aten.native_layer_norm.default, aten.native_group_norm.default}
_BATCH_NORMS = {
    aten.native_batch_norm.default: 0,
    aten.native_batch_norm_backward.default: 1,
}  # where the map is


def _laid_out(made: tuple[Tensor | None, ...], x: Tensor) -> tuple[Tensor | None, ...]:
    """What batch norm makes of a map, or of its gradient: on a CPU contiguous or in channels_last, where its fake keeps
    any order of the map's dimensions. Between transposed tokens that is a copy for each norm."""
    first, form = made[0], suggest_memory_format(x)
    if first is None or first.device.type != "cpu" or first.is_contiguous(memory_format=form):
        return made
    return torch.empty_like(first, memory_format=form), *made[1:]


def _normalised(made: tuple[Tensor, Tensor, Tensor], args: tuple) -> tuple[Tensor, ...]:
    """A norm's output, mean and 1/deviation: on a CPU the last two are FP32 beside FP32 weights, which its fake misses.

    Its backward pass would be one that PyTorch refuses, and its scratch unknown.
    """
    weight = next((a for a in args[1:] if isinstance(a, Tensor)), None)
    out, *statistics = made
    if weight is None or weight.dtype == out.dtype or out.device.type != "cpu":
        return made
    return out, *(part.new_empty(part.shape, dtype=weight.dtype) for part in statistics)


_GROUPED = getattr(aten, "_grouped_mm", None)  # older versions have none


def _grouped_product(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Products of groups of rows or columns that end at `offsets`; PyTorch's fake refuses all but BF16."""
    rows, columns = a.shape[-2], b.shape[-1]
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():
        groups = (a.shape[0],) if a.dim() == 3 else (offsets.numel(),) if offsets is not None else ()
    return a.new_empty((*groups, rows, columns), dtype=out_dtype)


# How many indices coincide depends on the data: `_coalesce` is assumed to find none, which needs most.
_FAKES: dict[Any, Callable[..., Tensor]] = {
    aten.clone.default: _copy,
    aten._coalesce.default: _copy,
    aten.sparse_mask.default: _mask,
}
