"""Rehearsals: a forward pass of one microbatch on fake tensors, to see what it saves and what the rules make of it."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ambient import Ambient
from ...passes.saved_tensors import AsIs, OneUse, Stored, storing
from ...profiling.dry import dry_run
from ...structure import tensors
from ...task import Task
from .codecs import Half, View
from .compressed import Compressed
from .saving import Kept, Saver, storage_number


class Saved(NamedTuple):
    """What operations save in a forward pass.

    `bytes` are those of all storages in which it is stored, parameters, buffers and the batch left out; `exact_bytes`
    those of them that no codec compressed, as masks; `taken` is how many tensors the rules of `activations` matched,
    and `compressed` are those among them that a codec compressed.
    """

    bytes: int
    exact_bytes: int
    taken: int
    compressed: tuple[Kept, ...]


def saved(task: Task) -> Saved:
    """A task -> what the forward pass of one microbatch saves, on fake tensors."""

    def look(batch: Any) -> Saved:
        with ExitStack() as stack:
            savers = _entered(task, stack)
            counter = _Counter([*tensors(batch), *task.model.parameters(), *task.model.buffers()])
            stack.enter_context(storing(counter.keep))
            stack.callback(counter.made.clear)
            loss = task.loss_of(task.model, batch)
            compressed = tuple(kept for saver in savers for kept in saver.compressed)
            taken = sum(saver.taken for saver in savers)
            found = Saved(counter.bytes(), counter.bytes(compressed=False), taken, compressed)
            del loss
            return found

    return dry_run(task, next(iter(task.split(task.batch))), look)


class _Taken(Exception):
    """Ends a rehearsal that has shown what it was made for."""


def takes_any(task: Task) -> bool:
    """Whether the rules of `activations` match anything that the forward pass of one microbatch saves."""

    def look(batch: Any) -> bool:
        with ExitStack() as stack:
            savers, around = _entered(task, stack), _store_around()

            def keep(tensor: Tensor) -> Stored:
                stored = around(tensor)
                if any(saver.taken for saver in savers):
                    raise _Taken
                return stored

            stack.enter_context(storing(keep))
            task.loss_of(task.model, batch)
            return any(saver.taken for saver in savers)  # a region hands its input to the rules itself

    try:
        return dry_run(task, next(iter(task.split(task.batch))), look)
    except _Taken:
        return True


def _entered(task: Task, stack: ExitStack) -> list[Saver]:
    """Enters the contexts of a pass -> those of them that decide by rules."""
    entered = [stack.enter_context(context(task.model)) for context in task.contexts]
    return [saver for saver in entered if isinstance(saver, Saver)]


def _store_around() -> Any:
    """The store of whatever is around: a tensor itself, if nothing is."""
    return next(iter(Ambient.now().stores[-1:]), AsIs)


def saved_bytes(task: Task) -> int:
    """The bytes of all storages that operations save in the forward pass of one microbatch."""
    return saved(task).bytes


class _Counter:
    """Hands every tensor on to the store around it, and looks at what that made of it."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        self.held = {storage_number(tensor) for tensor in held if tensor.layout == torch.strided}
        self.around = _store_around()
        # While they live, no new storage gets the same number. PyTorch's nodes hold their pack hook, and so this list:
        # with a tensor in it whose graph has not seen a backward pass, all of them would live for ever.
        self.made: list[Stored] = []

    def keep(self, tensor: Tensor) -> Stored:
        self.made.append(self.around(tensor))
        return self.made[-1]

    def bytes(self, compressed: bool = True) -> int:
        """Of all that was stored, or without what is compressed."""
        found = {storage_number(tensor): tensor for stored in self.made for tensor in _tensors_of(stored, compressed)}
        return sum(t.untyped_storage().nbytes() for number, t in found.items() if number not in self.held)


def _tensors_of(stored: Any, compressed: bool) -> Iterator[Tensor]:
    """The tensors in which something is stored; what is in a file, or is recomputed, is in none."""
    match stored:
        case AsIs(tensor=Tensor() as tensor):
            yield tensor
        case OneUse(stored=inner) | View(base=inner):
            yield from _tensors_of(inner, compressed)
        case Half():
            yield stored.copy
        case Compressed() if compressed:
            yield from stored.stored()
