"""Activation checkpointing: save less in the forward pass, recompute it in the backward pass. Exact.

The card is docs/techniques/checkpoint.md.

| strategy | saved | recomputed |
|---|---|---|
| `none` | everything | nothing |
| `no-bn` | the inputs of batch norms | batch norm and ReLU, from saved statistics |
| `every-m` | the input of every m-th operation | the operations between |
| `residual-m` | the input of every m-th block | the m blocks, everything in them saved meanwhile |
| `residual-m*` | the input of every m-th block | the m blocks' inputs; then, block by block, what is inside |
| `optimal` | what a dynamic programme chooses (segments.py) for least memory | as little as that allows |
| `optimal-30MB` | the same, for a budget of 30 MB for what is saved | as little as that allows |
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import NoEffect, ShoestringError
from ...passes.buffers import Slot, slots_of
from ...passes.hooks import looking_once
from ...passes.mode import LeanMode, current_mode, with_mode
from ...passes.patching import patched
from ...passes.regions import Region
from ...passes.states import devices_of
from ...passes.switches import switched
from ...structure import leaves
from ...task import Task
from ...units import parse_bytes
from ..technique import Bounds, Price, Technique
from .blocks import block_costs, find_blocks
from .chains import find_chains
from .segments import choose_segments, least_bytes

STRATEGIES = "none, no-bn, every-M, residual-M, residual-M*, optimal, optimal-SIZE (M from 1, SIZE such as 30MB)"


@dataclass(frozen=True)
class Settings:
    """`strategy` as in the table above; `blocks` names the blocks (with * and ?) if they are not found."""

    strategy: str = "none"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionPlan:
    """Blocks that are one region; `nested`: each is a region of its own inside it."""

    names: tuple[str, ...]
    nested: bool


Slots = list[list[Slot]]  # the buffers of each block
_NUMBERED = re.compile(r"(every|residual)-([1-9][0-9]{0,5})(\*?)")
_OPTIMAL = re.compile(r"optimal(?:-(.+))?")


def has_norms(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def options(task: Task) -> list[str]:
    """The strategies that the planner tries on this model."""
    norms = has_norms(task.model)
    if find_blocks(task.model):
        with_norms = ["no-bn", "residual-1*"] if norms else []  # without norms residual-1* is residual-1
        return [*with_norms, "residual-1", "residual-2*", "optimal"]
    return [*(["no-bn"] if norms else []), "every-4", "every-12"]


def bounds(task: Task, strategy: str) -> Bounds:
    """Recomputing takes time. Fused batch norm may be faster than PyTorch's; no-bn is that alone."""
    if strategy == "no-bn":
        return Bounds()
    fused = has_norms(task.model) and ("*" in strategy or _OPTIMAL.fullmatch(strategy))
    return Bounds(price=Price("no-bn" if fused else None, "memory"))


