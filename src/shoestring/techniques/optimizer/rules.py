"""The algorithm of each parameter group of a task's optimizer: torch.optim's SGD, Adam and AdamW are known."""

from typing import Any, NamedTuple

import torch

from ...errors import ShoestringError
from ...optimizers import outline
from ...task import SGD, Adam, Task
from .factored import SM3, Adafactor

Rule = SGD | Adam | SM3 | Adafactor
# Of torch.optim: settings that change the update and have no lean form, with the value at which they change nothing.
WITHOUT_A_FORM = {"dampening": 0, "maximize": False, "amsgrad": False, "differentiable": False}


class Group(NamedTuple):
    """Parameters by name (that of the dense weight, if a layer is sparse), and their algorithm."""

    names: tuple[str, ...]
    rule: Rule


def groups_of(task: Task) -> tuple[Group, ...]:
    """A task -> the groups of its optimizer; one that has no lean form is refused with the reason."""
    made, names = outline(task.optimizer, task.model)
    return tuple(
        Group(tuple(names[tensor] for tensor in group["params"]), _rule(type(made), group))
        for group in made.param_groups
    )


def _rule(kind: type, group: dict[str, Any]) -> Rule:
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise ShoestringError(
            f"the lean form of {kind.__name__} is not known: give the task SGD(...), Adam(...), SM3(...) or "
            "Adafactor(...), or torch.optim's SGD, Adam or AdamW"
        )
    for name, harmless in WITHOUT_A_FORM.items():
        if group.get(name, harmless) != harmless:
            raise ShoestringError(
                f"the lean form of {kind.__name__} with {name}={group[name]} is not known: leave {name} out"
            )
    lr, decay = float(group["lr"]), group["weight_decay"]
    if kind is torch.optim.SGD:
        return SGD(lr, group["momentum"], group["nesterov"], decay)
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    first, second = (float(beta) for beta in group["betas"])
    return Adam(lr, (first, second), group["eps"], decay, decoupled)
