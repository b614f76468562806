"""Activation checkpointing strategies: a graph -> how long each forward value stays, and which nodes are recomputed.

x is a residual block's input, h the output of a convolution inside it, r a normalised value after its ReLU.

    none         everything stays
    no-bn        x and h stay; r is recomputed on the fly when the backward pass needs it
    every-M      every M-th node's input stays (a node: an operation that saves something); the nodes between
                 are recomputed, and what they save stays while the backward pass is among them
    residual-M   the same with every M-th block's output; what comes after the last block is not recomputed
    residual-M*  as residual-M, but on entering the M blocks only their inputs are recomputed; then, block by
                 block from the last, h is recomputed and stays while in the block, r is recomputed on the fly

Only what a backward pass needs is recomputed, so the last convolution before a cut never is.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..errors import ShoestringError
from .graph import Graph, Kept

NAMES = "none, no-bn, every-M, residual-M, residual-M* (M = 1, 2, ...)"


@dataclass(frozen=True)
class Stay:
    """A value that is there when the backward pass comes to node `since`, until node `until` is done."""

    kept: Kept
    since: int
    until: int


@dataclass
class Schedule:
    """How long forward values stay; the nodes that are recomputed, and whether with saved statistics."""

    stays: list[Stay] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    saves_statistics: bool = True

    def keep(self, needs: dict[Kept, int], since: int, known: Iterable[Kept] = ()) -> None:
        """Values with the first node that needs each stay from node `since` on, except the `known` ones."""
        known = set(known)
        self.stays += [Stay(kept, since, first) for kept, first in needs.items() if kept not in known]


def schedule(graph: Graph, strategy: str) -> Schedule:
    """A strategy by name -> its schedule on `graph`."""
    match = re.fullmatch(r"(none|no-bn)|(every-|residual-)([1-9]\d{0,8})(\*?)", str(strategy))
    if match and match[1]:
        return SIMPLE[match[1]](graph)
    if match and match[2] + match[4] in COUNTED:
        return COUNTED[match[2] + match[4]](graph, int(match[3]))
    raise ShoestringError(f"there is no checkpoint strategy {strategy!r}: use one of {NAMES}")


def keep_everything(graph: Graph) -> Schedule:
    """none: each value stays from the forward pass until the first node that needs it is done."""
    plan = Schedule()
    plan.keep(graph.needs(graph.start, graph.end), since=graph.end)
    return plan


def keep_no_normalised(graph: Graph) -> Schedule:
    """no-bn: as none, with what cheap nodes make made on the fly."""
    plan = Schedule()
    plan.keep(lasting_needs(graph, graph.start, graph.end), since=graph.end)
    remake_cheap(graph, graph.start, graph.end, plan)
    return plan


def keep_every(graph: Graph, m: int) -> Schedule:
    """every-m: cuts before nodes m, 2m, ... of those that need something; all are recomputed as they were."""
    needing = [place for place, node in enumerate(graph.nodes) if node.needs]
    cuts = (before_moves(graph, place) for place in needing[m - 1 :: m])
    plan = Schedule(saves_statistics=False)
    keep_segments(graph, sorted({graph.start, *cuts, graph.end}), plan)
    return plan


def before_moves(graph: Graph, place: int) -> int:
    """The place of the first of the nodes right before `place` that only move elements, or `place` itself."""
    while graph.nodes[place - 1].moves:
        place -= 1
    return place


def keep_residual(graph: Graph, m: int) -> Schedule:
    """residual-m: cuts after every m-th residual block."""
    plan, cuts = Schedule(), block_cuts(graph, m)
    keep_segments(graph, cuts, plan)
    keep_tail(graph, cuts[-1], plan)
    return plan


def keep_segments(graph: Graph, cuts: Sequence[int], plan: Schedule) -> None:
    """The inputs of each segment stay from the forward pass until it is done; what it needs, while in it."""
    inputs: dict[Kept, int] = {}
    for start, end in pairwise(cuts):
        needs = graph.needs(start, end)
        sources, again = graph.redo(needs, start)
        plan.again += again
        plan.keep(needs, since=end - 1, known=sources)
        inputs = dict.fromkeys(sources, start) | inputs
    plan.keep(inputs, since=graph.end)


def keep_residual_recursively(graph: Graph, m: int) -> Schedule:
    """residual-m*: cuts after every m-th block; inside, block inputs first, then each block, r on the fly."""
    plan, cuts = Schedule(), block_cuts(graph, m)
    units = sorted({*block_cuts(graph, 1), *(fork + 1 for fork, _ in graph.blocks)})  # each block, the stem
    inputs: dict[Kept, int] = {}
    for start, end in pairwise(cuts):
        unit_inputs: dict[Kept, int] = {}
        for unit, unit_end in pairwise(cut for cut in units if start <= cut <= end):
            needs = lasting_needs(graph, unit, unit_end)
            sources, again = graph.redo(needs, unit)
            plan.again += again
            plan.keep(needs, since=unit_end - 1, known=sources)
            remake_cheap(graph, unit, unit_end, plan)
            unit_inputs = dict.fromkeys(sources, unit) | unit_inputs
        sources, again = graph.redo(unit_inputs, start)
        plan.again += again
        plan.keep(unit_inputs, since=end - 1, known=sources)
        inputs = dict.fromkeys(sources, start) | inputs
    plan.keep(inputs, since=graph.end)
    keep_tail(graph, cuts[-1], plan)
    return plan


def keep_tail(graph: Graph, start: int, plan: Schedule) -> None:
    """What follows the last block is not recomputed: the backward pass starts there, with everything in memory."""
    at_hand = {stay.kept for stay in plan.stays if stay.since == graph.end}
    plan.keep(graph.needs(start, graph.end), since=graph.end, known=at_hand)


def block_cuts(graph: Graph, m: int) -> list[int]:
    """The starts of segments of m blocks and of the tail; what is before the first block goes with it."""
    if not graph.blocks:
        raise ShoestringError("the model has no residual blocks for residual-M to cut at: use every-M")
    ends = [end for _, end in graph.blocks]
    return sorted({graph.start, *(end + 1 for end in ends[m - 1 :: m]), ends[-1] + 1})


def lasting_needs(graph: Graph, start: int, end: int) -> dict[Kept, int]:
    """The needs of nodes `start` to `end` - 1 that cheap nodes do not make on the fly."""
    return {kept: first for kept, first in graph.needs(start, end).items() if kept.node not in graph.cheap}


def remake_cheap(graph: Graph, start: int, end: int, plan: Schedule) -> None:
    """Adds to `plan` what cheap nodes make on the fly for the backward passes of nodes `start` to `end` - 1.

    A node's output and mask are made together when the backward pass comes to the last node that reads
    either, and each stays until the first that does.
    """
    needs = {kept: first for kept, first in graph.needs(start, end).items() if kept.node in graph.cheap}
    last = {kept.node: place for place in range(start, end) for kept in graph.nodes[place].needs}
    plan.stays += [Stay(kept, last[kept.node], first) for kept, first in needs.items()]
    for node in {kept.node for kept in needs}:
        plan.again += cheap_chain(graph, node)


def cheap_chain(graph: Graph, node: int) -> list[int]:
    """A cheap node and the cheap ones that it follows: a ReLU and its normalisation."""
    chain = [node]
    while (earlier := graph.nodes[chain[-1]].inputs[0]) in graph.cheap:
        chain.append(earlier)
    return chain


SIMPLE: dict[str, Callable[[Graph], Schedule]] = {"none": keep_everything, "no-bn": keep_no_normalised}
COUNTED: dict[str, Callable[[Graph, int], Schedule]] = {
    "every-": keep_every,
    "residual-": keep_residual,
    "residual-*": keep_residual_recursively,
}
