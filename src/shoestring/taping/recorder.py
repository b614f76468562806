"""Records a tape: writes down each operator of a pass while it runs as ever.

Refused are random numbers (but those of keys that end in the pass's number), values that Python reads, tensors that
it makes or fills itself (from numbers, or a file), other devices than CPUs, hooks of others, and tensors that a pass
leaves behind in the model.
"""

import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from ..ambient import Ambient
from ..kernels.define import body_of, compiled_form
from ..kernels.prepared import ALLOCATIONS, prepare
from ..randomness import draws
from ..user_hooks import hooked_modules
from .tape import (
    NOBODY,
    Head,
    Leaves,
    Tape,
    accumulate,
    given_tensors,
    gradients_of,
    has_hook,
    longer,
    with_key_of_pass,
)

_aten = torch.ops.aten


class _NotStatic(Exception):
    """Why a pass cannot be written down."""


def record(run: Callable[[], Tensor], model: nn.Module, leaves: Leaves) -> tuple[Tensor, Tape | str]:
    """Runs a pass over a microbatch -> its loss, and the tape of it, or why there is none."""
    if whose := _whose_hook(model):
        return run(), f"{whose} has a hook"
    recorder = _Recorder(list(given_tensors(model, leaves)), list(gradients_of(model)))
    try:
        with recorder:
            loss = run()
        return loss, recorder.tape(loss, model, leaves)
    except _NotStatic as reason:
        return loss, str(reason)
    finally:
        recorder.forget()


def _whose_hook(model: nn.Module) -> str:
    """A module or parameter with a hook that a tape would not call; "" if there is none."""
    hooked = sorted(hooked_modules(model))
    hooked += [name for name, parameter in model.named_parameters() if has_hook(parameter)]
    return next((name or "the model" for name in hooked), "")


@contextmanager
def unseen() -> Iterator[None]:
    """What is done inside belongs to no tape."""
    if not isinstance(_get_current_dispatch_mode(), _Recorder):
        yield
        return
    with _disable_current_modes():
        yield


def hand_over(tensor: Tensor, take: Callable[[Tensor], None]) -> None:
    """Gives a tensor of the pass to what is no part of it, such as a check of the loss or an update of weights:
    take(tensor). A tape does so again, with the tensor of its own pass."""
    mode = _get_current_dispatch_mode()
    if isinstance(mode, _Recorder):
        mode.hand_over(tensor, take)
    with unseen():
        take(tensor)


class _Watch(weakref.ref):
    """Of a storage, whose key it knows after its death."""

    __slots__ = ("key",)
    key: int


