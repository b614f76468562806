"""The graph that the paper's rules apply to: operations in forward order and what each saves for backward."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Kept:
    """A tensor that a backward pass may need, made by `node`; `bits` per element, or None: the precision's."""

    node: int
    what: str
    elements: int
    bits: int | None = None


@dataclass(frozen=True)
class Node:
    """One operation. Sizes and FLOPs are those of the traced batch; `inputs` are indices of earlier nodes."""

    path: str
    operation: str
    inputs: tuple[int, ...]
    elements: int
    block: str = ""  # the element of a list of modules that it belongs to
    bits: int | None = None  # per element of its output, if not the precision's
    needs: tuple[Kept, ...] = ()  # what its backward pass reads
    parameters: tuple[str, ...] = ()
    forward_flops: int = 0
    backward_flops: int = 0
    again_flops: int = 0  # of a second forward pass that has the first one's statistics
    moves: bool = False  # moves elements without arithmetic: views, padding, every second pixel
    not_padding: int | None = None  # of a move's elements
    shares_gradient: bool = False  # its inputs' gradient is its output's, the same tensor: an addition
    normalises: bool = False
    differentiable: bool = True  # false for the batch itself

    @property
    def filled(self) -> int:
        """The elements of its output that are not padding."""
        return self.elements if self.not_padding is None else self.not_padding

    def output(self, place: int) -> Kept:
        """Its output as a saved tensor; `place` is its own index."""
        return Kept(place, "output", self.elements, self.bits)


def modules_around(path: str) -> Iterator[str]:
    """The paths of a module and those that it is part of: "a.b" -> "a", "a.b"."""
    return accumulate(path.split("."), "{}.{}".format)


@dataclass(frozen=True)
class Graph:
    """Nodes in forward order, first the tensors of the batch, and the number of items in the traced batch."""

    nodes: tuple[Node, ...]
    items: int

    @cached_property
    def start(self) -> int:
        """The first node that computes something."""
        return next(place for place, node in enumerate(self.nodes) if node.differentiable)

    @property
    def end(self) -> int:
        return len(self.nodes)

    @cached_property
    def cheap(self) -> frozenset[int]:
        """Normalisations and the ReLUs that follow them: what no-bn and residual-m* recompute on the fly."""
        cheap: set[int] = set()
        for place, node in enumerate(self.nodes):
            if node.normalises or (node.operation == "relu" and node.inputs[0] in cheap):
                cheap.add(place)
        return frozenset(cheap)

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Residual blocks as (node whose output is the block's input, last node of the block).

        A block is an element of a list of modules with an addition that joins two ways from one value; an
        addition outside any list ends a block of its own.
        """
        last = {module: place for place, node in enumerate(self.nodes) for module in modules_around(node.path)}
        blocks: dict[int, int] = {}  # last node -> input
        for place, node in enumerate(self.nodes):
            if node.shares_gradient and node.elements and (fork := self._fork(node.inputs)) is not None:
                blocks.setdefault(last[node.block] if node.block else place, fork)
        return tuple((fork, end) for end, fork in blocks.items())

    def _fork(self, ends: tuple[int, ...]) -> int | None:
        """The latest node that both `ends` come from; None if there is none, or it is the batch."""
        if len(ends) < 2:
            return None
        leads_to = {end: {end} for end in ends}
        frontier = sorted(-end for end in leads_to)
        while frontier:
            place = -heapq.heappop(frontier)
            if len(leads_to[place]) == len(ends):
                return place if self.nodes[place].differentiable else None
            for earlier in self.nodes[place].inputs:
                if earlier not in leads_to:
                    heapq.heappush(frontier, -earlier)
                leads_to.setdefault(earlier, set()).update(leads_to[place])
        return None

    def needs(self, start: int, end: int) -> dict[Kept, int]:
        """The tensors that the backward passes of nodes `start` to `end` - 1 need -> the first node that needs each."""
        first: dict[Kept, int] = {}
        for place in range(start, end):
            for kept in self.nodes[place].needs:
                first.setdefault(kept, place)
        return first

    def redo(self, wanted: Iterable[Kept], start: int) -> tuple[set[Kept], set[int]]:
        """To recompute `wanted` from values older than node `start` -> (those values, the nodes to run).

        Elements that were only moved come from the value that they were moved from.
        """
        sources: set[Kept] = set()
        nodes: set[int] = set()
        waiting = [kept.node for kept in wanted]
        while waiting:
            place = waiting.pop()
            node = self.nodes[place]
            if place < start and not node.moves:
                sources.add(node.output(place))
            elif place not in nodes:
                nodes.add(place)
                waiting += node.inputs
        return sources, nodes
