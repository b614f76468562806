"""Dry runs: a model on fake tensors, which go the way that real ones would and allocate nothing.

`dry_run(task, piece, act)` is a forward pass, or part of one, of whoever wants to see what a model does: techniques
look for blocks, patterns and saved tensors. `on_fakes` is what it shares with the trace of a whole step.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..distributed import is_sharded
from ..errors import ShoestringError
from ..fakes import Faker, faked
from ..patching import ForAllThreads
from ..structure import tensors
from ..task import Task
from .choices import Choices, short
from .packed import unpacked_by_operators
from .trace import Tracer

T = TypeVar("T")
WAYS = 8  # tried at most, if a step branches on numbers that a trace cannot know


def dry_run(task: Task, piece: Any, act: Callable[[Any], T]) -> T:
    """A task, a piece of its batch and a function of that piece on fake tensors (calling the model, say) -> its result.

    If the code branches on a number that a trace cannot know, both ways are run, and the one that needs more counts.
    """
    found: dict[Tracer, T] = {}

    def once(choices: Choices) -> Tracer:
        tracer = Tracer(choices=choices)
        with on_fakes(task, tracer, [piece]) as (fake,), tracer:
            found[tracer] = act(fake)
        return tracer

    return found[larger_way(once)]


def flops_so_far() -> int:
    """The FLOPs of a dry run until now."""
    return next(sum(mode.flops.values()) for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tracer))


@contextmanager
def on_fakes(task: Task, tracer: Tracer, trees: list[Any]) -> Iterator[list[Any]]:
    """The model on fake tensors -> fakes of these structures. Tensors of the model or the batch that are not learned
    have their values beside them in the tracer."""
    _refuse_compiled(task)
    _refuse_sharded(task)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faker = Faker(mode, _device(task))
    fakes = [faker.tree(tree) for tree in trees]
    with _told_clearly(task), torch.random.fork_rng(devices=[]), faked(task.model, faker):
        learned = {parameter.untyped_storage()._cdata for parameter in task.model.parameters()}
        for real, fake in faker.pairs():
            if fake.untyped_storage()._cdata not in learned:
                tracer.values.lend(fake, real)
        faker.forget()
        with mode, tracer.choices.drawing(), _as_in_a_run, unpacked_by_operators:
            yield fakes


def _refuse_compiled(task: Task) -> None:
    """Refuses modules under torch.compile: inside, no hook or mode of ours sees what is saved, let alone changes it."""
    for path, module in task.model.named_modules():
        if module._compiled_call_impl is not None or _is_compiled(module.forward):
            raise ShoestringError(
                f"{path or 'the model'} ({type(module).__name__}) is under torch.compile, inside which nothing can be "
                "followed: leave out compile, or pass the module that it was made from (its _orig_mod)"
            )


def _refuse_sharded(task: Task) -> None:
    if any(map(is_sharded, task.model.parameters())):
        raise ShoestringError("a sharded model cannot be traced: profile it, and apply plans, before it is sharded")


def _is_compiled(function: Any) -> bool:
    wrapped = getattr(function, "_torchdynamo_orig_callable", None) is not None
    return wrapped and not getattr(function, "_torchdynamo_disable", False)


def larger_way(trace: Callable[[Choices], Tracer]) -> Tracer:
    """Traces a task both ways at each branch on a number that no trace can know -> the trace that needs more memory."""
    tracer, tried = _first_way(trace), 0
    told: dict[str, None] = {}
    todo = list(tracer.choices.asked)
    while todo and tried < WAYS:
        place, tried = todo.pop(0), tried + 1
        try:
            other = trace(tracer.choices.flipped(place))
        except Exception:  # this way cannot be taken
            continue
        peaks = tracer.peak_bytes, other.peak_bytes
        todo += [new for new in other.choices.asked if new not in tracer.choices.asked and new not in todo]
        why = tracer.choices.asked[place]
        tracer = other if peaks[1] > peaks[0] else tracer
        if peaks[0] != peaks[1]:
            told[f"{why} at {short(place)}: the way that needs more memory is counted"] = None
    tracer.unseen |= told
    return tracer


def _first_way(trace: Callable[[Choices], Tracer]) -> Tracer:
    """A way without an error: if one raises, the last branch before that may go the other way."""
    choices = Choices()
    for _ in range(WAYS):
        try:
            return trace(choices)
        except Exception:
            turns = [place for place in choices.asked if place not in choices.answers]
            if not turns:
                raise
            choices = choices.flipped(turns[-1])
    return trace(choices)


@ForAllThreads
@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Transformers asks whether a tensor is fake, and then takes a path meant for export: it is told no."""
    library: Any = sys.modules.get("transformers.utils.import_utils")
    asks = getattr(library, "is_fake_tensor", None)
    if asks is not None:
        library.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        if asks is not None:
            library.is_fake_tensor = asks


@contextmanager
def _told_clearly(task: Task) -> Iterator[None]:
    """Refuses what cannot be traced, with the reason and a way out; other errors are the user's own."""
    name = task.name or type(task.model).__name__
    try:
        with _unlogged:
            yield
    except DataDependentOutputException as error:
        reason = f"{error.func} reads values of the data; move it into the data preparation"
    except DynamicOutputShapeException as error:
        reason = f"the size of what {error.func} makes depends on the data; move it into the data preparation"
    except UnsupportedOperatorException as error:
        reason = f"{error.func} has no fake implementation; register one with torch.library.register_fake"
    except RuntimeError as error:
        reason = next((words for sign, words in _UNTRACEABLE.items() if sign in str(error)), "")
        if not reason:
            raise
    else:
        return
    raise ShoestringError(f"{name} cannot be traced: {reason}")


@ForAllThreads
@contextmanager
def _unlogged() -> Iterator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")  # writes a traceback of what is raised anyway
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


_UNTRACEABLE = {
    "no fake impl registered": "a custom operator has no fake; register one with its register_fake",
    ".numpy() is not supported": "a tensor is read with .numpy(); move it into the data preparation",
}


def _device(task: Task) -> torch.device:
    """The device that the step would run on; meta stands for wherever the batch is."""
    homes = {t.device for t in task.model.parameters()} | {t.device for t in task.model.buffers()}
    homes |= {tensor.device for tensor in tensors(task.batch)}
    homes = {home for home in homes if home.type != "meta"}
    if len(homes) > 1:
        names = ", ".join(sorted(map(str, homes)))
        raise ShoestringError(f"the model and the batch are on different devices ({names}): move them to one")
    return homes.pop() if homes else torch.device("cpu")
