"""The techniques, in the order in which a plan applies them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..task import Task
from . import checkpoint, lean_optimizer, microbatch, precision, saved, sparsity
from .effect import Effect, Least, Price
from .risk import Risk


def _no_options(task: Task) -> list:
    return []


def _exact(task: Task, value: Any) -> Risk:
    return Risk.EXACT


def _mild(task: Task, value: Any) -> int:
    return 0


def _stands(task: Task, settings: Mapping[str, Any]) -> str:
    return ""


def _lasting(task: Task, value: Any) -> Least:
    return Least()


def _unknown(task: Task, value: Any) -> Price | None:
    return None


def _itself(value: Any) -> Any:
    return value


class Technique(NamedTuple):
    """`name` is the plan's field, `settings(value)` makes the technique's settings from its value.

    What the planner asks:
    `options(task)` are the values that it may try; where there can be none, it raises ShoestringError with the reason.
    `risk(task, value)` is what a value does to the result, `degree` how much within its risk, in steps of about half a
    point of accuracy, and `warning` what a user should know who did not choose it.
    `refuses(task, settings)` is the reason why two settings of a plan cannot stand together, "" if they can.
    `effect(task, value)` scales a trace of the whole batch; without one, a value needs a trace of its own, and
    `alike(value)` is the value whose trace serves as well, `least(task, value)` bounds its memory from below, and
    `price(task, value)` its time, if anything does.
    """

    name: str
    settings: Callable[[Any], Any]
    apply: Callable[[Task, Any], Task]
    options: Callable[[Task], list] = _no_options
    risk: Callable[[Task, Any], Risk] = _exact
    warning: str = ""
    degree: Callable[[Task, Any], int] = _mild
    refuses: Callable[[Task, Mapping[str, Any]], str] = _stands
    effect: Callable[[Task, Any], Effect] | None = None
    alike: Callable[[Any], Any] = _itself
    least: Callable[[Task, Any], Least] = _lasting
    price: Callable[[Task, Any], Price | None] = _unknown


REGISTRY = (
    Technique(
        "nonzero", sparsity.Settings, sparsity.apply, sparsity.options, sparsity.risk, sparsity.WARNING,
        degree=sparsity.degree, effect=sparsity.effect,
    ),
    Technique(
        "precision", precision.Settings, precision.apply, precision.options, precision.risk,
        alike=precision.alike, least=precision.least,
    ),
    Technique(
        "optimizer", lean_optimizer.Settings, lean_optimizer.apply, lean_optimizer.options, lean_optimizer.risk,
        refuses=lean_optimizer.refuses, effect=lean_optimizer.effect,
    ),
    Technique("checkpoint", checkpoint.Settings, checkpoint.apply, checkpoint.options, price=checkpoint.price),
    Technique(
        "keep", saved.parse, saved.apply, saved.options, saved.risk,
        refuses=saved.refuses, least=saved.least, price=saved.price,
    ),
    Technique(
        "microbatch", microbatch.Settings, microbatch.apply, microbatch.options, microbatch.risk,
        degree=microbatch.degree, effect=microbatch.effect,
    ),
)  # fmt: skip
