"""Estimates the memory of a combination of techniques from a trace that many combinations share.

A trace of the whole batch shows the live bytes of weights, gradients, optimizer state and of everything that grows with
the batch, at each moment. Techniques that have an `Effect` scale these by known factors; the peak of the scaled
timeline is the estimate. It decides which plans are worth a trace of their own.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from ..ledger import BUCKET, Category, Entry, Ledger, Phase
from ..profiling import Profile
from ..techniques.technique import Effect

_FIXED = {Category.MODEL: "weights", Category.GRADIENT: "gradients", Category.OPTIMIZER: "state"}
_MOVING = {Category.ACTIVATION, Category.ACTIVATION_GRADIENT, Category.WORKSPACE}


def forward_start(traced: Profile) -> int:
    """The time at which the forward pass of a trace starts."""
    return min((entry.born for entry in traced.ledger.entries if entry.phase is Phase.FORWARD), default=0)


class Footprint:
    """The timelines of a brief trace of the whole batch; optimizer state exists when its forward pass starts."""

    def __init__(self, traced: Profile) -> None:
        start = forward_start(traced)
        self.length = traced.ledger.time + 1
        entries = {category: [e for e in traced.ledger.entries if e.category == category] for category in Category}
        brief = [e for e in entries[Category.OPTIMIZER] if not e.alive_at(start)]
        self._gradients = self._timeline(entries[Category.GRADIENT])
        self._inputs = self._timeline(entries[Category.INPUT])
        self._update = self._timeline(brief)  # temporaries of an update
        self._moving = self._timeline(e for category in _MOVING for e in entries[category])
        own = [e for e in entries[Category.GRADIENT] if e.operation != BUCKET]  # buckets hold the same ones once more
        most_gradients = int(self._timeline(own).argmax())
        self._lasting = {
            Category.MODEL: entries[Category.MODEL],
            Category.GRADIENT: [e for e in own if e.alive_at(most_gradients)],
            Category.OPTIMIZER: [e for e in entries[Category.OPTIMIZER] if e.alive_at(start)],
        }
        self._totals: dict[tuple, tuple[int, int]] = {}

    def _timeline(self, entries: Iterable[Entry]) -> np.ndarray:
        part = Ledger()
        part.time, part.entries = self.length - 1, list(entries)
        return np.array(part.timeline(), float)

    def fixed(self, effects: Sequence[Effect]) -> float:
        """Bytes of weights and optimizer state under these effects: whatever the batch, a step needs them."""
        return self._scaled(Category.MODEL, effects) + self._scaled(Category.OPTIMIZER, effects)

    def gradients(self, effects: Sequence[Effect]) -> float:
        """Bytes of all gradients under these effects."""
        return self._scaled(Category.GRADIENT, effects)

    @property
    def moving(self) -> float:
        """The peak of the bytes that grow with the batch."""
        return float(self._moving.max())

    def peak(self, effects: Sequence[Effect]) -> float:
        """Effects -> the estimated peak in bytes."""
        share = prod(effect.share for effect in effects)
        lasting: Any = self.gradients(effects)  # accumulated over microbatches
        if share == 1 and lasting:
            lasting = self._gradients * (lasting / self.gradients(()))
        update = prod(effect.update for effect in effects) * self._update
        return float((self.fixed(effects) + lasting + update + self._inputs + share * self._moving).max())

    def _scaled(self, category: Category, effects: Sequence[Effect]) -> float:
        """The bytes of a category under all effects."""
        factors = [(getattr(effect, _FIXED[category]), effect.layers) for effect in effects]
        layers = next((layers for _, layers in factors if layers), ())
        inside, outside = self._split(category, layers)
        everywhere = prod(factor for factor, where in factors if not where)
        return everywhere * (inside * prod(factor for factor, where in factors if where) + outside)

    def _split(self, category: Category, layers: tuple[str, ...]) -> tuple[int, int]:
        """Bytes of a category inside and outside these layers."""
        if (category, layers) not in self._totals:
            names, entries = set(layers), self._lasting[category]
            inside = sum(e.bytes for e in entries if e.module in names)
            self._totals[category, layers] = inside, sum(e.bytes for e in entries) - inside
        return self._totals[category, layers]
