"""Fakes of operators on sparse tensors that keep the number of nonzeros, which PyTorch's own fakes forget."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator call on fake tensors -> its result."""
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


# How many indices coincide is a matter of the data: `_coalesce` is taken to find none, which needs most.
_FAKES: dict[Any, Callable[..., Tensor]] = {
    aten.clone.default: _copy,
    aten._coalesce.default: _copy,
    aten.sparse_mask.default: _mask,
}
