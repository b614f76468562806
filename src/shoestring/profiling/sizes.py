"""Sizes that depend on values: known from the values beside the fakes, or bounded from above.

The routing of a mixture of experts is learned, so that no trace knows it: each expert is assumed to get all tokens.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from .values import LIMIT, Values

aten = torch.ops.aten


def made_by(func: Any, args: tuple, kwargs: dict, values: Values, call: Callable) -> tuple[Any, bool] | None:
    """A call whose result's size depends on values -> the result, and whether it is exact; None if it is not known.

    `call` makes another call on fakes in its place.
    """
    if func is aten.index.Tensor:
        return aten.index.Tensor(args[0], _by_number(args[1], call)), True  # `call` told what is bounded
    if func is aten._pack_padded_sequence.default:
        return _pack_padded_sequence(values, call, *args)
    results = values.run(func, args, kwargs)
    if results is not None:
        largest = max(results, key=lambda result: sum(part.numel() for part in _flat(result)))
        return _fakes(largest, values), len(results) == 1
    bound = _BOUNDS.get(func)
    return bound(values, *args, **kwargs) if bound else None


def _by_number(indices: list[Tensor | None], call: Callable) -> list[Tensor | None]:
    """Masks among indices -> the positions that they select."""
    numbers: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            numbers += call(aten.nonzero.default, (), (index,)).unbind(1)
        else:
            numbers.append(index)
    return numbers


def _fakes(real: Any, values: Values) -> Any:
    """The real results of an operator -> fakes of the same sizes, with the values."""
    if isinstance(real, Tensor):
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        values.keep(fake, [real])
        return fake
    return tuple(_fakes(part, values) for part in real) if isinstance(real, list | tuple) else real


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [part for part in result if isinstance(part, Tensor)]


# Each returns the result, and whether it is exact: a size may be known even if the rest is not.
def _nonzero(values: Values, x: Tensor) -> tuple[Tensor, bool]:
    """As if no element were zero: the most that can be found."""
    if x.numel() > LIMIT or not x.dim():
        return x.new_empty((x.numel(), x.dim()), dtype=torch.int64), False
    with no_dispatch():
        found = torch.ones(x.shape, dtype=torch.bool).nonzero()
    return _fakes(found, values), False


def _masked_select(values: Values, x: Tensor, mask: Tensor) -> tuple[Tensor, bool]:
    size, known = torch.broadcast_shapes(x.shape, mask.shape).numel(), values.of(mask)
    if known is None:
        return x.new_empty(size), False
    with no_dispatch():
        picked = max(int(value.sum()) for value in known)
    return x.new_empty(picked * size // max(1, mask.numel())), len(known) == 1


def _unique(values: Values, x: Tensor, *how: Any, **more: Any) -> tuple[Any, bool]:
    counts = x.new_empty(x.numel(), dtype=torch.int64)
    return (x.new_empty(x.numel()), torch.empty_like(x, dtype=torch.int64), counts), False


def _bincount(
    values: Values, x: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> tuple[Tensor, bool] | None:
    """If the caller says how many there are; else there is no bound."""
    kind = torch.int64 if weights is None else torch.float64
    return (x.new_empty(minlength, dtype=kind), False) if minlength else None


def _ctc_loss(
    values: Values, scores: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor, *how: Any
) -> tuple[Any, bool]:
    """The losses, and the table for the backward pass: a row for each step, two columns for each label and one more."""
    known = values.of(lengths)
    with no_dispatch():
        longest = int(known[0].max()) if known else targets.shape[-1]
    batch = scores.shape[1] if scores.dim() == 3 else 1
    return (scores.new_empty(batch), scores.new_empty(batch, scores.shape[0], 2 * longest + 1)), known is not None


def _pack_padded_sequence(
    values: Values, call: Callable, x: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Any, bool]:
    """The steps of all sequences one after another, and how many sequences have each step; as if all were whole, where
    the lengths are not known. The second is real: PyTorch's recurrent layers read it without an operator."""
    x = x.transpose(0, 1) if batch_first else x
    known = values.of(lengths)
    with no_dispatch():
        given = known[-1] if known else torch.full((x.shape[1],), x.shape[0])
        sizes = aten._pack_padded_sequence(torch.empty(x.shape[:2]), given, False)[1]
        counts = sizes.tolist()
    parts, start = [], 0
    for size, run in groupby(counts):  # PyTorch copies what is not contiguous, and then puts it together
        stop = start + len(list(run))
        part = x[start:stop, :size]
        if not part.is_contiguous():
            part = call(aten.clone.default, (), (part,), {"memory_format": torch.contiguous_format})
        parts.append(part.flatten(0, 1))
        start = stop
    return (call(aten.cat.default, (), (parts,)), sizes), known is not None and len(known) == 1


_BOUNDS: dict[Any, Callable[..., tuple[Any, bool] | None]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.bincount.default: _bincount,
    aten._ctc_loss.Tensor: _ctc_loss,
}
