"""The blocks of a model: repeated children of a Sequential or ModuleList; what each of them saves and costs."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...errors import ShoestringError
from ...passes.saved_tensors import AsIs, storing
from ...passes.switches import switched
from ...patching import patched
from ...profiling.dry import dry_run, flops_so_far
from ...structure import tensors
from ...task import Task
from .segments import BlockCost


def find_blocks(model: nn.Module, names: tuple[str, ...] = ()) -> list[list[str]]:
    """A model -> runs of block names, in the order of the model, from its structure alone.

    A run is the children of one Sequential or ModuleList that are of one class and not leaves, such as residual
    blocks or transformer layers, or the stages that hold them; at least two make a run. Where there is none, any
    module's children of one class are, such as the halves of a U-Net. `names` (with * and ?) picks blocks by hand.
    """
    if names:
        return _named(model, names)
    return _repeats(model, nn.Sequential | nn.ModuleList) or _repeats(model, nn.Module)


def _repeats(model: nn.Module, homes: Any) -> list[list[str]]:
    """The outermost runs of children of modules of these classes."""
    runs: list[list[str]] = []
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(block) for block in inside):
            continue
        if isinstance(module, homes) and (run := _run(path, module)):
            runs.append(run)
            inside += [f"{name}." for name in run]
    return runs


def _run(path: str, container: nn.Module) -> list[str]:
    inner = [(name, child) for name, child in container.named_children() if any(True for _ in child.children())]
    kinds = [type(child) for _, child in inner]
    repeated = {kind for kind in kinds if kinds.count(kind) > 1}
    return [f"{path}.{name}" if path else name for name, child in inner if type(child) in repeated]


def _named(model: nn.Module, names: tuple[str, ...]) -> list[list[str]]:
    modules = [path for path, _ in model.named_modules() if path]
    for name in names:
        if not any(fnmatch(path, name) for path in modules):
            near = ", ".join(modules[:5])
            raise ShoestringError(f"the model has no module {name!r} to checkpoint: its modules are {near}, ...")
    run = [path for path in modules if any(fnmatch(path, name) for name in names)]
    return [[path for path in run if not any(path.startswith(f"{other}.") for other in run)]]


def block_costs(task: Task, names: list[str]) -> list[BlockCost]:
    """A task and its blocks in order -> what each takes in, saves inside and computes, from a trace of the forward."""
    costs: dict[str, BlockCost] = {}
    traced(task, {name: partial(_measure, costs, name) for name in names})
    return [costs[name] for name in names if name in costs]


def traced(task: Task, calls: Mapping[str, Callable]) -> None:
    """Runs the forward pass of one piece on fake tensors; calls of the named modules go to `calls`, as in `patched`."""

    def forward(batch: Any) -> None:
        with switched(task.model), ExitStack() as stack:
            for context in task.contexts:
                stack.enter_context(context(task.model))
            for name, call in calls.items():
                stack.enter_context(patched(task.model.get_submodule(name), call))
            task.loss_of(task.model, batch)

    dry_run(task, next(iter(task.split(task.batch))), forward)


def _measure(costs: dict[str, BlockCost], name: str, forward: Any, args: tuple, kwargs: dict) -> Any:
    inputs = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors((args, kwargs))}
    inside: dict[int, int] = {}

    def note(tensor: Tensor) -> AsIs:
        storage = tensor.untyped_storage()
        if storage._cdata not in inputs:
            inside[storage._cdata] = storage.nbytes()
        return AsIs(tensor)

    before = flops_so_far()
    with storing(note):
        output = forward(*args, **kwargs)
    costs[name] = BlockCost(name, sum(inputs.values()), sum(inside.values()), flops_so_far() - before)
    return output
