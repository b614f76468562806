"""A region: activation checkpointing of a part of the forward pass. It saves its inputs, and is recomputed when the
backward pass needs a tensor that was saved inside it.

A region is a list of calls; an argument of a call is the result of an earlier one, or comes from outside and is stored.
While the region runs forward, every tensor that an operation saves becomes a ticket (region, number). The first ticket
that is taken recomputes the calls, under the random state of the first run; tensors are collected in the order of their
numbers, and the run stops as soon as the last one is there.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from ..errors import ShoestringError
from ..ledger import Phase
from ..phases import phase
from ..structure import Rebuild, flatten
from ..structure import leaves as leaves_of
from .buffers import Slot
from .checksums import Seen
from .saved_tensors import SECOND_BACKWARD, AsIs, Stored, store, storing
from .states import State, devices_of


class _Complete(Exception):
    """Raised to stop a recomputation: every tensor that the region saved is there."""


class Ticket:
    """Stands for the `number`-th tensor that a region saved."""

    __slots__ = ("number", "region")

    def __init__(self, region: "Region", number: int) -> None:
        self.region: Region | None = region
        self.number = number

    def take(self) -> Tensor:
        region, self.region = self.region, None
        if region is None:
            raise ShoestringError(SECOND_BACKWARD)
        return region.take(self.number)


class _Place(NamedTuple):
    """The `leaf`-th tensor that the `call`-th call returned."""

    call: int
    leaf: int


class _Argument:
    """A tensor from outside: stored as the surroundings of the region decide, and returned as a leaf of a new graph.

    One that needs no gradient is the caller's or a buffer, which the first run may have changed: it is held as it is.
    """

    def __init__(self, tensor: Tensor, store_input: Callable[[Tensor], Stored]) -> None:
        self.stored: Stored | Tensor = store_input(tensor) if tensor.requires_grad else tensor
        self.seen = Seen.of(tensor) if tensor.requires_grad else None

    def take(self) -> tuple[Tensor, bool]:
        """The tensor, and whether it has the values of the first run: one stored in 16 bits has not."""
        if isinstance(self.stored, Tensor):
            return self.stored, True
        tensor = self.stored.take()
        with DisableTorchFunction():
            return tensor.detach().requires_grad_(), not Seen.of(tensor).difference(self.seen)


class _Call(NamedTuple):
    """A call of the region: the function, its arguments as places, stored tensors and plain values, and its state."""

    function: Callable
    leaves: list[Any]
    rebuild: Rebuild
    state: State


class Region:
    """A region of the forward pass.

    `name` is for error messages, `running` the context that a recomputation needs, `store_input` stores the
    tensors that come from outside, `devices` are those of random numbers that the region may draw, besides its
    arguments'.
    """

    def __init__(
        self,
        name: str,
        running: Callable[[], AbstractContextManager] = nullcontext,
        store_input: Callable[[Tensor], Stored] = store,
        devices: frozenset[torch.device] = frozenset(),
    ) -> None:
        self.name, self.running, self.store_input, self.devices = name, running, store_input, devices
        self.calls: list[_Call] = []
        self.saved: list[Seen] = []  # what the saved tensors looked like, in order
        self.recomputed: dict[int, Stored] | None = None
        self.cache = ""  # the class of a cache of keys and values among the arguments: transformers' blocks add to it
        self.exact = True  # in a recomputation: whether its inputs are those of the first run
        # What calls returned, and its version then; a strong reference would keep the tensors alive.
        self._made: dict[int, tuple[weakref.ref, int, _Place]] = {}

    # -- the first run ------------------------------------------------------------------------------------------
    def call(self, function: Callable, args: tuple, kwargs: dict, buffers: Sequence[Slot] = ()) -> Any:
        """Runs `function`, which may change `buffers`, as the region's next call; stores nothing that it saves."""
        with DisableTorchFunction():  # the region's own operations are not the model's
            leaves, rebuild = flatten((args, kwargs))
            # What was one tensor is one again: attention(x, x, x) goes another way than for three that are equal.
            distinct = {id(leaf): self._write_down(leaf) for leaf in {id(leaf): leaf for leaf in leaves}.values()}
            written = [distinct[id(leaf)] for leaf in leaves]
            entered = [(leaf, leaf._version) for leaf, argument in zip(leaves, written, strict=True)
                       if isinstance(argument, _Argument) and leaf.requires_grad]  # fmt: skip
            state = State(self.devices | devices_of(leaves), buffers)
            del leaves
        with storing(self._ticket):
            output = function(*args, **kwargs)
        with DisableTorchFunction():
            state.forget_if_unused()
            self._check_unchanged(entered)
            for number, leaf in enumerate(leaves_of(output)):
                if isinstance(leaf, Tensor):
                    self._made[id(leaf)] = weakref.ref(leaf), leaf._version, _Place(len(self.calls), number)
        self.calls.append(_Call(function, written, rebuild, state))
        return output

    def _check_unchanged(self, entered: list[tuple[Tensor, int]]) -> None:
        if any(leaf._version != version for leaf, version in entered):
            raise ShoestringError(
                f"{self.name} changes its input in place, so it cannot be recomputed from it: write x = x + y in place "
                "of x += y there (also relu_, ...), or leave it out of checkpointing"
            )

    def place(self, leaf: Any) -> _Place | None:
        """Which call of this region returned the tensor, if one did and nobody changed it in place since."""
        if (found := self._made.get(id(leaf))) is None:
            return None
        made, version, place = found
        tensor = made()
        return place if tensor is not None and tensor is leaf and tensor._version == version else None

    def _write_down(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, torch.nn.Parameter):
            self.cache = self.cache or (type(leaf).__name__ if "Cache" in type(leaf).__name__ else "")
            return leaf
        return self.place(leaf) or _Argument(leaf, self.store_input)

    def _ticket(self, tensor: Tensor) -> Ticket:
        self.saved.append(Seen.of(tensor))
        return Ticket(self, len(self.saved) - 1)

    # -- recomputation ------------------------------------------------------------------------------------------
    def take(self, number: int) -> Tensor:
        """The `number`-th saved tensor; the first to be taken recomputes them all."""
        if self.recomputed is None:
            self._recompute()
        assert self.recomputed is not None
        if number not in self.recomputed:
            raise ShoestringError(SECOND_BACKWARD)
        return self.recomputed.pop(number).take()

    def _recompute(self) -> None:
        self.recomputed = {}
        calls, self.calls = self.calls, []
        self._made.clear()
        last = {leaf: number for number, call in enumerate(calls) for leaf in call.leaves if isinstance(leaf, _Place)}
        made: dict[_Place, Any] = {}
        with phase(Phase.RECOMPUTE), torch.enable_grad(), self.running(), storing(self._collect):
            try:
                for number, call in enumerate(calls):
                    made |= self._recompute_call(number, call, made)
                    made = {place: tensor for place, tensor in made.items() if last.get(place, -1) > number}
            except _Complete:
                return
        raise ShoestringError(self._different(f"{len(self.recomputed)} tensors in place of {len(self.saved)}"))

    def _recompute_call(self, number: int, call: _Call, made: dict[_Place, Any]) -> dict[_Place, Any]:
        arguments = dict.fromkeys(leaf for leaf in call.leaves if isinstance(leaf, _Argument))
        taken = {argument: self._taken(argument) for argument in arguments}
        leaves = [
            made[leaf] if isinstance(leaf, _Place) else taken[leaf] if isinstance(leaf, _Argument) else leaf
            for leaf in call.leaves
        ]
        del taken
        args, kwargs = call.rebuild(leaves)
        del leaves
        with call.state.restored():
            output = call.function(*args, **kwargs)
        return {_Place(number, place): leaf for place, leaf in enumerate(leaves_of(output))}

    def _taken(self, argument: _Argument) -> Tensor:
        tensor, exact = argument.take()
        self.exact &= exact
        return tensor

    def _collect(self, tensor: Tensor) -> Stored:
        assert self.recomputed is not None
        number = len(self.recomputed)
        wanted = self.saved[number] if number < len(self.saved) else None
        if difference := Seen.of(tensor).difference(wanted, values=self.exact):
            raise ShoestringError(self._different(difference))
        self.recomputed[number] = AsIs(tensor.detach())
        if len(self.recomputed) == len(self.saved):
            raise _Complete
        return _NOTHING

    def _different(self, what: str) -> str:
        found = f"{self.name} saved {what} when it was recomputed: "
        if self.cache:
            return found + f"it changes the {self.cache} that it was given; call the model with use_cache=False"
        return found + (
            "its forward is not deterministic; "
            "leave it out of checkpointing, or take the randomness from torch's generators"
        )


class _Nothing:
    """Stored by the graph of a recomputation, which is never run backward."""

    def take(self) -> Tensor:
        raise ShoestringError(SECOND_BACKWARD)


_NOTHING = _Nothing()
