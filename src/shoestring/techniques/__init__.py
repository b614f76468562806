"""The techniques, in the order in which a plan applies them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..task import Task
from . import checkpoint, lean_optimizer, microbatch, precision, saved, sparsity
from .risk import Risk


def _no_options(task: Task) -> list:
    return []


def _exact(task: Task, value: Any) -> Risk:
    return Risk.EXACT


class Technique(NamedTuple):
    """`name` is the plan's field, `settings(value)` makes the technique's settings from its value.

    `options(task)` are the values that the planner may try; where there can be none, it raises ShoestringError with the
    reason. `risk(task, value)` is what a value does to the result, and `warning` what a user should know who did not
    choose it.
    """

    name: str
    settings: Callable[[Any], Any]
    apply: Callable[[Task, Any], Task]
    options: Callable[[Task], list] = _no_options
    risk: Callable[[Task, Any], Risk] = _exact
    warning: str = ""


REGISTRY = (
    Technique("nonzero", sparsity.Settings, sparsity.apply, sparsity.options, sparsity.risk, sparsity.WARNING),
    Technique("precision", precision.Settings, precision.apply, precision.options, precision.risk),
    Technique("optimizer", lean_optimizer.Settings, lean_optimizer.apply, lean_optimizer.options, lean_optimizer.risk),
    Technique("checkpoint", checkpoint.Settings, checkpoint.apply, checkpoint.options),
    Technique("keep", saved.parse, saved.apply, risk=saved.risk),
    Technique("microbatch", microbatch.Settings, microbatch.apply, microbatch.options, microbatch.risk),
)
