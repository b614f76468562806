"""Shoestring trains a neural network in the memory you have.

    task = shoestring.Task(model, loss, batch, shoestring.SGD(lr=0.1, momentum=0.9))
    print(shoestring.profile(task))

Names are imported when they are first used, so that `shoestring --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Task": "task",
    "SGD": "task",
    "Adam": "task",
    "builtin": "models",
    "profile": "profiling",
    "Profile": "profiling",
    "Plan": "planning.plan",
    "plan": "planning.search",
    "apply": "training.apply",
    "train": "training.loop",
    "load_weights": "training.save",
    "ShoestringError": "errors",
}
__all__ = [
    "SGD",
    "Adam",
    "Plan",
    "Profile",
    "ShoestringError",
    "Task",
    "apply",
    "builtin",
    "load_weights",
    "plan",
    "profile",
    "train",
]

if TYPE_CHECKING:
    from .errors import ShoestringError
    from .models import builtin
    from .planning.plan import Plan
    from .planning.search import plan
    from .profiling import Profile, profile
    from .task import SGD, Adam, Task
    from .training.apply import apply
    from .training.loop import train
    from .training.save import load_weights


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoestring' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
