"""The backward pass, node by node: what is in memory at each, where the peak is (rule 2), and FLOPs."""

import math
from collections import Counter, defaultdict

from ..ledger import Category, Ledger, Peak, Phase
from ..task import Task
from .graph import Graph, Kept, Node
from .storage import optimizer_copies, weights_of
from .strategies import Schedule, Stay


def write_weights(ledger: Ledger, task: Task, graph: Graph, nonzero: float, precision: str) -> None:
    """Writes model, gradients and optimizer state into the ledger."""
    copies = optimizer_copies(task)
    for weights in weights_of(task, graph, nonzero, precision):
        module = weights.name.rpartition(".")[0]
        ledger.birth(weights.value_bytes + weights.index_bytes, Category.MODEL, module)
        ledger.birth(weights.value_bytes, Category.GRADIENT, module)
        ledger.birth(copies * weights.value_bytes, Category.OPTIMIZER, module)


def write_activations(ledger: Ledger, graph: Graph, plan: Schedule, items: int, bits: int) -> Peak:
    """Writes what is in memory at each node of the backward pass into the ledger -> the peak (rule 2)."""
    arriving: dict[int, list[Stay]] = defaultdict(list)
    leaving: dict[int, list[int]] = defaultdict(list)
    for stay in sorted([*plan.stays, *gradients(graph)], key=lambda stay: stay.kept.node):
        arriving[stay.since].append(stay)

    def arrive(place: int, phase: Phase) -> None:
        for stay in arriving[place]:
            kept, node = stay.kept, graph.nodes[stay.kept.node]
            size = math.ceil(kept.elements * items * (kept.bits or bits) / (8 * graph.items))
            number = ledger.birth(size, category(kept, node), node.path, node.operation, phase)
            leaving[stay.until].append(number)

    arrive(graph.end, Phase.FORWARD)
    most: tuple[int, bool] = (-1, False)
    for place in range(graph.end - 1, graph.start - 1, -1):
        node = graph.nodes[place]
        arrive(place, Phase.BACKWARD)
        there = (ledger.live_bytes, bool(node.needs))  # of equals, one that the paper calls a node
        if there > most:
            most, peak = there, Peak(there[0], ledger.time, Phase.BACKWARD, node.path, node.operation)
        for number in leaving[place]:
            ledger.death(number)
    return peak


def category(kept: Kept, node: Node) -> Category:
    """The category of a tensor that is in memory in the backward pass."""
    if kept.what == "gradient":
        return Category.ACTIVATION_GRADIENT
    return Category.ACTIVATION if node.differentiable else Category.INPUT


def gradients(graph: Graph) -> list[Stay]:
    """How long the gradient with respect to each node's output is there.

    It is made by the backward pass of the node's last reader and is there until the node's own is done; a sum
    is a new tensor. An addition hands its gradient on, so one tensor may wait for several nodes, and is there
    once.
    """
    tensors: list[Kept] = []
    since: list[int] = []
    until: dict[int, int] = {}  # tensor -> the last node at which it is there
    waiting: dict[int, int] = {}  # node -> the tensor that is its output's gradient

    def make(node: int, place: int) -> None:
        waiting[node] = len(tensors)
        tensors.append(Kept(node, "gradient", graph.nodes[node].elements))
        since.append(place)

    make(graph.end - 1, graph.end - 1)
    for place in range(graph.end - 1, graph.start - 1, -1):
        until |= dict.fromkeys(waiting.values(), place)
        if (tensor := waiting.pop(place, None)) is None:
            continue
        node = graph.nodes[place]
        for earlier in (place for place in node.inputs if graph.nodes[place].differentiable):
            same_size = graph.nodes[earlier].elements == node.elements
            if node.shares_gradient and same_size and earlier not in waiting:
                waiting[earlier] = tensor
            else:
                make(earlier, place - 1)
    return [Stay(tensors[number], since[number], last) for number, last in until.items()]


def count_flops(graph: Graph, plan: Schedule, items: int) -> dict[str, float]:
    """FLOPs of a step over `items`; if a value has several readers, their gradients are added."""
    readers = Counter(earlier for node in graph.nodes for earlier in node.inputs)
    values = ((graph.nodes[place], count) for place, count in readers.items())
    sums = sum((count - 1) * node.elements for node, count in values if node.differentiable)
    forward = sum(node.forward_flops for node in graph.nodes)
    backward = sum(node.backward_flops for node in graph.nodes) + sums
    nodes_again = (graph.nodes[place] for place in plan.again)
    again = sum(node.again_flops if plan.saves_statistics else node.forward_flops for node in nodes_again)
    flops = {"forward": forward, "backward": backward, "recompute": again}
    scaled = {name: round(count * items / graph.items) for name, count in flops.items()}
    return scaled | {"ratio": (forward + backward + again) / (forward + backward)}
