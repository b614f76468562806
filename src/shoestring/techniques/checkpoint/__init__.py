"""Activation checkpointing: save less in the forward pass, recompute it in the backward pass. Exact.

The card is docs/techniques/checkpoint.md.

| strategy | saved | recomputed |
|---|---|---|
| `none` | everything | nothing |
| `no-bn` | the inputs of batch norms | batch norm and ReLU, from saved statistics |
| `every-m` | the input of every m-th operation | the operations between |
| `residual-m` | the input of every m-th block | the m blocks, everything in them saved meanwhile |
| `residual-m*` | the input of every m-th block | the m blocks' inputs; then, block by block, what is inside |
| `residual-m**` | the same | the same a few samples at a time, several times for batch norm's sums (passes/sweeps.py) |
| `optimal` | what a dynamic programme chooses (segments.py) for least memory | as little as that allows |
| `optimal-30MB` | the same, for a budget of 30 MB for what is saved | as little as that allows |
"""

import re
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import NoEffect, ShoestringError
from ...passes.buffers import Slot, slots_of
from ...passes.hooks import looking_once
from ...passes.mode import LeanMode, current_mode, with_mode
from ...passes.regions import Region
from ...passes.states import devices_of
from ...passes.sweeps import Block, Remade, Source, is_let_go, only_input, refuse_hooks, swept
from ...passes.switches import switched
from ...patching import patched
from ...structure import leaves
from ...task import Task
from ...units import parse_bytes
from ..technique import Bounds, Price, Technique
from .blocks import block_costs, find_blocks
from .chains import Ahead, find_chains, look_ahead
from .segments import choose_segments, least_bytes

STRATEGIES = (
    "none, no-bn, every-M, residual-M, residual-M*, residual-M**, optimal, optimal-SIZE (M from 1, SIZE such as 30MB)"
)

SWEPT = "residual-2**"  # only by name: it is slow, and evaluations, which are not swept, may need more than a step


@dataclass(frozen=True)
class Settings:
    """`strategy` as in the table above; `blocks` names the blocks (with * and ?) if they are not found."""

    strategy: str = "none"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionPlan:
    """Blocks that are one region; `nested`: each is a region of its own inside it; `swept`: each runs a few samples at
    a time."""

    names: tuple[str, ...]
    nested: bool
    swept: bool = False
    ahead: tuple[Ahead, ...] = ()  # of each block, if it is swept


Slots = list[list[Slot]]  # the buffers of each block
_NUMBERED = re.compile(r"(every|residual)-([1-9][0-9]{0,5})(\*{0,2})")
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
    if strategy == SWEPT:  # it does what residual-2* does, several times
        return Bounds(price=Price("residual-2*", "memory"))
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
    runs = _runs(task, settings)
    if int(number) > (blocks := sum(map(len, runs))):
        raise ShoestringError(
            f"{strategy} asks for regions of {number} blocks, and {type(task.model).__name__} has {blocks}: use "
            f"residual-{blocks}{star} or less"
        )
    groups = equal_groups(runs, int(number), star)
    if star == "**":
        ahead = look_ahead(task, [name for group in groups for name in group.names])
        unknown = Ahead(alone=False, growth=1.0)
        groups = tuple(replace(g, ahead=tuple(ahead.get(name, unknown) for name in g.names)) for g in groups)
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


def equal_groups(runs: list[list[str]], size: int, stars: str) -> tuple[RegionPlan, ...]:
    """Chains of blocks -> groups of `size`; the last of a chain may be smaller."""
    groups = (tuple(run[i : i + size]) for run in runs for i in range(0, len(run), size))
    return tuple(RegionPlan(names, stars == "*" and len(names) > 1, stars == "**") for names in groups)


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
                for name, block in zip(plan.names, blocks, strict=True) if plan.swept else ():
                    refuse_hooks(name, block)
                stack.enter_context(looking_once({part for block in blocks for part in block.modules()}))
                blocks_in_region = (_Swept if plan.swept else _Blocks)(plan, current_mode(), devices, blocks)
                for index, block in enumerate(blocks):
                    stack.enter_context(patched(block, partial(blocks_in_region.call, index)))
            yield


class _Blocks:
    """Consecutive blocks, and the region that they share in this pass."""

    def __init__(
        self, plan: RegionPlan, mode: LeanMode, devices: frozenset[torch.device], blocks: list[nn.Module]
    ) -> None:
        self.names, self.nested = plan.names, plan.nested
        self.mode, self.devices, self.slots = mode, devices, [slots_of(block) for block in blocks]
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


class _Swept:
    """Consecutive blocks that run a few samples at a time; the first one's input is stored, the others' are made again
    from it."""

    def __init__(
        self, plan: RegionPlan, mode: LeanMode, devices: frozenset[torch.device], blocks: list[nn.Module]
    ) -> None:
        self.names, self.mode, self.devices, self.blocks = plan.names, mode, devices, blocks
        self.ahead = plan.ahead
        # The last call's output, block and source, which the graph holds until its backward pass.
        self.before: tuple[weakref.ref, weakref.ref, weakref.ref] | None = None

    def call(self, index: int, forward: Any, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        (args, kwargs), module = self.mode.real((args, kwargs)), self.blocks[index]
        x = only_input(self.names[index], args, kwargs)
        block = Block(self.names[index], self.mode, forward, module, x, self.ahead[index].growth)
        made, last, read = (reference() for reference in self.before) if self.before else (None, None, None)
        if index > 0 and made is x and last is not None and read is not None:
            source: Source = Remade(last, read, block.pieces)
        else:
            source = Source(self.mode.store_input(x))
        del made, last, read
        block.owns_input = self.ahead[index].alone and not source.holds(x) and is_let_go(x)
        y = swept(x, block, source, slots_of(module), self.devices)
        self.before = weakref.ref(y), weakref.ref(block), weakref.ref(source)
        return y
