"""The records of all techniques, by their words, and the one function that applies them."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import ShoestringError
from ..task import Task
from . import WORDS
from .technique import Technique

REGISTRY: dict[str, Technique] = {
    word.name: import_module(f".{word.module}", __package__).TECHNIQUE for word in WORDS
}  # fmt: skip


def apply_settings(task: Task, values: Mapping[str, Any]) -> Task:
    """A task and a plan's values -> the task with these techniques; `Task.settings` says which."""
    if unknown := sorted(set(values) - set(REGISTRY)):
        raise ShoestringError(f"there is no technique {unknown[0]!r}: known are {', '.join(REGISTRY)}")
    for word in WORDS:
        if word.name in values:
            technique, value = REGISTRY[word.name], word.checked(values[word.name])
            settings = technique.settings(**word.as_mapping(value))
            task = technique.apply(task, settings)
            task = task.with_(settings=task.settings | {word.name: plan_value(settings)})
    return task


def is_open(values: Mapping[str, Any]) -> bool:
    """Whether one of a plan's values means something under a budget only."""
    return any(value in REGISTRY[name].open_values for name, value in values.items() if isinstance(value, str))


def sized(task: Task, values: Mapping[str, Any], fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A plan's values -> the same, but open ones are made definite, so that `fits(values)` holds."""
    found = {word.name: values[word.name] for word in WORDS if word.name in values}
    for number, (name, value) in enumerate(found.items()):
        if (fit := REGISTRY[name].sized) is not None and is_open({name: value}):
            before = apply_settings(task, dict(list(found.items())[:number]))
            found[name] = fit(before, value, partial(_fits, fits, found, name))
    return found


def _fits(fits: Callable[[dict[str, Any]], bool], values: dict[str, Any], name: str, value: Any) -> bool:
    return fits(values | {name: value})


def plan_value(settings: Any) -> Any:
    """A technique's settings -> a plan's value in its shortest form: what is as by default is left out."""
    first, *rest = fields(settings)
    changed = {f.name: getattr(settings, f.name) for f in rest if getattr(settings, f.name) != f.default}
    value = getattr(settings, first.name)
    return {first.name: value, **changed} if changed else value
