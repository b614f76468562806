"""A checkpointed region: it keeps its inputs, and runs again when the backward pass asks for what it saved.

A region is a chain of calls, each of which takes what the one before it returned. While it runs forward, every tensor
that an operation saves becomes a ticket (region, number). The first ticket that is taken back runs the chain again,
under the random state of the first run; tensors are collected in the order of their numbers, and the run is cut short
when the last one is there, so that nothing is computed that nobody asked for.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.utils import _pytree as pytree

from ..errors import ShoestringError
from ..ledger import Phase
from ..phases import phase
from .keeping import SECOND_BACKWARD, Kept, Whole, keep, keeping


class _Complete(Exception):
    """Every tensor that the region saved has been made again."""


class Ticket:
    """Stands for the `number`-th tensor that a region saved."""

    __slots__ = ("frame", "number")

    def __init__(self, frame: "Frame", number: int) -> None:
        self.frame: Frame | None = frame
        self.number = number

    def take(self) -> Tensor:
        frame, self.frame = self.frame, None
        if frame is None:
            raise ShoestringError(SECOND_BACKWARD)
        return frame.take(self.number)


class _Call:
    """One call of the chain and what is kept of its arguments; `chained` means the first comes from the call before."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, chained: bool) -> None:
        self.function = function
        self.chained = chained
        leaves, self.spec = pytree.tree_flatten((args[1:] if chained else args, kwargs))
        self.leaves = [_Argument(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def again(self, previous: Any) -> Any:
        leaves = [leaf.take() if isinstance(leaf, _Argument) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(previous, *args, **kwargs) if self.chained else self.function(*args, **kwargs)


class _Argument:
    """A tensor argument: kept by the keeper outside the region, and given back as a leaf of a new graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        self.kept: Kept = keep(tensor) if tensor.is_floating_point() else Whole(tensor)

    def take(self) -> Tensor:
        return self.kept.take().detach().requires_grad_(self.requires_grad)


class Frame:
    """A region of the forward pass. `name` is for error messages; `running` is the context that a second run needs."""

    def __init__(self, name: str, running: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.name = name
        self.running = running
        self.calls: list[_Call] = []
        self.shapes: list[tuple] = []  # of the saved tensors, in order
        self.states: list[_State] = []  # random and autocast state before each call
        self.store: dict[int, Kept] | None = None
        self._output: weakref.ref | None = None  # of the last call; a strong reference would keep the map alive

    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs `function` as the next call of the chain, keeping nothing of what it saves."""
        chained = self.continues(args)
        self.calls.append(_Call(function, args, kwargs, chained))
        self.states.append(_State())
        with keeping(self._ticket):
            output = function(*args, **kwargs)
        self.states[-1].forget_if_unused()
        self._output = weakref.ref(output) if isinstance(output, Tensor) else None
        return output

    def continues(self, args: tuple) -> bool:
        """Whether a call with these arguments takes what the last call returned."""
        return self._output is not None and bool(args) and args[0] is self._output()

    def _ticket(self, tensor: Tensor) -> Ticket:
        self.shapes.append((tensor.shape, tensor.dtype))
        return Ticket(self, len(self.shapes) - 1)

    def take(self, number: int) -> Tensor:
        """The `number`-th saved tensor, made again if need be."""
        if self.store is None:
            self._run_again()
        assert self.store is not None
        if number not in self.store:
            raise ShoestringError(SECOND_BACKWARD)
        return self.store.pop(number).take()

    def _run_again(self) -> None:
        self.store = {}
        calls, self.calls = self.calls, []
        with phase(Phase.RECOMPUTE), torch.enable_grad(), self.running(), keeping(self._collect):
            output = None
            try:
                for call, state in zip(calls, self.states, strict=True):
                    with state.restored():
                        output = call.again(output)
            except _Complete:
                return
        self._missing()

    def _collect(self, tensor: Tensor) -> Kept:
        assert self.store is not None
        number = len(self.store)
        if number >= len(self.shapes) or self.shapes[number] != (tensor.shape, tensor.dtype):
            wanted = self.shapes[number][0] if number < len(self.shapes) else "nothing"
            raise ShoestringError(self._different(f"{tuple(tensor.shape)} in place of {tuple(wanted)}"))
        self.store[number] = Whole(tensor.detach())
        if len(self.store) == len(self.shapes):
            raise _Complete
        return _Nothing()

    def _missing(self) -> None:
        assert self.store is not None
        if len(self.store) < len(self.shapes):
            raise ShoestringError(self._different(f"{len(self.store)} tensors in place of {len(self.shapes)}"))

    def _different(self, what: str) -> str:
        return (
            f"{self.name} saved {what} when it was run again: its forward is not deterministic; "
            "leave it out of checkpointing, or take the randomness from torch's generators"
        )


class _Nothing:
    """What the second run's own graph keeps: nothing, it is never run backward."""

    def take(self) -> Tensor:
        raise ShoestringError(SECOND_BACKWARD)


class _State:
    """Random state and autocast as they were before a call."""

    def __init__(self) -> None:
        # Fake tensors have no values: a trace draws no random numbers and needs no state.
        self.random: Tensor | None = None if active_fake_mode() else torch.get_rng_state()
        self.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def forget_if_unused(self) -> None:
        """Drops the state (5 KB) where the call drew no random number."""
        if self.random is not None and torch.equal(self.random, torch.get_rng_state()):
            self.random = None

    @contextmanager
    def restored(self):
        enabled, dtype = self.autocast
        with torch.autocast("cpu", dtype=dtype, enabled=enabled), torch.random.fork_rng([], self.random is not None):
            if self.random is not None:
                torch.set_rng_state(self.random)
            yield
