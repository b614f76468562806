"""A task -> the graph of one forward pass, traced on fake tensors: nothing is computed or allocated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from ..errors import ShoestringError
from ..fakes import Faker, faked
from ..structure import tensors
from ..task import Task
from .graph import Graph, Node
from .rules import RULES, Call, Rule


def trace(task: Task) -> Graph:
    """The loss of `task` on its batch -> its graph, which the loss is the last node of."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faker = Faker(mode, torch.device("cpu"))
    with faked(task.model, faker), mode, torch.no_grad(), paths_of(task.model) as paths:
        batch = faker.tree(task.batch)
        recorder = Recorder(task.model, paths)
        recorder.add_batch(batch)
        with recorder:
            loss = task.loss_of(task.model, batch)
    last = recorder.made_by.get(id(loss), 0)
    if not recorder.nodes[last].differentiable:
        raise ShoestringError("the loss depends on no parameter of the model: return the loss of its output")
    return Graph(in_order(recorder.nodes, leading_to(recorder.nodes, last)), task.count(task.batch))


class Recorder(TorchFunctionMode):
    """Records a node for each torch function that is called on something that comes from the batch."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.paths = paths  # of the modules that are running, outermost first
        self.made_by: dict[int, int] = {}  # id of a tensor -> the node that made it
        self.alive: list[Tensor] = []  # so that no id is used twice
        self.names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        self.elements = {path for path, module in model.named_modules() if is_in_list(model, path)}

    def add_batch(self, batch: Any) -> None:
        for tensor in tensors(batch):
            bits = None if tensor.is_floating_point() else 8 * tensor.element_size()
            self.nodes.append(Node("", "input", (), tensor.numel(), bits=bits, differentiable=False))
            self.remember(tensor, len(self.nodes) - 1)

    def remember(self, tensor: Tensor, place: int) -> None:
        self.made_by[id(tensor)] = place
        self.alive.append(tensor)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        leaves = [id(leaf) for leaf in pytree.tree_leaves((args, kwargs))]
        inputs = [self.made_by[leaf] for leaf in leaves if leaf in self.made_by]
        output = function(*args, **(kwargs or {}))
        if inputs and isinstance(output, Tensor) and output.is_floating_point():
            call = Call(
                place=len(self.nodes),
                path=self.paths[-1],
                block=next((path for path in reversed(self.paths) if path in self.elements), ""),
                inputs=tuple((place, self.nodes[place]) for place in inputs),
                parameters=tuple(self.names[leaf] for leaf in leaves if leaf in self.names),
                args=args,
                kwargs=kwargs or {},
                output=output,
            )
            self.record(rule_for(function, call.path)(call), inputs[0], output)
        return output

    def record(self, made: Node | tuple[Node, Node], source: int, output: Tensor) -> None:
        for node in made if isinstance(made, tuple) else (made,):
            if node.moves and node.elements == self.nodes[source].elements:
                self.remember(output, source)  # the same elements in another shape
            else:
                self.nodes.append(node)
                self.remember(output, len(self.nodes) - 1)


def rule_for(function: Any, path: str) -> Rule:
    """The rule of a torch function that is called in the module at `path`."""
    if function not in RULES:
        where = f"module {path!r}" if path else "the model"
        raise ShoestringError(
            f"the paper's rules do not count {resolve_name(function) or function}, which {where} calls:"
            " profile this model with the real rules"
        )
    return RULES[function]


def is_in_list(model: nn.Module, path: str) -> bool:
    """Whether the module at `path` is an element of a Sequential or a ModuleList."""
    parent = path.rpartition(".")[0]
    return bool(path) and isinstance(model.get_submodule(parent), nn.Sequential | nn.ModuleList)


@contextmanager
def paths_of(model: nn.Module) -> Iterator[list[str]]:
    """A list that holds, at any moment, the paths of the modules that are running, outermost first."""
    stack, handles = [""], []

    def leave(*_: Any) -> None:
        stack.pop()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: stack.append(path)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def leading_to(nodes: list[Node], last: int) -> set[int]:
    """The places of the batch, and of the nodes that the one at `last` comes from."""
    places, waiting = {place for place, node in enumerate(nodes) if not node.inputs}, [last]
    while waiting:
        place = waiting.pop()
        if place not in places:
            places.add(place)
            waiting += nodes[place].inputs
    return places


def in_order(nodes: list[Node], places: set[int]) -> tuple[Node, ...]:
    """The nodes at `places`, each that only moves elements right after its input.

    So the backward pass of a shortcut comes last in its block: until then its gradient is that of the block's
    output, the same tensor.
    """
    keys: list[tuple[int, ...]] = []
    for place, node in enumerate(nodes):
        keys.append((*keys[max(node.inputs)], place) if node.moves else (place,))
    order = sorted(places, key=keys.__getitem__)
    new = {old: place for place, old in enumerate(order)}
    return tuple(renumbered(nodes[old], new) for old in order)


def renumbered(node: Node, new: dict[int, int]) -> Node:
    """The node with the places that it names replaced by new ones."""
    needs = tuple(replace(kept, node=new[kept.node]) for kept in node.needs)
    return replace(node, inputs=tuple(new[place] for place in node.inputs), needs=needs)
