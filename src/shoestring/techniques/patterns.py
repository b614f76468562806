"""Which operations follow each other in a model, learned from one forward pass on fake tensors.

Batch norm -> ReLU -> convolution can be done as one operation that keeps only its input, but only where nothing else
looks at what is in between. That is a fact about the model's code, so it is read off a run of it.
"""

import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..profiling.fakes import Faker, faked
from ..task import Task
from .sparse_products import sparse_convolution

RELU = {F.relu, torch.relu, torch.relu_, F.relu_, Tensor.relu, Tensor.relu_}
NORM = {F.batch_norm}
CONVOLUTION = {torch.conv2d, F.conv2d, sparse_convolution}


@dataclass(frozen=True)
class Patterns:
    """Names of batch-norm weights by what their output goes to, and how many of each operation there are."""

    norm_relu_conv: frozenset[str]  # relu, and its result only to one convolution
    norm_relu: frozenset[str]  # relu only
    norms: int
    relus: int


class _Recorder(TorchFunctionMode):
    """Writes down which call made a tensor and which calls took it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.users: dict[int, list[int]] = defaultdict(list)  # tensor -> numbers of the calls that took it

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":  # .shape and the like look at no value
            return out
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.users[id(leaf)].append(len(self.calls))
        self.calls.append((func, args, kwargs, out))  # holds the tensors, so that no id is used twice
        return out


_learned: weakref.WeakKeyDictionary[nn.Module, Patterns] = weakref.WeakKeyDictionary()


def learn(task: Task, piece: Any) -> Patterns:
    """A task and one of its microbatches -> the patterns of its forward pass.

    Those of a model on the meta device are learned once: nothing changes such a model in place, and a planner applies
    many plans to it.
    """
    if not any(parameter.is_meta for parameter in task.model.parameters()):
        return _learn(task, piece)
    if task.model not in _learned:
        _learned[task.model] = _learn(task, piece)
    return _learned[task.model]


def _learn(task: Task, piece: Any) -> Patterns:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faker = Faker(mode, torch.device("cpu"))
    recorder = _Recorder()
    batch = faker.tree(piece)
    with faked(task.model, faker), mode:
        names = {id(p): name for name, p in task.model.named_parameters()}
        with recorder:
            task.loss(task.model, batch)
        return _patterns(recorder, names)


def _patterns(recorder: _Recorder, names: dict[int, str]) -> Patterns:
    relu_conv, relu = set(), set()
    calls_of: dict[str, int] = defaultdict(int)
    for func, args, kwargs, out in recorder.calls:
        if func in NORM and (name := names.get(id(norm_arguments(*args, **kwargs)["weight"]))):
            calls_of[name] += 1
            takers = _takers_of_relu(recorder, out)
            if takers is not None:
                relu.add(name)
                if len(takers) == 1 and recorder.calls[takers[0]][0] in CONVOLUTION:
                    relu_conv.add(name)
    once = {name for name, count in calls_of.items() if count == 1}
    return Patterns(
        norm_relu_conv=frozenset(relu_conv & once),
        norm_relu=frozenset((relu - relu_conv) & once),
        norms=sum(calls_of.values()),
        relus=sum(func in RELU for func, *_ in recorder.calls),
    )


def _takers_of_relu(recorder: _Recorder, out: Tensor) -> list[int] | None:
    """A norm's output -> the calls that take its ReLU, or None where anything but a ReLU looks at the output."""
    users = recorder.users[id(out)]
    if not users or recorder.calls[users[0]][0] not in RELU:
        return None
    activated = recorder.calls[users[0]][3]
    if activated is out:  # in place: who comes later looks at the ReLU
        return users[1:]
    return recorder.users[id(activated)] if len(users) == 1 else None


def norm_arguments(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
) -> dict[str, Any]:
    """The arguments of `F.batch_norm`, however they were passed -> by name."""
    return locals()
