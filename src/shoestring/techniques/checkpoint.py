"""Checkpointing: keep less in the forward pass, run parts of it again in the backward pass. Exact.

| strategy | kept | done again |
|---|---|---|
| `none` | everything | nothing |
| `no-bn` | the inputs of batch norms | batch norm and ReLU, from saved statistics |
| `residual-m` | the input of every m-th block | the m blocks, everything in them kept meanwhile |
| `residual-m*` | the input of every m-th block | the m blocks' inputs; then, block by block, what is inside |
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import NoEffect, ShoestringError
from ..task import Task
from .blocks import find_blocks
from .frames import Frame
from .keeping import keep
from .lean import LeanRun, lean_run, with_lean

STRATEGIES = "none, no-bn, residual-M, residual-M* (M a whole number from 1)"


@dataclass(frozen=True)
class Settings:
    """`strategy` as in the table above; `blocks` names the blocks by hand (with * and ?) where they are not found."""

    strategy: str = "none"
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Strategy:
    every: int  # blocks in a region; 0: no region
    star: bool


def parse(text: str) -> _Strategy:
    """"residual-2*" -> regions of 2 blocks, each block a region of its own inside."""
    if text in ("none", "no-bn"):
        return _Strategy(0, False)
    match = re.fullmatch(r"residual-([1-9][0-9]{0,5})(\*?)", text)
    if not match:
        raise ShoestringError(f"there is no checkpoint strategy {text!r}: use one of {STRATEGIES}")
    return _Strategy(int(match[1]), bool(match[2]))


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task that keeps less of its activations; the numbers it computes are the same."""
    strategy = parse(settings.strategy)
    if settings.strategy == "none":
        raise NoEffect("checkpoint none keeps everything: leave it out of the plan")
    groups = group_blocks(task.model, settings, strategy)
    task, patterns = with_lean(task, fuse=strategy.star or not strategy.every)
    if settings.strategy == "no-bn" and not patterns.norms:
        raise ShoestringError(
            f"{type(task.model).__name__} has no batch norm, so no-bn would change nothing: use residual-1"
        )
    contexts = (*task.contexts, Regions(groups, strategy.star)) if groups else task.contexts
    return task.with_(contexts=contexts, settings=task.settings | {"checkpoint": settings.strategy})


def group_blocks(model: nn.Module, settings: Settings, strategy: _Strategy) -> tuple[tuple[str, ...], ...]:
    """The names of the blocks in each region."""
    if not strategy.every:
        return ()
    runs = find_blocks(model, settings.blocks)
    if not runs:
        raise ShoestringError(
            f"{type(model).__name__} has no repeated blocks in a Sequential or ModuleList for {settings.strategy}: "
            "name them with checkpoint blocks, or use no-bn"
        )
    size = strategy.every
    return tuple(tuple(run[i : i + size]) for run in runs for i in range(0, len(run), size))


@dataclass(frozen=True)
class Regions:
    """The context of a pass: given the live model, it turns groups of blocks into regions that run again."""

    groups: tuple[tuple[str, ...], ...]
    star: bool

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for group in self.groups:
                region = _Region(group, self.star, lean_run())
                for index, name in enumerate(group):
                    stack.enter_context(_patched(model.get_submodule(name), region, index))
            yield


class _Region:
    """Blocks that follow each other, and the frame that they share in this pass."""

    def __init__(self, names: tuple[str, ...], star: bool, run: LeanRun) -> None:
        self.names, self.nested, self.run = names, star and len(names) > 1, run
        self.keep_input = run.keep_input if star else keep
        self.frame: Frame | None = None

    def call(self, index: int, forward: Any, args: tuple, kwargs: dict) -> Any:
        if self.frame is None or index == 0:
            self.frame = Frame(" + ".join(self.names), self.run.running, self.keep_input)
        elif not (args and self.frame.place(args[0])):
            raise ShoestringError(
                f"{self.names[index]} is not called with what {self.names[index - 1]} returned, so they cannot be one "
                "region: use residual-1, or name the blocks that follow each other"
            )
        return self.frame.call(self._block(index, forward) if self.nested else forward, args, kwargs)

    def _block(self, index: int, forward: Any) -> Any:
        """The block as a region of its own, inside the larger one."""
        return lambda *args, **kwargs: Frame(self.names[index], self.run.running).call(forward, args, kwargs)


@contextmanager
def _patched(module: nn.Module, region: _Region, index: int) -> Iterator[None]:
    """The module's forward goes through the region inside the context."""
    forward = module.forward
    had = "forward" in vars(module)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not module.training and not any(p.requires_grad for p in module.parameters()):
            return forward(*args, **kwargs)
        return region.call(index, forward, args, kwargs)

    module.forward = checkpointed  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had:
            module.forward = forward  # type: ignore[method-assign]
        else:
            del module.forward
