"""Shoestring trains a neural network in the memory you have.

    task = shoestring.Task(model, loss, batch, shoestring.SGD(lr=0.1, momentum=0.9))
    print(shoestring.profile(task))

`__all__` is the public API, with a few names of submodules: docs/api.md lists them. Names are imported when they are
first used, so that `shoestring --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the one place that has it: pyproject.toml reads it here

_HOMES = {
    "Task": "task",
    "SGD": "task",
    "Adam": "task",
    "builtin": "models",
    "Profile": "profiling",
    "Plan": "planning.plan",
    "apply": "training.apply",
    "plain": "techniques.plain",
    "train": "training.loop",
    "load": "training.load",
    "load_weights": "runs.save",
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
    "load",
    "load_weights",
    "measure",
    "plain",
    "plan",
    "profile",
    "train",
]

if TYPE_CHECKING:
    from .errors import NoPlanFits, OverBudget, ShoestringError
    from .measuring import measure
    from .models import builtin
    from .planning.plan import Plan
    from .profiling import Profile
    from .runs.save import load_weights
    from .task import SGD, Adam, Task
    from .techniques.plain import plain
    from .training.apply import apply
    from .training.load import load
    from .training.loop import train


def profile(task: "Task", calibrate: bool = True, **how: Any) -> "Profile":
    """A task -> where the memory of its training step goes, as `shoestring profile` shows it.

    If the step runs on the CPU, the scratch of PyTorch's operators is measured on this machine, unless it is cached;
    without `calibrate` it is not counted, and the profile says so. `how` goes to `profiling.profile`: with your own
    table `workspace` nothing is measured. `progress(done, total)` is called after each operator that is measured.
    """
    from .profiling import profile
    from .task import need_task

    need_task(task)
    progress = how.pop("progress", None)
    if not calibrate or "workspace" in how or not _is_on_cpu(task):
        return profile(task, **how)
    from .measuring import calibrated

    return calibrated(lambda table: profile(task, table, **how), progress)


def _is_on_cpu(task: "Task") -> bool:
    """Whether the step would run on the CPU: only its operators are calibrated."""
    return all(parameter.device.type in ("cpu", "meta") for parameter in task.model.parameters())


def plan(task: "Task", budget: str | int | None, risk: str = "neutral", **how: Any) -> "Plan":
    """A task and a budget such as "1.5GB" -> the plan with the least predicted time that fits it.

    A budget may be a share of what plain training needs, "50%". With None the fastest plan is returned, with the
    trade-offs that were found (print it) and `least_budget_bytes`, the least that works.

    `risk` is exact, neutral or approximate: the most that techniques may change the result. The scratch of PyTorch's
    operators is measured on this machine, unless it is cached. With `rehearse=True` one microbatch is run under the
    plan, on a copy of the model, before it is returned. `how` goes to `planning.search.plan`.
    In several processes (torchrun) the budget is that of each, `task.batch` is the share of one, and all get one plan.
    """
    from .distributed import joined
    from .task import need_task

    need_task(task)
    world = joined()
    if world.size == 1:
        return _planned(task, budget, risk, how)
    from .training.processes import planned_by_first

    link = world.bytes_per_second()
    return planned_by_first(world, lambda: _planned(task.with_(devices=world.size), budget, risk, how, link))


def _planned(
    task: "Task", budget: str | int | None, risk: str, how: dict[str, Any], link_bytes_per_second: float | None = None
) -> "Plan":
    from dataclasses import replace

    from .measuring import calibrate
    from .measuring.calibration import load_cache
    from .measuring.rates import device_rates
    from .planning.search import plan
    from .reporting.progress import steps

    with steps("planning") as tell:
        known: dict[str, Any] = {"calibrate": calibrate, "workspace": dict(load_cache()), "progress": tell}
        known["rates"] = device_rates()
        if link_bytes_per_second is not None:
            known["rates"] = replace(known["rates"], link_bytes_per_second=link_bytes_per_second)
        return plan(task, budget, risk, **(known | how))


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoestring' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
