"""The lean mode: while it is active, operations that save less stand in for PyTorch's own.

`LeanMode` is a function mode. It receives the calls of a model's forward pass, wherever they are written, and answers
some by the functions of `functions.py`; the model's code stays as it is. Batch norm -> ReLU -> convolution becomes one
operation if `patterns` found that nothing else reads the tensors in between: the first two calls return placeholders
(placeholders.py), and the convolution knows what they stand for.

When a region recomputes, its norms get the batch statistics of the first run, and no buffer changes.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import _verify_batch_size  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from ..ambient import Ambient
from ..kernels.norm import batch_norm_learn, batch_norm_statistics
from ..ledger import Phase
from ..phases import current_phase
from ..task import Task
from ..user_hooks import hooked_modules
from .arguments import (
    convolution_arguments,
    dropout_arguments,
    instance_norm_arguments,
    linear_arguments,
    max_pool_arguments,
    relu_arguments,
)
from .functions import (
    Statistics,
    lean_dropout,
    lean_max_pool,
    lean_product,
    lean_relu,
    lean_relu_in_place,
    norm_relu_product,
)
from .layers import Convolution, Linear, PlainConvolution
from .norms import plain_norm
from .owned import usual_references
from .patterns import CONVOLUTION, NORM, RELU, Call, Patterns, learn, norm_arguments
from .placeholders import METADATA, Norm, Placeholders, Record
from .saved_tensors import Stored, store
from .sparse_layers import sparse_convolution
from .switches import without_checkpoints
from .tape import Tape, changes_its_input
from .widened import is_narrow, widened


@dataclass(frozen=True)
class ModeOptions:
    """Which operations the mode takes over."""

    fuse: bool = True  # batch norm with the ReLU (and the convolution) after it: saves the norm's input only
    masks: bool = True  # ReLU and dropout save one bit per element
    products: bool = True  # convolution and linear free their input before they compute its gradient
    every: int = 0  # operations per region of the tape; 0: no tape
    stores: bool = False  # PyTorch's own convolution and linear hand their input to the store, in one piece


@dataclass(frozen=True)
class LeanModeContext:
    """The context of a pass in which a `LeanMode` answers. There is at most one, and the techniques that asked
    for it, `asked_by` in a plan's words, share it."""

    options: ModeOptions
    patterns: Patterns
    asked_by: tuple[str, ...] = ()

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        mode = LeanMode(model, self.options, self.patterns)
        usual_references()  # here, for it cannot be counted inside a pass
        with Ambient.during(mode=mode):
            try:
                with mode, without_checkpoints():
                    yield
            finally:
                mode.tape = None  # in a cycle with the mode, its last region would hold what it saved
            mode.placeholders.close()


def mode_context(task: Task) -> LeanModeContext | None:
    """The context of a task's lean mode, if a technique has asked for one."""
    return next((context for context in task.contexts if isinstance(context, LeanModeContext)), None)


def with_mode(task: Task, asker: str, **changes: Any) -> tuple[Task, Patterns]:
    """A task and the plan's name of a technique -> the same task under a lean mode with these options changed, and the
    patterns that were found in the model."""
    known = mode_context(task)
    if known is None:
        known = LeanModeContext(ModeOptions(), learn(task, next(iter(task.split(task.batch)))))
    rest = tuple(context for context in task.contexts if not isinstance(context, LeanModeContext))
    askers = tuple(dict.fromkeys((*known.asked_by, asker)))
    context = LeanModeContext(replace(known.options, **changes), known.patterns, askers)
    return task.with_(contexts=(context, *rest)), known.patterns


def askers_of(task: Task) -> str:
    """The settings that brought a task's lean mode, for error messages: "precision fp16 and checkpoint no-bn"."""
    context = mode_context(task)
    names = context.asked_by if context is not None else ()
    return " and ".join(f"{name} {task.settings.get(name, '')}".strip() for name in names)


