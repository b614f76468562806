"""What each operation saves for its backward pass, and its FLOPs, as the paper counts them (rule 1).

Operations that only reshape save nothing. For the Transformer the count follows what PyTorch 1.0 stored:
layer norm saves its input and the normalised values, dropout a byte per element, attention its weights before
and after dropout.

FLOPs: a multiplication and an addition are two. The backward pass of a product costs as much as the forward
pass for each factor that has a gradient. An element of a normalisation costs 8 forward (mean 1, variance 3,
normalise 2, scale and shift 2), 9 backward (normalise once more 2, sums for the shift 1 and the scale 2, the
input's gradient 4), and 2 when recomputed with saved statistics, which fold into one scale and one shift.
If a value has several readers, their gradients are added (`sweep.count_flops`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph import Kept, Node


@dataclass(frozen=True)
class Call:
    """One call of a torch function, as a rule sees it."""

    place: int  # of the node that it will be
    path: str
    block: str
    inputs: tuple[tuple[int, Node], ...]  # the nodes that its arguments come from, and their places
    parameters: tuple[str, ...]
    args: tuple
    kwargs: dict[str, Any]
    output: Tensor

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def size(self) -> int:
        return self.output.numel()

    def input(self, number: int = 0) -> Kept:
        place, node = self.inputs[number]
        return node.output(place)

    def own(self, what: str, elements: int, bits: int | None = None) -> Kept:
        """A tensor that the operation itself makes and saves."""
        return Kept(self.place, what, elements, bits)

    def node(
        self, operation: str, needs: tuple[Kept, ...] = (), forward: int = 0, backward: int = 0, **fields: Any
    ) -> Node:
        """The node of this call; `forward` and `backward` are FLOPs.

        Without a parameter, or an input that comes from one, there is no gradient and nothing to need.
        """
        differentiable = bool(self.parameters) or any(node.differentiable for _, node in self.inputs)
        return Node(
            path=self.path,
            block=self.block,
            operation=operation,
            inputs=tuple(place for place, _ in self.inputs),
            elements=self.size if self.output.dim() else 0,  # the loss itself has no size to speak of
            needs=needs if differentiable else (),
            parameters=self.parameters,
            forward_flops=forward,
            backward_flops=backward if differentiable else 0,
            differentiable=differentiable,
            **{"again_flops": forward} | fields,
        )


Rule = Callable[[Call], Node | tuple[Node, Node]]


def weighted(operation: str) -> Rule:
    """Convolution and linear need their input."""

    def rule(call: Call) -> Node:
        flops = 2 * call.size * call.argument(1, "weight")[0].numel()
        factors = 1 + call.inputs[0][1].differentiable
        return call.node(operation, (call.input(),), flops, factors * flops)

    return rule


def embedding(call: Call) -> Node:
    """An embedding needs the ids; its backward pass adds rows up."""
    return call.node("embedding", (call.input(),), 0, call.size)


def matrix_product(call: Call) -> Node:
    """A product of two activations needs both; zeros that padding put into the first are not multiplied."""
    (_, left), _ = call.inputs
    flops = 2 * left.filled * call.output.shape[-1]
    return call.node("matmul", (call.input(0), call.input(1)), flops, 2 * flops)


def batch_norm(call: Call) -> Node:
    """Batch norm needs its input; the batch's statistics are too few to count."""
    size = call.size
    return call.node("batch_norm", (call.input(),), 8 * size, 9 * size, again_flops=2 * size, normalises=True)


def layer_norm(call: Call) -> Node:
    """Layer norm keeps two maps: its input, and the normalised values before scale and shift."""
    size = call.size
    needs = (call.input(), call.own("normalised", size))
    return call.node("layer_norm", needs, 8 * size, 9 * size, again_flops=2 * size, normalises=True)


def relu(call: Call) -> Node:
    """ReLU saves a bit per element, in addition to the next layer's input."""
    return call.node("relu", (call.own("mask", call.size, bits=1),), call.size, call.size)


