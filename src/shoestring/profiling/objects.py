"""The objects of Python and autograd around a traced step's tensors: on the heap, but not in a trace."""

from typing import Any, NamedTuple

from ..ledger import Ledger, Phase

# Of each storage alive at the peak: the headers of tensor and storage, 184 and 104 bytes, and what malloc rounds up. Of
# each node of autograd's graph, which is there though its tensors may be on disk: its edges, its saved variables and
# their hooks. By the update the graph is gone, but not its leaves: a parameter holds the block of the node that
# accumulates its gradient for good. And what a run has once: the optimizer's tables, the files' buffers. A pass that is
# recorded (taping/) has more of each storage: who watches for its end, and its place in the tape; 103 to 136 bytes in
# eight steps of four networks. benchmarks/budgets_kept.py fits nodes and leaves on some models, proves them on others.
STORAGE_BYTES, NODE_BYTES, LEAF_BYTES, ONCE_BYTES = 350, 1000, 700, 64 * 1024
RECORDED_BYTES = 140
# What oneDNN has on the heap while it runs a recurrent layer, past PyTorch's allocator and whatever the layer's size:
# 187 KB forward and 242 backward with AVX-512, 128 backward with AVX2, 5 KB more for each further layer or direction;
# less what is counted of storages and nodes in any case.
LIBRARY_BYTES = {"mkldnn_rnn_layer.default": 180_000, "mkldnn_rnn_layer_backward.default": 230_000}


class Fullest(NamedTuple):
    """What is there when a step needs most."""

    tensor_bytes: int
    storages: int
    nodes: int  # of autograd's graph
    leaves: int  # of a graph that is gone
    is_recorded: bool = False
    library_bytes: int = 0

    @property
    def needed(self) -> int:
        graph = NODE_BYTES * self.nodes + LEAF_BYTES * self.leaves
        storages = (STORAGE_BYTES + RECORDED_BYTES * self.is_recorded) * self.storages
        return self.tensor_bytes + storages + graph + self.library_bytes + ONCE_BYTES


def fullest(ledger: Ledger, nodes: int, leaves: int, is_recorded: bool) -> Fullest:
    """The moment at which a traced step needs most, objects included: with its graph, or in the update after it."""
    timeline = ledger.timeline()

    def peak(births: list[int], *graph: Any) -> Fullest:
        time = max(births, key=timeline.__getitem__)
        return Fullest(timeline[time], len(ledger.live_at(time)), *graph)

    with_graph, after_it, updated = list[int](), list[int](), list[int]()
    for entry in ledger.entries:
        if entry.phase == Phase.UPDATE:
            updated.append(entry.born)
            continue
        # An update in the backward pass, which goes on after it, has the graph beside it.
        (with_graph if entry.phase in (Phase.BACKWARD, Phase.RECOMPUTE) else after_it).extend(updated)
        updated.clear()
        with_graph.append(entry.born)
    after_it += updated
    library = max((LIBRARY_BYTES.get(entry.operation, 0) for entry in ledger.entries), default=0)
    moments = [peak(with_graph, nodes, 0, is_recorded, library)]
    if after_it:
        moments.append(peak(after_it, 0, leaves, False))
    return max(moments, key=lambda moment: moment.needed)