def current_mode() -> "LeanMode":
    """The mode of the pass that is running."""
    mode = Ambient.now().mode
    assert mode is not None, "a region needs a lean mode around it"
    return mode


@dataclass
class _Recipe:
    """Stores a layer's input in place of its larger output; `take()` recomputes the output."""

    product: Any
    x: Tensor

    def take(self) -> Tensor:
        return self.samples(0, len(self.x))

    def samples(self, start: int, stop: int) -> Tensor:
        with torch.no_grad():
            return self.product.forward(self.x[start:stop], None)


class LeanMode(TorchFunctionMode):
    """One forward and backward pass of a model with lean operations."""

    def __init__(self, model: nn.Module, options: ModeOptions, patterns: Patterns) -> None:
        super().__init__()
        self.options = options
        self.tape = Tape(options.every, self) if options.every else None
        weights, buffers = dict(model.named_parameters()), list(model.buffers())
        hooked = hooked_modules(model) if options.fuse else frozenset()
        unseen = {name for name, modules in patterns.seen_by.items() if not modules & hooked}
        conv, relu = patterns.norm_relu_conv & unseen, patterns.norm_relu & unseen
        self.fused = {id(weights[name]) for name in conv} if options.fuse and options.products else set()
        self.activated = {id(weights[name]) for name in conv | relu} if options.fuse else set()
        self.names = {id(parameter): name for name, parameter in weights.items()}
        self.buffers = {id(buffer) for buffer in buffers}
        self.statistics: dict[int, list[Statistics]] = {}  # of the first run, by the id of `_identity`
        self.before: dict[int, list[dict[str, Tensor]]] = {}  # statistics of instance norms, before their first run
        self.placeholders = Placeholders()
        self.recipes: dict[int, tuple[weakref.ref, _Recipe]] = {}
        self.sweep: Any = None  # the block that runs a few samples at a time (sweeps.py), if one does

    def store_input(self, tensor: Tensor) -> Stored:
        """Chooses how a region stores its input. If a layer produced it from a smaller tensor that is alive anyway,
        stores how to recompute it."""
        made, recipe = self.recipes.pop(id(tensor), (None, None))
        return recipe if recipe is not None and made is not None and made() is tensor else store(tensor)

    def running(self) -> AbstractContextManager:
        """A context in which this mode answers calls: PyTorch takes it off its stack for `backward()`."""
        return nullcontext() if self in _get_current_function_mode_stack() else self

    @contextmanager
    def sweeping(self, block: Any) -> Iterator[None]:
        """Inside the context, norms get the statistics of their batch from the block, of which some samples run."""
        before, self.sweep = self.sweep, block
        try:
            yield
        finally:
            self.sweep = before

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if self.tape and current_phase() == Phase.FORWARD and getattr(func, "__name__", "") != "__get__":
            return self.tape.call(func, args, kwargs)
        return self.answer(func, args, kwargs)

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call of the model -> its result, by a lean function if there is one."""
        handler, recomputing = self._handler(func, args, kwargs), current_phase() == Phase.RECOMPUTE
        if handler not in _TAKES_PLACEHOLDERS:
            args, kwargs = self.placeholders.real((args, kwargs))
        repeats = recomputing or self.sweep is not None
        changes = repeats and args and id(args[0]) in self.buffers and changes_its_input(func, args, kwargs)
        if changes and (recomputing or not self.sweep.may_change(args[0])):
            return args[0]  # the first run has changed it, e.g. a counter of batches
        return handler(self, func, args, kwargs) if handler else func(*args, **kwargs)

    def _handler(self, func: Any, args: tuple, kwargs: dict) -> "Callable | None":
        if func in NORM:
            return LeanMode._norm
        if func not in _HANDLERS and func not in _PRODUCTS:
            return None
        if func in _LAYERS and torch.is_autocast_enabled("cpu"):
            return None  # autocast chooses the dtype to compute in
        narrow = is_narrow(_first_tensor(args, kwargs))
        if func in _PRODUCTS:
            return LeanMode._widened if narrow else None
        return _HANDLERS[func] if torch.is_grad_enabled() or narrow or func in RELU else None

    def real(self, tree: Any) -> Any:
        """A region's arguments with real tensors for placeholders: it is recomputed without what came before it."""
        return self.placeholders.real(tree)

    # -- batch norm ---------------------------------------------------------------------------------------------
    def _norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = norm_arguments(Call(func, args, kwargs, None, True))
        x, gamma, beta = call["input"], call["weight"], call["bias"]
        if not call["training"]:
            return func(*args, **kwargs)
        if self.options.stores and not self.options.products:  # then the forward pass is PyTorch's own
            plain = torch.is_autocast_enabled("cpu") or not x.requires_grad or x.device.type != "cpu"
            return func(*args, **kwargs) if plain else plain_norm(x, call)
        _verify_batch_size(x.size())  # as F.batch_norm does
        norm = Norm(x, gamma, beta, self._statistics(call), self.names.get(id(gamma), ""))
        if id(gamma) in self.activated and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            return self.placeholders.make(norm)
        return norm.compute(relu=False)

    def _statistics(self, call: dict) -> Statistics:
        """The batch's statistics: those of the first run if this is a recomputation, else computed and remembered."""
        if self.sweep is not None:
            return self.sweep.statistics(call)
        recomputing, key = current_phase() == Phase.RECOMPUTE, self._identity(call)
        known = self.statistics.get(key, [])
        if recomputing and len(known) == 1:  # a norm that is called twice per pass recomputes its statistics
            return known[0]
        with torch.no_grad():
            x = call["input"]
            mean, variance = batch_norm_statistics(x)
            running = [None if recomputing else call[name] for name in ("running_mean", "running_var")]
            count = x.numel() // x.shape[1]
            invstd = batch_norm_learn(mean, variance, running[0], running[1], call["momentum"], call["eps"], count)
            statistics = Statistics(mean, invstd)
            if not recomputing:
                self.statistics.setdefault(key, []).append(statistics)
        return statistics

    def _identity(self, call: dict) -> int:
        """The id of a tensor of the model that belongs to this norm alone; 0 for norms without any."""
        if id(call["running_mean"]) in self.buffers:
            return id(call["running_mean"])
        return id(call["weight"]) if id(call["weight"]) in self.names else 0

    def _instance_norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Instance norm, whose running statistics a recomputation must neither change nor find changed."""
        call = instance_norm_arguments(*args, **kwargs)
        running = {name: call[name] for name in ("running_mean", "running_var") if call[name] is not None}
        if not running or not call["use_input_stats"]:
            return func(*args, **kwargs)
        before = self.before.setdefault(id(running["running_mean"]), [])
        if current_phase() != Phase.RECOMPUTE:
            before.append({name: buffer.clone() for name, buffer in running.items()})
            return func(*args, **kwargs)
        found = before[0] if len(before) == 1 else running
        return func(**(call | {name: buffer.clone() for name, buffer in found.items()}))

    # -- the other operations -----------------------------------------------------------------------------------
    def _relu(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = relu_arguments(*args, **kwargs)
        x, in_place = call["input"], func in _IN_PLACE or call["inplace"]
        if (record := self.placeholders.record(x)) and record.norm and not record.activated and torch.is_grad_enabled():
            return self._activated(x, record, in_place)
        if not self.options.masks or not torch.is_grad_enabled():
            args, kwargs = self.placeholders.real((args, kwargs))
            return func(*args, **kwargs)
        x = self.placeholders.real(x)
        if in_place:
            return lean_relu_in_place(x) if x.requires_grad and not x.is_leaf else func(x)
        return lean_relu(x)

    def _max_pool(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = max_pool_arguments(*args, **kwargs)
        x, window = call["input"], call["window"]
        if not self.options.masks or not x.requires_grad or x.dim() != 4 or not window.fits_a_byte():
            return func(*args, **kwargs)
        return lean_max_pool(x, window)

    def _activated(self, x: Tensor, record: Record, in_place: bool) -> Tensor:
        """ReLU of a placeholder: another placeholder if a convolution is to follow, else batch norm and ReLU as one."""
        norm = record.norm
        assert norm is not None
        fused = id(norm.gamma) in self.fused
        if in_place:
            record.activated = True
            return x if fused else record.value()
        return self.placeholders.make(norm, activated=True) if fused else norm.compute(relu=True)

    def _dropout(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = dropout_arguments(*args, **kwargs)
        if not self.options.masks or not call["training"] or call["inplace"] or not 0 < call["p"] < 1:
            return func(*args, **kwargs)
        return lean_dropout(call["input"], call["p"])

    def _convolution(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = convolution_arguments(*args, **kwargs)
        ours = self.options.products or self.options.stores
        if not ours or call["input"].dim() != 4 or isinstance(call["padding"], str):
            args, kwargs = self.placeholders.real((args, kwargs))
            return func(*args, **kwargs)
        x = call.pop("input")
        call |= self.placeholders.real({"weight": call["weight"], "bias": call["bias"]})
        layer = Convolution if self.options.products else PlainConvolution
        return self._product(x, call["weight"], call["bias"], layer(**call))

    def _sparse(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return self._product(*args, **kwargs)

    def _product(self, x: Tensor, values: Tensor, bias: Tensor | None, product: Any) -> Tensor:
        record = self.placeholders.record(x)
        if record and record.activated and record.real is None:
            norm = record.fused()
            return norm_relu_product(norm.x, norm.gamma, norm.beta, values, bias, norm.statistics, product)
        x = self.placeholders.real(x)  # its ReLU was skipped this time, or its values were read
        y = lean_product(x, values, bias, product)
        if not x.requires_grad and x.nbytes < y.nbytes and current_phase() == Phase.FORWARD:
            self.recipes[id(y)] = weakref.ref(y), _Recipe(product, x)
        return y

    def _linear(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = linear_arguments(*args, **kwargs)
        x, weight, bias = call["input"], call["weight"], call["bias"]
        ours = self.options.products or self.options.stores
        return lean_product(x, weight, bias, Linear(weight, bias)) if ours else func(*args, **kwargs)

    def _widened(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return widened(func, args, kwargs)


def _first_tensor(args: tuple, kwargs: dict) -> Tensor | None:
    """The first tensor among a call's arguments, positional or keyword, in a list or not."""
    return next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)


