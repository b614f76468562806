"""`optimal`: unequal regions, chosen by a dynamic programme to recompute the least within a budget.

A chain of blocks is cut into regions from front to back. Of each region it is decided what happens to it:

| choice | kept until the region's backward pass | while in its backward pass | computed again |
|---|---|---|---|
| keep | its blocks' inputs and insides | nothing more | nothing |
| once | its input | all its blocks' inputs and insides | the region |
| nested | its input | its blocks' inputs, and one block's inside | the region, twice but for its last block |

The backward pass of a region sees what is kept of all regions before it, so the state of the programme is (next block,
bytes kept so far); bytes are counted in 1/256 of the budget, rounded up.
"""

from dataclasses import dataclass

import numpy as np

from ...errors import ShoestringError
from ...units import format_bytes

GRAIN = 256


@dataclass(frozen=True)
class BlockCost:
    """A block: bytes of its input, bytes that it saves inside, and its forward FLOPs."""

    name: str
    input_bytes: int
    inside_bytes: int
    flops: float


@dataclass(frozen=True)
class Segment:
    """Blocks `start` to `stop`; `choice` is keep, once or nested."""

    start: int
    stop: int
    choice: str


def choose_segments(blocks: list[BlockCost], budget_bytes: float) -> list[Segment]:
    """A chain of blocks and a budget for what is saved -> the segments with least recomputation that fit it."""
    best, moves = _programme(blocks, budget_bytes)
    if not np.isfinite(best[0][0]):
        least = least_bytes(blocks)
        raise ShoestringError(
            f"optimal checkpointing of {len(blocks)} blocks needs at least {format_bytes(least)} of activations, "
            f"more than {format_bytes(budget_bytes)}: give it a larger budget"
        )
    segments, block, used = [], 0, 0
    while block < len(blocks):
        stop, choice, used_after = moves[block][used]
        segments.append(Segment(block, stop, choice))
        block, used = stop, used_after
    return segments


def least_bytes(blocks: list[BlockCost]) -> float:
    """The smallest budget that some choice of segments fits, to 1/128."""
    low, high = 0.0, float(sum(b.input_bytes + b.inside_bytes for b in blocks))
    while high - low > high / 128:
        middle = (low + high) / 2
        fits = np.isfinite(_programme(blocks, middle)[0][0][0])
        low, high = (low, middle) if fits else (middle, high)
    return high


def _programme(blocks: list[BlockCost], budget: float) -> tuple[list[np.ndarray], list[dict]]:
    """best[i][used]: the FLOPs to recompute for blocks i and on; moves[i][used]: the segment that attains it."""
    count, unit = len(blocks), max(budget, 1) / GRAIN
    inputs, insides = (np.array([getattr(b, f) for b in blocks], float) for f in ("input_bytes", "inside_bytes"))
    flops = np.array([b.flops for b in blocks])
    best = [np.full(GRAIN + 1, np.inf) for _ in range(count)] + [np.zeros(GRAIN + 1)]
    moves: list[dict[int, tuple]] = [{} for _ in range(count)]
    for i in reversed(range(count)):
        kept = int(np.ceil(inputs[i] / unit))
        _offer(best, moves, i, i + 1, "keep", int(np.ceil((inputs[i] + insides[i]) / unit)), 0, 0.0)
        all_inputs = all_insides = work = largest = 0.0
        for stop in range(i + 1, count + 1):
            all_inputs += inputs[stop - 1]
            all_insides += insides[stop - 1]
            largest = max(largest, insides[stop - 1])
            again, work = work, work + flops[stop - 1]
            nested = int(np.ceil((all_inputs + largest) / unit))
            if nested > GRAIN:
                break
            _offer(best, moves, i, stop, "once", kept, int(np.ceil((all_inputs + all_insides) / unit)), work)
            if stop > i + 1:
                _offer(best, moves, i, stop, "nested", kept, nested, work + again)
    return best, moves


def _offer(
    best: list[np.ndarray], moves: list[dict], i: int, stop: int, choice: str, kept: int, meanwhile: int, work: float
) -> None:
    """Blocks i to stop as one segment, for every number of units used before it: taken if it is better."""
    room = GRAIN - max(kept, meanwhile)
    if room < 0:
        return
    used = np.arange(room + 1)
    offered = work + best[stop][used + kept]
    better = np.nonzero(offered < best[i][used])[0]
    best[i][better] = offered[better]
    moves[i].update({int(u): (stop, choice, int(u) + kept) for u in better})
