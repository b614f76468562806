"""Sparse training: weights, gradients and optimizer state exist only at the nonzeros, which are rewired on the way.

The card is docs/techniques/sparsity.md.

Risk: quality is traded for memory, always. The paper's Table 3 has 93.95 ± 0.18% of WRN-28-2 with 30% nonzeros beside
94.28 ± 0.17% without, twice the spread over random seeds; ours, in short runs, lost some four points at 10%
(docs/results/figure3.small.md).
"""

import math
import warnings
from dataclasses import dataclass

from torch import nn

from ...errors import NoEffect, ShoestringError
from ...task import Task
from ..copies import copied
from ..technique import Effect, Risk, Technique
from .conversion import check_nonzero, from_dense
from .layer import SparseLayer
from .layers import SparseConv2d
from .readers import readers
from .rewiring import METHODS, MOST, Rewiring, Schedule
from .selection import select, words_of

FRACTION = 0.01377866  # of all positions, rewired at a time (the paper's table 5)
# Percent of nonzeros -> how many times the default fraction is rewired, and how many times as often: tables 8 and 9.
CONVOLUTIONAL = {50: (4, 0.5), 40: (1, 2), 30: (2, 0.5), 20: (2, 1), 10: (1, 0.5), 5: (1, 0.25)}
OTHER = {50: (4, 0.125), 40: (4, 0.125), 30: (4, 0.125), 20: (2, 0.25), 10: (1, 0.5), 5: (0.5, 0.5)}
LOST = "the paper's WRN-28-2 lost 0.3 points of accuracy at 30%, 0.6 at 20%; smaller networks lose more"


@dataclass(frozen=True)
class Settings:
    """`nonzero` is in percent; `layers` are names or types (with * and ?), by default those of `selection.select`.

    `fraction` of all positions is rewired at a time. Multipliers that are None are those of the paper's tables 8
    (if most positions are in convolutions) and 9, at the nearest density, and are fitted to few nonzeros and to short
    runs (see `rewiring`); explicit ones are used as they are, or refused. `updates` is the run length assumed when the
    trainer does not pass one. `positions` says which weights of a model that has values survive: the largest, unless
    random ones are asked for; those of a model on the meta device are drawn at random positions.
    """

    nonzero: float
    method: str = "dsr"
    layers: tuple[str, ...] = ()
    fraction: float = FRACTION
    fraction_multiplier: float | None = None
    frequency_multiplier: float | None = None
    updates: int = 100_000
    positions: str | None = None
    seed: int = 0


def options(task: Task) -> list[float]:
    """Percentages that the planner tries."""
    try:
        select(task.model)
    except ShoestringError as error:
        raise NoEffect(str(error)) from None
    return [50, 40, 30, 20, 10]


def risk(task: Task, nonzero: float) -> Risk:
    return Risk.APPROXIMATE


_ROUGHNESS = {50: 1, 40: 1, 30: 1, 20: 2}  # the paper's Table 3: at 10% and below more than two points are lost


def roughness(task: Task, nonzero: float) -> int:
    return _ROUGHNESS.get(int(nonzero), 4)


def effect(task: Task, nonzero: float) -> Effect:
    """The nonzeros and the smaller of two indices: one bit per position, or one byte per nonzero."""
    layers, density = select(task.model), nonzero / 100
    item_bytes = next(iter(layers.values())).weight.element_size()
    index = min(1 / 8, density) / item_bytes
    return Effect(density + index, density, density, density, density, layers=tuple(layers))


def evidence(task: Task, nonzero: float) -> str:
    on_meta = any(parameter.is_meta for parameter in task.model.parameters())
    drawn = "weights are drawn at random positions" if on_meta else "of the model's weights the largest are kept"
    return f"{drawn}; {LOST}"


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task with sparse layers. A model on the meta device is copied, a real one changed in place:
    it must not be in memory twice."""
    check_nonzero(settings.nonzero)
    _check_rewiring(settings)
    on_meta = any(parameter.is_meta for parameter in task.model.parameters())
    model = copied(task.model) if on_meta else task.model
    found = readers(task)
    from_dense(model, settings.nonzero, settings.layers, settings.positions, settings.seed, found)
    if found and not on_meta:
        warnings.warn(words_of(found), stacklevel=2)
    hooks = () if settings.method == "static" else (rewiring(model, settings),)
    return task.with_(model=model, after_update=(*task.after_update, *hooks))


TECHNIQUE = Technique(Settings, apply, options, risk, roughness, effect=effect, evidence=evidence)


def _check_rewiring(settings: Settings) -> None:
    if settings.method not in METHODS:
        raise ShoestringError(f"there is no rewiring {settings.method!r}: use one of {', '.join(METHODS)}")
    for name in ("fraction", "fraction_multiplier", "frequency_multiplier", "updates"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ShoestringError(f"{name}={value:g} cannot be rewired by: use a number above 0")


def rewiring(model: nn.Module, settings: Settings) -> Rewiring:
    """The hook that rewires a sparse model by the settings."""
    fraction, frequency = multipliers(model, settings.nonzero)
    if settings.fraction_multiplier is not None:
        fraction = settings.fraction_multiplier
    if settings.fraction_multiplier is not None or settings.fraction != FRACTION:
        _check_share(settings.fraction * fraction, settings.nonzero / 100)
    schedule = Schedule(frequency=frequency)
    if settings.frequency_multiplier is not None:
        schedule = Schedule(frequency=settings.frequency_multiplier, least=0)
    return Rewiring(settings.method, settings.fraction * fraction, schedule, settings.updates, seed=settings.seed)


def _check_share(fraction: float, density: float) -> None:
    """Refuses to rewire so many of the nonzeros at a time that training would not survive it."""
    if fraction > MOST * density:
        raise ShoestringError(
            f"a fraction of {fraction:.3g} of all positions is {fraction / density:.0%} of the nonzeros, which are "
            f"{density:.3g} of them: rewire at most {MOST * density:.3g} at a time"
        )


def multipliers(model: nn.Module, nonzero: float) -> tuple[float, float]:
    """A sparse model and its percent of nonzeros -> the paper's multipliers of fraction and frequency."""
    layers = [module for module in model.modules() if isinstance(module, SparseLayer)]
    convolutions = sum(layer.numel for layer in layers if isinstance(layer, SparseConv2d))
    table = CONVOLUTIONAL if 2 * convolutions > sum(layer.numel for layer in layers) else OTHER
    return table[min(table, key=lambda density: abs(density - nonzero))]
