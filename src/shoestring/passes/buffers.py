"""Buffers that a block changes in its forward pass: a recomputation starts from the first run's, and changes none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

COPIED_BYTES = 1 << 20  # larger buffers, such as tables of positions, are not copied before the first run


class Slot(NamedTuple):
    """Where a buffer is: its module's buffers, and its name there."""

    home: dict[str, Tensor | None]
    name: str

    def mark(self) -> tuple[int, int]:
        """Differs whenever the buffer was changed, in place or replaced."""
        buffer = self.home.get(self.name)
        return id(buffer), -1 if buffer is None else buffer._version


def slots_of(module: nn.Module) -> list[Slot]:
    """A block -> where its buffers are, except constant ones, and those of batch norms: the lean mode sees to it that
    they change once."""
    inside = (part for part in module.modules() if not isinstance(part, nn.modules.batchnorm._BatchNorm))
    return [Slot(part._buffers, name) for part in inside for name in part._buffers if name not in constant(part)]


def constant(module: nn.Module) -> Sequence[str]:
    """The buffers that no step changes, as the module says."""
    return getattr(module, "constant_buffers", ())


class Buffers:
    """Buffers as they are now."""

    __slots__ = ("kept",)

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.kept = [(slot, slot.mark(), _copy(slot)) for slot in slots]

    def forget_unchanged(self) -> None:
        self.kept = [(slot, mark, copy) for slot, mark, copy in self.kept if slot.mark() != mark]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside the context, copies stand in for the buffers, and changes to them are dropped."""
        buffers = [(slot, slot.home.get(slot.name)) for slot, *_ in self.kept]
        for (slot, buffer), (*_, copy) in zip(buffers, self.kept, strict=True):
            slot.home[slot.name] = copy if copy is not None or buffer is None else buffer.clone()
        try:
            yield
        finally:
            for slot, buffer in buffers:
                slot.home[slot.name] = buffer


def _copy(slot: Slot) -> Tensor | None:
    buffer = slot.home.get(slot.name)
    if buffer is None or buffer.dtype == torch.bool or buffer.nbytes > COPIED_BYTES:
        return None
    return buffer.detach().clone()