class _Recorder(TorchDispatchMode):
    """A tensor is known by its storage and by where it lies in it: autograd and views make other objects of the same
    tensor, and addresses are used again."""

    def __init__(self, given: list[Tensor], gradients: list[Tensor | None]) -> None:
        super().__init__()
        self.heads: list[Head] = []  # of all kinds of calls
        self.calls = array("h")  # of each call: the number of its head
        self.numbers = array("h")  # of each call: the slots that it reads and fills
        self.constants: dict[int, weakref.ref] = {}  # tensors that no operator of the pass has made
        self.blank: set[int] = set()  # storages that no operator has written to
        self.depends = bytearray()  # of each slot, whether its values depend on what the pass is given
        self.refused = ""
        # A storage -> who watches for its end, and the places and slots of its tensors, in turn. One table and not two:
        # it is there at the peak of a step, for which a plan leaves it no room of its own.
        self._known: dict[int, tuple[Any, ...]] = {}
        self._shared: dict[Any, Any] = {}
        self.pass_number: list[int] | None = None  # which the tape counts on
        self.prepared: dict[int, Callable] = {}  # of a head, by its number: a kernel with all but the addresses decided
        self.given = array("i", [self._given(tensor) for tensor in given])
        first = len(self.depends)
        self.given.extend(NOBODY if gradient is None else self._given(gradient) for gradient in gradients)
        self.sums = range(first, len(self.depends))  # the slots of gradients that are there
        self.only_added_to = bool(self.sums)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.refused:
            return func(*args, **kwargs)
        self.pass_number = self.pass_number or Ambient.now().pass_number
        try:
            _check(func, args, kwargs)
        except _NotStatic as reason:
            self.refused = str(reason)
            return func(*args, **kwargs)
        places = tuple(_places(args))
        reads = [self._slot(_at(args, place)) for place in places]
        sums = [number in self.sums for number in reads]
        if any(sums):
            self.only_added_to &= sums == [True, False] and _adds(func, args, kwargs)
        unwritten = self._unwritten(func, args, places)
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, places, reads, result)
        self._follow_blank(func, unwritten, result)
        return result

    def hand_over(self, tensor: Tensor, take: Callable[[Tensor], None]) -> None:
        number = self._known_slot(tensor) if tensor.layout == torch.strided else None
        if number is None:
            self.refused = self.refused or "the loss or a gradient comes from elsewhere"
            return
        self.heads.append(Head(take, (None,), {}, (0,), 0))
        self.prepared[len(self.heads) - 1] = take
        self._call(len(self.heads) - 1, [number])

    def _unwritten(self, func: Any, args: tuple, places: tuple) -> set[int]:
        """The storages that the operator reads and nobody has written to; what it writes to is blank no more."""
        found = set()
        for place in places if self.blank else ():
            key = _at(args, place).untyped_storage()._cdata
            info = func._schema.arguments[place if isinstance(place, int) else place[0]].alias_info
            if info is not None and info.is_write:
                self.blank.discard(key)
            elif key in self.blank and not _reads_shape(func, args, place):
                found.add(key)
        return found

    def _follow_blank(self, func: Any, unwritten: set[int], result: Any) -> None:
        results = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        keys = {one.untyped_storage()._cdata for one in results}
        if func in ALLOCATIONS:
            self.blank |= keys
        elif unwritten - keys:  # a view of it is no reading
            self.refused = f"{func} reads what was written without an operator"

    def _write(
        self, func: Any, args: tuple, kwargs: dict[str, Any], places: tuple, reads: list[int], result: Any
    ) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        depends = any(self.depends[number] for number in reads)
        if not all(one is None or isinstance(one, Tensor) for one in results):
            if depends:
                self.refused = f"the model reads a value ({func})"
            return
        changes = func._schema.is_mutable
        known = [NOBODY if one is None else self._known_slot(one) for one in results]
        fills: list[int] = []
        if None in known:
            pairs = zip(known, results, strict=True)
            fills = [self._new(one, depends or changes) if number is None else number for number, one in pairs]
        elif not changes:
            return  # another name of what is there: detach, alias, a view of the same shape
        for number in reads if changes else ():
            self.depends[number] |= depends
        self._call(self._head(func, args, kwargs, places, len(fills)), (*reads, *fills))

    def _call(self, head: int, slots: Sequence[int]) -> None:
        self.calls = longer(self.calls, (head,))
        self.numbers = longer(self.numbers, slots)

    def _head(self, func: Any, args: tuple, kwargs: dict[str, Any], places: tuple, fills: int) -> int:
        """The number of the head of such calls."""
        template = tuple(
            None if isinstance(arg, Tensor) else [None if isinstance(part, Tensor) else part for part in arg]
            if isinstance(arg, list | tuple) else arg for arg in args
        )  # fmt: skip
        forms = tuple(_form(_at(args, place)) for place in places) if body_of(func) else ()
        key = func, repr(template), repr(kwargs), places, fills, forms
        if key not in self._shared:
            number = self._shared[key] = len(self.heads)
            self.heads.append(Head(func, template, kwargs, places, fills))
            if ready := self._keyed(func, args) or prepare(func, args):
                self.prepared[number] = ready
        return self._shared[key]

    def _keyed(self, func: Any, args: tuple) -> Callable | None:
        """An operator that draws by a key -> the same with the key of the pass that runs; None for any other."""
        place = _place_of_key(func)
        if place is None:
            return None
        assert self.pass_number is not None, "checked before"
        return with_key_of_pass(compiled_form(func), place, self.pass_number)

    # -- tensors ------------------------------------------------------------------------------------------------
    def _slot(self, tensor: Tensor) -> int:
        """The slot of an argument. What no operator made is a view of something known, or a constant."""
        found = self._known_slot(tensor)
        if found is not None:
            return found
        inside = self._known.get(tensor.untyped_storage()._cdata)
        if inside is None:
            number = self._new(tensor, depends=False)
            self.constants[number] = weakref.ref(tensor)
            return number
        base = inside[2]
        self.only_added_to &= base not in self.sums  # a view of a gradient reads it
        number = self._new(tensor, bool(self.depends[base]))
        view = (None, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        self._call(self._head(torch.ops.aten.as_strided.default, (tensor, *view[1:]), {}, (0,), 1), (base, number))
        return number

    def _given(self, tensor: Tensor) -> int:
        found = self._known_slot(tensor)  # tied weights are one tensor
        return self._new(tensor, depends=True, outlives=True) if found is None else found

    def _known_slot(self, tensor: Tensor) -> int | None:
        inside = self._known.get(tensor.untyped_storage()._cdata, ())
        place = _place(tensor)
        return next((inside[at + 1] for at in range(1, len(inside), 2) if inside[at] == place), None)

    def _new(self, tensor: Tensor, depends: bool, outlives: bool = False) -> int:
        """A new slot; of a tensor that `outlives` the pass, no end need be watched for."""
        storage = tensor.untyped_storage()
        key, place, number = storage._cdata, _place(tensor), len(self.depends)
        if key not in self._known:
            self._known[key] = (None if outlives else self._watch(storage),)
        self._known[key] = (*self._known[key], self._shared.setdefault(place, place), number)
        self.depends.append(depends)
        return number

    def _watch(self, storage: torch.UntypedStorage) -> _Watch:
        watch = _Watch(storage, self._forget)
        watch.key = storage._cdata
        return watch

    def _forget(self, watch: Any) -> None:
        del self._known[watch.key]
        self.blank.discard(watch.key)

    def forget(self) -> None:
        """Watches hold their recorder, and it holds them."""
        self._known.clear()

    # -- the tape -----------------------------------------------------------------------------------------------
    def tape(self, loss: Tensor, model: nn.Module, leaves: Leaves) -> Tape:
        if self.refused:
            raise _NotStatic(self.refused)
        given = set(self.given) - set(self.sums if self.only_added_to else ())
        gradients = [
            (module, name, number)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.grad is not None
            if (number := self._made(parameter.grad, f"the gradient of {name}")) not in given
        ]
        if {*map(self._known_slot, given_tensors(model, leaves))} - given:
            raise _NotStatic("the pass replaces a tensor of the model")
        last = self._made(loss, "the loss")
        return _Compact(self, {last, *(number for *_, number in gradients)}).tape(last, gradients)

    def _made(self, tensor: Tensor, what: str) -> int:
        found = self._known_slot(tensor)
        if found is None:
            raise _NotStatic(f"{what} comes from elsewhere")
        return found


def _check(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    if draws(func, args, kwargs) or not _knows_pass(func, args):
        raise _NotStatic(f"the model draws random numbers ({func})")
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(kwargs)):
        raise _NotStatic(f"{func} takes a tensor by name")
    if any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args):
        raise _NotStatic(f"{func} runs on another device than a CPU")


