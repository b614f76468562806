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
    "apply": "training.apply",
    "train": "training.loop",
    "load_weights": "training.save",
    "measure": "measuring",
    "ShoestringError": "errors",
    "NoPlanFits": "errors",
    "OverBudget": "errors",
}
__all__ = [
    "SGD",
    "Adam",
    "NoPlanFits",
    "OverBudget",
    "Plan",
    "Profile",
    "ShoestringError",
    "Task",
    "apply",
    "builtin",
    "load_weights",
    "measure",
    "plan",
    "profile",
    "train",
]

if TYPE_CHECKING:
    from .errors import NoPlanFits, OverBudget, ShoestringError
    from .measuring import measure
    from .models import builtin
    from .planning.plan import Plan
    from .profiling import Profile, profile
    from .task import SGD, Adam, Task
    from .training.apply import apply
    from .training.loop import train
    from .training.save import load_weights


def plan(task: "Task", budget: str | int, risk: str = "neutral", **how: Any) -> "Plan":
    """A task and a budget such as "1.5GB" -> the plan with the least predicted time that fits it.

    `risk` is exact, neutral or approximate: what may change the result. The scratch of PyTorch's operators is measured
    on this machine where it is not known yet. `how` goes to `planning.search.plan`.
    """
    from .measuring import calibrate
    from .measuring.calibration import load_cache
    from .planning.search import plan

    known: dict[str, Any] = {"calibrate": calibrate, "workspace": dict(load_cache())}
    return plan(task, budget, risk, **(known | how))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoestring' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
