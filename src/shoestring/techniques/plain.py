"""The way back: a model that techniques have changed -> plain PyTorch."""

import copy as copying
from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from ..errors import ShoestringError
from ..passes.boundary import boundary_dtype, release
from ..task import Task
from .sparsity.conversion import densify
from .sparsity.layer import SparseLayer
from .words import described


def plain(model: nn.Module, copy: bool = False) -> nn.Module:
    """Undoes what `apply` did to a model, in place (or in a copy), and returns it: sparse layers are PyTorch's own
    again, zeros included, a model in 16 bits is in FP32, and no hook of ours is left. A plain model stays as it is.

    The weights are those that the model has now. A lean task of it cannot be stepped after that: apply a plan anew.
    """
    model = copying.deepcopy(model) if copy else model
    was_narrow = boundary_dtype(model) is not None
    release(densify(model))
    if was_narrow:
        model.zero_grad(set_to_none=True)  # gradients are in 16 bits
    for tensor in (*model.parameters(), *model.buffers()) if was_narrow else ():
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def is_lean(model: nn.Module) -> bool:
    """Whether a technique has changed a model."""
    return boundary_dtype(model) is not None or is_sparse(model)


def is_sparse(model: nn.Module) -> bool:
    return any(isinstance(module, SparseLayer) for module in model.modules())


_under_a_plan: WeakSet[nn.Module] = WeakSet()  # a sparse model may also be a user's own, made by `from_dense`


def note_plan(model: nn.Module) -> None:
    """Remembers that a plan was applied to a model."""
    _under_a_plan.add(model)


def check_plain(task: Task, techniques: Iterable[str] = ()) -> None:
    """Refuses a task that is under a plan already, or whose model is: another plan would stack on it."""
    model = task.model
    if dtype := boundary_dtype(model):
        raise _refusal(f"it is in {str(dtype).removeprefix('torch.')}")
    if is_sparse(model) and (model in _under_a_plan or "nonzero" in techniques):
        raise _refusal("it has sparse layers")
    if task.settings:
        raise ShoestringError(
            f"the task is under a plan already ({described(task.settings.items())}): apply the new one to the task "
            "that it was made from"
        )


def _refusal(why: str) -> ShoestringError:
    return ShoestringError(
        f"the model is lean already ({why}): lead it back with shoestring.plain(model), which keeps its weights, and "
        "apply the plan to a task of that"
    )