def check(strategy: str) -> None:
    """Raises unless the strategy exists."""
    numbered = _NUMBERED.fullmatch(strategy)
    exists = strategy in ("none", "no-bn") or _OPTIMAL.fullmatch(strategy) or numbered
    if not exists or (numbered and numbered[1] == "every" and numbered[3]):
        raise ShoestringError(f"there is no checkpoint strategy {strategy!r}: use one of {STRATEGIES}")


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task, which saves fewer activations and computes the same numbers.

    The strategy replaces one that the task had.
    """
    check(settings.strategy)
    if settings.strategy == "none":
        raise NoEffect("checkpoint none saves everything: leave it out of the plan")
    others = tuple(context for context in task.contexts if not isinstance(context, Regions))
    return _with_strategy(task.with_(contexts=others), settings)


TECHNIQUE = Technique(Settings, apply, options, bounds=bounds)


def _with_strategy(task: Task, settings: Settings) -> Task:
    strategy = settings.strategy
    if strategy == "no-bn":
        return _without_norms(task)
    if optimal := _OPTIMAL.fullmatch(strategy):
        task = with_mode(task, "checkpoint", fuse=True, every=0)[0]
        groups = optimal_groups(task, _runs(task, settings), parse_bytes(optimal[1]) if optimal[1] else None)
        return _with_regions(task, groups)
    kind, number, star = _NUMBERED.fullmatch(strategy).groups()  # type: ignore[union-attr]
    if kind == "every":
        return with_mode(task, "checkpoint", fuse=False, every=int(number))[0]
    groups = equal_groups(_runs(task, settings), int(number), bool(star))
    return _with_regions(with_mode(task, "checkpoint", fuse=bool(star), every=0)[0], groups)


def _without_norms(task: Task) -> Task:
    task, patterns = with_mode(task, "checkpoint", fuse=True, every=0)
    if not patterns.norms:
        raise ShoestringError(
            f"{type(task.model).__name__} has no batch norm, so no-bn would change nothing: use residual-1"
        )
    return task


def _with_regions(task: Task, groups: tuple[RegionPlan, ...]) -> Task:
    return task.with_(contexts=(*task.contexts, Regions(groups)))


def _runs(task: Task, settings: Settings) -> list[list[str]]:
    runs = find_chains(task, settings.blocks)
    if not runs:
        raise ShoestringError(
            f"{type(task.model).__name__} has no repeated blocks for {settings.strategy}: "
            "name them with checkpoint blocks, or use every-8"
        )
    return runs


def equal_groups(runs: list[list[str]], size: int, star: bool) -> tuple[RegionPlan, ...]:
    """Chains of blocks -> groups of `size`; the last of a chain may be smaller."""
    groups = (tuple(run[i : i + size]) for run in runs for i in range(0, len(run), size))
    return tuple(RegionPlan(names, star and len(names) > 1) for names in groups)


def optimal_groups(task: Task, runs: list[list[str]], budget_bytes: int | None) -> tuple[RegionPlan, ...]:
    """Chains of blocks -> the groups that the dynamic programme chooses, as if they were one chain."""
    costs = block_costs(task, [name for run in runs for name in run])
    ends = {run[-1] for run in runs}
    budget = least_bytes(costs) * 1.01 if budget_bytes is None else budget_bytes
    groups = []
    for segment in choose_segments(costs, budget):
        names = [cost.name for cost in costs[segment.start : segment.stop]]
        if segment.choice != "keep":
            groups += [RegionPlan(part, segment.choice == "nested" and len(part) > 1) for part in _cut(names, ends)]
    return tuple(groups)


def _cut(names: list[str], ends: set[str]) -> Iterator[tuple[str, ...]]:
    """Splits a segment where a chain of blocks ends: the next block does not consume its output."""
    part: list[str] = []
    for name in names:
        part.append(name)
        if name in ends:
            yield tuple(part)
            part = []
    if part:
        yield tuple(part)


@dataclass(frozen=True)
class Regions:
    """The context of a pass: given the live model, it turns groups of blocks into regions that are recomputed."""

    plans: tuple[RegionPlan, ...]

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        devices = devices_of(model.parameters())
        with ExitStack() as stack:
            stack.enter_context(switched(model))
            for plan in self.plans:
                blocks = [model.get_submodule(name) for name in plan.names]
                stack.enter_context(looking_once({part for block in blocks for part in block.modules()}))
                blocks_in_region = _Blocks(plan, current_mode(), devices, [slots_of(block) for block in blocks])
                for index, block in enumerate(blocks):
                    stack.enter_context(patched(block, partial(blocks_in_region.call, index)))
            yield


class _Blocks:
    """Consecutive blocks, and the region that they share in this pass."""

    def __init__(
        self, plan: RegionPlan, mode: LeanMode, devices: frozenset[torch.device], slots: list[list[Slot]]
    ) -> None:
        self.names, self.nested = plan.names, plan.nested
        self.mode, self.devices, self.slots = mode, devices, slots
        self.region: Region | None = None

    def call(self, index: int, forward: Any, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = self.mode.real((args, kwargs))
        follows = self.region is not None and any(map(self.region.place, leaves((args, kwargs))))
        if self.region is None or index == 0 or not follows:  # what lies between two blocks is not recomputed
            self.region = Region(" + ".join(self.names), self.mode.running, self.mode.store_input, self.devices)
        return self.region.call(
            self._block(index, forward) if self.nested else forward, args, kwargs, self.slots[index]
        )

    def _block(self, index: int, forward: Any) -> Any:
        """The block as a region of its own, inside the larger one."""
        region = partial(Region, self.names[index], self.mode.running, devices=self.devices)
        return lambda *args, **kwargs: region().call(forward, args, kwargs, self.slots[index])
