"""A tape: the operators of one forward and backward pass, as `recorder.py` writes them down."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _AutoDispatchBelowAutograd

from ..kernels.core import core

Leaves = list[Any]  # of a microbatch
NOBODY = -1  # in place of the slot of a result that nobody reads


class Head(NamedTuple):
    """What calls of alike layers have in common: the operator, its arguments with None in place of tensors, the places
    of those (a pair for one inside a list), and how many results it has that are new."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    places: tuple[int | tuple[int, int], ...]
    fills: int


class Tape(NamedTuple):
    """Calls of operators on numbered slots. In `numbers` each call has the number of its head, the slots that it reads,
    how many slots are read there for the last time and which, and the slots of its results. It is small, for networks
    that are: in 16 bits, while they are enough."""

    heads: list[Head]
    calls: int
    numbers: "array[int]"
    slots: int
    given: "array[int]"  # the slot of each of `given_tensors` and `gradients_of`, in their order, or NOBODY
    constants: dict[int, Tensor]
    loss: int
    gradients: list[tuple[nn.Module, str, int]]  # where the pass leaves gradients: parameters, and their slots
    may_begin: bool  # whether it may be run where there are no gradients yet, and it was recorded adding to some
    pass_number: list[int] | None = None  # counts passes, for random numbers whose keys hold it

    def run(self, given: list[Tensor | None]) -> Tensor:
        """Does the pass on tensors like those that it was recorded with -> its loss."""
        if self.pass_number is not None:
            self.pass_number[0] += 1
        slots: list[Any] = [None] * self.slots
        for number, tensor in zip(self.given, given, strict=True):
            if number != NOBODY:
                slots[number] = tensor
        for number, tensor in self.constants.items():
            slots[number] = tensor
        with torch.no_grad(), _AutoDispatchBelowAutograd():
            (self._do if core is None else self._do_compiled)(slots)
        for module, name, number in self.gradients:
            module._parameters[name].grad = slots[number]  # type: ignore[union-attr]
        return slots[self.loss]

    def _do_compiled(self, slots: list[Any]) -> None:
        core.run_tape(self.heads, self.calls, self.numbers.buffer_info()[0], self.numbers.itemsize, slots)

    def _do(self, slots: list[Any]) -> None:
        """The calls, one after another: what csrc/tape.cpp does without Python's work for each."""
        numbers = iter(self.numbers)
        for _ in range(self.calls):
            function, template, kwargs, places, fills = self.heads[next(numbers)]
            args = [*template]
            for place in places:
                tensor = slots[next(numbers)]
                if type(place) is int:
                    args[place] = tensor
                else:
                    _put_inside(args, place, tensor)
            result = function(*args, **kwargs)
            for _ in range(next(numbers)):
                slots[next(numbers)] = None
            if fills == 1:
                number = next(numbers)
                slots[number] = result if isinstance(result, Tensor) else result[0]
            elif fills:
                for part in result:
                    if (number := next(numbers)) != NOBODY:
                        slots[number] = part
                part = None
            del args, result  # nothing else is held when the next operator allocates
            tensor = None


def _put_inside(args: list[Any], place: Any, tensor: Tensor) -> None:
    outer, inner = place
    args[outer] = [*args[outer]]  # the template's own list is for other runs
    args[outer][inner] = tensor


def longer(numbers: "array[int]", more: Sequence[int]) -> "array[int]":
    """Numbers and more of them, in 16 bits while they all fit."""
    try:
        numbers.extend(array(numbers.typecode, more))
    except OverflowError:
        numbers = array("i", [*numbers, *more])
    return numbers


def accumulate(gradient: Tensor | None, new: Tensor) -> Tensor:
    """What autograd does with a new gradient: adds it to that of earlier passes, or leaves it as the first; a copy, if
    another tensor lies in its storage (which its Python object counts as well)."""
    if gradient is not None:
        return gradient.add_(new)
    return new if torch._C._storage_Use_Count(new.untyped_storage()._cdata) == 2 else new.clone()


def with_key_of_pass(function: Callable, place: int, pass_number: list[int]) -> Callable:
    """An operator that draws random numbers by a key -> the same, with the number of the pass that runs for the key's
    last word."""

    def call(*args: Any) -> Any:
        *words, _ = args[place]
        return function(*args[:place], [*words, *pass_number], *args[place + 1 :])

    return call


def given_tensors(model: nn.Module, leaves: Leaves) -> Iterator[Tensor]:
    """What a pass finds when it begins, besides gradients: the microbatch's tensors, parameters and buffers."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def gradients_of(model: nn.Module) -> Iterator[Tensor | None]:
    """The gradients so far, one for each parameter of each module."""
    for module in model.modules():
        for parameter in module._parameters.values():
            yield None if parameter is None else parameter.grad


def form_of(tensors: Sequence[Tensor | None]) -> int:
    """Hash of what a tape depends on of the tensors that a pass is given: all but their values."""
    forms = (
        t if t is None else (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, has_hook(t)) for t in tensors
    )
    return hash(tuple(forms))


def has_hook(tensor: Tensor) -> bool:
    """Whether somebody is to see the tensor's gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
