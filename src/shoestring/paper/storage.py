"""Bytes of parameters, gradients and optimizer state, dense or sparse (rules 3 to 5)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ..errors import ShoestringError
from ..task import SGD, Adam, Task
from .graph import Graph

BITS = {"fp32": 32, "fp16": 16}


@dataclass(frozen=True)
class Weights:
    """One tensor of the model: bytes of its values, and of the index that gradient and momentum share."""

    name: str
    value_bytes: int
    index_bytes: int = 0


def weights_of(task: Task, graph: Graph, nonzero: float, precision: str) -> Iterator[Weights]:
    """Every parameter of the task's model, and every buffer that is not of integers -> its bytes.

    Buffers (running statistics, position tables) count like parameters, once for each module that uses them:
    that is what the paper's figures show (rule 5).
    """
    sparse = sparsified(graph) if nonzero < 100 else set()
    full = {name for node in graph.nodes if node.operation == "batch_norm" for name in node.parameters}
    buffers = ((n, b) for n, b in task.model.named_buffers(remove_duplicate=False) if b.is_floating_point())
    for name, tensor in [*task.model.named_parameters(), *buffers]:
        bits = BITS["fp32" if name in full else precision]
        if name in sparse:
            yield sparse_weights(name, tensor, nonzero, bits)
        else:
            yield Weights(name, tensor.numel() * bits // 8)


def sparse_weights(name: str, tensor: Tensor, nonzero: float, bits: int) -> Weights:
    """A weight as a matrix of its outputs (an embedding's: words) by the rest, in compressed rows."""
    rows, size = tensor.shape[0], tensor.numel()
    count = round(size * nonzero / 100)
    index_bits = count * bits_to_tell(size // rows) + (rows + 1) * bits_to_tell(size + 1)
    return Weights(name, count * bits // 8, math.ceil(index_bits / 8))


def bits_to_tell(values: int) -> int:
    """ceil(log2(values)): the bits that tell `values` values apart."""
    return (values - 1).bit_length()


def sparsified(graph: Graph) -> set[str]:
    """The weights that are made sparse.

    In a network of convolutions (section 3.1): those of every convolution but the one that reads the batch.
    In the Transformer (section 4.3): those of linear layers and embeddings, but not of the projections that
    make kernels, whose output goes to a softmax.
    """
    to_softmax = {place for node in graph.nodes if node.operation == "softmax" for place in node.inputs}
    convolutions = [node for node in graph.nodes if node.operation == "conv"]
    layers = [node for node in convolutions if graph.nodes[node.inputs[0]].differentiable] or [
        node
        for place, node in enumerate(graph.nodes)
        if node.operation in ("linear", "embedding") and place not in to_softmax and not convolutions
    ]
    return {name for node in layers for name in node.parameters if not name.endswith("bias")}


def optimizer_copies(task: Task) -> int:
    """How many tensors of a parameter's size the optimizer's state holds, the gradient not among them."""
    match task.optimizer:
        case SGD(momentum=momentum):
            return int(momentum != 0)
        case Adam():
            return 2
    raise ShoestringError("the paper's rules know two optimizers: give the task SGD(...) or Adam(...)")
