"""The lean run: inside it, PyTorch's own operations are done by functions that keep less.

`LeanRun` is a function mode. It takes the calls of a model's forward pass, whoever makes them, and answers some by the
functions of `functions.py`: the model's code stays as it is. Batch norm -> ReLU -> convolution, where `patterns` found
that nothing else looks in between, becomes one operation: the first two calls answer with a placeholder of the right
shape that holds NaN, and the convolution knows what it stands for.

A model that is run again (checkpointing) finds the batch statistics of its first run, and changes no buffer.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from ..errors import ShoestringError
from ..kernels.norm import batch_norm_statistics
from ..ledger import Phase
from ..phases import current
from ..task import Task
from .functions import (
    Statistics,
    lean_dropout,
    lean_norm,
    lean_product,
    lean_relu,
    norm_relu_product,
)
from .keeping import Kept, keep
from .patterns import CONVOLUTION, NORM, RELU, Patterns, learn, norm_arguments
from .products import Convolution, Linear
from .sparse_products import sparse_convolution
from .tape import Tape
from .widened import is_narrow, widened


@dataclass(frozen=True)
class Lean:
    """Which operations a lean run takes over."""

    fuse: bool = True  # batch norm with the ReLU (and the convolution) after it: keep the norm's input only
    masks: bool = True  # ReLU and dropout keep a bit an element
    products: bool = True  # convolution and linear let go of their input before they make its gradient
    every: int = 0  # operations in a region of the tape; 0: no tape


@dataclass
class _Pending:
    """What a placeholder stands for: batch norm of x, then, once `activated`, its ReLU."""

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    statistics: Statistics
    activated: bool = False


_current: ContextVar["LeanRun | None"] = ContextVar("lean_run", default=None)


@dataclass(frozen=True)
class LeanPass:
    """The context of a pass in which a `LeanRun` answers; there is one, whatever techniques asked for it."""

    lean: Lean
    patterns: Patterns

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        run = LeanRun(model, self.lean, self.patterns)
        token = _current.set(run)
        try:
            with run:
                yield
        finally:
            _current.reset(token)


def with_lean(task: Task, **changes: Any) -> tuple[Task, Patterns]:
    """A task -> the same task under a lean run with these settings changed, and the patterns that were found in it."""
    known = next((context for context in task.contexts if isinstance(context, LeanPass)), None)
    if known is None:
        known = LeanPass(Lean(), learn(task, next(iter(task.split(task.batch)))))
    rest = tuple(context for context in task.contexts if not isinstance(context, LeanPass))
    lean = LeanPass(replace(known.lean, **changes), known.patterns)
    return task.with_(contexts=(lean, *rest)), known.patterns


def lean_run() -> "LeanRun":
    """The run that is in force."""
    run = _current.get()
    assert run is not None, "a region needs a lean run around it"
    return run


@dataclass
class _Recipe:
    """What a product made of its input: kept as the input, and made again when it is taken."""

    product: Any
    x: Tensor

    def take(self) -> Tensor:
        with torch.no_grad():
            return self.product.forward(self.x, None)


class LeanRun(TorchFunctionMode):
    """One forward and backward pass of a model with lean operations."""

    def __init__(self, model: nn.Module, lean: Lean, patterns: Patterns) -> None:
        super().__init__()
        self.lean = lean
        self.tape = Tape(lean.every, self) if lean.every else None
        weights = dict(model.named_parameters())
        conv, relu = patterns.norm_relu_conv, patterns.norm_relu
        self.fused = {id(weights[name]) for name in conv} if lean.fuse and lean.products else set()
        self.activated = {id(weights[name]) for name in conv | relu} - self.fused if lean.fuse else set()
        self.names = {id(parameter): name for name, parameter in weights.items()}
        self.counters = {id(m._buffers.get("num_batches_tracked")) for m in model.modules()} - {id(None)}
        self.statistics: dict[int, list[Statistics]] = {}  # of the first run, by the norm's running mean or weight
        self.nans: dict[tuple, Tensor] = {}
        self.pending: dict[int, tuple[Tensor, _Pending]] = {}
        self.recipes: dict[int, tuple[weakref.ref, _Recipe]] = {}
        self.already: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # rectified by the norm

    def keep_input(self, tensor: Tensor) -> Kept:
        """What a region keeps of its input: where that is the stem's output and larger than the stem's input, which
        is there anyway, how to make it again."""
        made, recipe = self.recipes.pop(id(tensor), (None, None))
        return recipe if recipe is not None and made is not None and made() is tensor else keep(tensor)

    def running(self) -> AbstractContextManager:
        """A context in which this run answers calls: inside `backward()` PyTorch has taken it off its stack."""
        return nullcontext() if self in _get_current_function_mode_stack() else self

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.pending:
            self._check_placeholders(func, args, kwargs)
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **kwargs)
        if self.tape and current() == Phase.FORWARD and getattr(func, "__name__", "") != "__get__":
            return self.tape.call(func, args, kwargs)
        return self.answer(func, args, kwargs)

    def answer(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A call of the model -> its result, by a lean function where there is one."""
        again = current() == Phase.RECOMPUTE
        if func in NORM:
            return self._norm(func, args, kwargs, again)
        if again and func is Tensor.add_ and id(args[0]) in self.counters:
            return args[0]  # num_batches_tracked counted this batch in the first run
        if func in _LAYERS and torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)  # autocast chooses the type that it computes in
        if func in _PRODUCTS and is_narrow(args[0]):
            return widened(func, args, kwargs)
        handler = _HANDLERS.get(func) if torch.is_grad_enabled() or is_narrow(args[0] if args else None) else None
        return handler(self, func, args, kwargs) if handler else func(*args, **kwargs)

    def _check_placeholders(self, func: Any, args: tuple, kwargs: dict) -> None:
        if func in RELU or func in CONVOLUTION or getattr(func, "__name__", "") == "__get__":
            return
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self.pending:
                gamma = self.pending[id(leaf)][1].gamma
                raise ShoestringError(
                    f"the output of batch norm {self.names.get(id(gamma), '')!r} went to {func.__name__}, but to ReLU "
                    "and one convolution when the model was examined: its code takes different paths; "
                    "use a checkpoint strategy without '*' or no-bn"
                )

    # -- batch norm ---------------------------------------------------------------------------------------------
    def _norm(self, func: Any, args: tuple, kwargs: dict, again: bool) -> Any:
        call = norm_arguments(*args, **kwargs)
        x, gamma, beta = call["input"], call["weight"], call["bias"]
        if not call["training"]:
            return func(*args, **kwargs)
        statistics = self._statistics(call, again)
        if id(gamma) in self.fused and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
            placeholder = self._nan(x).expand(x.shape)
            self.pending[id(placeholder)] = placeholder, _Pending(x, gamma, beta, statistics)
            return placeholder
        relu = id(gamma) in self.activated
        y = lean_norm(x, gamma, beta, statistics, relu)
        if relu:
            self.already[id(y)] = y
        return y

    def _nan(self, like: Tensor) -> Tensor:
        """The one value of all placeholders of a type."""
        kind = like.dtype, like.device
        if kind not in self.nans:
            self.nans[kind] = like.new_full((), float("nan"))
        return self.nans[kind]

    def _statistics(self, call: dict, again: bool) -> Statistics:
        """The batch's statistics: those of the first run where this is a second one, else computed and remembered."""
        key = next((id(t) for t in (call["running_mean"], call["weight"]) if t is not None), 0)
        known = self.statistics.get(key, [])
        if again and len(known) == 1:  # a norm that is called twice a pass computes its statistics again
            return known[0]
        with torch.no_grad():
            x = call["input"]
            mean, variance = batch_norm_statistics(x)
            statistics = Statistics(mean, (variance + call["eps"]).rsqrt())
            if not again:
                self.statistics.setdefault(key, []).append(statistics)
                _update_running(call, mean, variance, x.numel() // x.shape[1])
        return statistics

    # -- the other operations -----------------------------------------------------------------------------------
    def _relu(self, func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs["input"]
        if id(x) in self.pending:
            self.pending[id(x)][1].activated = True
            return x
        if self.already.get(id(x)) is x:
            return x
        in_place = func in _IN_PLACE or kwargs.get("inplace") or (len(args) > 1 and args[1])
        return lean_relu(x) if self.lean.masks and not in_place else func(*args, **kwargs)

    def _dropout(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = _dropout_arguments(*args, **kwargs)
        if not self.lean.masks or not call["training"] or call["inplace"] or not 0 < call["p"] < 1:
            return func(*args, **kwargs)
        return lean_dropout(call["input"], call["p"])

    def _convolution(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if not self.lean.products:
            return func(*args, **kwargs)
        call = _convolution_arguments(*args, **kwargs)
        x, weight, bias = call.pop("input"), call["weight"], call["bias"]
        if x.dim() != 4 or isinstance(call["padding"], str):
            return func(*args, **kwargs)
        return self._product(x, weight, bias, Convolution(**call))

    def _sparse(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return self._product(*args)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Any) -> Tensor:
        if pending := self.pending.pop(id(x), None):
            norm = pending[1]
            return norm_relu_product(norm.x, norm.gamma, norm.beta, weight, bias, norm.statistics, product)
        y = lean_product(x, weight, bias, product)
        if not x.requires_grad and x.nbytes < y.nbytes and current() == Phase.FORWARD:
            self.recipes[id(y)] = weakref.ref(y), _Recipe(product, x)
        return y

    def _linear(self, func: Any, args: tuple, kwargs: dict) -> Any:
        call = _linear_arguments(*args, **kwargs)
        x, weight, bias = call["input"], call["weight"], call["bias"]
        return lean_product(x, weight, bias, Linear(weight, bias)) if self.lean.products else func(*args, **kwargs)


def _update_running(call: dict, mean: Tensor, variance: Tensor, count: int) -> None:
    """running = (1 - momentum) running + momentum new, with the unbiased variance: what PyTorch does."""
    if call["running_mean"] is not None:
        momentum = call["momentum"]
        call["running_mean"].lerp_(mean.to(call["running_mean"].dtype), momentum)
        unbiased = variance * (count / max(1, count - 1))
        call["running_var"].lerp_(unbiased.to(call["running_var"].dtype), momentum)


def _pairs(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value) * (2 // len(value))


def _convolution_arguments(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> dict[str, Any]:
    padding = padding if isinstance(padding, str) else _pairs(padding)
    return {"input": input, "weight": weight, "bias": bias, "stride": _pairs(stride), "padding": padding,
            "dilation": _pairs(dilation), "groups": groups}  # fmt: skip


def _linear_arguments(input, weight, bias=None) -> dict[str, Any]:
    return locals()


def _dropout_arguments(input, p=0.5, training=True, inplace=False) -> dict[str, Any]:
    return locals()


def _opened(func: Any) -> Callable:
    """A function of PyTorch that hands itself to a mode as a whole -> its twin, whose own calls go to the mode."""
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
    dict.fromkeys(RELU, LeanRun._relu)
    | dict.fromkeys(CONVOLUTION, LeanRun._convolution)
    | {F.dropout: LeanRun._dropout, F.linear: LeanRun._linear, sparse_convolution: LeanRun._sparse}
)
