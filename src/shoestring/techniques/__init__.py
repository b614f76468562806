"""The techniques, in the order in which a plan applies them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..task import Task
from . import checkpoint, microbatch


class Technique(NamedTuple):
    """`name` is the plan's field, `settings(value)` makes the technique's settings from its value."""

    name: str
    settings: Callable[[Any], Any]
    apply: Callable[[Task, Any], Task]


REGISTRY = (
    Technique("checkpoint", checkpoint.Settings, checkpoint.apply),
    Technique("microbatch", microbatch.Settings, microbatch.apply),
)
