"""Who reads the weight of a layer, besides the layer's own forward: functional weight tying, a look at its type.

Such a layer stays dense, for a sparse one has no weight to read. It is found by a trace of a step on fake tensors, in
which every read of a weight is looked at.
"""

import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ...errors import ShoestringError
from ...profiling.profile import profile
from ...task import Task
from .layers import KINDS, sparse_kind

_OWN = frozenset(kind.dense.forward.__code__ for kind in KINDS)
_known: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()  # a plan applies many settings to one model
_patching = threading.RLock()


def readers(task: Task) -> Mapping[str, str]:
    """A task -> the layers whose weight other code reads in a step, by name, and that code.

    What a step does not do (an evaluation's other path) is not seen: a sparse layer then says what is wrong.
    """
    if task.batch is None:
        return {}
    if task.model not in _known:
        found: dict[str, str] = {}
        names = {id(m): name for name, m in task.model.named_modules() if sparse_kind(m) and "weight" in m._parameters}
        with _watched(names, found):
            _rehearse(task)
        _known[task.model] = found
    return _known[task.model]


def _rehearse(task: Task) -> None:
    try:
        profile(task, steps=1)
    except ShoestringError:
        pass  # a step that cannot be traced is refused by whoever needs the trace
    except Exception as error:
        warnings.warn(
            f"a step of {task.name or type(task.model).__name__} could not be traced, so code that reads the weight of "
            f"a sparse layer would fail in training ({type(error).__name__}: {error})",
            stacklevel=2,
        )


@contextmanager
def _watched(names: Mapping[int, str], found: dict[str, str]) -> Iterator[None]:
    """Records who reads the weight of a module of these ids, except the forward of PyTorch's layers."""
    get = nn.Module.__getattr__

    def watching(self: nn.Module, name: str) -> Any:
        if name == "weight" and id(self) in names:
            reader = sys._getframe(1)
            if reader.f_code not in _OWN:
                found.setdefault(names[id(self)], _words(reader))
        return get(self, name)

    with _patching:
        nn.Module.__getattr__ = watching  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__getattr__ = get  # type: ignore[method-assign]


def _words(reader: FrameType) -> str:
    code = reader.f_code
    owner, name = reader.f_locals.get(next(iter(code.co_varnames), "")), code.co_name
    return f"{type(owner).__name__}.{name}" if isinstance(owner, nn.Module) else name
