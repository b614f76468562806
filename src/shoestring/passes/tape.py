"""`every-m`: the pass is cut into regions of m operations, whatever modules they are in.

The operations are recorded as the model calls them, and a region recomputes them. An operation counts if it saves
something for the backward pass; the others belong to the region that they are in.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .regions import Region


class Tape:
    """Records the operations of one pass, `every` counted ones per region."""

    def __init__(self, every: int, mode: Any) -> None:
        self.every, self.mode = every, mode
        self.region: Region | None = None
        self.counted = self.regions = 0

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Answers a call of the model as part of the current region."""
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or not any(leaf.requires_grad for leaf in leaves):
            return self.mode.answer(func, args, kwargs)
        if self.region is None or self.counted >= self.every:
            self._next_region()
        assert self.region is not None
        if changes_its_input(func, args, kwargs) and not self.region.place(leaves[0]):
            return self.mode.answer(func, args, kwargs)  # recomputed, it would change the tensor a second time
        before = len(self.region.saved)
        output = self.region.call(lambda *a, **k: self.mode.answer(func, a, k), args, kwargs)
        self.counted += len(self.region.saved) > before
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)):
            self.region.calls.pop()  # .size() etc. need not be recomputed
        return output

    def _next_region(self) -> None:
        self.regions += 1
        self.counted = 0
        self.region = Region(f"region {self.regions} of {self.every} operations", self.mode.running)


def changes_its_input(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call changes its first argument in place: `x.add_(y)`, `x += y`, `relu(x, inplace=True)`."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    return in_place or bool(kwargs.get("inplace"))
