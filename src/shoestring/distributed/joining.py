"""The way into a run of several processes."""

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ShoestringError
from .voice import speak_as_one
from .world import ALONE, Group, Launched, World, attempt, launched_as


def joined() -> World:
    """-> the processes of this run: those of the process group, which is initialised here in a process of torchrun."""
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        launched = launched_as()
        if launched is None or launched.size == 1:
            return ALONE
        speak_as_one()
        _join(launched)
    if dist.get_world_size() == 1:
        return ALONE
    speak_as_one()
    return known_group(dist.group.WORLD)


@cache
def known_group(group: Any) -> Group:
    """One for each group: it counts what it sends."""
    return Group()


def is_restarted() -> bool:
    """Whether torchrun has started this process again, after one of the run had died."""
    return attempt() != "0"


def _join(launched: Launched) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ShoestringError(
            f"RANK and WORLD_SIZE say that this is one of {launched.size} processes, but {missing[0]} is not set, so "
            "they cannot meet: start them with torchrun, or unset RANK and WORLD_SIZE"
        )
    try:
        store, rank, size = next(dist.rendezvous("env://"))
        fresh = dist.PrefixStore(f"attempt {attempt()}", store)  # torchrun's has the addresses of killed processes
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        words = " ".join(str(error).split())[:200]
        raise ShoestringError(
            f"process {launched.rank} did not meet the other {launched.size - 1} at {where} ({words}): "
            "start all of them with torchrun"
        ) from error
