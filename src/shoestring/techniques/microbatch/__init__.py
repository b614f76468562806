"""Microbatches, that is gradient accumulation: the batch goes through the model in pieces. Exact without batch norm.

The card is docs/techniques/microbatch.md.

Each microbatch is weighted by its share of the items, so that a smaller last one counts rightly. A batch is split
(pieces.py) along its first dimension, by examples, or by tokens if the task says which id is padding. Whether the
microbatches add up to the batch is found out from the loss (adding_up.py): if they do not, microbatching is refused.
Batch norm's statistics are those of a microbatch (approximate: evidence.py);
`simulated` computes these in one pass over the batch.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import NoEffect, ShoestringError
from ...passes.mode import askers_of
from ...patching import patched
from ...task import Task
from ..evidence import SHORT
from ..technique import Effect, Risk, Technique
from .adding_up import Verdict, judge
from .pieces import SPLITS, Split, check_names


@dataclass(frozen=True)
class Settings:
    """`size`: examples per microbatch, or tokens including padding; `by` says which ("": the task's usual unit).

    `simulated` runs the whole batch at once and only takes batch norm's statistics per microbatch: it saves no memory,
    and is for studies of how microbatches affect accuracy.
    """

    size: int
    by: str = ""
    simulated: bool = False


def options(task: Task) -> list[int]:
    """Sizes that the planner tries: 2, 4, 10, 25 and 100 microbatches; refused if they do not add up to the batch."""
    _accept(verdict(task))
    whole = units(task)
    if whole == 1:
        raise NoEffect("a batch of one cannot be split")
    return sorted({-(-whole // pieces) for pieces in (2, 4, 10, 25, 100)} - {whole}, reverse=True)


def units(task: Task) -> int:
    """The batch size in the unit of microbatches: examples or tokens."""
    return split_of(task, 1).measure(task.batch)


def risk(task: Task, size: int) -> Risk:
    """Exact without batch norm, if the microbatches are known to add up to the batch and no other buffer is changed by
    each pass; else neutral. Batch norm's statistics of a microbatch cost accuracy in our own, short runs, though not in
    the paper's (Figure 4)."""
    if _has_batch_norm(task):
        return Risk.APPROXIMATE
    found = verdict(task)
    return Risk.EXACT if found.adds_up and not found.changes else Risk.NEUTRAL


def evidence(task: Task, size: int) -> str:
    if not _has_batch_norm(task):
        changes = verdict(task).changes
        return f"{changes} is changed by each pass, and so by each microbatch" if changes else ""
    if size >= 10:
        return f"batch norm's statistics of 10 examples: {SHORT['microbatch 10']}; the paper's long runs lost nothing"
    return "the paper's WRN-28-2 lost 0.6 points of accuracy from 10 examples to 4, whose statistics batch norm takes"


def _has_batch_norm(task: Task) -> bool:
    return any(isinstance(module, _BatchNorm) for module in task.model.modules())


_verdicts: dict[int, tuple[weakref.ref, Verdict]] = {}  # a task is frozen, but has no hash: its batch has none


def verdict(task: Task) -> Verdict:
    """Whether microbatches add up to a task's batch; cached per task, because it takes a few forward passes."""
    key = id(task)
    known, found = _verdicts.get(key, (None, None))
    if found is None or known is None or known() is not task:
        found = judge(task, split_of(task, 1))
        _verdicts[key] = weakref.ref(task, lambda _: _verdicts.pop(key, None)), found
    return found


def split_of(task: Task, size: int, by: str = "") -> Split:
    """How a task's batch is split into microbatches of `size`, by the task's usual unit if `by` is empty."""
    by = by or _usual(task)
    if by not in SPLITS:
        raise ShoestringError(f"microbatches go by {' or by '.join(SPLITS)}, not by {by!r}")
    return SPLITS[by](size, task.padding, task.shared)


def roughness(task: Task, size: int) -> int:
    """Batch norm's statistics of fewer than 10 examples are a step worse than of more, of fewer than 4 two."""
    return 1 + (size < 10) + (size < 4) if _has_batch_norm(task) else 0


def effect(task: Task, size: int) -> Effect:
    whole = units(task)
    return Effect(share=size / whole, pieces=-(-whole // size))


def _usual(task: Task) -> str:
    return "examples" if task.padding is None else "tokens"


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task, whose batch runs in microbatches of `size`."""
    by = settings.by or _usual(task)
    split = split_of(task, settings.size, by)
    whole = split.measure(task.batch)
    if not 1 <= settings.size <= whole:
        raise ShoestringError(
            f"a microbatch of {settings.size} does not go into a batch of {whole} {by}: use 1 to {whole}"
        )
    if settings.size == whole:
        raise NoEffect(f"a microbatch of {settings.size} {by} is the whole batch: leave it out of the plan")
    check_names(task.batch, task.shared)
    list(split(task.batch))  # refuses now what it would refuse in the step
    changed = _simulated(task, settings, by) if settings.simulated else {"split": split} | weighing(task, split)
    return task.with_(**changed)


TECHNIQUE = Technique(Settings, apply, options, risk, roughness, effect=effect, evidence=evidence)


def weighing(task: Task, split: Split) -> dict[str, Any]:
    """A task and a split -> the `items` that weight its microbatches; refused if they do not add up to the batch."""
    found = judge(task, split)
    _accept(found)
    return {"items": task.items if found.items is None else found.items}


def _accept(found: Verdict) -> None:
    if found.adds_up is False:
        raise ShoestringError(f"microbatches do not add up to the batch: {found.reason}")


# -- simulated ----------------------------------------------------------------------------------------------------
def _simulated(task: Task, settings: Settings, by: str) -> dict[str, Any]:
    if by != "examples":
        raise ShoestringError("simulated microbatches go by examples: batch norm knows no tokens")
    if askers := askers_of(task):
        raise ShoestringError(
            f"simulated microbatches save no memory and do not work with {askers}: use true microbatches"
        )
    if not any(isinstance(module, _BatchNorm) for module in task.model.modules()):
        raise NoEffect(f"{type(task.model).__name__} has no batch norm: simulated microbatches change nothing in it")
    return {"contexts": (*task.contexts, GroupedNorms(settings.size))}


@dataclass(frozen=True)
class GroupedNorms:
    """The context of a pass in which each batch norm processes groups of `size` examples one by one.

    Running statistics and counters are updated per group, as by true microbatches. The first dimension of a norm's
    input must be the batch.
    """

    size: int

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, _BatchNorm) and module.training:
                    stack.enter_context(patched(module, self._by_groups))
            yield

    def _by_groups(self, forward: Any, args: tuple, kwargs: dict) -> Tensor:
        (x,) = (*args, *kwargs.values())
        return torch.cat([forward(group) for group in x.split(self.size)])
