"""How a kernel becomes a PyTorch op: a schema, a reference implementation, a fake for tracing, and the compiled form.

    define("pack_bits(Tensor mask) -> Tensor", reference=..., fake=..., compiled=...)

makes `torch.ops.shoestring.pack_bits`. On the CPU it runs `compiled` if the core is loaded, and the reference, in
PyTorch, everywhere else; there is no other fallback. The function that `define` returns skips PyTorch's dispatcher if
nobody listens there: a lean step makes thousands of calls, and the way through it costs more than many a kernel. `fake`
allocates all that the op allocates; the part that it drops before it returns is the op's scratch, which `scratch_of`
reports to the profiler. Gradients are given by autograd functions around ops.
"""

import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..ambient import Ambient
from ..ledger import Category, Ledger
from . import core

_library = torch.library.Library("shoestring", "DEF")
_fakes: dict[Any, Callable] = {}  # of each op, for tracers
_compiled: dict[Any, Callable] = {}  # of each op, if the core is loaded
_bodies: dict[Any, Callable | None] = {}  # of what is compiled


def define(
    schema: str,
    *,
    reference: Callable,
    fake: Callable,
    compiled: Callable,
    body: Callable | None = None,
    idle: int = 0,
) -> Any:
    """An op schema and its three forms -> the op as a function of positional arguments.

    `body(launch, *args)` is what the compiled form is made of, if it is (`calls.forms`). `idle` are how many last
    arguments change nothing of what is allocated: the number of a step, say.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if core.core is not None:
        _library.impl(name, compiled, "CPU")
    told = _telling_scratch(fake, idle)
    torch.library.register_fake(f"shoestring::{name}", told, lib=_library)
    op = getattr(torch.ops.shoestring, name).default
    _fakes[op] = told
    if core.core is None:
        return op
    _compiled[op] = compiled
    _bodies[op] = body
    return _direct(op, compiled)


def compiled_form(op: Any) -> Callable:
    """What the dispatcher calls in the end for plain CPU tensors: our compiled function, or PyTorch's own."""
    return _compiled.get(op, op._op)


def body_of(op: Any) -> Callable | None:
    """The body of an op's compiled form; None if it has none, as PyTorch's own ops."""
    return _bodies.get(op)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _direct(op: Callable, compiled: Callable) -> Callable:
    """The op; its compiled form is called directly if the dispatcher would do just that: plain CPU tensors, and no mode
    (a trace, a meter, a compiler) that wants to see the call."""

    @wraps(compiled)
    def call(*args: Any) -> Any:
        for a in args:
            if isinstance(a, Tensor) and not (type(a) in _PLAIN and a.is_cpu):
                return op(*args)
        if _len_torch_dispatch_stack() or torch.compiler.is_compiling():
            return op(*args)
        return compiled(*args)

    return call


def scratch_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call of one of our ops on fake tensors -> its result, and its peak scratch in bytes."""
    told: list[int] = []
    with Ambient.during(scratch_bytes=told):
        return call(), max(told, default=0)


def fake_call(op: Any, args: tuple) -> tuple[Any, int]:
    """A call of one of our ops, seen by a mode above the fake one -> what `scratch_of` gives for it.

    The fake is called directly: PyTorch's way to it costs more than all else in the trace of an update.
    """
    return scratch_of(lambda: _fakes[op](*args))


def _telling_scratch(fake: Callable, idle: int) -> Callable:
    """The fake of an op -> the same, reporting its scratch to `scratch_of`; equal calls run it once."""
    known: dict[Any, tuple[int, Callable[[], Any]]] = {}

    @wraps(fake)
    def watched(*args: Any) -> Any:
        told = Ambient.now().scratch_bytes
        if told is None:
            return fake(*args)
        call = torch.get_num_threads(), *map(_key, args[: len(args) - idle])
        if call in known:
            told.append(known[call][0])
            return known[call][1]()
        with _Watch() as watch:
            result = fake(*args)
        told.append(watch.scratch_bytes(result))
        if again := _remade(result, watch):
            known[call] = told[-1], again
        return result

    return watched


def _key(argument: Any) -> Any:
    """An argument of an op -> its part of the key by which calls allocate alike."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    return tuple(argument) if isinstance(argument, list) else (type(argument), argument)


def _remade(result: Any, watch: "_Watch") -> Callable[[], Any] | None:
    """A fake's result -> a function that reallocates outputs like it; None if any is not a freshly allocated dense
    tensor."""
    leaves, form = pytree.tree_flatten(result)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):  # it writes into its arguments, or gives a number
        return lambda: result
    if not all(isinstance(leaf, Tensor) and watch.made(leaf) for leaf in leaves):
        return None
    like = [{"size": t.shape, "stride": t.stride(), "dtype": t.dtype, "device": t.device} for t in leaves]
    return lambda: pytree.tree_unflatten([torch.empty_strided(**settings) for settings in like], form)


class _Watch(TorchDispatchMode):
    """Records the storages that are allocated and freed while a fake runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.numbers: dict[int, int] = {}
        self.watches: list[weakref.ref] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        known = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in known and storage._cdata not in self.numbers:
                key = storage._cdata
                self.numbers[key] = self.ledger.birth(storage.nbytes(), Category.WORKSPACE)
                self.watches.append(weakref.ref(storage, partial(self._death, key)))
        return out

    def _death(self, key: int, _: Any) -> None:
        self.ledger.death(self.numbers.pop(key))

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor is new, and all of its storage."""
        storage = tensor.untyped_storage()
        return storage._cdata in self.numbers and storage.nbytes() == tensor.numel() * tensor.dtype.itemsize

    def scratch_bytes(self, result: Any) -> int:
        """The peak of everything that is not part of the result."""
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and (number := self.numbers.get(tensor.untyped_storage()._cdata)) is not None:
                self.ledger.entries[number].bytes = 0
        return self.ledger.peak().bytes
