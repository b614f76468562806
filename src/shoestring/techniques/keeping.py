"""What is kept of a tensor that the backward pass will ask for: one mechanism for every technique.

An operation that needs a tensor later calls `keep(tensor)` and gets a `Kept`, whose `take()` gives the tensor back,
once. PyTorch's own operations come through `saved_tensors_hooks`, our autograd functions call it themselves, before
they compute. Who decides what is kept is the innermost keeper: a checkpointed region keeps nothing and runs again, a
codec keeps 16 bits, a file, and so on. Without a keeper the tensor itself is kept.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ShoestringError

SECOND_BACKWARD = (
    "a saved tensor was asked for a second time: this step keeps each tensor for one backward pass only; "
    "call loss.backward() once, without retain_graph, or use no checkpointing"
)


class Kept(Protocol):
    """Something from which a saved tensor can be had back, once."""

    def take(self) -> Tensor: ...


class Whole:
    """The tensor itself, given up when it is taken, so that the taker decides when it dies."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise ShoestringError(SECOND_BACKWARD)
        return tensor


Keeper = Callable[[Tensor], Kept]


class _Stack(threading.local):
    def __init__(self) -> None:
        self.keepers: list[Keeper] = []


_stack = _Stack()


def keep(tensor: Tensor) -> Kept:
    """A tensor that the backward pass will want -> what is kept of it by the innermost keeper."""
    return _stack.keepers[-1](tensor) if _stack.keepers else Whole(tensor)


@contextmanager
def keeping(keeper: Keeper) -> Iterator[None]:
    """`keeper` decides what is kept of every tensor that is saved inside the context.

    Parameters are not handed to it: the model holds them anyway.
    """

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, torch.nn.Parameter) else keeper(tensor)

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.take()

    _stack.keepers.append(keeper)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _stack.keepers.pop()


@contextmanager
def keeping_outside() -> Iterator[None]:
    """The next outer keeper decides inside the context: for what a region keeps of its own inputs."""
    keeper = _stack.keepers.pop()
    try:
        yield
    finally:
        _stack.keepers.append(keeper)


class Shared:
    """Packs a storage once however many operations save it: remembers what was kept for as long as it is wanted."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()

    def once(self, tensor: Tensor, pack: Callable[[], Any]) -> Any:
        key = (tensor.untyped_storage()._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride())
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = pack()
        return kept
