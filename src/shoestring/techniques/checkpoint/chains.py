"""Blocks in the order in which the model's code calls them: which follow each other, and which are stages of others.

Structure alone tells neither: the experts of a layer stand in a list as its residual blocks do, and a U-Net takes turns
between its lists. So one forward pass on fake tensors is watched.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...passes.placeholders import METADATA
from ...task import Task
from .blocks import find_blocks, traced

_CONTAINERS = nn.Sequential | nn.ModuleList
_chains: weakref.WeakKeyDictionary[nn.Module, list[list[str]]] = weakref.WeakKeyDictionary()


def find_chains(task: Task, names: tuple[str, ...] = ()) -> list[list[str]]:
    """A task -> its blocks (`find_blocks`) in the order of their calls, a new run wherever a block is not called with
    what the one before it returned. A block in which smaller ones follow each other is a stage: they are the blocks.

    What is found of a model on the meta device is remembered: nothing changes such a model in place.
    """
    if names or not any(parameter.is_meta for parameter in task.model.parameters()):
        return _find_chains(task, names)
    if task.model not in _chains:
        _chains[task.model] = _find_chains(task, names)
    return _chains[task.model]


def _find_chains(task: Task, names: tuple[str, ...]) -> list[list[str]]:
    blocks = [name for run in find_blocks(task.model, names) for name in run]
    levels = [blocks]
    while not names and (parts := _parts(task.model, levels[-1])):
        levels.append(parts)
    calls = _Calls()
    if blocks:
        traced(task, {name: partial(calls.note, name) for level in levels for name in level})
    for parts in levels[1:]:
        blocks = _opened(task.model, blocks, parts, calls)
    return calls.chains(blocks)


def _parts(model: nn.Module, blocks: list[str]) -> list[str]:
    """The parts of blocks, if these are stages: modules of one class in a container, each of several layers."""
    found = []  # path, class, and the container's path
    for block in blocks:
        for path, home in model.get_submodule(block).named_modules(prefix=block):
            if isinstance(home, _CONTAINERS):
                found += [(f"{path}.{name}", type(child), path) for name, child in home.named_children()
                          if not isinstance(child, _CONTAINERS) and _layers(child) > 1]  # fmt: skip
    counts = Counter((kind, home) for _, kind, home in found)
    repeated = {kind for (kind, _), count in counts.items() if count > 1}
    paths = [path for path, kind, _ in found if kind in repeated]
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


def _layers(module: nn.Module) -> int:
    """How many layers with a matrix of weights are inside a module."""
    return sum(any(p.dim() > 1 for p in part.parameters(recurse=False)) for part in module.modules() if part != module)


def _opened(model: nn.Module, blocks: list[str], parts: list[str], calls: "_Calls") -> list[str]:
    """Blocks -> the same with their parts in place of those that are stages."""
    kinds = {type(model.get_submodule(name)) for name in parts if calls.follows(name, parts)}
    parts = [name for name in parts if type(model.get_submodule(name)) in kinds]
    return [name for name in blocks if not any(part.startswith(f"{name}.") for part in parts)] + parts


class _Calls:
    """Which modules were called, in what order, with which tensors, and which they returned."""

    def __init__(self) -> None:
        self.taken: dict[str, set[int]] = {}
        self.returned: dict[str, set[int]] = {}
        self.tensors: list[Tensor] = []  # held, so that no id is used twice

    def note(self, name: str, forward: Any, args: tuple, kwargs: dict) -> Any:
        first = name not in self.taken
        if first:
            self.taken[name] = self._ids((args, kwargs))
        output = forward(*args, **kwargs)
        if first:
            self.returned[name] = self._ids(output)
        return output

    def _ids(self, tree: Any) -> set[int]:
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.tensors += tensors
        return {id(tensor) for tensor in tensors}

    def follows(self, name: str, others: list[str]) -> bool:
        """Whether a module was called with what another of these returned."""
        taken = self.taken.get(name, set())
        return any(taken & self.returned.get(other, set()) for other in others if other != name)

    def chains(self, blocks: list[str]) -> list[list[str]]:
        wanted, runs = set(blocks), list[list[str]]()
        for name in self.taken:
            if name in wanted:
                if runs and self.taken[name] & self.returned[runs[-1][-1]]:
                    runs[-1].append(name)
                else:
                    runs.append([name])
        return runs


class Ahead(NamedTuple):
    """What one look at a forward pass tells about a block."""

    alone: bool  # nobody else reads its input, as the model's code is: it is of no use once the block has it
    growth: float  # bytes of its output per byte of its input


def look_ahead(task: Task, names: Sequence[str]) -> dict[str, Ahead]:
    """Blocks -> what a forward pass tells about each."""
    watch = _Watch()
    with watch:
        traced(task, {name: partial(watch.note, name) for name in names})
    return {name: Ahead(watch.readers[taken] == 1, watch.growth.get(name, 1.0)) for name, taken in watch.taken.items()}


class _Watch(TorchFunctionMode):
    """Counts who reads what blocks, and functions that are called outside of them, return: others of these."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}  # held, so that no id is used twice
        self.taken: dict[str, int] = {}
        self.growth: dict[str, float] = {}
        self.readers: Counter[int] = Counter()
        self.depth = 0

    def note(self, name: str, forward: Any, args: tuple, kwargs: dict) -> Any:
        found = self._read((args, kwargs))
        for leaf in found:
            self.taken[name] = id(leaf)
        self.depth += 1
        output = forward(*args, **kwargs)
        self.depth -= 1
        if isinstance(output, Tensor) and found:
            self.growth[name] = output.nbytes / max(1, found[-1].nbytes)
        return self._made(output)

    def _made(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            self.made[id(output)] = output
        return output

    def _read(self, tree: Any) -> list[Any]:
        # Before a tensor requires a gradient, it is its maker who reads it.
        found = [leaf for leaf in pytree.tree_leaves(tree) if id(leaf) in self.made and leaf.requires_grad]
        self.readers.update(map(id, found))
        return found

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.depth or func in METADATA:
            return func(*args, **(kwargs or {}))
        self._read((args, kwargs))
        return self._made(func(*args, **(kwargs or {})))