def dropout(call: Call) -> Node:
    """Dropout saves a byte per element; when off it does nothing."""
    if not call.argument(1, "p", 0.5) or not call.argument(2, "training", True):
        return move(call)
    return call.node("dropout", (call.own("mask", call.size, bits=8),), call.size, call.size)


def softmax(call: Call) -> Node:
    """Softmax needs its output."""
    return call.node("softmax", (call.own("output", call.size),), 5 * call.size, 4 * call.size)


def attention(call: Call) -> Node:
    """Attention needs queries, keys, values, weights; with dropout a byte mask and what is left too."""
    query, key = call.argument(0, "query"), call.argument(1, "key")
    weights = query.numel() // query.shape[-1] * key.shape[-2]
    needs = [*(call.input(number) for number in range(3)), call.own("weights", weights)]
    if call.argument(4, "dropout_p", 0.0):
        needs += [call.own("mask", weights, bits=8), call.own("dropped", weights)]
    products = 2 * weights * (query.shape[-1] + call.output.shape[-1])
    return call.node("attention", tuple(needs), products + 6 * weights, 2 * products + 6 * weights)


def log_softmax(call: Call) -> Node:
    """Log-softmax needs its output."""
    return call.node("log_softmax", (call.own("output", call.size),), 4 * call.size, 3 * call.size)


def nll_loss(call: Call) -> Node:
    """The mean of the labels' log-probabilities needs nothing."""
    return replace(call, inputs=call.inputs[:1]).node("loss")


def add(call: Call) -> Node:
    return call.node("add", forward=call.size, shares_gradient=True)


def multiply(call: Call) -> Node:
    """A product with a constant needs nothing; one of two activations needs both."""
    needs = tuple(call.input(number) for number in range(len(call.inputs))) if len(call.inputs) > 1 else ()
    return call.node("multiply", needs, call.size, call.size * len(call.inputs))


def move(call: Call) -> Node:
    """Views, padding, slices: no arithmetic, nothing kept."""
    return call.node("move", moves=True, not_padding=min(call.size, call.inputs[0][1].filled))


def pool(call: Call) -> Node:
    """An average needs nothing."""
    size = call.inputs[0][1].elements
    return call.node("pool", forward=size, backward=size)


def cross_entropy(call: Call) -> Node | tuple[Node, Node]:
    """The loss needs the log-softmax of the scores; with smoothed labels it is two nodes.

    There fairseq's criterion still held the scores while the log-softmax and its gradient were there: three
    tensors of the vocabulary's size.
    """
    call = replace(call, inputs=call.inputs[:1])  # labels are not counted
    scores = call.inputs[0][1].elements
    log_softmax = call.own("log_softmax", scores)
    if not call.argument(7, "label_smoothing", 0.0):
        return call.node("loss", (log_softmax,), 4 * scores, 3 * scores)
    softmax = call.node("log_softmax", (call.input(), log_softmax), 4 * scores, 3 * scores)
    loss = call.node("loss", (), 2 * scores, 2 * scores)
    return replace(softmax, elements=scores), replace(loss, inputs=(call.place,))


def a_rule_for(rule: Rule, *functions: Callable) -> dict[Callable, Rule]:
    return dict.fromkeys(functions, rule)


RULES: dict[Callable, Rule] = {
    F.conv2d: weighted("conv"),
    F.linear: weighted("linear"),
    F.embedding: embedding,
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    **a_rule_for(relu, F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
    **a_rule_for(softmax, F.softmax, torch.softmax, Tensor.softmax),
    **a_rule_for(log_softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    **a_rule_for(matrix_product, torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__),
    **a_rule_for(add, torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__),
    **a_rule_for(multiply, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__),
    **a_rule_for(pool, F.avg_pool2d, F.adaptive_avg_pool2d, Tensor.mean, torch.mean),
    **a_rule_for(move, F.pad, Tensor.__getitem__, Tensor.masked_fill, Tensor.contiguous),
    **a_rule_for(move, torch.flatten, Tensor.flatten, Tensor.unflatten, Tensor.view, Tensor.reshape),
    **a_rule_for(move, Tensor.squeeze, Tensor.unsqueeze, Tensor.transpose, Tensor.permute),
}
