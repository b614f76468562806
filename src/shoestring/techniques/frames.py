"""A checkpointed region: it keeps its inputs, and runs again when the backward pass asks for what it saved.

A region is a list of calls; an argument of a call is what an earlier call made, or comes from outside and is kept.
While the region runs forward, every tensor that an operation saves becomes a ticket (region, number). The first ticket
that is taken back runs the calls again, under the random state of the first run; tensors are collected in the order of
their numbers, and the run is cut short when the last one is there: nothing is computed that nobody asked for.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _len_torch_dispatch_stack
from torch._guards import active_fake_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

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


class _Place(NamedTuple):
    """The `leaf`-th tensor that the `call`-th call made."""

    call: int
    leaf: int


class _Argument:
    """A tensor from outside: kept by the keeper outside the region, and given back as a leaf of a new graph.

    One that needs no gradient is the caller's or a buffer, which the first run may have changed, and stays as it is.
    """

    def __init__(self, tensor: Tensor, keep_input: Callable[[Tensor], Kept]) -> None:
        self.kept: Kept | Tensor = keep_input(tensor) if tensor.requires_grad else tensor

    def take(self) -> Tensor:
        if isinstance(self.kept, Tensor):
            return self.kept
        tensor = self.kept.take()
        with DisableTorchFunction():
            return tensor.detach().requires_grad_()


class _Call(NamedTuple):
    """A call of the region: the function, its arguments as places, kept tensors and plain values, and its state."""

    function: Callable
    leaves: list[Any]
    spec: Any
    state: "_State"


class Frame:
    """A region of the forward pass.

    `name` is for error messages, `running` the context that a second run needs, `keep_input` what is kept of what
    comes from outside.
    """

    def __init__(
        self,
        name: str,
        running: Callable[[], AbstractContextManager] = nullcontext,
        keep_input: Callable[[Tensor], Kept] = keep,
    ) -> None:
        self.name, self.running, self.keep_input = name, running, keep_input
        self.calls: list[_Call] = []
        self.saved: list[tuple] = []  # shape and type of the saved tensors, in order
        self.print: Tensor | None = None  # a few values of the last one
        self.store: dict[int, Kept] | None = None
        self._made: dict[int, tuple[weakref.ref, _Place]] = {}  # a strong reference would keep the maps alive

    # -- the first run ------------------------------------------------------------------------------------------
    def call(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs `function` as the next call of the region, keeping nothing of what it saves."""
        with DisableTorchFunction():  # the region's own looks at tensors are no calls of the model
            leaves, spec = pytree.tree_flatten((args, kwargs))
            written = [self._write_down(leaf) for leaf in leaves]
            entered = [(leaf, leaf._version) for leaf, argument in zip(leaves, written, strict=True)
                       if isinstance(argument, _Argument) and leaf.requires_grad]  # fmt: skip
            del leaves
            state = _State()
        with keeping(self._ticket):
            output = function(*args, **kwargs)
        with DisableTorchFunction():
            state.forget_if_unused()
            self._check_unchanged(entered)
            for number, leaf in enumerate(pytree.tree_leaves(output)):
                if isinstance(leaf, Tensor):
                    self._made[id(leaf)] = weakref.ref(leaf), _Place(len(self.calls), number)
        self.calls.append(_Call(function, written, spec, state))
        return output

    def _check_unchanged(self, entered: list[tuple[Tensor, int]]) -> None:
        if any(leaf._version != version for leaf, version in entered):
            raise ShoestringError(
                f"{self.name} changes its input in place, so it cannot be run again from it: write x = x + y in place "
                "of x += y there (also relu_, ...), or leave it out of checkpointing"
            )

    def place(self, leaf: Any) -> _Place | None:
        """Which call of this region made the tensor, if one did."""
        made, place = self._made.get(id(leaf), (None, None))
        return place if made is not None and made() is leaf else None

    def _write_down(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, torch.nn.Parameter):
            return leaf
        return self.place(leaf) or _Argument(leaf, self.keep_input)

    def _ticket(self, tensor: Tensor) -> Ticket:
        self.saved.append((tensor.shape, tensor.dtype))
        self.print = _fingerprint(tensor)
        return Ticket(self, len(self.saved) - 1)

    # -- the second run -----------------------------------------------------------------------------------------
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
        self._made.clear()
        last = {leaf: number for number, call in enumerate(calls) for leaf in call.leaves if isinstance(leaf, _Place)}
        made: dict[_Place, Any] = {}
        with phase(Phase.RECOMPUTE), torch.enable_grad(), self.running(), keeping(self._collect):
            try:
                for number, call in enumerate(calls):
                    made |= self._call_again(number, call, made)
                    made = {place: tensor for place, tensor in made.items() if last.get(place, -1) > number}
            except _Complete:
                return
        raise ShoestringError(self._different(f"{len(self.store)} tensors in place of {len(self.saved)}"))

    def _call_again(self, number: int, call: _Call, made: dict[_Place, Any]) -> dict[_Place, Any]:
        leaves = [
            made[leaf] if isinstance(leaf, _Place) else leaf.take() if isinstance(leaf, _Argument) else leaf
            for leaf in call.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        del leaves
        with call.state.restored():
            output = call.function(*args, **kwargs)
        return {_Place(number, place): leaf for place, leaf in enumerate(pytree.tree_leaves(output))}

    def _collect(self, tensor: Tensor) -> Kept:
        assert self.store is not None
        number = len(self.store)
        if number >= len(self.saved) or self.saved[number] != (tensor.shape, tensor.dtype):
            wanted = tuple(self.saved[number][0]) if number < len(self.saved) else "nothing"
            raise ShoestringError(self._different(f"{tuple(tensor.shape)} in place of {wanted}"))
        self.store[number] = Whole(tensor.detach())
        if len(self.store) == len(self.saved):
            self._compare(tensor)
            raise _Complete
        return _NOTHING

    def _compare(self, tensor: Tensor) -> None:
        now = _fingerprint(tensor)
        if self.print is not None and now is not None and not _same_bytes(self.print, now):
            raise ShoestringError(self._different("other values"))

    def _different(self, what: str) -> str:
        return (
            f"{self.name} saved {what} when it was run again: its forward is not deterministic; "
            "leave it out of checkpointing, or take the randomness from torch's generators"
        )


class _Nothing:
    """What the second run's own graph keeps: nothing, it is never run backward."""

    def take(self) -> Tensor:
        raise ShoestringError(SECOND_BACKWARD)


_NOTHING = _Nothing()


def _fingerprint(tensor: Tensor) -> Tensor | None:
    """At most 16 values spread over a tensor; None where there are no values."""
    with DisableTorchFunction():
        if tensor.numel() == 0 or is_traced():
            return None
        flat = tensor.detach() if tensor.is_contiguous() else tensor.detach()[(0,) * (tensor.dim() - 1)].contiguous()
        count = min(16, flat.numel())
        return flat.as_strided((count,), (flat.numel() // count,)).clone()


def is_traced() -> bool:
    """Whether tensors are fake here, without values."""
    return bool(_len_torch_dispatch_stack()) and active_fake_mode() is not None


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, so that NaN equals NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class _State:
    """Random state and autocast as they were before a call."""

    def __init__(self) -> None:
        self.random: Tensor | None = torch.get_rng_state()
        self.autocast = _autocast()

    def forget_if_unused(self) -> None:
        """Drops the state (5 KB) where the call drew no random number."""
        # A trace has no values, but the generator's state is real there too.
        with _disable_current_modes() if is_traced() else nullcontext():
            if self.random is not None and torch.equal(self.random, torch.get_rng_state()):
                self.random = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        if self.random is None and self.autocast == _autocast():
            yield
            return
        enabled, dtype = self.autocast
        now = torch.get_rng_state()
        try:
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                torch.set_rng_state(now if self.random is None else self.random)
                yield
        finally:
            torch.set_rng_state(now)


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