def _changes(function: Any) -> bool:
    """Whether a call does more than to make tensors: an operator says so, what tensors are handed over to does."""
    return not isinstance(function, OpOverload) or function._schema.is_mutable


def _reads_shape(func: Any, args: tuple, place: int | tuple[int, int]) -> bool:
    """Whether the operator reads of this argument its shape and layout only: a convolution's input, where the gradient
    of its weight is not wanted."""
    return func is _aten.convolution_backward.default and place == 1 and not args[-1][1]


@cache
def _place_of_key(func: Any) -> int | None:
    """Of an operator of ours that draws by a key, the words of it; None of any other: attention's is a tensor."""
    arguments = enumerate(func._schema.arguments)
    return next((place for place, one in arguments if one.name == "key" and str(one.type) == "List[int]"), None)


def _knows_pass(func: Any, args: tuple) -> bool:
    """Whether an operator draws nothing by a key, or by one whose last word is the number of the pass."""
    place = _place_of_key(func)
    return place is None or args[place][-1:] == Ambient.now().pass_number


def _adds(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the operator adds to its first argument another like it, which might as well stand in its place."""
    return func is _aten.add_.Tensor and len(args) == 2 and not kwargs and _form(args[0]) == _form(args[1])


def _places(args: tuple) -> Iterator[int | tuple[int, int]]:
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor):
            yield place
        elif isinstance(arg, list | tuple):
            yield from ((place, inner) for inner, part in enumerate(arg) if isinstance(part, Tensor))


def _at(args: tuple, place: int | tuple[int, int]) -> Tensor:
    return args[place] if isinstance(place, int) else args[place[0]][place[1]]


def _form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype


def _place(tensor: Tensor) -> tuple:
    return tensor.storage_offset(), *_form(tensor)


def _kept(constant: weakref.ref) -> Tensor:
    """A tensor that was there before the pass, and is after it."""
    tensor = constant()
    if tensor is None:
        raise _NotStatic("the pass makes a tensor without an operator, as from numbers or a file")
    return tensor


class _Compact:
    """From what was recorded to the tape: without calls that neither change anything nor make what is wanted, each slot
    freed after its last use, and used again for another tensor."""

    def __init__(self, recorder: _Recorder, wanted: set[int]) -> None:
        self.recorder = recorder
        self.kept: list[tuple[int, list[int], list[int], list[int]]] = []  # head, reads, frees, fills
        self.may_begin = recorder.only_added_to
        alive, end = set(wanted), len(recorder.numbers)
        for call in reversed(recorder.calls):
            head = recorder.heads[call]
            start = end - len(head.places) - head.fills
            reads = list(recorder.numbers[start : start + len(head.places)])
            fills = [number if number in alive else NOBODY for number in recorder.numbers[end - head.fills : end]]
            end = start
            if all(number == NOBODY for number in fills):
                if not _changes(head.function):
                    continue
                fills = []
            if self.may_begin and reads and reads[0] in recorder.sums:
                fills = reads[:1]
                self.may_begin = reads[1] not in alive  # else two parameters might get the same tensor
            self.kept.append((call, reads, [*({*reads} - alive)], fills))
            alive.update(reads)
        self.kept.reverse()
        self._names: dict[int, int] = {}
        self._free: list[int] = []

    def _name(self, number: int) -> int:
        """The slot by which the tape calls a tensor."""
        if number == NOBODY:
            return NOBODY
        if number not in self._names:
            self._names[number] = self._free.pop() if self._free else len(self._names)
        return self._names[number]

    def tape(self, loss: int, gradients: list[tuple[nn.Module, str, int]]) -> Tape:
        recorder, heads, numbers = self.recorder, list[Head](), array("h")
        read = {number for _, reads, *_ in self.kept for number in reads} | {loss}
        given = array("i", [self._name(number) if number in read else NOBODY for number in recorder.given])
        constants = {self._name(number): _kept(held) for number, held in recorder.constants.items() if number in read}
        places, most = dict[Any, int](), len(self._names)
        for call, reads, frees, fills in self.kept:
            adds = bool(reads) and fills == reads[:1]
            key = call, len(fills), adds
            if key not in places:
                head = recorder.heads[call]
                ready = recorder.prepared.get(call) or compiled_form(head.function)
                function = accumulate if adds else ready
                places[key] = len(heads)
                heads.append(head._replace(function=function, fills=len(fills)))
            reading = [*map(self._name, reads)]
            freed = [self._names.pop(number) for number in frees]
            self._free += freed
            numbers = longer(numbers, (places[key], *reading, len(freed), *freed, *map(self._name, fills)))
            most = max(most, len(self._names) + len(self._free))
        left = [(module, name, self._name(number)) for module, name, number in gradients]
        number = recorder.pass_number
        calls, end = len(self.kept), self._name(loss)
        return Tape(heads, calls, numbers, most, given, constants, end, left, self.may_begin, number)
