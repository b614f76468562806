"""About how much memory a combination of techniques needs, from one trace that others share.

A trace of the whole batch with a precision and a checkpoint strategy tells at each moment what is alive of weights,
gradients, optimizer state and of what grows with the batch. The other techniques make each of these smaller by a known
factor; the peak of the scaled timeline is the estimate. It decides which plans are worth a trace of their own.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..ledger import Category, Entry, Ledger
from ..profiling import Profile
from ..techniques.lean_optimizer import USING_UP

_FIXED = {Category.MODEL, Category.GRADIENT, Category.OPTIMIZER}
_MOVING = {Category.ACTIVATION, Category.ACTIVATION_GRADIENT, Category.WORKSPACE}


class Footprint:
    """The timelines of one traced step of the whole batch; `sparse` names the layers that sparsity would change."""

    def __init__(self, traced: Profile, sparse: Iterable[str], item_bytes: int) -> None:
        self.length, self.item_bytes, names = traced.ledger.time + 1, item_bytes, set(sparse)
        fixed = [e for e in traced.ledger.entries if e.category in _FIXED]
        kept = [e for e in fixed if e.category != Category.OPTIMIZER or e.died is None]
        self._totals = {
            (category, where): sum(e.bytes for e in kept if e.category == category and (e.module in names) == where)
            for category in _FIXED
            for where in (True, False)
        }
        brief = [e for e in fixed if e.category == Category.OPTIMIZER and e.died is not None]
        self._gradients = self._timeline(e for e in fixed if e.category == Category.GRADIENT)
        self._inputs = self._timeline(e for e in traced.ledger.entries if e.category == Category.INPUT)
        self._update = self._timeline(brief)  # what PyTorch's optimizers make and drop; lean ones do not
        self._moving = self._timeline(e for e in traced.ledger.entries if e.category in _MOVING)

    def _timeline(self, entries: Iterable[Entry]) -> np.ndarray:
        part = Ledger()
        part.time, part.entries = self.length - 1, list(entries)
        return np.array(part.timeline(), float)

    def peak(self, settings: Mapping[str, Any], share: float) -> float:
        """Settings of the other techniques, and the largest microbatch's share of the batch -> bytes at the peak."""
        density, optimizer = settings.get("nonzero", 100) / 100, str(settings.get("optimizer", ""))
        index = min(1 / 8, density) / self.item_bytes if density < 1 else 0.0  # a bitmap, or a byte a nonzero
        narrow = 1.02 / self.item_bytes if "8bit" in optimizer else 1.0
        weights = self._scaled(Category.MODEL, density + index)
        state = narrow * self._scaled(Category.OPTIMIZER, density)
        gradients = self._scaled(Category.GRADIENT, density)
        lasting: Any = gradients  # of the microbatches before
        if USING_UP in optimizer:
            lasting = 0.0
        elif share == 1:
            whole = self._scaled(Category.GRADIENT, 1.0)
            lasting = self._gradients * (gradients / whole if whole else 1.0)
        update = 0.0 if optimizer else density * self._update
        return float((weights + state + lasting + update + self._inputs + share * self._moving).max())

    def _scaled(self, category: Category, density: float) -> float:
        return density * self._totals[category, True] + self._totals[category, False]
