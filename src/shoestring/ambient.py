"""The ambient state of a step: what code deep inside a pass may look at without being handed it.

PyTorch calls us back (function modes, hooks, autograd functions, operators) with arguments of its own, so what those
calls must know of the step around them stands here, in one object. It is immutable: `during` replaces it for the length
of a `with` block. There is one for each thread; PyTorch runs the backward pass of CPU tensors in the thread that calls
`backward()`, so it sees the step's.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn

from .ledger import Phase


class Ambient(NamedTuple):
    """Beside each field, the module that sets it."""

    phase: Phase = Phase.BUILD  # phases: the part of the step that is running,
    listeners: tuple[Callable[[Phase], None], ...] = ()  # and who is called when it changes
    rank: int = 0  # step: which of the processes that share a batch this is
    mode: Any = None  # passes.mode: the LeanMode that answers the model's calls
    stores: tuple[Callable[[Tensor], Any], ...] = ()  # passes.saved_tensors: the last decides how a tensor is stored
    pass_number: list[int] | None = None  # techniques.activations: counts passes, a word of random numbers' keys
    checkpoints: bool = True  # passes.switches: whether torch.utils.checkpoint does anything
    choices: Any = None  # profiling.choices: what single random numbers are in a trace,
    state_made: Callable[[Tensor], None] | None = None  # and, profiling.trace, who is told of a generator's state
    times: int = 1  # passes.sweeps: in a trace, what runs stands for so many runs that are like it
    outside_call: Any = None  # passes.boundary: the call of a 16-bit model's module from outside the model
    scratch_bytes: list[int] | None = None  # kernels.define: collects the scratch of each op that is traced
    offloaded_bytes: list[int] | None = None  # planning.traces: collects the sizes of tensors offloaded
    entered: tuple[nn.Module, ...] = ()  # training.evaluate: models that run under their task's contexts,
    evaluated: Callable[[int, int], None] | None = None  # and who is told of batches done and in all
    room: Callable[[], int] | None = None  # training.run: bytes that the budget leaves while a batch is read
    split: Callable[[Any], Iterable[Any]] | None = None  # training.judging: how a replanned run cuts its batches

    @staticmethod
    def now() -> "Ambient":
        """The ambient state of this thread."""
        return _ambient.get()

    @staticmethod
    def change(**fields: Any) -> None:
        """Replaces some fields until they are changed the next time."""
        _ambient.set(_ambient.get()._replace(**fields))

    @staticmethod
    @contextmanager
    def during(**fields: Any) -> Iterator[None]:
        """These fields have these values inside the context, and afterwards those that they had before."""
        before = _ambient.get()
        Ambient.change(**fields)
        try:
            yield
        finally:
            Ambient.change(**{name: getattr(before, name) for name in fields})


_ambient: ContextVar[Ambient] = ContextVar("ambient", default=Ambient())  # noqa: B039 - immutable