def _opened(func: Any) -> Callable:
    """A function of PyTorch that offers itself to a mode as a whole -> a copy whose inner calls go to the mode."""
    names = func.__globals__ | {"has_torch_function": lambda tensors: False}
    return FunctionType(func.__code__, names, func.__name__, func.__defaults__)


_OPENED = {F.multi_head_attention_forward: _opened(F.multi_head_attention_forward)}
_PRODUCTS = {
    torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm, torch.einsum, Tensor.matmul, Tensor.bmm, Tensor.mm,
    Tensor.__matmul__, F.scaled_dot_product_attention, torch.conv1d, torch.conv3d, torch.conv_transpose2d,
}  # fmt: skip
_LAYERS = _PRODUCTS | CONVOLUTION | {F.linear}
_IN_PLACE = {torch.relu_, F.relu_, Tensor.relu_}
_HANDLERS: dict[Any, Callable] = (
    dict.fromkeys(RELU, LeanMode._relu)
    | dict.fromkeys(CONVOLUTION, LeanMode._convolution)
    | {F.dropout: LeanMode._dropout, F.linear: LeanMode._linear, sparse_convolution: LeanMode._sparse}
    | {F.instance_norm: LeanMode._instance_norm, F.max_pool2d: LeanMode._max_pool, torch.max_pool2d: LeanMode._max_pool}
)
_TAKES_PLACEHOLDERS = {LeanMode._relu, LeanMode._convolution, LeanMode._sparse}
