"""Which operations follow each other in a model, learned from one forward pass on fake tensors.

Batch norm -> ReLU -> convolution can be one operation that saves only its input, but only if nothing else reads the
tensors in between. That is a property of the model's code, so it is learned from a run of it.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..profiling.dry import dry_run
from ..task import Task
from .placeholders import METADATA
from .sparse_layers import sparse_convolution

RELU = {F.relu, torch.relu, torch.relu_, F.relu_, Tensor.relu, Tensor.relu_}
NORM = {F.batch_norm, torch.batch_norm}
CONVOLUTION = {torch.conv2d, F.conv2d, sparse_convolution}


@dataclass(frozen=True)
class Patterns:
    """Names of batch-norm weights by what their output goes to, and how many of each operation there are.

    `seen_by` names the modules that take or return a norm's output or its ReLU: a hook on one of them would see it.
    """

    norm_relu_conv: frozenset[str]  # relu, and its result only to one convolution
    norm_relu: frozenset[str]  # relu only
    norms: int
    relus: int
    seen_by: Mapping[str, frozenset[str]]


class Call(NamedTuple):
    """A call of the model; `fusible`: autograd records it, and the model's own checkpointing does not recompute it."""

    func: Any
    args: tuple
    kwargs: dict
    out: Any
    fusible: bool


class _CallRecorder(TorchFunctionMode):
    """Records which call returned a tensor, which calls took it, and which modules took or returned it."""

    def __init__(self, paths: dict[int, str]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.users: dict[int, list[int]] = defaultdict(list)  # tensor -> numbers of the calls that took it
        self.seen_by: dict[int, set[str]] = defaultdict(set)  # tensor -> modules
        self.paths = paths

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in METADATA:  # .shape etc. read no values
            return out
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.users[id(leaf)].append(len(self.calls))
        # Holds the tensors, so that no id is reused.
        self.calls.append(Call(func, args, kwargs, out, _recorded_once()))
        return out

    @contextmanager
    def following(self) -> Iterator[None]:
        """Records the calls of modules as well."""
        hooks = (
            module_hooks.register_module_forward_pre_hook(lambda module, args: self._see(module, args)),
            module_hooks.register_module_forward_hook(lambda module, args, output: self._see(module, output)),
        )
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, module: nn.Module, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and id(module) in self.paths:
                self.seen_by[id(leaf)].add(self.paths[id(module)])


def _recorded_once() -> bool:
    """Whether autograd records what runs now, and no checkpointing of the model's own will recompute it."""
    return torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None


_learned: weakref.WeakKeyDictionary[nn.Module, Patterns] = weakref.WeakKeyDictionary()


def learn(task: Task, piece: Any) -> Patterns:
    """A task and one of its microbatches -> the patterns of its forward pass.

    They are learned once for a model on the meta device: nothing changes such a model in place, and a planner applies
    many plans to it.
    """
    if not any(parameter.is_meta for parameter in task.model.parameters()):
        return _learn(task, piece)
    if task.model not in _learned:
        _learned[task.model] = _learn(task, piece)
    return _learned[task.model]


def _learn(task: Task, piece: Any) -> Patterns:
    def watched(batch: Any) -> Patterns:
        recorder = _CallRecorder({id(module): path for path, module in task.model.named_modules()})
        with recorder.following():
            task.loss_of(task.model, batch)
        return _patterns(recorder, {id(p): name for name, p in task.model.named_parameters()})

    return dry_run(task, piece, watched)


class _Found(NamedTuple):
    """A norm whose output goes to a ReLU, both outputs, who sees them, and whether a convolution is next."""

    name: str
    tensors: tuple[weakref.ref, ...]
    seen_by: frozenset[str]
    conv: bool


def _patterns(recorder: _CallRecorder, names: dict[int, str]) -> Patterns:
    calls = [(names.get(id(norm_arguments(call)["weight"])), call) for call in recorder.calls if call.func in NORM]
    counts = Counter(name for name, _ in calls)
    found = [found for name, call in calls if name and counts[name] == 1 and (found := _followed(recorder, name, call))]
    relus = sum(call.func in RELU for call in recorder.calls)
    # A tensor that is alive without the recorder is referenced elsewhere (an attribute, a hook), and may be read later.
    recorder.calls.clear()
    calls.clear()
    free = [norm for norm in found if not any(reference() is not None for reference in norm.tensors)]
    return Patterns(
        norm_relu_conv=frozenset(norm.name for norm in free if norm.conv),
        norm_relu=frozenset(norm.name for norm in free if not norm.conv),
        norms=counts.total(),
        relus=relus,
        seen_by={norm.name: norm.seen_by for norm in free},
    )


def _followed(recorder: _CallRecorder, name: str, norm: Call) -> _Found | None:
    """A norm -> where its output goes, or None if that is anything but one ReLU."""
    users = recorder.users[id(norm.out)]
    if not users or (relu := recorder.calls[users[0]]).func not in RELU or not (norm.fusible and relu.fusible):
        return None
    if relu.out is norm.out:  # in place: later calls read the ReLU's output
        takers = users[1:]
    elif len(users) == 1:
        takers = recorder.users[id(relu.out)]
    else:
        return None
    conv = len(takers) == 1 and _takes_as_input(recorder.calls[takers[0]], relu.out)
    seen_by = recorder.seen_by[id(norm.out)] | recorder.seen_by[id(relu.out)]
    return _Found(name, (weakref.ref(norm.out), weakref.ref(relu.out)), frozenset(seen_by), conv)


def _takes_as_input(call: Call, tensor: Tensor) -> bool:
    """Whether a call is a convolution with this tensor as its input (and not as its weight)."""
    return call.func in CONVOLUTION and call.fusible and (call.args or (call.kwargs.get("input"),))[0] is tensor


def norm_arguments(call: Any) -> dict[str, Any]:
    """A call of batch norm, however its arguments were passed -> the arguments by name."""
    return _ARGUMENTS[call.func](*call.args, **call.kwargs)


def _functional(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: Any = False,
    momentum: Any = 0.1, eps: Any = 1e-05,
) -> dict[str, Any]:  # fmt: skip
    return locals()


def _native(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: Any, momentum: Any, eps: Any,
    cudnn_enabled: Any = True,
) -> dict[str, Any]:  # fmt: skip
    return locals()


_ARGUMENTS: dict[Any, Callable[..., dict[str, Any]]] = {F.batch_norm: _functional, torch.batch_norm: _native}
