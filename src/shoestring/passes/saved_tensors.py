"""What is kept of a tensor that the backward pass will ask for: one mechanism for every technique.

An operation that needs a tensor later calls `store(tensor)` and gets a `Stored`, whose `take()` gives the tensor back,
once. PyTorch's own operations come through `saved_tensors_hooks`, our autograd functions call it themselves, before
they compute. Who decides what is kept is the innermost keeper: a checkpointed region keeps nothing and runs again, a
codec keeps 16 bits, a file, and so on. Without a keeper the tensor itself is kept.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..ambient import Ambient
from ..errors import ShoestringError

SECOND_BACKWARD = (
    "a saved tensor was asked for a second time: this step keeps each tensor for one backward pass only; "
    "call loss.backward() once, without retain_graph, or use no checkpointing"
)


class Stored(Protocol):
    """Something from which a saved tensor can be had back, once."""

    def take(self) -> Tensor: ...


CHANGED_IN_PLACE = (
    "a tensor of shape {} that the backward pass needs was changed in place after it was kept: "
    "write x = x + y in place of x += y there (also add_, relu_, ...)"
)


class AsIs:
    """The tensor itself, given up when it is taken, so that the taker decides when it dies."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise ShoestringError(SECOND_BACKWARD)
        if tensor._version != self.version:  # PyTorch looks at this only where no hook is
            raise ShoestringError(CHANGED_IN_PLACE.format(tuple(tensor.shape)))
        return tensor


class OneUse:
    """One use of something kept that several operations share; the last use lets go of it."""

    __slots__ = ("kept",)

    def __init__(self, kept: "Stored") -> None:
        self.kept: Stored | None = kept

    def take(self) -> Tensor:
        kept, self.kept = self.kept, None
        if kept is None:
            raise ShoestringError(SECOND_BACKWARD)
        return kept.take()


Store = Callable[[Tensor], Stored]


def store(tensor: Tensor) -> Stored:
    """A tensor that the backward pass will want -> what is kept of it by the innermost keeper."""
    stores = Ambient.now().stores
    return stores[-1](tensor) if stores else AsIs(tensor)


@contextmanager
def storing(keeper: Store) -> Iterator[None]:
    """`keeper` decides what is kept of every tensor that is saved inside the context.

    Parameters are not handed to it: the model holds them anyway. Nothing has its history with it: an output that its
    own operation saves (tanh, softmax, attention) would hold itself, in a cycle that no garbage collector sees, and a
    graph that is dropped before its backward pass would stay for ever.
    """

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, torch.nn.Parameter) else keeper(tensor.detach())

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept.take()

    with (
        Ambient.during(stores=(*Ambient.now().stores, keeper)),
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    ):
        yield


class Deduplicated:
    """Packs a tensor once however many operations save it: remembers what was kept for as long as it is wanted."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()

    def once(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = pack(tensor)
            kept.origin = StorageWeakRef(storage)  # while it lives, no new storage gets the same number
        return kept
