"""Checks of a step's gradients: `all_finite(x)` and `squared_norm(x)`, in one pass and without temporaries.

On fake tensors the answers are those of a step that goes well: True, and 1.
"""

import torch
from torch import Tensor

from .calls import CODES
from .core import core, threads
from .define import define

_STRIP = 1 << 14  # of csrc/gradients.cpp


def _is_read(x: Tensor) -> bool:
    """Whether the core reads this tensor where it lies; the order of its values does not matter."""
    return x.dtype in CODES and torch.ops.aten.is_non_overlapping_and_dense(x)


def _reference_finite(x: Tensor) -> bool:
    # Multiplying by zero makes NaN of Inf and NaN, and of them alone; the sum of zeros is zero.
    return all(bool((part * 0).sum() == 0) for part in _parts(x))


def _reference_squares(x: Tensor) -> float:
    return sum(float(part.double().square().sum()) for part in _parts(x))


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    return x.reshape(-1).split(_STRIP)


def _finite(x: Tensor) -> bool:
    if not _is_read(x):
        return _reference_finite(x)
    return core.all_finite(x.data_ptr(), CODES[x.dtype], x.numel(), threads())


def _squares(x: Tensor) -> float:
    if not _is_read(x):
        return _reference_squares(x)
    totals = _totals(x)
    return core.squared_norm(x.data_ptr(), CODES[x.dtype], x.numel(), totals.data_ptr(), threads())


def _fake_finite(x: Tensor) -> bool:
    if not _is_read(x):
        x.new_empty(min(x.numel(), _STRIP))  # what the reference makes of a part
    return True


def _fake_squares(x: Tensor) -> float:
    _totals(x)
    return 1.0


def _totals(x: Tensor) -> Tensor:
    return x.new_empty(-(-x.numel() // _STRIP), dtype=torch.float64)


all_finite = define("all_finite(Tensor x) -> bool", reference=_reference_finite, fake=_fake_finite, compiled=_finite)
squared_norm = define(
    "squared_norm(Tensor x) -> float",
    reference=_reference_squares,
    fake=_fake_squares,
    compiled=_squares,
)
