"""How a tensor is stored for the backward pass: one mechanism for every technique.

An operation that needs a tensor later calls `store(tensor)` and gets a `Stored`, whose `take()` returns the tensor,
once. PyTorch's own operations come here through `saved_tensors_hooks`; our autograd functions call `store` themselves,
before they compute. The innermost store decides: a checkpointed region stores nothing and recomputes, a codec stores 16
bits, or a file, and so on. Without any, the tensor itself is stored.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..ambient import Ambient
from ..errors import ShoestringError

SECOND_BACKWARD = (
    "a saved tensor was asked for a second time: this step saves each tensor for one backward pass only; "
    "call loss.backward() once, without retain_graph, or use no checkpointing"
)


class Stored(Protocol):
    """Something that returns a saved tensor, once."""

    def take(self) -> Tensor: ...


CHANGED_IN_PLACE = (
    "a tensor of shape {} that the backward pass needs was changed in place after it was saved: "
    "write x = x + y in place of x += y there (also add_, relu_, ...)"
)


class AsIs:
    """The tensor itself; `take()` gives up the reference, so that the taker decides when it is freed."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise ShoestringError(SECOND_BACKWARD)
        if tensor._version != self.version:  # with hooks, PyTorch does not check this
            raise ShoestringError(CHANGED_IN_PLACE.format(tuple(tensor.shape)))
        return tensor


class OneUse:
    """One use of a stored tensor that several operations share; the last use frees it."""

    __slots__ = ("stored",)

    def __init__(self, stored: "Stored") -> None:
        self.stored: Stored | None = stored

    def opened(self) -> "Stored":
        """What is shared itself; this use is over."""
        stored, self.stored = self.stored, None
        if stored is None:
            raise ShoestringError(SECOND_BACKWARD)
        return stored

    def take(self) -> Tensor:
        return self.opened().take()


@runtime_checkable
class StoredInput(Protocol):
    """The input of a layer in a form from which the weight's gradient can be made without the whole input."""

    def weight_gradient(self, layer: Any, grad: Tensor) -> Tensor: ...

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """The tensor, a few samples at a time."""
        ...


PIECE_BYTES = 1 << 20


def samples_at_a_time(shape: torch.Size, dtype: torch.dtype, piece_bytes: int = PIECE_BYTES) -> int:
    """How many samples of a tensor fill a piece of about so many bytes; at least one."""
    return max(1, piece_bytes * shape[0] // max(1, shape.numel() * dtype.itemsize))


def is_lossy(stored: Stored) -> bool:
    """Whether what comes back is not what was stored."""
    return isinstance(stored.stored if isinstance(stored, OneUse) else stored, StoredInput)


Store = Callable[[Tensor], Stored]


def store(tensor: Tensor) -> Stored:
    """A tensor that the backward pass will need -> what the innermost store makes of it."""
    stores = Ambient.now().stores
    return stores[-1](tensor) if stores else AsIs(tensor)


@contextmanager
def storing(innermost: Store) -> Iterator[None]:
    """`innermost` decides how every tensor is stored that an operation saves inside the context.

    It gets no parameters, which the model holds anyway, and only detached tensors: an output that its own operation
    saves (tanh, softmax, attention) would hold itself, in a cycle that no garbage collector sees, and a graph that is
    dropped before its backward pass would stay for ever.
    """

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, torch.nn.Parameter) else innermost(tensor.detach())

    def unpack(stored: Any) -> Tensor:
        return stored if isinstance(stored, Tensor) else stored.take()

    with (
        Ambient.during(stores=(*Ambient.now().stores, innermost)),
        torch.autograd.graph.saved_tensors_hooks(pack, unpack),
    ):
        yield


class Deduplicated:
    """Packs a tensor once, however many operations save it: remembers the packed form while someone needs it."""

    def __init__(self) -> None:
        self._packed: weakref.WeakValueDictionary[tuple, Any] = weakref.WeakValueDictionary()

    def once(self, tensor: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        packed = self._packed.get(key)
        if packed is None:
            packed = self._packed[key] = pack(tensor)
            packed.origin = StorageWeakRef(storage)  # while it lives, no new storage gets the same number
        return packed
