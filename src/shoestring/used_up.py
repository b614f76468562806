"""A mark in the place of a gradient that an optimizer in backward has applied already: whoever reads it learns why.

`torch.nn.utils.clip_grad_norm_` and loggers of gradients go by `parameter.grad`. Where there is none they silently do
nothing, so a loop that clips would train unclipped. The mark has the gradient's shape and no memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .errors import ShoestringError

USED_UP = (
    "no-gradient used them up in the backward pass; pass Task(clip=...), so that the planner keeps them, or leave "
    "no-gradient out of the plan"
)


class UsedUp(Tensor):
    """A tensor that refuses every operation, with the reason."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShoestringError(f"the gradients cannot be read any more: {USED_UP}")


def mark_used_up(model: nn.Module) -> None:
    """Marks the parameters that can have a gradient and have none."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            mark = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            parameter.grad = torch.Tensor._make_subclass(UsedUp, mark)


def clear_used_up(model: nn.Module) -> None:
    for parameter in model.parameters():
        if isinstance(parameter.grad, UsedUp):
            parameter.grad = None
